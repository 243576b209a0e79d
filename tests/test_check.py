"""check.py and run.sh's use of it: on invented machines, with data of a few tokens."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import check
import train_gpt
from shards import write_shard
from train_gpt import GPT, Hyperparameters, World

ROOT = Path(check.__file__).parent
SMALL = (
    "--preset nano --device cpu --num_iterations 4 --model_dim 32 --num_heads 2 --head_dim 16 --attention_layout LS "
    "--value_embed_layout 0. --block_size 16 --train_seq_len 64 --batch_tokens 128 --val_seq_len 96 --val_tokens 288"
).split()
H100 = "NVIDIA H100 80GB HBM3, 81079, 9.0, 580.65.06"
RTX_4090 = "NVIDIA GeForce RTX 4090, 24082, 8.9, 580.65.06"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Two training shards and one of validation for SMALL, and one of each for two steps of gpt2."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, num_tokens in (("train_0", 1000), ("train_1", 1000), ("val_0", 1000)):
        write_shard(folder / f"{name}.bin", np.arange(num_tokens) % 257)
    for name, num_tokens in (("gpt2_train", 2 * 393216 + 1), ("gpt2_val", 262145)):
        write_shard(folder / f"{name}.bin", np.zeros(num_tokens, dtype=np.int64))
    return folder


@pytest.fixture
def flags(corpus, tmp_path) -> list[str]:
    """A small run on a CPU with nothing wrong."""
    data = ["--train_files", f"{corpus}/train_*.bin", "--val_files", f"{corpus}/val_*.bin"]
    return [*SMALL, *data, "--log_dir", str(tmp_path / "logs")]


@pytest.fixture
def gpt2(corpus, tmp_path) -> list[str]:
    """Two steps of gpt2 with nothing wrong but perhaps the hardware."""
    data = ["--train_files", f"{corpus}/gpt2_train.bin", "--val_files", f"{corpus}/gpt2_val.bin"]
    return [*"--preset gpt2 --num_iterations 2 --val_tokens 262144".split(), *data, "--log_dir", str(tmp_path / "logs")]


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Invents the GPUs of this machine, `name, free MiB, capability, driver`, and torch's CUDA; at first there is none.

    nvidia-smi is a program on the PATH that answers nothing but the question it is asked.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    columns = "index,uuid,name,memory.free,compute_cap,driver_version"

    def invent(*gpus: str, cuda: str = "13.0", answer: str = "", code: int = 0) -> None:
        lines = "\n".join(f"{i}, GPU-{i}a1b2c3d-{i}, {gpu}" for i, gpu in enumerate(gpus))
        question = f"--query-gpu={columns} --format=csv,noheader,nounits"
        script = f"#!/bin/sh\n[ \"$*\" = '{question}' ] || exit 7\ncat <<'END'\n{answer or lines}\nEND\nexit {code}\n"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(check, "torch_cuda", lambda: cuda)
        monkeypatch.setattr(check, "list_gpus", list_gpus)

    list_gpus = check.list_gpus
    monkeypatch.setattr(check, "list_gpus", dict)
    return invent


@pytest.fixture
def outcome(capfd):
    """Runs check.main: the exit code, the lines of stdout and those of stderr, which are only problems and notes."""

    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        capfd.readouterr()
        code = check.main(argv)
        captured = capfd.readouterr()
        errors = captured.err.splitlines()
        assert all(line.startswith(("check.py: ", "note: ", "getting the data: ")) for line in errors)
        return code, captured.out.splitlines(), errors

    return run


@pytest.fixture
def problems(outcome):
    """The lines that refuse a run, which has to be refused."""

    def run(*argv: str) -> list[str]:
        code, out, errors = outcome(*argv)
        assert (code, out) == (2, [])
        return [line.removeprefix("check.py: ") for line in errors if line.startswith("check.py: ")]

    return run


def as_run(cfg: Hyperparameters, *gpus: check.Gpu, processes: int = 1) -> check.Run:
    return check.Run(check.load_trainer(len(gpus)), cfg, gpus, processes)


def on_h100(processes: int, **fields) -> check.Run:
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda", **fields)
    return as_run(cfg, *[check.Gpu("NVIDIA H100", 80 * 2**30, (9, 0), "580.65.06")] * processes, processes=processes)


# What it refuses


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--foo 3", "unrecognized arguments: --foo 3; --help lists the flags"),
        ("300", "unrecognized arguments: 300; --help lists the flags"),
        ("--num_iterations abc", "argument --num_iterations: invalid int value: 'abc'"),
        ("--num_iterations 0", "--num_iterations 0: expected a whole number of at least 1"),
        ("--seed", "argument --seed: expected one argument"),
        ("--preset big", "argument --preset: invalid choice: 'big'"),
        ("--batch_tokens 100", "--batch_tokens 100: expected a multiple of --train_seq_len 64"),
        ("--cooldown_frac nan", "--cooldown_frac nan: expected a finite number"),
        ("--attention_layout LX", "--attention_layout LX: expected only the letters L, S and -"),
        ("--dtype int8", "--dtype int8: expected bfloat16, float32, float64 or auto"),
        ("--run_id a/b", "--run_id a/b: expected a file name without folders"),
        ("--device tpu", "--device tpu: expected cuda, cpu or auto"),
        ("--device cuda", "--device cuda: there is no NVIDIA GPU; or use --device cpu"),
        ("--num_iterations 15", "hold 14 batches of 128 tokens, the run needs 15; get more: "),
        ("--val_tokens 1056", "hold 10 batches of 96 tokens, the run needs 11; get more: "),
        ("--train_files none_*.bin", "no shards match none_*.bin in "),
        ("--val_files none_*.bin", "no shards match none_*.bin in "),
        ("--train_files {tmp}", "{tmp}: Is a directory; get it again: "),
        ("--train_files {tmp}/short.bin", "{tmp}/short.bin: 3023 bytes long, but its header's 1000 tokens make 3024"),
        ("--train_files {tmp}/text.bin", "{tmp}/text.bin: not a token shard: begins with "),
        ("--train_files {tmp}/empty.bin", "{tmp}/empty.bin: not a token shard: begins with 0, 0, not 20240520, 1"),
        (
            "--log_dir {tmp}/text.bin",
            "{tmp}/text.bin is not a folder to write to; choose another --log_dir",
        ),
        ("--log_dir {tmp}/text.bin/a/b", "{tmp}/text.bin/a/b: {tmp}/text.bin is not a folder to write to; choose"),
        ("--log_dir {tmp} --run_id mine", "{tmp}/mine.txt is another run's log: choose another --run_id"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(flags, problems, corpus, tmp_path, argv, message):
    (tmp_path / "short.bin").write_bytes((corpus / "train_0.bin").read_bytes()[:-1])
    (tmp_path / "text.bin").write_text("Once upon a time")
    (tmp_path / "empty.bin").touch()
    (tmp_path / "mine.txt").touch()
    [line] = problems(*flags, *argv.format(tmp=tmp_path).split())
    assert message.format(tmp=tmp_path) in line


@pytest.mark.parametrize("wish", ["two", "0", "-1", "1.5", "", "²"])
def test_number_of_processes_that_is_none_is_refused(flags, problems, monkeypatch, wish):
    monkeypatch.setenv("NPROC", wish)
    assert problems(*flags) == [f"NPROC={wish}: expected a number of processes of at least 1"]


def test_all_problems_are_reported_at_once(machine, flags, problems, corpus, tmp_path, monkeypatch):
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes((corpus / "train_0.bin").read_bytes()[:-1])
    monkeypatch.setenv("NPROC", "3")
    machine("Tesla T4, 15095, 7.5, 580.65.06")
    monkeypatch.setattr(check.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    monkeypatch.setattr(check, "peak_bytes", lambda _: {"train_seq_len": 1e18, "val_seq_len": 1e18})
    lines = problems(*flags, "--train_files", f"{tmp_path}/?.bin", "--val_tokens", "9600", "--device", "cuda")
    beginnings = [
        "NPROC=3: 3 processes do not divide the 2 sequences of a step: start 2, ",
        "NPROC=3: there are 1 GPUs",
        f"{tmp_path}/a.bin: 3023 bytes",
        f"{tmp_path}/b.bin: 3023 bytes",
        f"the 1 shards of {corpus}/val_*.bin hold 10 batches",
        "Tesla T4, compute capability 7.5: ",
        "training takes about 1000000000.0 GB",
        "validation takes about 1000000000.0 GB",
        f"{tmp_path}/logs: logs need 0.1 MB, 0.0 MB are free; make room, or choose another --log_dir",
    ]
    assert len(lines) == len(beginnings)
    assert all(line.startswith(start) for line, start in zip(lines, beginnings, strict=True))


def test_all_bad_flags_are_reported_at_once_and_none_for_the_lack_of_another(flags, problems, monkeypatch):
    """Without the refused --block_size, 96 tokens are no multiple of the preset's block: no fault of the user's."""
    monkeypatch.setenv("NPROC", "two")
    bad = "--block_size seven --foo 3 --bar --muon_lr x --muon_momentum 1.5 --val_files none.bin --eot_token 300"
    lines = problems(*flags, *bad.split())
    assert [re.findall(r"--\w+|NPROC|none\.bin", line)[0] for line in lines] == [
        "--block_size", "--muon_lr", "--foo", "--eot_token", "--muon_momentum", "NPROC", "none.bin",
    ]  # fmt: skip


def test_refused_flag_does_not_let_the_data_look_too_short(flags, problems):
    """With --num_iterations misspelled the preset's 680 would be needed."""
    assert len(problems(*flags, "--num_iteration", "4")) == 1
    at = flags.index("--num_iterations")
    [line] = problems(*flags[:at], *flags[at + 2 :], "--num_iteration", "4")
    assert "unrecognized arguments: --num_iteration 4" in line


