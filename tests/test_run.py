"""run.py, run.sh and environment.sh: on invented machines, with data of a few tokens, and packages of one file."""

import dataclasses
import ensurepip
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import train_gpt
from conftest import SMALL, TINY
from speedrun import ROOT, process, run

H100, RTX_4090 = ((9, 0), 79e9), ((8, 9), 24.5e9)  # compute capability, and bytes that are free


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Invent what torch sees, and what nvidia-smi, a program on the PATH, prints."""
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC", "SCRIPT", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(run, "ROOT_SCRIPT", Path(train_gpt.__file__))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)

    def invent(*gpus: tuple, nvidia_smi: str = "echo No devices were found; exit 6") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpus[0][0])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (gpus[i][1], 0))
        put_program("nvidia-smi", nvidia_smi)

    def put_program(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    invent()
    invent.program = put_program
    return invent


@pytest.fixture
def check(corpus, capfd):
    """Check a small run of nano: the exit code, stdout and stderr."""

    def check_flags(*flags: str, numbers: Sequence[str] = SMALL) -> tuple[int, str, str]:
        files = f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin"
        return run.main(["--check", *numbers, *files, *flags]), *capfd.readouterr()

    return check_flags


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Choose a copy of the script, with a change at its end."""

    def choose(change: str) -> None:
        (tmp_path / "my.py").write_text(f"{Path(train_gpt.__file__).read_text()}\n{change}\n")
        monkeypatch.setenv("SCRIPT", str(tmp_path / "my.py"))

    return choose


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset", "--preset: expected one argument"),
        ("--device cuda", "there is no NVIDIA GPU; --preset nano trains on a CPU"),
        ("--num_iterations 999", "the run needs 999; documents begin with --eot_token 256"),
        ("--train_files README.md", "README.md: not a whole shard of tokens; data/pack_text.py packs text"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(check, flags, message):
    code, out, line = check(*flags.split())
    assert (code, out, line.startswith("run.sh: "), line.count("\n"), message in line) == (2, "", True, 1, True), line


def test_a_gpu_that_torch_cannot_use_is_never_a_silent_run_on_the_cpu(machine, check, monkeypatch):
    machine(nvidia_smi="echo GPU 0: driver mismatch; exit 18")
    code, out, errors = check("--device=auto")
    assert (code, out, "GPU 0: " in errors, "update the driver to 580" in errors) == (2, "", True, True)
    assert check()[0] == 0  # --device cpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert check("--device=auto")[0] == 0


@pytest.mark.published  # what the root's sizes take
@pytest.mark.parametrize(
    ("gpus", "code", "found"),
    [
        ([H100] * 7, 0, "4 processes\n"),
        ([RTX_4090] * 2, 0, "2 processes --no-cuda_graphs --ngram_rows=2643840 --no-layers_fp8\n"),
        ([((8, 0), 8e9)], 2, "free some, or halve --train_seq_len"),
    ],
)
def test_processes_and_flags_suit_the_machine(machine, copy, monkeypatch, capfd, gpus, code, found):
    machine(*gpus)
    monkeypatch.setattr(train_gpt, "check_data", lambda cfg: None)
    monkeypatch.setattr(run, "get", lambda command: False)  # no mask
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))  # FP8 may hang with it
    for _ in "root", "copy":
        assert run.main(["--check"]) == code
        assert found in "".join(capfd.readouterr())
        copy("check_data = print")


def test_a_copy_is_checked_as_what_it_is(check, copy, monkeypatch):
    """With the numbers of its own preset, which flags change."""
    monkeypatch.setattr(run, "get", None)  # own files: nothing is fetched
    monkeypatch.setenv("NPROC", "3")
    assert "NPROC=3: expected one of [1, 2]; sequences a step: 2" in check()[2]
    copy(f"PRESETS['nano'] = dataclasses.replace(PRESETS['nano'], **{TINY | dict(batch_tokens=192)})")
    assert check(numbers=["--preset=nano"]) == (0, "ready to start 3 processes\n", "")
    assert "expected one of [1, 2]; sequences a step: 2" in check("--batch_tokens=128", numbers=["--preset=nano"])[2]
    assert "none.bin in " in check("--batch_tokens=192", "--train_files=none.bin")[2]
    copy("Hyperparameters.own_flag = 0\ndef parse_args(flags):\n    raise UserError('a flag of its own')")
    assert check("--own_flag=3") == (2, "", "run.sh: a flag of its own\n")


