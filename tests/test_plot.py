"""plot: what its picture shows, whatever the logs are called and however many there are."""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from conftest import train
from speedrun.__main__ import main


def draw(path: Path, *logs: Path) -> Image.Image:
    assert main(["plot", *map(str, logs), "-o", str(path)]) == 0
    return Image.open(path)


def names(picture: Image.Image) -> list[str]:
    return [curve["name"] for curve in json.loads(picture.text["Comment"])["curves"]]


def test_each_curve_is_seen_and_named_whole(flags, tmp_path, capsys, recwarn):
    """Also one of a single validation, those with long names, and two of one name."""
    log = Path(train([*flags, "--val_loss_every=0", "--run_id=one"])["log"])
    picture = draw(tmp_path / "one.png", log)
    panel = np.array(picture.convert("RGB"))[:, : picture.width // 2]
    assert (panel == (31, 119, 180)).all(axis=2).sum() > 20, "a point in the first color"
    long = [tmp_path / f"{'x' * 200}{i:02}.txt" for i in range(20)]
    for path in (more := tmp_path / "more" / "one.txt", *long):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(log, path)
    assert (names(picture), names(draw(tmp_path / "two.png", log, more))) == (["one"], ["logs/one", "more/one"])
    many = draw(tmp_path / "many.png", *long)
    assert names(many) == [path.stem for path in long]
    assert many.height > 2 * picture.height, "a name of 200 letters takes six lines of the legend"
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []
    assert main(["plot", *map(str, [log, *long])]) == 2
    assert "21 curves: name 20 at most" in capsys.readouterr().err
