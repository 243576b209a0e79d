"""What is measured when, and the report."""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch.distributed as dist

import train_gpt
from benchmarks import ROOT, measure
from shards import write_shard
from train_gpt import PRESETS, Batch, Hyperparameters, UserError, World

INTRODUCTION = """Measures train_gpt.py on this machine: the parts of a step, utilization, memory, compilation, loading,
validation. Prints a table; writes it, a JSON document and a profile to --out.

    python -m benchmarks [--quick] [--out FOLDER] [flags of train_gpt.py, such as --preset nano]
    torchrun --standalone --nproc_per_node=8 -m benchmarks       the step with its communication; start-up is left out

Exit codes: 0 done, 1 a stage failed, 2 something has to be mended, 130 interrupted."""
SIDE_BUDGET_S = 330  # for starts and the self-test together, in processes of their own; the rest takes about 150 s
MIN_SECONDS = 10  # nothing of the kind is done in less
DOCUMENT_TOKENS = 500  # mean, of synthetic data


@dataclass(frozen=True)
class Effort:
    """How much is measured, in full and with --quick. Seconds limit the number of steps, never below `min_steps`."""

    min_steps: int = 5
    max_steps: int = 50
    step_seconds: float = 60
    repetitions: int = 20
    loads: int = 3
    validations: int = 3
    loader_tokens: int = 2**21
    val_sequences: int = 10**9


QUICK = Effort(3, 3, 0, repetitions=3, loads=1, validations=1, loader_tokens=2**16, val_sequences=4)


# ----------------------------------------------------------------------------------------------------------------------
# Data