# The configuration


@pytest.fixture(scope="module")
def trainer() -> types.ModuleType:
    return check.load_trainer(torch.cuda.device_count())


VALUES = st.sampled_from("0 1 2 8 64 128 1024 49152 -1 0.5 1.5 nan cuda cpu auto gpt2 nano L- LS 0. a/b x".split())
FLAGS = st.sampled_from([field.name for field in dataclasses.fields(Hyperparameters)])
ARGV = st.lists(
    st.one_of(
        st.tuples(FLAGS.map("--{}".format), VALUES),
        st.tuples(st.sampled_from("--preset=nano --preset=gpt2 --compile --no-compile --no-lm_head_fp8".split())),
    ),
    max_size=5,
).map(lambda groups: [argument for group in groups for argument in group])


def outcome_of(module, argv: list[str]) -> dict | str:
    try:
        return dataclasses.asdict(module.parse_args(argv))
    except module.UserError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(ARGV)
def test_configuration_is_that_of_the_trainer(trainer, argv):
    assert repr(outcome_of(trainer, argv)) == repr(outcome_of(train_gpt, argv))


def test_presets_and_checks_are_those_of_the_trainer(trainer, flags, corpus):
    assert {name: dataclasses.asdict(cfg) for name, cfg in trainer.PRESETS.items()} == {
        name: dataclasses.asdict(cfg) for name, cfg in train_gpt.PRESETS.items()
    }
    cfg, theirs = trainer.parse_args(flags), train_gpt.parse_args(flags)
    assert trainer.data_command(cfg) == train_gpt.data_command(theirs)
    shards = trainer.find_shards(f"{corpus}/train_*.bin", "")
    assert [dataclasses.astuple(shard) for shard in shards] == [
        dataclasses.astuple(shard) for shard in train_gpt.find_shards(f"{corpus}/train_*.bin", "")
    ]
    assert len(trainer.plan_batches(shards, 128, 99)) == 14
    with pytest.raises(trainer.UserError, match="3 processes do not divide the 2 sequences"):
        trainer.check_world(cfg, World(size=3))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(), FLAGS.map("--{}".format), VALUES), max_size=6))