def test_a_foreign_script_is_started_without_checks_and_without_being_imported(tmp_path, monkeypatch, capfd):
    (script := tmp_path / "foreign.py").write_text("raise SystemExit('trains')\ndef parse_args(): ...\n")
    monkeypatch.setenv("SCRIPT", str(script))
    monkeypatch.setattr(os, "execv", lambda _, command: print(*command[1:]))
    run.main(["--its_flag"])
    told = f"run.sh: {script} defines no PRESETS, UserError, resolve: its flags, data and memory are not"
    assert capfd.readouterr() == (f"{script} --its_flag\n", f"{told} checked\n")


@pytest.mark.parametrize(
    ("record", "shards"), [("21_BatchSize", 11), ("89_FP8DownProjection", 6), ("92f_FP8Backward", 5)]
)
def test_data_of_older_records_are_fetched_and_their_memory_is_not_checked(
    machine, tmp_path, monkeypatch, capfd, record, shards
):
    machine(H100)
    monkeypatch.chdir(tmp_path)  # where no data are
    monkeypatch.setenv("SCRIPT", str(path := ROOT / "records" / "gpt2" / record / "train_gpt.py"))
    monkeypatch.setattr(run, "get", lambda command: print(command))
    assert run.main(["--check"]) == 2
    out, errors = capfd.readouterr()
    assert out == f"data/cached_fineweb10B.py {shards}\n"
    assert errors.splitlines() == [
        f"run.sh: {path} has no step_schedules: whether it fits into memory is not checked",
        "run.sh: the data could not be fetched: see above, then run this again",
    ]


def test_a_presets_data_are_fetched_where_they_are_missing_or_damaged(corpus, tmp_path, monkeypatch, capfd):
    """With the packer replaced by one that copies a small corpus into place."""
    monkeypatch.chdir(tmp_path)
    nano = dataclasses.replace(train_gpt.PRESETS["nano"], **TINY)
    monkeypatch.setitem(train_gpt.PRESETS, "nano", nano)
    (tmp_path / "data" / "nano").mkdir(parents=True)
    packer, shard = tmp_path / "data" / "pack_nano.py", tmp_path / "data" / "nano" / "nano_train_0.bin"
    copy = f"shutil.copy(f'{corpus}/{{role}}_000000.bin', f'data/nano/nano_{{role}}_0.bin')"
    packer.write_text(f"import shutil\nfor role in ('train', 'val'):\n    {copy}")
    for _ in range(2):
        assert run.main(["--check"]) == 0
        assert capfd.readouterr().err == f"run.sh: getting data: {process.PYTHON} data/pack_nano.py\n"
        assert (run.main(["--check"]), capfd.readouterr().err) == (0, "")
        shard.write_text("damaged")
    packer.write_text("raise SystemExit(1)")
    assert run.main(["--check"]) == 2
    assert "the data could not be fetched: see above" in capfd.readouterr().err
    packer.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(20)")
    assert (run.main(["--check"]), capfd.readouterr().err.splitlines()[-1]) == (130, "run.sh: interrupted")


def test_a_name_that_a_module_lacks_is_no_missing_package(capsys):
    with pytest.raises(ImportError), process.packages():
        from train_gpt import no_such_name  # noqa: F401
    with pytest.raises(SystemExit), process.packages():
        import no_such_module  # noqa: F401
    assert f"No module named 'no_such_module'; {process.PIP} -r " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "bench"])
