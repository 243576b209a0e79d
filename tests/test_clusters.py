"""docs/clusters.md: its commands as two nodes of one machine, the batch script with a stand-in for Slurm, the image."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

import check
import train_gpt
from test_world_size import finish, free_ports, start, write_tokens

ROOT = Path(train_gpt.__file__).parent
PAGE = (ROOT / "docs" / "clusters.md").read_text()
TEXT = " ".join(PAGE.split())  # however its lines break
SCRIPT = ROOT / "docs" / "train.slurm"
SHORT = (
    "--preset nano --device cpu --dtype float64 --cpu_threads 1 --seed 1 --num_iterations 48 --val_loss_every 0 "
    "--model_dim 32 --head_dim 16 --bigram_rows 61 --train_seq_len 256 --batch_tokens 1024 --val_seq_len 1024 "
    "--val_tokens 4096"
).split()


# ----------------------------------------------------------------------------------------------------------------------
# Two nodes


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """A short run of nano in double precision, in which the number of processes makes no difference to speak of."""
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "train.bin", 48 * 1024 + 1, 257, seed=0)
    write_tokens(folder / "val.bin", 4097, 257, seed=1)
    return [*SHORT, "--train_files", str(folder / "train.bin"), "--val_files", str(folder / "val.bin")]


@pytest.fixture(scope="module")
def loss_alone(flags, tmp_path_factory) -> float:
    return train_gpt.main([*flags, "--log_dir", str(tmp_path_factory.mktemp("alone"))]).val_loss


def loss_of_two(run: Path) -> float:
    """The loss of a run of two processes that is over, from its log without ending."""
    assert "; 2 processes, " in run.with_suffix(".txt").read_text()
    return json.loads(run.with_suffix(".json").read_text())["val_loss"]


def job_id() -> str:
    """Of a job whose port, which the batch script derives from it, is free."""
    return str(next(int(port) for port in free_ports(99) if 20_000 <= int(port) < 30_000) - 10_000)


def recipes() -> list[list[list[str]]]:
    """The page's ways to start two nodes: for each the commands of both. What needs no rank is the same on both."""
    lines = [shlex.split(line) for line in re.findall(r"^ {4}(torchrun .*--nnodes=2 .*train_gpt\.py.*)$", PAGE, re.M)]
    with_ranks = [line for line in lines if any("--node_rank" in argument for argument in line)]
    return [with_ranks, *([line] * 2 for line in lines if line not in with_ranks)]


def test_the_page_starts_two_nodes_in_two_ways():
    static, c10d = recipes()
    assert [line[2] for line in static] == ["--node_rank=0", "--node_rank=1"]
    assert static[0][:2] + static[0][3:] == static[1][:2] + static[1][3:]
    assert "--rdzv_backend=c10d" in c10d[0]
    for line in (*static, *c10d):
        train_gpt.parse_args(line[line.index("train_gpt.py") + 1 :])


@pytest.mark.slow
def test_commands_of_the_page_train_as_one_process(flags, loss_alone, tmp_path):
    nodes = []
    for (kind, commands), port in zip(enumerate(recipes()), free_ports(2), strict=True):
        for command in commands:
            line = shlex.join(command).replace("NODE0:29500", f"127.0.0.1:{port}").replace("NODE0", "127.0.0.1")
            line = re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=1", line).replace("=29500", f"={port}")
            own = [*flags, "--log_dir", str(tmp_path), "--run_id", f"recipe{kind}"]
            nodes.append(start(["-m", "torch.distributed.run", *shlex.split(line)[1:], *own]))
    finish(nodes, timeout=80)
    for kind in range(2):
        assert loss_of_two(tmp_path / f"recipe{kind}") == pytest.approx(loss_alone, rel=1e-7)