def random_documents(cfg: Hyperparameters, count: int, seed: int) -> np.ndarray:
    """Random tokens, in documents of about DOCUMENT_TOKENS."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(cfg.vocab_size, size=count, dtype=np.uint16)
    tokens[tokens == cfg.eot_token] = (cfg.eot_token + 1) % cfg.vocab_size
    tokens[rng.random(count) < 1 / DOCUMENT_TOKENS] = cfg.eot_token
    return tokens


@contextlib.contextmanager
def prepared_data(cfg: Hyperparameters, world: World, effort: Effort) -> Iterator[tuple[Hyperparameters, list, str]]:
    """The configuration with its data, the plans of training and validation, and what the data is.

    Where the preset's shards are missing, synthetic ones stand in, in a temporary folder.
    """
    steps = max(64, effort.loader_tokens // cfg.batch_tokens) if effort is not QUICK else 16
    val_sequences = min(cfg.val_tokens // cfg.val_seq_len, effort.val_sequences)
    preset = PRESETS[cfg.preset]
    patterns = (cfg.train_files, cfg.val_files)
    is_default = patterns == (preset.train_files, preset.val_files)
    missing = is_default and not all(list(Path().glob(pattern)) for pattern in patterns)
    with contextlib.ExitStack() as stack:
        what = f"{cfg.train_files} and {cfg.val_files}"
        if missing:
            folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-")) if world.rank == 0 else ""]
            if world.size > 1:
                dist.broadcast_object_list(folder, src=0)
            files = [Path(folder[0]) / name for name in ("train_000000.bin", "val_000000.bin")]
            if world.local_rank == 0:  # of every machine
                write_shard(files[0], random_documents(cfg, steps * cfg.batch_tokens + 1, seed=0))
                write_shard(files[1], random_documents(cfg, val_sequences * cfg.val_seq_len + 1, seed=1))
            if world.size > 1:
                dist.barrier()
            cfg = dataclasses.replace(cfg, train_files=str(files[0]), val_files=str(files[1]), val_sha256="")
            what = f"SYNTHETIC: random tokens in documents of about {DOCUMENT_TOKENS}, as {what} are not both there"
        else:
            steps = min(steps, cfg.num_iterations)
        tokens = val_sequences * cfg.val_seq_len
        plans = train_gpt.plan_data(dataclasses.replace(cfg, num_iterations=steps, val_tokens=tokens))
        yield cfg, plans, what
        if world.size > 1:
            dist.barrier()  # nobody reads any more


# ----------------------------------------------------------------------------------------------------------------------
# Processes of their own


def own_process(command: Sequence[str], seconds: float, cwd: Path | None = None, **environment: str) -> str:
    """The stdout of a Python with these arguments. Raises RuntimeError with the last line that a failed one wrote."""
    if seconds < MIN_SECONDS:
        raise RuntimeError(f"left out: the {SIDE_BUDGET_S} s for processes of their own are spent")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=dict(os.environ) | dict(PYTHONPATH=path) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # it may start others, which have to end with it
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"not done in {seconds:.0f} s") from None
        raise
    if process.returncode != 0:
        told = (stdout.strip() or stderr.strip() or "nothing said").splitlines()
        raise RuntimeError(f"exit code {process.returncode}: {told[-1]}")
    return stdout


def startup(cfg: Hyperparameters, plans: Sequence[Sequence[Batch]], seconds: float, cache: str) -> dict:
    """Seconds of each part of a start; what is compiled comes from and goes into the folder `cache`."""
    free = ("run_id", "log_dir", "resume", "num_iterations", "val_tokens")
    fields = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in free}
    fields |= dict(num_iterations=len(plans[0]), val_tokens=len(plans[1]) * cfg.val_seq_len)
    flags = []
    for name, value in fields.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    caches = dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=str(Path(cache) / "triton"))
    command = ["-m", "benchmarks.startup", str(time.time()), *flags]
    found = json.loads(own_process(command, seconds, **caches).splitlines()[-1])
    return found | dict(total=sum(found.values()))


def self_test(seconds: float) -> str:
    """The last line of the GPU tests."""
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest is not installed"
    command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    return own_process(command, seconds, cwd=ROOT).strip().splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# The measurement


def settings(cfg: Hyperparameters, world: World, flags: Sequence[str]) -> dict:
    names = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return dict(
        machine=train_gpt.describe_machine(cfg, world).splitlines(),
        processes=world.size,
        load_average=list(os.getloadavg()),
        environment={name: os.environ[name] for name in names if name in os.environ},
        flags=list(flags),
        configuration=dataclasses.asdict(cfg),
    )


def measure_all(cfg: Hyperparameters, world: World, effort: Effort, flags: Sequence[str]) -> tuple[dict, str]:
    """The document of all figures, and the profile. A stage that fails says why in place of its figures."""
    began = time.perf_counter()
    profiled = [""]
    cfg, device = train_gpt.set_up(cfg, world)
    found: dict = dict(settings=settings(cfg, world, flags))
    alone, is_quick, on_cuda = world.size == 1, effort is QUICK, device.type == "cuda"

    def left(limit: float) -> float:
        return min(limit, SIDE_BUDGET_S - (time.perf_counter() - began))

    def stage(name: str, function: Callable[[], object], skipped: str = "") -> None:
        if world.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s: {name}", file=sys.stderr, flush=True)
        try:
            found[name] = f"not run: {skipped}" if skipped else function()
        except Exception as error:  # the other figures are worth having
            if not alone:
                raise  # where other ranks would wait
            found[name] = f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"

    with contextlib.ExitStack() as stack:
        cfg, (train_plan, val_plan), found["data"] = stack.enter_context(prepared_data(cfg, world, effort))
        plans = (train_plan, val_plan)
        if alone and cfg.compile and not is_quick:
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True))
            os.environ |= dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=str(Path(cache) / "triton"))
            stage("startup_cold", lambda: startup(cfg, plans, left(300), cache))
            stage("startup", lambda: startup(cfg, plans, left(120), cache))
        elif alone and not cfg.compile:
            with tempfile.TemporaryDirectory() as cache:
                stage("startup", lambda: startup(cfg, plans, left(120), cache))
        else:
            stage("startup", dict, "only with one process, and not with --quick where it compiles")
        starts = {name: found.get(key) for name, key in (("cold_s", "startup_cold"), ("warm_s", "startup"))}
        found["compile"] = "not run: not compiled" if not cfg.compile else "not run: see the start-up"
        if cfg.compile and all(isinstance(seconds, dict) for seconds in starts.values()):
            found["compile"] = {name: seconds["warm-up"] for name, seconds in starts.items()}
        if on_cuda:
            stage("self_test", lambda: self_test(left(150)), "--quick" if is_quick else "" if alone else "one process")

        trainer = measure.Trainer.build(cfg, world, device)
        start = time.perf_counter()
        trainer.warm_up()
        measure.synchronize(device)
        found["warm_up_s"] = time.perf_counter() - start
        dtype = train_gpt.activation_dtype(cfg)
        rates = measure.matmul_tflops(device, dtype, effort.repetitions)

        batches = trainer.batches(cycle(train_plan))
        gc.collect()
        gc.freeze()
        gc.disable()  # as in training
        at = {name: train_gpt.window_blocks(step, cfg) for name, step in window_steps(cfg).items()}
        probe = measure.step_times(trainer, batches, at["middle"], 2, parts=False)["whole"]["median"]
        probe = measure.agree(world, device, probe)  # all ranks take as many steps
        n = int(min(effort.max_steps, max(effort.min_steps, 1000 * effort.step_seconds / (3 * probe))))
        stage("step", lambda: measure.step_times(trainer, batches, at["middle"], n, parts=True))
        few = max(effort.min_steps, n // 4)
        for name in ("first", "last"):
            stage(
                f"step_{name}_window",
                lambda name=name: measure.step_times(trainer, batches, at[name], few, parts=False),
            )
        trainer.window.fill_(at["last"])
        stage("validation", lambda: measure.validation(trainer, val_plan, effort.validations))
        found["peak_memory_mib"] = train_gpt.peak_memory_mib(device)
        trainer.window.fill_(at["middle"])
        rates += measure.matmul_tflops(device, dtype, effort.repetitions)
        found["matmul_tflops"] = measure.figure(rates) | dict(dtype=cfg.dtype)
        if isinstance(found["step"], dict):
            found["throughput"] = throughput(cfg, world, found["step"], found["matmul_tflops"]["median"])

        stage("newton_schulz", lambda: measure.newton_schulz(trainer, effort.repetitions))
        tokens = next(batches)[0][0]
        stage("block_mask", lambda: measure.block_mask(trainer, tokens, at["middle"], effort.repetitions))
        stage("loader", lambda: measure.loader(trainer, train_plan, effort.loads))
        if on_cuda:
            stage("synchronizations", lambda: measure.synchronizations(trainer, batches))
        stage("profile", lambda: profiled.insert(0, measure.profile(trainer, batches)) or "profile.txt")
        batches.close()
        gc.unfreeze()
        gc.enable()
    found["load_average_after"] = list(os.getloadavg())
    found["seconds"] = time.perf_counter() - began
    return found, profiled[0]


def window_steps(cfg: Hyperparameters) -> dict[str, int]:
    """The steps of a run whose attention windows are measured."""
    return dict(first=0, middle=cfg.num_iterations // 2, last=cfg.num_iterations)


def throughput(cfg: Hyperparameters, world: World, step: dict, matmul_tflops: float) -> dict:
    """Of the whole step at its median; FLOPs and utilization are those of this rank's device."""
    seconds = step["whole"]["median"] / 1000
    tflops = step["flops"] / seconds / 1e12
    found = dict(tokens_per_s=cfg.batch_tokens / seconds, tokens_per_s_per_rank=cfg.batch_tokens / seconds / world.size)
    return found | dict(model_tflops_per_s=tflops, model_flops_utilization=tflops / matmul_tflops)