def test_any_arguments_end_in_a_configuration_or_a_problem(trainer, argv):
    argv = [argument for argument in argv if not argument.startswith(("-h", "--h"))]  # those of --help
    cfg, refused = check.configure(trainer, argv)
    assert isinstance(cfg, trainer.Hyperparameters)
    assert isinstance(outcome_of(trainer, argv), str) == bool(refused)


def test_definition_that_the_trainer_lost_is_named(monkeypatch):
    monkeypatch.setattr(check, "TAKEN", [*check.TAKEN, "plan_nothing"])
    with pytest.raises(AssertionError, match=r"does not define plan_nothing, which check\.py takes"):
        check.load_trainer(0)


# GPUs


def test_eight_h100(machine, gpt2, outcome):
    machine(*[H100] * 8)
    code, out, notes = outcome(*gpt2)
    assert (code, out) == (0, ["8"])
    assert notes == [
        "note: precision: bfloat16, head in training FP8, large attention tiles (NVIDIA H100 80GB HBM3, compute "
        "capability 9.0)"
    ]


def test_two_gpus_with_16_gb_are_told_what_fits(machine, gpt2, problems, outcome):
    small = RTX_4090.replace(RTX_4090.split(", ")[1], "15900")
    machine(small, small)
    lines = problems(*gpt2)
    assert [line.partition(" takes about ")[0] for line in lines] == ["training"]
    assert all("16.7 GB are free: --" in line for line in lines)
    fixes = [argument for line in lines for argument in line.rpartition(": ")[2].split()]
    assert fixes == "--train_seq_len 24576".split()
    assert outcome(*gpt2, *fixes)[0] == 0


