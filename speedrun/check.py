"""Check a run in one plain process before it starts, and get the data it lacks.

    python -m speedrun check [flags of train_gpt.py]    what run.sh does before it trains (speedrun/launch.py)
    ./run.sh --check [flags of train_gpt.py]            only the checks, with all that they find
    ./run.sh --check --card H100 [--price 2.5]          what gpt2 would take on one card that need not be here

Exit codes: 0 ready, 2 something has to be mended first (a line for each thing), 130 interrupted. When ready, the last
line of stdout is the number of processes to start, NPROC or as many as there are GPUs and divide a step's sequences.
Flags follow that suit this machine: rows of n-grams that its GPUs hold, and what they cannot do.
"""

import dataclasses
import glob
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import ROOT, cards, needs

with needs.packages():
    import torch

    import train_gpt
    from speedrun.model import run
    from train_gpt import GPT, PRESETS, Hyperparameters, NgramTable, Ranks, UserError

NO_GPU = "there is no NVIDIA GPU"
VERSION = torch.__version__.partition("+")[0]
CPU_RUNS = "--preset nano trains on a CPU"
CAPABILITY = "gpt2 needs a GPU of compute capability 8.0 or newer (A100, RTX 30)"
PACKING = 1.5  # tokens for one that packing keeps, assumed
# Bytes that gpt2 needs for a token of the longest sequence, by layer and channel, beside parameters, gradients,
# optimizers and n-grams: by the peaks of `python -m speedrun lower` in training and validation
BUFFER_BYTES = {"train_seq_len": 22.7, "val_seq_len": 3.75}
WITHOUT_KERNEL = 1.3  # times as many below compute capability 9.0, where the MLP has no kernel
SPARE_MIB = 1_000  # for NCCL, cuBLAS and gaps; CUDA itself is there while the free memory is looked at


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    free: int  # bytes of memory


class Report:
    """Collect problems, and tell facts: on stdout for --check, else as notes on stderr if they matter all the same."""

    def __init__(self, is_full: bool):
        self.is_full = is_full
        self.problems: list[str] = []

    def fact(self, line: str, note: bool = False) -> None:
        if self.is_full or note:
            print(line if self.is_full else f"note: {line}", file=None if self.is_full else sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Return the first line of a message, without what train_gpt.py advises to do about data."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.split(r";? \./run\.sh", line)[0][:300]


def try_gpu(i: int) -> Gpu:
    """Run a kernel. Raise RuntimeError if the GPU is broken, full, or none that this torch was built for."""
    torch.ones(1, device=f"cuda:{i}").add_(1).item()
    return Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i), torch.cuda.mem_get_info(i)[0])


