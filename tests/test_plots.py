"""The pictures: masks equal a brute force over tokens, only times that compare share a colour, none is stale."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from records import plots
from records.__main__ import main
from records.logs import read_log
from shards import write_shard
from synthetic_logs import ROOT, log_text, write_record
from test_pack import nano

BLOCK, EOT = 16, 256


@pytest.mark.parametrize(("step", "training"), [(1, False), (None, False), (0, True), (3, True), (None, True)])
def test_mask_equals_a_brute_force(tmp_path, capsys, training, step):
    """In the second sequence of 4,000 bytes, whose documents may be empty or begin at a block's edge."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(256, size=4000).astype(np.uint16)
    tokens[np.cumsum(generator.integers(1, 200, size=25))] = EOT
    tokens[[5 * BLOCK, 6 * BLOCK - 1, 700, 701, 702]] = EOT
    write_shard(tmp_path / "all.bin", tokens)
    command = "mask --json --sequence 1" + " --training" * training + f" --step {step}" * (step is not None)
    command += f" -o {tmp_path}/mask.png -- --preset nano --train_files {tmp_path}/*.bin --val_files {tmp_path}/*.bin"
    command += " --num_iterations 5 --val_tokens 1024 --batch_tokens 640 --train_seq_len 320 --val_seq_len 512"
    command += f" --window_tokens 120 --block_size {BLOCK} --attention_layout LS"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    step = 5 - training if step is None else step
    start, length = (640 * step + 320, 320) if training else (512, 512)
    documents, position = np.cumsum(tokens[start : start + length] == EOT), np.arange(length)
    query, key = position[:, None], position[None, :]
    long = max(1, -(-120 * step // (5 * BLOCK)))
    for letter, window in ("L", long), ("S", max(1, long // 2)):
        pairs = (query >= key) & (documents[query] == documents[key]) & (query // BLOCK - key // BLOCK < window)
        blocks = pairs.reshape(length // BLOCK, BLOCK, -1, BLOCK)
        visible, full = blocks.any((1, 3)), blocks.all((1, 3))
        assert found[letter]["blocks"] == ["".join(map(str, row)) for row in visible.astype(int) + full]


def test_curves_and_series(tmp_path):
    """Times share a series only where records have runs of one seed on one machine; then those runs are compared."""

    def runs(seeds, step_ms: float, cpu: str = "Some Processor") -> list[str]:
        return [log_text(seed=seed, val_loss=1.4 + seed / 100, step_ms=step_ms, cpu=cpu) for seed in seeds]

    first = write_record(tmp_path, "2026-01-01_First", runs((1, 2, 3), 40.0))
    write_record(tmp_path, "2026-01-02_Second", runs((7, 8), 90.0))
    in_turn = [log_text(seed=seed, step_ms=step_ms, steps=10) for seed, step_ms in ((2, 30.0), (3, 34.0))]
    other = log_text(seed=1, step_ms=1.0, batch_tokens=2048)
    write_record(tmp_path / "2026-01-02_Second", "in_turn", [*in_turn, other])
    write_record(tmp_path, "2026-01-03_Third", runs((2, 3), 20.0, "Other"))
    write_record(tmp_path, "2026-01-04_Fourth", runs((3, 4), 10.0, "Other"))
    found = plots.own_history(tmp_path)["nano"]
    assert [(r["series"], r["seeds"]) for r in found] == [(1, [1, 2, 3]), (1, [2, 3]), (2, [2, 3]), (2, [3])]
    assert [r["seconds"] for r in found] == pytest.approx([20 * 0.040, 20 * 0.032, 20 * 0.020, 20 * 0.010])
    curve = plots.curve_of("First", [read_log(path) for path in sorted(first.glob("*.txt"))])
    assert (curve.steps, curve.seconds[-1]) == ([0, 5, 10, 15, 20], 0.8)
    assert (curve.low[-1], curve.mean[-1], curve.high[-1]) == pytest.approx((1.41, 1.42, 1.43))


@pytest.mark.parametrize("picture", ["docs/mask.png", "records/curves.png", "records/history.png"])
def test_pictures_show_what_their_commands_draw_today(picture, tmp_path, tmp_path_factory, monkeypatch):
    """Each PNG carries what it shows; the pages name the commands."""
    monkeypatch.chdir(ROOT)
    pages = "\n".join((ROOT / page).read_text() for page in ("README.md", "records/README.md"))
    [command] = set(re.findall(rf"^    python -m records (.*)-o {picture}(.*)$", pages, re.MULTILINE))
    argv = [str(path) for word in command[0].split() for path in (sorted(ROOT.glob(word)) if "*" in word else [word])]
    flags = command[1].split()
    if "mask" in argv:
        flags += ["--val_files", f"{nano(tmp_path_factory.getbasetemp() / 'nano')}/nano_val_*.bin"]
    assert main([*argv, "-o", str(tmp_path / "new.png"), *flags]) == 0
    shipped, new = (json.loads(Image.open(path).text["Comment"]) for path in (ROOT / picture, tmp_path / "new.png"))
    assert shipped == new, "draw it anew"