def test_two_gpus_with_24_gb_train_gpt2(machine, gpt2, outcome):
    machine(RTX_4090, RTX_4090)
    code, out, notes = outcome(*gpt2)
    assert (code, out, len(notes)) == (0, ["2"], 2)
    assert "head in training FP8, small attention tiles (NVIDIA GeForce RTX 4090, compute capability 8.9)" in notes[0]
    assert "of training on 2 H100, longer on smaller GPUs (an estimate)" in notes[1]


@pytest.mark.parametrize(
    ("capability", "head", "tiles"),
    [
        ("8.0", "bfloat16", "large"),
        ("8.6", "bfloat16", "small"),
        ("8.9", "FP8", "small"),
        ("9.0", "FP8", "large"),
        ("10.0", "FP8", "large"),
        ("12.0", "FP8", "small"),
    ],
)
def test_what_follows_from_the_compute_capability(machine, gpt2, outcome, capability, head, tiles):
    machine(f"Some GPU, 81079, {capability}, 580.65.06")
    code, _, notes = outcome(*gpt2)
    assert code == 0
    assert f"head in training {head}, {tiles} attention tiles" in notes[0]


@pytest.mark.gpu
def test_attention_tiles_are_those_of_the_trainer():
    is_large = torch.cuda.get_device_capability() in check.LARGE_SHARED_MEMORY
    assert is_large == (train_gpt.flex_kernel_options() is None)


def test_gpu_that_cannot_compile(machine, gpt2, problems, outcome):
    machine("Tesla T4, 81079, 7.5, 580.65.06")
    assert problems(*gpt2) == [
        "Tesla T4, compute capability 7.5: torch.compile needs 8.0 or newer for bfloat16; --dtype float32"
    ]
    assert outcome(*gpt2, "--dtype", "float32")[0] == 0
    machine("GTX 1080, 81079, 6.1, 580.65.06")
    assert problems(*gpt2) == ["GTX 1080, compute capability 6.1: torch.compile needs 7.0 or newer; --device cpu"]


