"""Run the tools from the command line: python -m speedrun COMMAND --help."""

import argparse
import contextlib
import datetime
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from speedrun import needs, process, proof, publish, race, rules, store, tried
from speedrun.logs import Log, ToolError, printable
from speedrun.needs import PYTHON

INTRODUCTION = (
    "Train, prove and compare: the tools around train_gpt.py. A record is named by its folder, or a unique part of "
    "that. Exit codes: 0 done, 1 a check failed, 2 something has to be mended, 130 interrupted."
)
# Commands that are modules, with flags of their own
MODULES = dict(
    check="Look at machine, data and flags before a training, and get the data; run.sh does it.",
    evaluate="Score a model: HellaSwag, choices of your own, bits per byte.",
    bench="Time the parts of a step of train_gpt.py on this machine.",
    lower="Lower train_gpt.py for GPUs that are not here: graph breaks, memory, spills, predicted times.",
)
COMMANDS: list[tuple[Callable, str, tuple, dict]] = []
Outcome = tuple[str, int]  # the text and the exit code
COLORS = {"+": 32, "-": 31, "@": 36}  # of a diff's lines: green, red, cyan


def arg(*names: str, **options) -> tuple:
    return names, options


def command(text: str, *arguments: tuple, **settings: str) -> Callable:
    """Make a function a command, with these arguments and settings of its parser."""

    def register(function: Callable) -> Callable:
        COMMANDS.append((function, text, arguments, settings))
        return function

    return register


def say(text: str, stream: TextIO) -> None:
    """Print without the control characters that names, scripts and logs may hold."""
    if text:
        print(printable(text), file=stream, flush=True)


@command(
    "Run scripts in turn on this machine, and compare times and losses of each with those of the one after it and of "
    "the last one, with 95% intervals and a verdict. Name the newest first. The data come first.",
    arg("scripts", nargs="+", metavar="SCRIPT", help="a record, a log, a script, or 'SCRIPT FLAGS OF ITS OWN'"),
    arg("--pairs", type=int, default=6, help="rounds, of one run of each script; 1 to 4 are a screen (default: 6)"),
    arg("--seed", type=int, default=1, help="of the first round; each next one is higher (default: 1)"),
    arg("--nproc_per_node", type=int, default=1, metavar="N", help="processes of each run; above 1 with torchrun"),
    arg("--out", type=Path, metavar="FOLDER", help="for race.json and the logs (default: logs/race-TIME)"),
    arg("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments"),
    arg("--note", metavar="TEXT", default="", help="what the idea is, for `tried` and the record"),
    usage="%(prog)s [options] NEWEST OLDER [OLDER ...] [-- FLAGS ...]",
    epilog="FLAGS after -- go to all scripts, such as -- --num_iterations 100 --val_loss_every 0. An idea that is a "
    f"flag: race 'train_gpt.py --muon_lr 0.05' train_gpt.py. {race.CONTRACT} {proof.FASTER}",
)
def command_race(args: argparse.Namespace) -> Outcome:
    settings = {name: getattr(args, name) for name in ("out", "resume", "pairs", "seed", "nproc_per_node", "note")}
    return race.told(race.race_scripts(args.scripts, args.root, args.flags, **settings)), 0


@command("List what was raced, the newest last: times and losses against another script, and verdicts.")
def command_tried(args: argparse.Namespace) -> Outcome:
    return tried.table(args.root), 0


@command(
    "Unified diff of two scripts, each named by a record, a log or a file. Without A, that is the root's train_gpt.py.",
    arg("a", metavar="A", nargs="?"),
    arg("b", metavar="B"),
)
def command_diff(args: argparse.Namespace) -> Outcome:
    names = args.a or str(args.root.parent / store.SCRIPT), args.b
    lines, removed, added = store.diff(*(store.read_script(name, args.root) for name in names))
    say(f"{removed} lines removed, {added} added", sys.stderr)
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return "\n".join(lines), 0
    for line in map(printable, lines):
        print(f"\033[{COLORS[line[0]]}m{line}\033[0m" if line[:1] in COLORS else line)
    return "", 0


@command(
    "Mean, sd, p, and how many runs the target is likely to need.",
    arg("logs", nargs="+", metavar="LOG", help="logs or records"),
    arg("--target", type=float, metavar="LOSS", help="(default: that of the logs' track, if they state it)"),
)
def command_stats(args: argparse.Namespace) -> Outcome:
    found = store.read_logs(args.logs, args.root)
    rules.require_one_experiment(found)
    track, target = store.TRACKS.get(found[0].track or ""), args.target
    if track and target is None:
        if problem := rules.validation_problem(found[0], track):
            raise ToolError(f"{found[0].path}: {problem}; or name the target of its own: --target LOSS")
        target = track.target
    sample = proof.describe([log.val_loss for log in found], target)
    if target is None:
        return f"{sample}; the logs state no track, so give its target for a p: --target LOSS", 0
    if sample.sd is None:
        return f"{sample} against {target}; one run gives no p", 0
    needed = proof.runs_needed(target - sample.mean, sample.sd)
    runs = f"{needed} in all" if sample.mean < target else "never, at this mean"
    power = f"p < {proof.ALPHA} nine times in ten if the true mean and sd are these"
    told = f"{sample} p={sample.p:.2g} against {target}\nruns that the target is likely to need ({power}): {runs}"
    return f"{told}\n{proof.PEEKING}", 0


