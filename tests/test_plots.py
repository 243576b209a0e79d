"""The pictures: masks are those of a brute force over tokens; the history has every record, and times that compare."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import shards
import train_gpt
from records import masks, plots, proof
from records.__main__ import main
from records.logs import RECORDS, record_folders
from synthetic_logs import log_text, write_record

ROOT = RECORDS.parent
BLOCK = 16
EOT = 256


@pytest.fixture
def data(tmp_path) -> Path:
    """Shards of 4,000 bytes in documents of 1 to 200, of which some begin at a block's edge and some are empty."""
    generator = np.random.default_rng(1)
    for role, num_tokens in ("train", 4000), ("val", 2600):
        tokens = generator.integers(256, size=num_tokens).astype(np.uint16)
        tokens[np.cumsum(generator.integers(1, 200, size=15))] = EOT
        tokens[[5 * BLOCK, 6 * BLOCK - 1, 700, 701, 702]] = EOT
        shards.write_shard(tmp_path / f"{role}_000000.bin", tokens)
    return tmp_path


def flags(data: Path, *more: str) -> list[str]:
    files = ["--train_files", str(data / "train_*.bin"), "--val_files", str(data / "val_*.bin")]
    shape = "--num_iterations 5 --batch_tokens 640 --train_seq_len 320 --val_seq_len 512 --val_tokens 1024"
    windows = f"--block_size {BLOCK} --window_tokens 120 --attention_layout LSSL --value_embed_layout 0..0"
    return ["--preset", "nano", *files, *shape.split(), *windows.split(), *more]


def mask_command(*argv: object) -> int:
    return main(["mask", *map(str, argv)])