def test_flex_attention_that_is_not_compiled_does_not_fit(machine, gpt2, problems):
    machine(*[H100] * 8)
    lines = problems(*gpt2, "--no-compile")
    assert len(lines) == 2
    assert all(line.endswith(": leave out --no-compile") for line in lines)


def test_gpu_that_others_fill(machine, gpt2, problems, outcome):
    machine(H100, H100.replace("81079", "500"))
    lines = problems(*gpt2)
    assert len(lines) == 2
    assert all(line.endswith("524.3 MB are free: train a smaller model (--model_dim), or free some") for line in lines)
    machine(H100.replace("81079", "[N/A]"))
    assert outcome(*gpt2)[0] == 0


@pytest.mark.parametrize(
    ("invented", "why"),
    [
        (dict(), "driver 470.57.06 is too old for torch's CUDA 13.0; update it to 580 or newer"),
        (dict(cuda=""), "the installed torch is a CPU build; pip install --force-reinstall -r requirements.txt"),
        (dict(answer="NVIDIA-SMI has failed: no driver", code=9), "nvidia-smi fails: NVIDIA-SMI has failed: no driver"),
        (dict(answer="0, GPU-1, H100, 81079, [N/A], 580.1"), "nvidia-smi answers '0, GPU-1, H100, 81079, [N/A], 580"),
        (dict(answer="0, GPU-1, H100, 81079, 9.0, [N/A]"), "nvidia-smi answers '0, GPU-1, H100, 81079, 9.0, [N/A]'"),
        (dict(answer="No devices were found"), "nvidia-smi answers 'No devices were found' when asked for index,"),
    ],
)
def test_gpu_that_torch_cannot_use(machine, flags, outcome, problems, invented, why):
    machine(H100.replace("580.65", "470.57"), **invented)
    code, out, notes = outcome(*flags, "--device", "auto")
    assert (code, out) == (0, ["1"])
    assert notes[0].startswith(f"note: training on the CPU although there is nvidia-smi: {why}")
    assert len(outcome(*flags, "--device", "cpu")[2]) == 1  # that of the time
    [line] = problems(*flags, "--device", "cuda")
    assert line.startswith(f"--device cuda: {why}")