@command(
    "Check records; exit code 1 if one fails.",
    arg("records", metavar="RECORD", nargs="*", help="default: all"),
    arg("--against", metavar="recordN", help="instead hold one gpt2 log's curve against that of this public record"),
)
def command_verify(args: argparse.Namespace) -> Outcome:
    if args.against:
        if len(args.records) != 1:
            raise ToolError("--against takes one log; name it")
        told, follows = proof.against_public(Log(Path(args.records[0])), args.against)
        return told, int(not follows)
    folders = [store.find_record(name, args.root) for name in args.records] or store.lineage(args.root)
    verdicts = [rules.verify(folder, args.root) for folder in folders]
    return "\n".join(map(str, verdicts)) or "no records yet", int(any(verdict.failures for verdict in verdicts))


@command(
    "Rewrite the leaderboards in the records' README.md from the logs.",
    arg("--check", action="store_true", help="only say, by exit code 1, whether they are out of date"),
)
def command_table(args: argparse.Namespace) -> Outcome:
    differs = publish.rewrite_tables(args.root, args.check)
    wrong = f"is out of date: run {PYTHON} -m speedrun table" if args.check else "written"
    return f"{args.root / 'README.md'} {wrong if differs else 'is up to date'}", int(differs and args.check)


@command(
    "From a race to a pull request: make the record's folder, after the newest, from finished logs of one script; "
    "write boards and picture; verify; say what is left. Run it again after each change; it goes on with the folder.",
    arg("name", metavar="NAME"),
    arg("logs", nargs="*", metavar="LOG"),
    arg("--date", type=datetime.date.fromisoformat, default=datetime.date.today(), help="(default: today)"),
    arg("--race", type=Path, metavar="FILE", help="race.json against the record before, to be stored, too"),
)
def command_submit(args: argparse.Namespace) -> Outcome:
    mine = [folder for folder in store.record_folders(args.root) if folder.name.partition("_")[2] == args.name]
    folder = mine[0] if mine else publish.new_record(args.name, args.logs, args.root, args.date, args.race)
    verdict = rules.verify(folder, args.root)
    left = str(verdict).splitlines() if verdict.failures else []
    try:
        publish.rewrite_tables(args.root, check_only=False)
        draw([], args.root, None, None)
    except ToolError as error:
        left.append(str(error))
    script, own = args.root.parent / store.SCRIPT, folder / store.SCRIPT
    if store.read_script(str(script), args.root)[1] != store.read_script(str(own), args.root)[1]:
        left.append(f"the root is the newest record's script: cp {own} {script}")
    left += [
        "README.md: its rows and figures of the newest record are written by hand",
        "./test.sh, then commit all of it",
    ]
    return "\n- ".join([f"{folder}: what is left to do", *left]), int(bool(verdict.failures))


@command(
    "Draw loss against train time of records or logs. Runs that validated only at their end have a thin line of their "
    "training loss, smoothed.",
    arg(
        "records", metavar="RECORD", nargs="*", help="records or logs (default: all ranked records, and the plain GPT)"
    ),
    arg("--anchor", type=Path, metavar="FILE", help="what speedrun/plain_gpt.py printed"),
    arg(
        "-o", "--output", type=Path, metavar="FILE.png", help="(default: records/curves.png, or curves.png for RECORDs)"
    ),
)
def command_plot(args: argparse.Namespace) -> Outcome:
    return str(draw(args.records, args.root, args.anchor, args.output)), 0


def draw(names: Sequence[str], root: Path, anchor: Path | None, output: Path | None) -> Path:
    from speedrun import plots

    path = output or (Path("curves.png") if names else root / "curves.png")
    usual = root / "anchor.json"
    anchor = anchor or (usual if not names and usual.is_file() else None)
    plots.plot_curves([*plots.curves_of(names, root), *([plots.read_result(anchor)] if anchor else [])], path)
    return path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speedrun", description=INTRODUCTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in MODULES.items():
        commands.add_parser(name, help=text)
    for function, text, arguments, settings in COMMANDS:
        name = function.__name__.removeprefix("command_")
        settings |= dict(help=text.replace("%", "%%"), description=text)
        command = commands.add_parser(name, allow_abbrev=False, **settings)
        for names, options in arguments:
            command.add_argument(*names, **options)
        command.add_argument(
            "--root", type=Path, default=store.RECORDS, help="where records are (default: %(default)s)"
        )
        command.set_defaults(function=function)
    return parser


def set_environment() -> None:
    """Give this process what run.sh gives to a training, before torch loads OpenMP."""
    os.environ |= process.ENVIRONMENT | dict(PYTORCH_ALLOC_CONF="expandable_segments:True") | os.environ
    with contextlib.suppress(AttributeError):  # the C library has read its variables already; only glibc has these
        for name, option in dict(MALLOC_TRIM_THRESHOLD_=-1, MALLOC_MMAP_THRESHOLD_=-3).items():
            process.LIBC.mallopt(option, int(os.environ[name]))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 a check failed, 2 something has to be mended (one line on stderr says what)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and argv[0] in MODULES:
        if argv[0] == "bench":
            set_environment()
        with needs.packages():
            module = importlib.import_module(f"speedrun.{argv[0]}")
        return module.main(argv[1:])
    flags: list[str] = []
    if argv[:1] == ["race"] and "--" in argv:
        at = argv.index("--")
        argv, flags = argv[:at], argv[at + 1 :]
    args = build_parser().parse_args(argv)
    args.flags = flags
    if args.function is not command_diff:
        with needs.packages("race"):
            import matplotlib  # noqa: F401
            import psutil  # noqa: F401
            import scipy.stats  # noqa: F401  to miss it now, and not after all runs
    try:
        told, code = args.function(args)
        say(told, sys.stdout)
        return code
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ToolError, OSError) as error:
        problem, code = str(error), 2
    say(f"python -m speedrun: {problem}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