def brute_force(tokens: np.ndarray, window: int) -> np.ndarray:
    """Every pair of tokens: causal, one document, fewer than `window` blocks back, but never less than one."""
    docs, position = np.cumsum(tokens == EOT), np.arange(len(tokens))
    query, key = position[:, None], position[None, :]
    pairs = (query >= key) & (docs[query] == docs[key]) & (query // BLOCK - key // BLOCK < max(window, 1))
    blocks = pairs.reshape(len(tokens) // BLOCK, BLOCK, -1, BLOCK).transpose(0, 2, 1, 3)
    seen = np.where(blocks.any((2, 3)), masks.PARTIAL, masks.UNSEEN)
    seen[blocks.all((2, 3))] = masks.FULL
    return seen


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("step", [None, 0, 1, 3])
@pytest.mark.parametrize("sequence", [0, 1])
def test_the_picture_of_the_masks_is_that_of_a_brute_force(data, monkeypatch, training, step, sequence):
    figures = []
    monkeypatch.setattr(masks, "save", lambda figure, path: figures.append(figure))
    arguments = [*(["--training"] * training), *(["--step", step] if step is not None else [])]
    assert mask_command("--sequence", sequence, *arguments, "--", *flags(data)) == 0
    step = 5 - training if step is None else step
    start, length = (640 * step + 320 * sequence, 320) if training else (512 * sequence, 512)
    path = data / f"{'train' if training else 'val'}_000000.bin"
    tokens = np.fromfile(path, dtype=np.uint16, offset=1024)[start : start + length]
    window = max(1, -(-120 * step // (5 * BLOCK)))
    edges = [0, *np.flatnonzero(tokens == EOT), length]
    (figure,) = figures
    for panel, blocks in zip(figure.axes, (window, window // 2), strict=True):
        wanted = brute_force(tokens, blocks)
        colours = np.array(masks.COLOURS)[wanted]
        colours[np.triu_indices(len(wanted), 1)] = 1
        (image,) = panel.images
        assert np.array_equal(image.get_array(), colours)
        assert image.get_extent() == [0, length, length, 0], "a column of keys, a row of queries, from the top"
        drawn = {(int(line.get_xdata()[0]), int(line.get_ydata()[1])) for line in panel.lines}
        assert drawn == {(a, b) for a, b in pairwise(edges) if a < b}
        causal = len(wanted) * (len(wanted) + 1) / 2
        assert f"{(wanted > 0).sum() / causal:.1%} of the causal blocks" in panel.get_title()
        assert f"{(wanted == masks.FULL).sum()} full" in panel.get_title()


def test_the_diagonal_is_masked_even_where_a_block_is_a_token(data):
    """Blocks on the diagonal are never listed as whole, so a block of one token is partial."""
    cfg = train_gpt.parse_args(flags(data, "--block_size", "1"))
    tokens, _ = masks.read_sequence(cfg, 5, 0, training=False)
    seen = masks.listed_blocks(masks.block_masks(cfg, tokens[:64], 8)["L"])
    assert set(np.diag(seen)) == {masks.PARTIAL}


def test_zoom_draws_a_part_and_counts_the_whole(data, monkeypatch, capsys):
    figures, outputs = [], []
    monkeypatch.setattr(masks, "save", lambda figure, path: figures.append(figure))
    for arguments in [], ["--zoom", "96", "320"]:
        assert mask_command(*arguments, "--", *flags(data)) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    limits = [[(panel.get_xlim(), panel.get_ylim()) for panel in figure.axes] for figure in figures]
    assert limits == [[((0, 512), (512, 0))] * 2, [((96, 320), (320, 96))] * 2]


def test_layers_are_named(data, capsys, tmp_path):
    assert mask_command("--json", "-o", tmp_path / "mask.png", "--", *flags(data)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["L"]["layers"], found["S"]["layers"]) == ([0, 3], [1, 2])
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--step", "6"], "--step 6: the run's last validation is step 5"),
        (["--training", "--step", "5"], "--step 5: the run's last training is step 4"),
        (["--sequence", "2"], "--sequence 2: there are 2, 0 to 1"),
        (["--training", "--sequence", "2"], "--sequence 2: there are 2, 0 to 1"),
        (["--zoom", "100", "513"], "--zoom 100 513: expected two of the tokens 0 to 512"),
        (["--zoom", "100", "100"], "--zoom 100 100: expected two"),
        (["--step", "-1"], "'-1' is not a whole number"),
        (["-o", "no/folder/mask.png"], "choose another -o FILE.png"),
        (["--", "--nonsense"], "--nonsense"),
        (["--", "--block_size", "17"], "a multiple of --block_size 17"),
        (["--", "--val_files", "nowhere/*.bin"], "get them: python data/pack_text.py"),
        (["--", "--val_tokens", "102400", "--num_iterations", "5"], "get more: "),
        (["--", "--vocab_size", "100", "--eot_token", "99"], "another tokenizer's shard?"),
    ],
    ids=" ".join,
)
def test_wrong_masks_are_one_line(data, capsys, monkeypatch, argv, told):
    monkeypatch.chdir(data)
    at = argv.index("--") if "--" in argv else len(argv)
    if "102400" in argv:
        argv, at = ["--sequence", "100", *argv], at + 2
    try:
        code = mask_command(*argv[:at], "--", *flags(data, *argv[at + 1 :]))
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_masks_without_fineweb_name_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert mask_command("--", "--preset", "gpt2") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "get them: python data/cached_fineweb10B.py 7" in err


# the history


def test_history_has_every_record_and_the_times_of_the_page(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    assert main(["plot", "--history"]) == 0
    (figure,) = figures
    names = [[label.get_text() for label in panel.get_yticklabels()] for panel in figure.axes]
    assert names[0] == [folder.name.replace("_", " ", 1) for folder in record_folders(RECORDS)]
    public = proof.public_history()["records"]
    assert [int(re.search(r"#(\d+)", name)[1]) for name in names[1]] == [record["number"] for record in public]
    widths = [[bar.get_width() for bar in panel.patches] for panel in figure.axes]
    assert widths[1] == [record["official_minutes"] for record in public]
    # records/README.md: | name | loss | median step (ms) | steps to the target | time to the target (s) | ...
    rows = re.findall(
        r"^\| \w+ \| [^|]*\| [\d.]+ \| (\d+) \| ([\d.]+) \|", (RECORDS / "README.md").read_text(), re.MULTILINE
    )
    assert [f"{width:.1f}" for width in widths[0]][: len(rows)] == [seconds for _, seconds in rows]
    assert len(rows) == len(names[0]) - 2  # ours since TokenPairs were timed in other series


def test_times_of_different_series_are_told_apart(tmp_path):
    def runs(seeds, step_ms: float, cpu: str = "1 processes, 2 threads") -> list[str]:
        return [log_text(seed=seed, step_ms=step_ms, threads=cpu) for seed in seeds]

    write_record(tmp_path, "2026-01-01_First", runs((1, 2, 3), 40.0))
    second = write_record(tmp_path, "2026-01-02_Second", runs((7, 8), 90.0))
    (second / "in_turn").mkdir()
    for i, (text, step_ms) in enumerate(((2, 30.0), (3, 34.0))):
        (second / "in_turn" / f"{i}.txt").write_text(log_text(seed=text, step_ms=step_ms, steps=10))
    (second / "in_turn" / "other.txt").write_text(log_text(seed=1, step_ms=1.0, batch_tokens=2048))
    write_record(tmp_path, "2026-01-03_Third", runs((2, 3), 20.0, "2 processes, 1 threads"))
    write_record(tmp_path, "2026-01-04_Fourth", runs((3, 4), 10.0, "2 processes, 1 threads"))
    found = plots.own_history(tmp_path)["nano"]
    assert [(r["series"], r["seeds"]) for r in found] == [(1, [1, 2, 3]), (1, [2, 3]), (2, [2, 3]), (2, [3])]
    assert [round(r["seconds"], 6) for r in found] == [20 * 0.040, 20 * 0.032, 20 * 0.020, 20 * 0.010]


# what is committed


def test_pictures_of_the_readme_are_there_small_and_made_by_a_command_in_it():
    text = "\n".join((ROOT / page).read_text() for page in ("README.md", "records/README.md"))
    pictures = set(re.findall(r"!\[[^\]]+\]\(([\w./]+\.png)\)", (ROOT / "README.md").read_text()))
    assert pictures == {"docs/mask.png", "records/curves.png", "records/history.png"}
    for picture in pictures:
        data = (ROOT / picture).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 150_000
        assert re.search(rf"python -m records (plot|mask) .*-o {picture}", text), picture