def test_driver_that_hangs_is_not_waited_for(machine, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    machine(H100)
    monkeypatch.setattr(subprocess, "run", hang)
    gpus, why = check.find_gpus()
    assert gpus == []
    assert re.fullmatch(r"nvidia-smi fails: .* timed out after 20 seconds", why)


@pytest.mark.parametrize(
    ("visible", "names"),
    [("0,1", "AB"), ("3, 1", "DB"), ("2,9,0", "C"), ("GPU-1a1b2c3d-1,GPU-3a", "BD"), ("MIG-77", "A"), ("-1", "")],
)
def test_hidden_gpus_do_not_count(machine, monkeypatch, visible, names):
    machine(*(f"{name}, 81079, 9.0, 580.65.06" for name in "ABCD"))
    assert len(check.find_gpus()[0]) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, why = check.find_gpus()
    assert "".join(gpu.name for gpu in gpus) == names
    assert why == ("" if names else "CUDA_VISIBLE_DEVICES=-1 hides every GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check.find_gpus()[0] == []


@pytest.mark.parametrize(
    ("text", "version"), [("= '12.8'", "12.8"), (': Optional[str] = "13.0"', "13.0"), (" = None", "")]
)
def test_cuda_version_of_torch_is_read_without_importing_it(tmp_path, monkeypatch, text, version):
    assert check.torch_cuda() == (torch.version.cuda or "")
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\ncuda{text}\nhip = '6.1'\n")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert check.torch_cuda() == version


# How many processes


def test_as_many_processes_as_fit(machine, flags, gpt2, outcome, problems, monkeypatch):
    assert outcome(*flags)[:2] == (0, ["1"])
    for gpus, expected in ((1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)):
        machine(*[H100] * gpus)
        assert outcome(*gpt2)[:2] == (0, [str(expected)])
    monkeypatch.setenv("NPROC", "2")
    assert outcome(*flags)[:2] == outcome(*gpt2)[:2] == (0, ["2"])
    machine(H100, H100, H100)
    monkeypatch.setenv("NPROC", "4")
    assert problems(*gpt2) == ["NPROC=4: there are 3 GPUs; set NPROC=2, or leave it out"]
    monkeypatch.setenv("NPROC", "3")
    [line] = problems(*flags)
    assert "3 processes do not divide the 2 sequences of a step: start 2, " in line


# Versions


def test_packages(flags, outcome, problems, monkeypatch):
    versions = {"torch": "2.12.1+cu130", "numpy": "2.4.6", "huggingface_hub": "2.4.0", "tqdm": "4.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    versions |= {name: pins[name] for name in ("numpy", "huggingface_hub")}
    code, _, notes = outcome(*flags)
    others = f"torch 2.12.1+cu130 instead of {pins['torch']}, tqdm 4.0 instead of {pins['tqdm']}"
    assert (code, notes[0]) == (0, f"note: not the tested versions: {others}; pip install -r requirements.txt")
    versions["torch"] = "2.10.0"
    del versions["tqdm"]
    assert problems(*flags) == [
        "torch 2.10.0: expected 2.11 or newer; pip install -r requirements.txt",
        "tqdm is not installed: pip install -r requirements.txt",
    ]
    del versions["numpy"]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numpy" else find_spec(name))
    assert "numpy is not installed: pip install -r requirements.txt" in problems(*flags, "--foo")


def test_old_python_gets_as_far_as_the_line_that_refuses_it(flags, problems, monkeypatch):
    ast.parse((ROOT / "check.py").read_text(), feature_version=(3, 8))
    monkeypatch.setattr(check.sys, "version_info", (3, 10, 4))
    assert problems(*flags) == ["Python 3.10.4: expected 3.11 or newer; name one: PYTHON=/path/to/python ./run.sh"]


# Estimates


@pytest.mark.parametrize("preset", ["gpt2", "nano"])
def test_parameters_are_those_of_the_model_and_its_optimizers(preset):
    cfg = dataclasses.replace(train_gpt.PRESETS[preset], device="cpu")
    run = as_run(cfg)
    with torch.device("meta"):
        gpt = GPT(cfg)
        named = {name: p for name, p in gpt.named_parameters() if p.ndim > 1}
        optimizers = train_gpt.build_optimizers(gpt, cfg, World(), lambda *_: None)
    counts = [sum(p.numel() for name, p in named.items() if kind in name) for kind in ("embed", "lm_head", "blocks")]
    assert check.parameters(run) == tuple(counts)
    values, state = check.model_bytes(run)
    assert values == sum(p.numel() * p.element_size() for p in named.values())
    assert state == pytest.approx(sum(t.nbytes for o in optimizers for t in o.state().values()), rel=1e-3)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float64"])
def test_precision_on_the_cpu_is_that_of_the_trainer(dtype):
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], device="cpu", dtype=dtype)
    assert as_run(cfg).is_bf16 == (train_gpt.activation_dtype(cfg) == torch.bfloat16)


def test_memory_of_gpt2_is_below_that_of_a_gpu_with_24_gb():
    published = 30_724 * 2**20  # of record 21, whose logits exist whole
    one, eight = (check.peak_bytes(on_h100(n)) for n in (1, 8))
    assert max(one.values()) < 24e9 < published
    assert eight["train_seq_len"] < one["train_seq_len"] < eight["train_seq_len"] + 2e9  # one holds the whole state
    kept = 13.7e9  # by the compiler's graph of the forward pass
    assert kept < eight["train_seq_len"] < 1.5 * kept
    whole = check.peak_bytes(on_h100(8, lm_head_slice=49152))
    assert whole["train_seq_len"] == pytest.approx(published, rel=0.05)
    shorter = check.peak_bytes(on_h100(8, train_seq_len=24576, val_seq_len=65536))
    assert shorter["train_seq_len"] < 0.7 * eight["train_seq_len"]
    assert shorter["val_seq_len"] < 0.6 * eight["val_seq_len"]


def test_cpu_without_enough_memory_is_told_what_fits(flags, problems, outcome, monkeypatch):
    long = "--train_seq_len 1048576 --batch_tokens 2097152 --num_iterations 1".split()
    monkeypatch.setattr(check, "check_data", lambda *_, **__: [])
    read_text = Path.read_text
    few = "MemTotal: 9 kB\nMemAvailable: 1000000 kB"
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **k: few if p.name == "meminfo" else read_text(p, *a, **k))
    [line] = problems(*flags, *long)
    assert re.match(r"training takes about \d+\.\d GB of memory a process, 1\.0 GB are free: --train_seq_len \d+", line)
    assert outcome(*flags, *long, *line.rpartition(": ")[2].split())[0] == 0