def why_no_gpu() -> str:
    """Say what keeps torch from a GPU that nvidia-smi tells of, and the fix. Return "" if there is none, or hidden."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    told = (done.stdout + done.stderr).strip()
    if not told or told.startswith("No devices"):
        return ""
    wheels = "cu126" if told < "580" else "cu130"
    pip = f"{needs.PIP} --index-url https://download.pytorch.org/whl/{wheels} torch=={VERSION}+{wheels}"
    fix = f"update the driver to 580 or newer, restart the machine, or {pip}; {CAPABILITY}"
    return f"torch {torch.__version__} sees no GPU, nvidia-smi says {told.splitlines()[0]}: {fix}"


def find_gpus(cfg: Hyperparameters, is_for_cpu: bool, report: Report) -> list[Gpu]:
    """Return the GPUs that work, and report those that do not. Raise UserError if there should be one."""
    gpus: list[Gpu] = []
    if not torch.cuda.is_available():
        why = why_no_gpu()
        is_wanted = cfg.device == "cuda" or (cfg.preset == "gpt2" and cfg.device != "cpu")
        if is_wanted or (why and not is_for_cpu):
            raise UserError(f"{why or NO_GPU}; {CPU_RUNS}")
        report.fact(f"hardware: {os.cpu_count()} CPU cores, {why or NO_GPU}")
    elif cfg.device != "cpu":
        for index in range(torch.cuda.device_count()):
            try:
                gpus.append(try_gpu(index))
            except RuntimeError as error:
                fix = "free or reset it, or leave it out with CUDA_VISIBLE_DEVICES"
                report.problems.append(f"GPU {index} does not work: {reason(error)}: {fix}")
    if gpus:
        gpu = min(gpus, key=lambda gpu: gpu.capability)
        this = f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        report.fact(f"hardware: {len(gpus)} x {this}", note=True)
        if gpu.capability < (8, 0):
            report.problems.append(f"{this} is too old: {CAPABILITY}; CUDA_VISIBLE_DEVICES leaves it out; {CPU_RUNS}")
    return gpus


def check_compiler(report: Report) -> None:
    """Look for what torch.compile needs on a GPU: Triton builds a Python module in C."""
    names = os.environ.get("CC", "gcc clang")
    if not any(map(shutil.which, names.split())):
        report.problems.append(f"torch.compile finds no {names} (CC): Debian, Ubuntu: apt install gcc")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Debian has its headers
    if not (header := Path(sysconfig.get_path("include", scheme), "Python.h")).exists():
        report.problems.append(f"torch.compile needs {header}: apt install python3.{sys.version_info.minor}-dev")


def fixed_bytes(cfg: Hyperparameters, processes: int) -> int:
    """Return what parameters, gradients and optimizers take of a process."""
    cfg = dataclasses.replace(cfg, device="cpu", compile=False, lm_head_fp8=False, layers_fp8=False)
    with train_gpt.refusing("rows of layers or groups do not fit each other"), torch.device("meta"):
        gpt = GPT(cfg)
        optimizers = train_gpt.build_optimizers(gpt, Ranks(0, processes, 0, processes))
    tensors = [t for o in optimizers for t in (*o.params, o.grad_buffer, o.grad_shard, *o.state.values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}  # some share one
    return sum(storages.values()) + sum(p.nbytes for name, p in gpt.named_parameters() if name not in gpt.tables)


def ngram_bytes(cfg: Hyperparameters, processes: int, longest: int, trains: bool) -> float:
    """Return what n-grams take of a process: its rows, and fetched rows and sums of a cycle of different n-grams.

    A validation has no sums, but the fetched rows of the cycle before.
    """
    table = NgramTable(cfg, Ranks(0, processes, 0, processes), torch.device("meta"))
    places = (cfg.ngram_order - 1) * max(table.group.every) * cfg.batch_sequences * longest / processes
    read = -cfg.ngram_rows * math.expm1(-places / cfg.ngram_rows)  # some n-grams share a row
    sums = table.sum_dtype.itemsize if trains else 0
    fetched = table.rows.itemsize if processes > 1 else 0
    return table.rows.nbytes + table.v.nbytes + read * cfg.model_dim * (sums + fetched)


def fit(cfg: Hyperparameters, gpu: Gpu, processes: int, free_to=()) -> tuple[Hyperparameters, dict[str, float]]:
    """Return what fits, if anything does, and the bytes that it needs for the longest sequences, by their fields.

    The need is estimated by the model itself and gpt2's buffers. free_to: fields that may change until all fits. Rows
    of n-grams are halved, eight times at most, and CUDA graphs left out before: what a graph uses stays with it, beside
    what the first, ordinary call of its shape has used. The host then launches each kernel, 23 to 55 ms a sequence, in
    which a GPU with so little memory computes for longer.
    """
    fixed = fixed_bytes(cfg, processes) + SPARE_MIB * 2**20
    longest = {"train_seq_len": max(plan.seq_len for plan in cfg.plans), "val_seq_len": cfg.val_seq_len}
    size = len(cfg.layers) * cfg.model_dim * (1.0 if gpu.capability >= (9, 0) else WITHOUT_KERNEL)
    buffers = {name: BUFFER_BYTES[name] * n * size for name, n in longest.items()}
    all_rows, kinds = cfg.ngram_rows, cfg.ngram_order - 1
    halves = range(9 if "ngram_rows" in free_to else 1)
    with_graphs = [True, False] if cfg.cuda_graphs and "cuda_graphs" in free_to else [cfg.cuda_graphs]
    for i, has_graphs in itertools.product(halves, with_graphs):
        cfg = dataclasses.replace(cfg, ngram_rows=all_rows // kinds // 2**i * kinds, cuda_graphs=has_graphs)
        need = {}
        for name in longest:
            ngrams = ngram_bytes(cfg, processes, longest["train_seq_len"], trains=name == "train_seq_len")
            need[name] = fixed + buffers[name] + buffers["train_seq_len"] * has_graphs + ngrams
        if max(need.values()) <= gpu.free:
            break
    return cfg, need


def fit_one(card: cards.Card) -> tuple[Hyperparameters, float]:
    """Return gpt2 as it fits on one such card, and the GiB that it needs."""
    gpu = Gpu(card.name, divmod(card.arch, 10), (card.memory_mib - cards.CUDA_MIB) * 2**20)
    cfg, need = fit(dataclasses.replace(PRESETS["gpt2"], dtype="bfloat16"), gpu, 1, {"ngram_rows", "cuda_graphs"})
    return cfg, max(need.values()) / 2**30


def check_memory(cfg: Hyperparameters, gpus: list[Gpu], processes: int, report: Report, free_to=()) -> list[str]:
    """Return the flags, of fields that may change, with which all fits, or report that nothing does."""
    least = Gpu("", min(gpu.capability for gpu in gpus), min(gpu.free for gpu in gpus))
    found, need = fit(cfg, least, processes, free_to)
    rows = [] if found.ngram_rows == cfg.ngram_rows else ["--ngram_rows", str(found.ngram_rows)]
    flags = rows + ["--no-cuda_graphs"] * (found.cuda_graphs < cfg.cuda_graphs)
    for name, total in need.items():
        told = " ".join([f"--{name} {getattr(cfg, name)}", *flags])
        told += f" takes {total / 2**30:.1f} GiB a process (estimated), {least.free / 2**30:.1f} are free"
        report.fact(f"memory: {told}")
        if total > least.free:
            report.problems.append(f"{told}: free some, or halve --{name}")
    if rows and not report.problems:
        told = f"{' '.join(rows)} is what fits here, not the record's {cfg.ngram_rows}"
        losses = f"loss {cards.loss_of(found.ngram_rows):.3f} instead of {cards.POINTER_LOSS:.3f}"
        report.fact(f"n-grams: {told}; by public runs {losses}", note=True)
    if found.cuda_graphs < cfg.cuda_graphs and not report.problems:
        report.fact("CUDA graphs: left out, as their memory does not fit here: --no-cuda_graphs", note=True)
    if cfg.preset == "gpt2" and (card := cards.CARDS.get(gpus[0].name)):
        ms, minutes, minutes_of_pairs = cards.costs(card, processes)
        told = f"{ms[0]:,.0f} to {ms[1]:,.0f} ms a step, {minutes:.1f} minutes for 1,050"
        report.fact(f"time: {told} on {processes} x {card.name} (estimated), without compiling")
        if processes == 1:
            told = f"8 pairs of runs with --batch_tokens 16384, {minutes_of_pairs:.0f} minutes"
            report.fact(f"an idea: {told} (estimated)")
    return flags


def shards_of(cfg: Hyperparameters) -> int:
    """Return how many training shards of FineWeb a run needs."""
    return math.ceil(PACKING * train_gpt.num_tokens(cfg.num_iterations, cfg) / 10**8)


def data_problem(cfg: Hyperparameters) -> tuple[str, str]:
    """Return what is wrong with the shards, as the script says it, and the command that gets them, if there is one."""
    try:
        for plan in train_gpt.plan_data(cfg).values():
            train_gpt.read_sequence(*plan[0][0], cfg)
        return "", ""
    except UserError as error:
        problem = reason(error)
    gpt2, nano = ((PRESETS[name].train_files, PRESETS[name].val_files) for name in ("gpt2", "nano"))
    shards = shards_of(cfg)
    commands = dict.fromkeys(gpt2, f"data/cached_fineweb10B.py {shards}") | dict.fromkeys(nano, "data/pack_nano.py")
    for files in {cfg.train_files, cfg.val_files} & commands.keys():
        paths = glob.glob(files, recursive=True)
        is_short = "the run needs" not in problem or len(paths) < (shards if files == gpt2[0] else 1)
        if is_short and problem.startswith((files, *paths)):
            return problem, commands[files]
    return f"{problem}; data/pack_text.py packs text; --num_iterations and --val_tokens say how much is read", ""


def get(what: str, command: str, report: Report) -> bool:
    """Run a command that gets data, or only name it for --check. Return whether all is well."""
    if report.is_full:
        report.fact(f"data: {what}; run.sh gets them: {needs.PYTHON} {command}")
        return True
    print(f"getting data: {needs.PYTHON} {command}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, *command.split()], stdout=sys.stderr).returncode == 0


def make_mask(path: str, report: Report) -> None:
    """Make gpt2's mask of the last validation. A run goes on without it where the tokenizer cannot be had."""
    is_ours = Path(sys.prefix) == ROOT / ".venv" and not report.is_full  # nothing is added elsewhere
    if is_ours and needs.missing("text"):
        command = "source speedrun/environment.sh; find_python text"
        subprocess.run(["bash", "-c", command, "check"], cwd=ROOT, env=os.environ | dict(PYTHON=sys.executable))
    if not get(f"no {path}", "data/gpt2_canonical.py", report):
        report.fact("the last validation goes without the mask, which costs 0.0017 of loss: see above", note=True)


