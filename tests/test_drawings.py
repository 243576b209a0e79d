"""Drawings of the script are those of its tables: a row that changes shows, and what a drawing lacks has a name."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from speedrun import ROOT, drawings, site
from speedrun.logs import load_script
from speedrun.process import ToolError
from test_site import SCRIPT, TOUR

CHANGES = {  # in a copy of the script, and the drawings in which they show
    "Layer(None, skip=3)": ("Layer(None)", "layers parameters"),
    "cooldown_frac: float = 0.8 ": ("cooldown_frac: float = 0.7 ", "schedules"),
    "windows=dict(short=768, long=1664)": ("windows=dict(short=900, long=1664)", "layers schedules masks"),
    'Group("value_embeds", "Adam"': ('Group("values", "Adam"', "step parameters"),
    'EMA("value_embeds.*"': ('EMA("lm_head.weight embed.weight"', "memory"),
    "softcap_shift: float = 5.0": ("softcap_shift: float = 4.0", "softcap"),
    "(2.256537145403, -2.1668": ("(2.256537145403, -2.1768", "newton_schulz"),
}
LACKS = dict(layers="gate_inits", masks="causal_block_mask", newton_schulz="NEWTON_SCHULZ")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "train_gpt.py")


@pytest.fixture(scope="module")
def drawn(script: ModuleType) -> dict[str, str]:
    return drawings.draw(script)


@pytest.mark.published
def test_the_files_are_drawings_of_the_script(drawn: dict[str, str]):
    files = {path.stem: path.read_text() for path in drawings.FOLDER.iterdir()}
    assert files == drawn, "run python -m speedrun.drawings"


@pytest.mark.published
def test_a_changed_row_shows(drawn: dict[str, str], tmp_path: Path):
    text = (ROOT / "train_gpt.py").read_text()
    for old, (new, _) in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "my.py").write_text(text)
    mine = drawings.draw(load_script(tmp_path / "my.py"))
    assert {name for name in mine if mine[name] != drawn[name]} == {*" ".join(it for _, it in CHANGES.values()).split()}
    skips = [re.findall(r"gpt2, layer 6: .*?\.", it["layers"])[0] for it in (drawn, mine)]
    assert skips == ["gpt2, layer 6: attention None, skip 3.", "gpt2, layer 6: attention None."]
    assert drawn["layers"].count(">skip<") == mine["layers"].count(">skip<") + 2  # the layer, and its gate


@pytest.mark.parametrize(("drawing", "name"), LACKS.items())
def test_what_a_drawing_lacks_is_named(drawing: str, name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(script, name)
    monkeypatch.setattr(drawings, "DRAWINGS", [getattr(drawings, drawing)])
    with pytest.raises(ToolError, match=f"{drawing} .*{name}") as error:
        drawings.draw(script)
    assert "\n" not in str(error.value)


def test_drawings_fit_into_one_page_and_are_told_in_words(drawn: dict[str, str]):
    ids = []
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        ids += [it.attrib["id"] for it in root.iter() if "id" in it.attrib]
        title, desc = (root.findtext(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
        assert title
        assert len(desc or "") > 40, name
        assert root.attrib["width"] == "390"
        assert {*re.findall(r'(?:href="|url\()(.)', svg)} <= {"#"}, "nothing from elsewhere"
        assert "<script" not in svg
        assert not [color for color in drawings.LIGHT if color in svg.partition("</style>")[2]], "dark pages"
    assert len(ids) == len({*ids})


def test_the_page_shows_drawings_of_its_own_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "train_gpt.py").write_text(SCRIPT)
    (tmp_path / "docs/tour.md").write_text(f"{TOUR}\n![a](drawings/layers.svg) ![b](drawings/none.svg)\n")
    monkeypatch.setattr(drawings, "draw", lambda script: {"layers": f"<svg>{len(script.ROWS)} rows</svg>"})
    site.add_script(made := site.Site(tmp_path, records=[]), tmp_path / "train_gpt.py")
    page = made.files[site.SCRIPT_PAGE].decode()
    assert "<svg>2 rows</svg>" in page
    assert "layers.svg" not in page
    assert [*made.broken_links()] == ["docs/tour.md: its link drawings/none.svg leads to no file or page"]