@pytest.mark.parametrize(
    ("preset", "num_gpus", "native", "time"),
    [
        ("nano", 0, True, "16 seconds of training on 2 cores with native bf16"),
        ("nano", 0, False, "32 seconds of training on 2 cores without native bf16"),
        ("gpt2", 8, True, "3 minutes of training on 8 H100"),
        ("gpt2", 1, True, "24 minutes of training on 1 H100, longer on smaller GPUs"),
        ("gpt2", 0, True, "65 days of training on 2 cores"),
    ],
)
def test_training_time(preset, num_gpus, native, time, monkeypatch):
    monkeypatch.setattr(check, "has_native_bf16", lambda: native)
    steps = {"nano": 640, "gpt2": 1770}[preset]
    cfg = dataclasses.replace(train_gpt.PRESETS[preset], num_iterations=steps)
    run = check.Run(check.load_trainer(num_gpus), cfg, [], max(num_gpus, 1))
    found = check.Findings()
    check.check_time(run, found)
    [(line, is_note)] = found.facts
    assert line.startswith(f"time: about {time}")
    assert is_note == (num_gpus < 8)


# Disk and data


def test_room_for_logs_checkpoints_and_data(machine, gpt2, problems, tmp_path, monkeypatch):
    free = 10**9
    monkeypatch.setattr(check.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    monkeypatch.chdir(tmp_path)  # where no data are
    machine(*[H100] * 8)
    assert problems("--preset", "gpt2") == [
        "data/fineweb10B: data need 1.6 GB, 1.0 GB are free; make room, or link it to a place with more"
    ]
    cfg = dataclasses.asdict(train_gpt.PRESETS["gpt2"])
    for every, refused in ((0, False), (100, True)):
        found = check.Findings()
        run = check.Run(check.load_trainer(8), types.SimpleNamespace(**cfg | dict(checkpoint_every=every)), [], 8)
        check.check_disk(run, False, found)
        assert bool(found.problems) == refused
    assert found.problems[0].startswith("logs: logs need 4.")
    for free, refused in ((10**9, False), (7 * 10**8, True)):  # noqa: B007
        found = check.Findings()
        run = check.Run(check.load_trainer(8), types.SimpleNamespace(**cfg | dict(save_checkpoint=True)), [], 8)
        check.check_disk(run, False, found)
        assert bool(found.problems) == refused
    free = 1000
    [line] = problems(*gpt2)
    assert line == f"{tmp_path}/logs: logs need 0.1 MB, 0.0 MB are free; make room, or choose another --log_dir"


def test_a_resumed_run_goes_on_in_its_log(flags, problems, tmp_path):
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "mine.txt").write_text("of the run so far")
    run = [*flags, "--log_dir", str(tmp_path / "logs"), "--run_id", "mine"]
    assert len(problems(*run)) == 1
    assert check.main([*run, "--resume", "latest"]) == 0