def get_data(cfg: Hyperparameters, report: Report) -> None:
    """Get the data that a run lacks, or report what is wrong with them."""
    problem, command = data_problem(cfg)
    if command and (report.is_full or not report.problems):
        if not get(problem, command, report):
            raise UserError("the data could not be fetched: see above, then run this again")
        problem, command = "" if report.is_full else data_problem(cfg)[0], ""
    if problem and not command:
        report.problems.append(problem)


def examine(argv: list[str], report: Report) -> list[str]:
    """Check everything, get the data, and return the number of processes, and flags for this machine."""
    report.fact(f"versions: Python {sys.version.split()[0]}, torch {torch.__version__}")
    wish, is_root = os.environ.get("NPROC") or "0", os.environ.get("SCRIPT") in (None, "", "train_gpt.py")
    if not is_root:  # its flags are its own: check the machine and a preset's data only
        argv = re.findall(r"--(?:preset|device)=\w+", re.sub(r"(--\w+) ", r"\1=", " ".join(argv)))
    if not re.fullmatch("[0-9]{1,4}", wish):
        raise UserError(f"NPROC={wish}: expected a number of processes")
    given = train_gpt.parse_args(argv)
    is_for_cpu = given.device == "cpu" and any(flag.startswith(("--preset", "--device")) for flag in argv)
    gpus = find_gpus(given, is_for_cpu, report)
    if report.problems:
        return []
    cfg, flags = train_gpt.resolve(given), list[str]()
    processes = int(wish) or next(n for n in range(max(1, len(gpus)), 0, -1) if cfg.batch_sequences % n == 0)
    if cfg.compile and gpus:
        check_compiler(report)
    if cfg.batch_sequences % processes or 0 < len(gpus) < processes:
        told = f"{cfg.batch_sequences} sequences a step, {len(gpus) or 'no'} GPUs"
        report.problems.append(f"NPROC={processes}: {told}: expected a divisor, and a GPU for each")
    elif is_root:
        train_gpt.read_invalid_tokens(cfg)  # refuses those of another vocabulary
        named = {flag.partition("=")[0].removeprefix("--").removeprefix("no-") for flag in argv}
        hangs = VERSION < "2.12" and (8, 9) in {gpu.capability for gpu in gpus}  # pytorch issues 177651, 192707
        if cfg.layers_fp8 and hangs and "layers_fp8" not in named:
            report.fact(f"FP8: may hang here with torch {VERSION}, so layers train in bf16: --no-layers_fp8", note=True)
            flags.append("--no-layers_fp8")
        if gpus:
            flags += check_memory(cfg, gpus[:processes], processes, report, {"ngram_rows", "cuda_graphs"} - named)
    get_data(cfg, report)
    is_gpt2 = is_root and gpus and given.canon_file == PRESETS["gpt2"].canon_file
    if is_gpt2 and not (cfg.canon_file or report.problems):
        make_mask(given.canon_file, report)
    return [str(processes), *flags]