# ----------------------------------------------------------------------------------------------------------------------
# The report


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(found: dict) -> str:
    """The document as Markdown."""
    rows: list[tuple[str, str, str, str]] = []

    def add(what: str, value, unit: str = "") -> None:
        if isinstance(value, str) or value is None:
            rows.append((what, value or "not measured", "", ""))
        elif isinstance(value, dict):
            spread = f"{shown(value['p10'])} to {shown(value['p90'])}"
            rows.append((what, f"{shown(value['median'])} {unit}", spread, str(value["n"])))
        else:
            rows.append((what, f"{shown(value)} {unit}".strip(), "", ""))

    def each(key: str, report: Callable[[dict], None]) -> None:
        if isinstance(found.get(key), str):
            add(key.replace("_", " "), found[key])
        elif key in found:
            report(found[key])

    def report_step(step: dict) -> None:
        for name, part in step["parts"].items():
            add(f"step: {name}", part, "ms")
        add("step: sum of the parts", step["sum_of_parts"], "ms")
        add(f"**step: whole, not instrumented**, window of {step['window_blocks']} blocks", step["whole"], "ms")
        add("sum of the parts / whole", step["sum_over_whole"])

    def report_throughput(figures: dict) -> None:
        add("throughput", figures["tokens_per_s"], "tokens a second")
        add("model FLOPs of a step and device", found["step"]["flops"] / 1e9, "G")
        add("attained", figures["model_tflops_per_s"], "TFLOP/s")
        add("utilization, of the measured matmul", 100 * figures["model_flops_utilization"], "%")

    def report_startup(seconds: dict, which: str = "start-up") -> None:
        for name, value in seconds.items():
            add(f"{which}: {name}", value, "s")

    def report_newton_schulz(shapes: list[dict]) -> None:
        for shape in shapes:
            of = " x ".join(map(str, shape["shape"]))
            add(f"Newton-Schulz of {of}, {shown(shape['tflops'])} TFLOP/s", shape["ms"], "ms")

    def report_states(what: str, figures: dict, key: str, unit: str) -> None:
        for state in ("cold", "warm"):
            add(what.format(state), figures[f"{state}_{key}"], unit)

    if "self_test" in found:
        add("self-test of the GPU", found["self_test"])
    each("step", report_step)
    for key in ("step_first_window", "step_last_window"):
        each(key, lambda s: add(f"step: whole, window of {s['window_blocks']} blocks", s["whole"], "ms"))
    add(f"large matmul in {found['matmul_tflops']['dtype']}", found["matmul_tflops"], "TFLOP/s")
    each("throughput", report_throughput)
    add("peak memory", found["peak_memory_mib"], "MiB")
    each("validation", lambda v: add(f"validation of {v['tokens']:,} tokens", v["seconds"], "s"))
    each("newton_schulz", report_newton_schulz)
    each("block_mask", lambda m: add(f"block mask of {m['tokens']:,} tokens, not compiled", m["ms"], "ms"))
    each("loader", lambda v: report_states("loader, {} files, of one rank", v, "tokens_per_s", "tokens a second"))
    each("compile", lambda c: report_states("compiling and warming up, {} cache", c, "s", "s"))
    each("startup_cold", lambda s: report_startup(s, "start-up, nothing compiled yet"))
    each("startup", report_startup)
    each("synchronizations", lambda s: add("host waits for the device within a step", s["count"]))
    each("profile", lambda _: None)

    lines = ["| what | median | 10th to 90th percentile | n |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    machine = [line for line in found["settings"]["machine"] if line and not line.startswith(("+", "|"))]
    cfg = found["settings"]["configuration"]
    load = ", ".join(f"{value:.1f}" for value in (found["settings"]["load_average"][0], found["load_average_after"][0]))
    processes = found["settings"]["processes"]
    about = [
        f"# Preset {cfg['preset']}, {processes} process{'es' if processes > 1 else ''}",
        "",
        *(f"- {line}" for line in machine),
        f"- data: {found['data']}",
        f"- flags: {' '.join(found['settings']['flags']) or 'none'}; environment: {found['settings']['environment']}",
        f"- load average before and after: {load}; this took {found['seconds']:.0f} s",
        "",
    ]
    return "\n".join([*about, *lines])


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; --help lists the flags")


def run(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description=INTRODUCTION,
        epilog="All other flags are those of train_gpt.py: python train_gpt.py --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, and only what is fast")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: logs/benchmark-TIME")
    args, flags = parser.parse_known_args(argv)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_gpt.main does
    world = World.from_env()
    cfg = train_gpt.resolve(train_gpt.parse_args(flags))
    if cfg.resume or cfg.checkpoint_every:
        raise UserError("--resume and --checkpoint_every: a measurement has no checkpoints; leave them out")
    train_gpt.check_world(cfg, world)
    out = args.out or Path("logs") / time.strftime("benchmark-%Y%m%d-%H%M%S")
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    try:
        found, profiled = measure_all(cfg, world, QUICK if args.quick else Effort(), argv)
    finally:
        gc.unfreeze()
        gc.enable()
    if world.rank == 0:
        told = table(found)
        (out / "benchmark.md").write_text(told + "\n", encoding="utf-8")
        (out / "benchmark.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if profiled:
            (out / "profile.txt").write_text(profiled + "\n", encoding="utf-8")
        print(f"{told}\n\nwritten to {out}", flush=True)
    if world.size > 1:
        dist.destroy_process_group()
    return int(any(isinstance(value, str) and value.startswith("FAILED") for value in found.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stage failed, 2 something has to be mended (one line on stderr says what)."""
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except (UserError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m benchmarks: interrupted", file=sys.stderr)
        return 130