def test_nothing_is_fetched_for_somebodys_own_data(flags, problems, monkeypatch):
    monkeypatch.setattr(check, "get_data", lambda *_: pytest.fail("data were fetched"))
    [line] = problems(*flags, "--train_files", "mine/*.bin")
    assert line.startswith("no shards match mine/*.bin")


def test_preset_with_more_steps_than_its_corpus_is_not_fetched_in_vain(tmp_path, monkeypatch, problems):
    monkeypatch.setattr(check, "get_data", lambda *_: pytest.fail("data were fetched"))
    monkeypatch.chdir(tmp_path)
    for role in ("train", "val"):
        write_shard(tmp_path / f"data/nano/nano_{role}_000000.bin", np.zeros(400_000, dtype=np.int64))
    [line] = problems("--preset", "nano", "--device", "cpu")
    steps = train_gpt.PRESETS["nano"].num_iterations
    assert line.endswith(f"hold 390 batches of 1024 tokens, the run needs {steps}; lower --num_iterations")


def test_presets_data_are_fetched_when_they_are_missing(flags, corpus, tmp_path, monkeypatch, outcome, problems):
    """With the packer replaced by one that copies the small corpus into place; --check does not run it."""
    monkeypatch.chdir(tmp_path)
    packer = tmp_path / "data" / "pack_nano.py"
    packer.parent.mkdir()
    copy = "shutil.copy('{0}/{1}_0.bin', 'data/nano/nano_{1}_0.bin')"
    copies = "; ".join(copy.format(corpus, role) for role in ("train", "val"))
    packer.write_text(f"import os, shutil; print('note: packing'); os.makedirs('data/nano'); {copies}")
    own = [*SMALL, "--log_dir", "logs"]
    code, out, errors = outcome(*own, "--check")
    assert (code, errors) == (0, [])
    [line] = [line for line in out if line.startswith("data: ")]
    assert re.fullmatch(r"data: no shards match .*; get them: python data/pack_nano.py \(run.sh does\)", line)
    assert not (tmp_path / "data/nano").exists()
    # Not either when the run is refused for something else
    assert len(problems(*own, "--device", "cuda")) == 1
    assert not (tmp_path / "data/nano").exists()
    code, out, errors = outcome(*own)
    assert (code, out) == (0, ["1"])
    assert errors[:2] == ["getting the data: python data/pack_nano.py", "note: packing"]
    assert (tmp_path / "data/nano/nano_train_0.bin").exists()
    (tmp_path / "data/nano/nano_train_0.bin").write_text("damaged")
    packer.write_text("raise SystemExit(1)")
    assert problems(*own) == ["the data could not be fetched: see above; then run this again"]
    packer.write_text("")
    [line] = problems(*own)
    assert "not a token shard" in line


# As programs


def program(*command: str, **env: str) -> subprocess.CompletedProcess:
    names = ("RANK", "WORLD_SIZE", "NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in names} | env
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_torch_is_not_imported(flags):
    code = "import sys, check; code = check.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
    done = program(sys.executable, "-c", code, *flags)
    assert (done.returncode, done.stdout) == (0, "1\nFalse\n")
    done = program(sys.executable, "-c", code, *flags, "--foo")
    assert (done.returncode, done.stdout) == (2, "False\n")


def test_run_sh_checks_before_it_launches(flags):
    python = dict(PYTHON=sys.executable)
    done = program("./run.sh", *flags, "--foo", "--muon_lr", "x", **python)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 2)
    assert done.stderr.startswith("check.py: argument --muon_lr")
    done = program("./run.sh", *flags, "--check", **python)
    assert (done.returncode, done.stderr) == (0, "")
    labels = {line.partition(": ")[0] for line in done.stdout.splitlines()}
    assert labels >= set("versions hardware data memory time disk processes".split())
    assert done.stdout.endswith("\nprocesses: 1\n")
    done = program("./run.sh", "--check", *flags, "--num_iterations", "15", **python)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the run needs 15" in done.stderr
