"""Shared fixtures: small resolved configurations on the CPU, and models with random values in every parameter."""

import dataclasses
import gc
import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from speedrun import ROOT
from world_worker import import_as_train_gpt

if path := os.environ.get("SCRIPT"):
    import_as_train_gpt(ROOT / path)

import mini
import train_gpt
from data.shards import write_shard
from dense import randomize
from train_gpt import GPT, Hyperparameters, UserError

torch.set_num_threads(1)  # for models so small threads cost more than they save: on a busy machine four times the time

# The background jobs of a shell ignore Ctrl-C, and what they start inherits that: the tests' programs have to hear it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# nano with little to do. Its layers and stages are its own, so the script itself runs it, by flags
CPU = dict(dtype="float32", device="cpu", cpu_threads=1)
TINY = dict(preset="nano", num_iterations=8, batch_tokens=128, train_seq_len=64, val_seq_len=128, val_tokens=256)
TINY |= dict(block_size=8, model_dim=32, num_heads=2, head_dim=16, mlp_dim=128, ngram_rows=61) | CPU
GPT2 = dict(preset="mini") | CPU
TINY_FLAGS, GPT2_FLAGS = ([f"--{name}={value}" for name, value in numbers.items()] for numbers in (TINY, GPT2))
SMALL = [*TINY_FLAGS, *"--seed 5 --num_iterations 4 --val_loss_every 2 --val_seq_len 96 --val_tokens 288".split()]
SMALL += ["--block_size=16", "--val_sha256="]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--idea", action="store_true", help="leave out what holds the root against published numbers")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        pytest.exit("no GPU that torch can use: ./run.sh --check says why", returncode=2)
    if config.option.idea:
        marks = config.option.markexpr
        config.option.markexpr = f"({marks}) and not published" if marks else "not published"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: at the end one process would run them while the other has nothing to do."""
    items.sort(key=lambda item: not any(name in item.name for name in ("three layers", "the_notebook")))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Write shards of words as bytes: two for training, one for validation, one long. Two are of a script."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = [b"muon ", b"adam ", b"rotary ", b"window ", b"shard ", b"block\n"]
    for name, count in dict(train_000000=400, train_000001=400, val_000000=400, long=50_000).items():
        text = b"".join(words[i] for i in rng.integers(len(words), size=count))
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        tokens[rng.random(len(tokens)) < 0.01] = 256
        write_shard(folder / f"{name}.bin", tokens)
    np.where(np.arange(257) % 3, 65535, np.arange(257) // 2).astype("<u2").tofile(folder / "prefixes")
    # It does not change: the root has a golden loss on it
    script = np.fromfile(ROOT / "records" / "nano" / "01_ValueEmbed" / "train_gpt.py", dtype=np.uint8).astype(int)
    tokens = np.where(np.arange(60_000) % 500, np.resize(script, 60_000), 256)
    write_shard(folder / "script.bin", tokens)
    write_shard(folder / "script_val.bin", tokens[7_000:17_000])
    return folder


@pytest.fixture(scope="session")
def script_flags(corpus) -> list[str]:
    return [f"--train_files={corpus}/script.bin", f"--val_files={corpus}/script_val.bin", "--val_sha256="]


@pytest.fixture(autouse=True)
def fixed_seed(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.delenv("SCRIPT", raising=False)  # tests name the script that they start


def train(flags: list[str]) -> dict:
    """Train, and return the result."""
    gc.freeze()  # or a run begins with a look at all that tests have imported, which takes longer than itself
    return train_gpt.main(flags)


@pytest.fixture
def flags(corpus, tmp_path) -> list[str]:
    data = ["--train_files", f"{corpus}/train_*.bin", "--val_files", f"{corpus}/val_*.bin"]
    return [*SMALL, *data, "--log_dir", str(tmp_path / "logs")]


def gpt2_run(corpus: Path, logs: Path) -> list[str]:
    """Return flags for a run of gpt2 in small."""
    data = [f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin", f"--prefix_file={corpus}/prefixes"]
    return [*GPT2_FLAGS, "--val_sha256=", *data, "--log_dir", str(logs)]


@pytest.fixture
def gpt2_flags(corpus, tmp_path) -> list[str]:
    return gpt2_run(corpus, tmp_path / "logs")


@pytest.fixture
def long_flags(flags, corpus) -> list[str]:
    """Return flags for a run that goes on until it is stopped."""
    return [*flags, "--train_files", f"{corpus}/long.bin", "--num_iterations", "1500", "--val_loss_every", "0"]


def losses(result: dict) -> list[tuple[int, float]]:
    """Return steps and losses of a result, or of its JSON, without the times."""
    return [(step, loss) for name in ("train_curve", "val_curve") for step, loss, _ in result[name]]


def refusal(argv: list[str]) -> str:
    """Return the line with which the script refuses its flags."""
    with pytest.raises(UserError) as error:
        train_gpt.main(argv)
    assert (error.value.code, str(error.value).count("\n")) == (2, 0)
    return str(error.value)


def small(numbers: dict, **changes) -> Hyperparameters:
    preset = train_gpt.PRESETS[numbers["preset"]]
    return train_gpt.resolve(dataclasses.replace(preset, **numbers | dict(seed=0, run_id="small") | changes))


@pytest.fixture
def tiny() -> Hyperparameters:
    """Return the nano preset with some thousand times less work: 8 or 16 (validation) blocks of 8 tokens."""
    return small(TINY)


@pytest.fixture
def gpt2() -> Hyperparameters:
    """Return mini with less work: all of its layers, 8 blocks of 8 tokens."""
    sizes = dict(train_seq_len=64, batch_tokens=64, val_seq_len=192, val_tokens=192, block_size=8, final_window=160)
    stages = []
    for row in mini.STAGES:
        windows = {kind: window // 16 * 8 for kind, window in row.windows.items()}
        stages.append(row._replace(windows=windows, max_doc_len=row.max_doc_len // 16))
    return small(GPT2 | sizes, stages=tuple(stages))


def random_ngrams(cfg) -> dict[str, torch.Tensor]:
    """Draw all rows of n-grams."""
    rows = torch.randn(cfg.ngram_rows, cfg.model_dim, dtype=torch.float64)
    return dict(ids=torch.arange(cfg.ngram_rows), rows=rows, v=torch.ones(cfg.ngram_rows, 1))


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A model with random values, of bytes."""
    cfg = dataclasses.replace(tiny, val_seq_len=80_000, val_tokens=80_000)
    path = tmp_path / "logs" / "random.pt"
    path.parent.mkdir()
    torch.save(random_ngrams(cfg), rows := path.with_suffix(".ngrams0"))
    saved = dict(configuration=json.dumps(dataclasses.asdict(cfg)), model=randomize(GPT(cfg)).state_dict())
    saved["script"] = hashlib.sha256(Path(train_gpt.__file__).read_bytes()).hexdigest()
    saved["script_path"] = train_gpt.__file__
    torch.save(saved | dict(rows=[train_gpt.checksum(rows)]), path)
    return path