def test_ctrl_c_while_modules_load_is_a_line(tmp_path, command):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    env = os.environ | dict(PYTHONPATH=str(tmp_path))
    start = [sys.executable, "-m", "speedrun", command]
    done = subprocess.run(start, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (130, "", 1), done.stderr
    assert done.stderr.endswith(": interrupted\n")


def shell(command: str, cwd: Path = ROOT, **env: str) -> tuple[int, str, str]:
    env = os.environ | dict(PYTHON=sys.executable) | env
    done = subprocess.run(["bash", "-c", command, "run.sh"], cwd=cwd, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_run_sh(corpus, tmp_path):
    (tmp_path / "run").symlink_to(ROOT / "run.sh")
    flags = [*SMALL, f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin", f"--log_dir={tmp_path}"]
    code, out, _ = shell(f"./run {' '.join(flags)}", tmp_path, NPROC="2", PYTHONSAFEPATH="1")
    assert (code, "val_loss" in out) == (0, True)
    assert shell("./run.sh", SCRIPT="no.py") == (2, "", f"run.sh: SCRIPT=no.py: there is no such file in {ROOT}\n")


def test_who_has_all_packages_is_told_once_which_python_to_go_on_with(machine, tmp_path):
    (tmp_path / "speedrun").mkdir()
    for name in "run.sh", "speedrun/environment.sh", "pyproject.toml":
        shutil.copy(ROOT / name, tmp_path / name)
    for name in "requirements.txt", "train_gpt.py":
        (tmp_path / name).touch()
    machine.program("python-of-all", f'[ "$1" = -m ] && echo "$@" || exec {sys.executable} "$@"')
    told = "run.sh: python-of-all has all packages, so no .venv was made: start the other commands with it\n"
    for change, line in ("", told), ("mkdir logs; ", ""), ("mkdir .venv; ", told):  # the last has no Python
        found = shell(f"{change}./run.sh --preset nano", tmp_path, PYTHON="python-of-all")
        assert found == (0, "-m speedrun run --preset nano\n", line)
    assert shell("./run.sh", tmp_path, NPROC="two") == (2, "", "run.sh: NPROC=two: expected a number\n")


UV = f"""case "$1" in
venv) exec {sys.executable} -m venv --without-pip .venv ;;
pip) shift 6 && exec {sys.executable} -m pip --quiet --python .venv install "$@" ;;
esac"""


@pytest.mark.slow
@pytest.mark.parametrize("uv", ["exit 2", UV])
def test_environment_is_made_once_and_completed_and_has_pip(machine, tmp_path, uv):
    """By uv, and by pip where that fails: with pip itself, and a package of one file, from folders."""
    machine.program("uv", uv)
    folder = tmp_path / "a clone"
    (folder / "speedrun").mkdir(parents=True)
    shutil.copy(ROOT / "speedrun" / "environment.sh", folder / "speedrun")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "requirements.txt").write_text("tiny==1.0\n")
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    wheels = dict(PIP_FIND_LINKS=f"{tmp_path} {Path(ensurepip.__file__).parent / '_bundled'}", PIP_NO_INDEX="1")
    find = "set -euo pipefail; source speedrun/environment.sh; find_python; echo $python; env"
    activated = "source .venv/bin/activate; pip --version; python -m pip --version"  # as README says next
    for damage, is_kept in (
        ("mkdir -p .venv/bin; ln -s /gone/python3.10 .venv/bin/python3", False),
        ("rm .venv/lib/*/site-packages/tiny*/METADATA", True),  # pip was killed: it writes METADATA last
        (f"cp -r . '{tmp_path}/a copy'", False),  # its `activate` leads to the first clone
    ):
        shell(f"touch .venv/mark; {damage}", folder)
        folder = tmp_path / "a copy" if "a copy" in damage else folder
        code, out, errors = shell(find, folder, **wheels)
        assert (code, out.startswith(".venv/bin/python\n"), "completing" in errors) == (0, True, True), errors
        assert (folder / ".venv" / "mark").exists() == is_kept
        assert all(f"{name}={value}\n" in out for name, value in process.ENVIRONMENT.items())
        assert shell(activated, folder)[1].count(str(folder / ".venv")) == 2
        assert shell(find, folder)[::2] == (0, "")  # nothing is left to do
    assert shell(find, folder, PYTHON="/no")[2] == "run.sh: PYTHON=/no is not Python 3.11 to 3.13\n"