@pytest.fixture
def sbatch(tmp_path):
    """Runs the batch script as Slurm does: a copy of it, with the variables that its #SBATCH lines ask for.

    The nodes' working directories hold the script and no more, so that logs and checkpoints are on disks of their own.
    """
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(SCRIPT, spool)
    for node in range(2):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        (tmp_path / "nodes" / str(node) / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
    for name in ("srun", "scontrol"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/slurm_stub.py {name} "$@"\n')
        command.chmod(0o755)
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.M)
    assert len(found) == SCRIPT.read_text().count("#SBATCH")
    options = dict(found)
    known = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time requeue open-mode".split()
    assert set(options) <= set(known)
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")

    def run(*flags: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
        slurm = dict(
            SLURM_JOB_ID=job_id(),
            SLURM_JOB_NODELIST="node[1-2]",
            SLURM_JOB_NUM_NODES=options["nodes"],
            SLURM_CPUS_PER_TASK=options["cpus-per-task"],
            SLURM_GPUS_ON_NODE=options["gpus-per-node"],
            SLURM_SUBMIT_DIR=str(cwd),
        )
        own = dict(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", NODES=f"{tmp_path}/nodes", PYTHON=sys.executable)
        inherited = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
        command = ["bash", spool, *flags]
        env = inherited | slurm | own | env
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=80)

    return run


@pytest.mark.slow
def test_batch_script_trains_as_one_process(sbatch, flags, loss_alone, tmp_path):
    done = sbatch(*flags, "--log_dir", str(tmp_path / "logs"), "--run_id", "shared", NPROC="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert loss_of_two(tmp_path / "logs" / "shared") == pytest.approx(loss_alone, rel=1e-7)
    assert "step:48/48 val_loss:" in done.stdout


@pytest.mark.slow
def test_batch_script_goes_on_after_a_node_is_lost(sbatch, flags, loss_alone, tmp_path):
    """With checkpoints on the nodes' own disks, half of each on either; the same job starts again and ends alike."""
    first, second = (tmp_path / "nodes" / str(node) / "logs" for node in range(2))
    job, flags = job_id(), [*flags, "--checkpoint_every", "4"]
    lost = sbatch(*flags, NPROC="1", SLURM_JOB_ID=job, LOSE=f"{first}/*/step-000004")
    assert lost.returncode != 0
    assert not (first / f"slurm-{job}.json").exists()
    done = sbatch(*flags, NPROC="1", SLURM_JOB_ID=job, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step " in done.stdout
    assert loss_of_two(first / f"slurm-{job}") == pytest.approx(loss_alone, rel=1e-7)
    for logs, rank in ((first, 0), (second, 1)):
        assert {path.name for path in logs.rglob("rank*.pt")} == {f"rank{rank}.pt"}


def test_batch_script_names_what_is_missing(sbatch, tmp_path):
    for done in (sbatch(cwd=tmp_path), sbatch(PYTHON="/nowhere/python")):
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert "submit from the repository's root" in line
        assert done.stdout == ""


def test_batch_script_asks_for_the_gpus_that_slurm_gives(sbatch, tmp_path):
    """And for gpt2 on them, whatever the node has; flags come last and win."""
    words = tmp_path / "bin" / "srun"
    words.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    plain = sbatch("--seed", "7").stdout.split()
    assert plain[plain.index("train_gpt.py") + 1 :] == "--preset gpt2 --device cuda --seed 7".split()
    assert {"--nnodes=2", "--nproc_per_node=4", "--cpus-per-task=16", "--kill-on-bad-exit=1"} <= set(plain)
    [endpoint] = [word for word in plain if word.startswith("--rdzv_endpoint")]
    assert re.fullmatch(r"--rdzv_endpoint=127\.0\.0\.1:2\d{4}", endpoint)
    for form in (["--checkpoint_every", "10"], ["--checkpoint_every=10"]):
        saved = sbatch(*form, SLURM_JOB_ID="123456").stdout.split()
        own = "--run_id slurm-123456 --resume latest --preset gpt2 --device cuda".split()
        assert saved[saved.index("train_gpt.py") + 1 :] == [*own, *form]


# ----------------------------------------------------------------------------------------------------------------------
# Time and cost


def table_of_hardware() -> dict[str, list[str]]:
    rows = re.findall(r"^\| (\d x [^|]+?) \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_time_and_cost_are_those_of_the_formula():
    """Of README.md's table, from docs/clusters.md's peaks and formula: 176 s on 8 H100, by the FLOP/s, and the head."""
    peaks = {name: float(peak) for name, peak in re.findall(r"(H100|A100|RTX 4090) ([\d.]+) TFLOP/s", TEXT)}
    assert len(peaks) == 3
    run = check.Run(train_gpt, train_gpt.PRESETS["gpt2"], gpus=[])
    _, head, blocks = check.parameters(run)
    without_fp8 = (blocks + head) / (blocks + head / 2)
    assert f"{without_fp8:.2f} times" in TEXT
    rows = table_of_hardware()
    assert len(rows) == 5
    for name, (_, head_in, time, gpu_hours, cost) in rows.items():
        count, gpu = name.split(" x ")
        hours = 176 / 3600 * 8 * peaks["H100"] / peaks[gpu]
        ends = [hours] if head_in == "FP8" else [hours, hours * without_fp8]
        minutes = [60 * end / int(count) for end in ends]
        expected = [[f"{m:.3g}" if m < 10 else f"{m:.0f}" for m in minutes]]
        expected += [[f"{end:.2f}" for end in ends], [f"{2 * end:.1f}" for end in ends]]
        assert [re.findall(r"[\d.]+", cell) for cell in (time, gpu_hours, cost)] == expected, name


def test_figures_of_the_page():
    cfg = train_gpt.PRESETS["gpt2"]
    tokens = cfg.num_iterations * cfg.batch_tokens
    assert round(tokens / 1e6) == 696
    validations = 1 + -(-cfg.num_iterations // cfg.val_loss_every)
    assert f"{validations} validations" in TEXT
    assert f"{100 * validations * cfg.val_tokens / 3 / tokens:.0f}% more" in TEXT
    _, head, blocks = check.parameters(check.Run(train_gpt, cfg, gpus=[]))
    flops = 6 * (head + blocks) * tokens
    assert f"{flops / 1e17:.2f}e17" in TEXT
    assert f"{100 * flops / (176 * 8 * 989e12):.0f}%" in TEXT
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    sums = re.search(r"with no padding at all \| ([\d.]+); [\d.]+ \| ([\d.]+);", benchmarks)
    sent = sum(map(float, sums.groups())) * 2**20 * 7 / 8
    assert f"{sent / 1e9:.2f} GB" in TEXT
    assert f"{sent / 1.25e9:.1f} s at 10 Gbit/s" in TEXT
    assert f"{sent / 12.5e9:.1f} s at 100" in TEXT


# ----------------------------------------------------------------------------------------------------------------------
# The image

DOCKERFILE = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.M)


def tracked() -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a clone of the repository")
    return done.stdout.splitlines()


def is_left_out(path: str) -> bool:
    """By .dockerignore: its patterns begin at the root, match whole names, and take what is below along."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    parts = PurePosixPath(path).parts
    for pattern in (PurePosixPath(line).parts for line in lines if line and not line.startswith("#")):
        for first in range(len(parts)) if pattern[0] == "**" else [0]:
            rest = pattern[1:] if pattern[0] == "**" else pattern
            names = parts[first : first + len(rest)]
            if len(names) == len(rest) and all(map(fnmatch.fnmatchcase, names, rest)):
                return True
    return False


def requirements(command: str) -> set[str]:
    return set(re.findall(r"\S*requirements\.txt", command))


def test_image_takes_its_versions_from_the_requirements():
    [base] = instructions("FROM")
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+", base)
    [install] = [line for line in instructions("RUN") if "pip" in line]
    assert set(re.findall(r"-r (\S+)", install)) == requirements(install)
    pinned = [re.split("[=<>~ ]", line)[0] for path in requirements(install) for line in (ROOT / path).open()]
    assert "torch" in pinned
    assert not set(pinned) & set(re.findall(r"[\w-]+", re.sub(r"#.*", "", DOCKERFILE)))
    assert "==" not in DOCKERFILE


def test_image_has_what_it_copies_and_starts():
    for line in instructions("COPY"):
        *sources, target = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == target == "." or not is_left_out(source), source
            assert source == "." or (target == "." or (ROOT / target).is_dir()), line
    [entry] = instructions("ENTRYPOINT")
    [program] = json.loads(entry)
    assert os.access(ROOT / program, os.X_OK)
    assert instructions("WORKDIR") == ["/train_gpt"]
    assert "safe.directory /train_gpt" in DOCKERFILE


def test_image_is_the_commit_and_nothing_else():
    """Every tracked file, or the log would speak of edits; and nothing that git ignores: data, logs, environments."""
    assert [path for path in tracked() if is_left_out(path)] == []
    assert not is_left_out(".git/HEAD")
    for line in (ROOT / ".gitignore").read_text().split():
        assert is_left_out(f"{line}anything"), line
    assert is_left_out("data/__pycache__/x.pyc")
    assert is_left_out("logs/a.txt")
    assert not is_left_out("records/2025-01-26_BatchSize/logs/a.txt")


def test_image_has_all_that_run_and_test_ask_for(tmp_path):
    """Else they would make an environment in it. Here: with a python3 that has the packages, in a bare folder."""
    [install] = [line for line in instructions("RUN") if "pip" in line]
    asked = {path for name in ("run.sh", "test.sh") for path in requirements((ROOT / name).read_text())}
    assert asked <= requirements(install)
    for path in ("environment.sh", *asked):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    refuse = "case $2 in venv | pip) exit 9 ;; esac"  # or a failure would install everything
    python.write_text(f'#!/bin/sh\n{refuse}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    command = f"set -euo pipefail; source ./environment.sh; find_python {shlex.join(sorted(asked))}; echo $python"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "python3\n", done.stderr
    assert not (tmp_path / ".venv").exists()


def test_folders_that_the_page_mounts_are_those_of_the_image():
    mounted = re.findall(r'-v "?\S+?:(/[\w/]+)"?', PAGE)
    assert len(mounted) >= 3
    [made] = [line for line in instructions("RUN") if "mkdir" in line]
    folders = re.search(r"mkdir -p (.*?) &&", made)[1].split()
    assert set(folders) <= set(re.search(r"chmod 1777 (.*)$", made)[1].split())
    assert set(mounted) <= {folder if folder.startswith("/") else f"/train_gpt/{folder}" for folder in folders}