def quote(argv: Sequence[str] | None) -> None:
    """Say what a training of gpt2 would take on one card that need not be here."""
    parser = train_gpt.FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--card", required=True)
    parser.add_argument("--price", type=float, default=cards.PRICE)
    args = parser.parse_args(argv)
    found = [card for card in cards.CARDS.values() if args.card.lower() in card.name.lower()]
    if len(found) != 1:
        raise UserError(f"--card {args.card}: is in {len(found)} of these names, expected 1: {', '.join(cards.CARDS)}")
    card, (cfg, gib), (_, minutes, pairs) = found[0], fit_one(found[0]), cards.costs(found[0])
    compiling, eighth = cards.COMPILE_MINUTES, cards.run_seconds(card, 1, sequences=1)
    data, mask = 0.2 * (shards_of(cfg) + 1), cfg.padded_vocab**2 / 8e9
    print(f"""card: one {card.name}, which need not be here; estimated where it does not say measured
image: Linux, driver 580 or newer (525 with torch's wheels for CUDA 12.6), Python 3.11 to 3.13, gcc; or runs/Dockerfile
disk: {data:.1f} GB of FineWeb, {mask:.1f} of the mask, and torch {VERSION} with CUDA, whose size nobody measured
memory: {gib:.0f} GiB of the card with --ngram_rows {cfg.ngram_rows}; the host's was not measured
commands: ./run.sh --check; ./test.sh -m gpu; ./run.sh --batch_tokens 16384; ./run.sh
time: {compiling} minutes to compile (measured on an H100, 16 cores), {minutes:.1f} to train
loss: {cards.loss_of(cfg.ngram_rows):.3f}, by public runs
an eighth: --batch_tokens 16384: {eighth:.0f} s (H100, measured: {cards.EIGHTH_SECONDS}); 8 pairs: {pairs:.0f} minutes
price: ${(compiling + minutes) / 60 * args.price:.2f} at ${args.price:g} an hour (--price), without downloads""")


def prepare(argv: list[str], report: Report) -> tuple[int, list[str]]:
    """Return the exit code, and what `examine` does. Print the problems that it finds."""
    found = [""]
    try:
        found = examine(argv, report)
    except (UserError, OSError) as error:  # the latter: a shard that cannot be read
        report.problems.append(str(error).partition("; ./run.sh")[0])
    except KeyboardInterrupt:  # while data are fetched
        return 130, found
    for problem in report.problems:
        print("check: " + "".join(c if c.isprintable() else "?" for c in problem), file=sys.stderr)
    return 2 if report.problems else 0, found


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(flag.startswith("--card") for flag in argv):
        return run("check", quote, argv)
    report = Report("--check" in argv)
    code, found = prepare([flag for flag in argv if flag != "--check"], report)
    if not code:
        print(*["processes:"] * report.is_full, *found)
    return code


if __name__ == "__main__":
    sys.exit(main())
