"""Run the record tools from the command line: python -m records COMMAND --help."""

import argparse
import datetime
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from records import logs, plots, proof, publish, race, rules
from records.logs import RECORDS, ToolError

INTRODUCTION = (
    "Prove and compare speedrun records. A record is named by its folder, or a unique part of that. "
    "Exit codes: 0 done, 1 a check failed, 2 something has to be mended, 130 interrupted."
)


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def count(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


COMMANDS: list[tuple[Callable, str, tuple, dict]] = []
Outcome = tuple[dict, str, int]  # the JSON document, the text, the exit code


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
        print(logs.printable(text), file=stream, flush=True)


@command(
    "Make a record's folder, after the newest record, from finished logs of one script.",
    arg("name", metavar="NAME"),
    arg("logs", metavar="LOG", nargs="+"),
    arg("--date", help="date of the record (default: today)"),
    arg("--race", type=Path, metavar="FILE", help="race.json against the record before, to be stored, too"),
)
def command_new(args: argparse.Namespace) -> Outcome:
    date = args.date or datetime.date.today().isoformat()
    folder = publish.new_record(args.name, args.logs, args.root, date, args.race)
    verdict = rules.verify(folder, args.root)
    told = f"{folder}\nWhat is left to do, as `python -m records verify {folder.name}` says:\n{verdict}"
    return dict(record=str(folder)) | vars(verdict), told, 0


@command(
    "Unified diff of two scripts, each named by a record, a log or a file.",
    arg("a", metavar="A"),
    arg("b", metavar="B"),
)
def command_diff(args: argparse.Namespace) -> Outcome:
    lines, removed, added = logs.diff(logs.read_script(args.a, args.root), logs.read_script(args.b, args.root))
    if not args.json:
        say(f"{removed} lines removed, {added} added", sys.stderr)
    return dict(removed=removed, added=added, diff=lines), "\n".join(lines), 0


@command(
    "Check records; exit code 1 if one fails.",
    arg("records", metavar="RECORD", nargs="*", help="default: all"),
    arg("--against", metavar="recordN", help="instead hold one gpt2 log's curve against that of this public record"),
)
def command_verify(args: argparse.Namespace) -> Outcome:
    if args.against:
        if len(args.records) != 1:
            raise ToolError("--against takes one log; name it")
        found = proof.against_public(logs.Log(Path(args.records[0])), args.against)
        points = f"{found['compared']} points" + (f"; {found['lacking']} more it lacks" if found["lacking"] else "")
        at_end = f", within {proof.AT_THE_END} at its end" if found["ends"] else ""
        told = f"follows {args.against} within {proof.TOLERANCE} at {points}{at_end}"
        if first := found["first"]:
            losses = f"{first['loss']:.4f}, the curve {first['curve']:.4f}"
            told = f"leaves {args.against} first at step {first['step']}: {losses} (compared at {points})"
        return found, told, 1 if found["first"] else 0
    verdicts = [rules.verify(logs.find_record(name, args.root), args.root) for name in args.records]
    verdicts = verdicts or [rules.verify(folder, args.root) for folder in logs.lineage(args.root)]
    failed = any(verdict.failures for verdict in verdicts)
    text = "\n".join(map(str, verdicts)) or "no records yet"
    return dict(records=[vars(verdict) for verdict in verdicts]), text, int(failed)


@command(
    "Mean, sd, p, and how many runs the target is likely to need.",
    arg("logs", nargs="+", metavar="LOG", help="logs or records"),
)
def command_stats(args: argparse.Namespace) -> Outcome:
    found = logs.read_logs(args.logs, args.root)
    logs.require_one_experiment(found)
    track = rules.track_of(found[0])
    for log in found:
        if log.configuration and (problem := rules.validation_problem(log, track)):
            raise ToolError(f"{log.path}: {problem}")
    target = track.target
    sample = proof.describe([log.val_loss for log in found], target)
    needed = None if sample.sd is None else proof.runs_needed(target - sample.mean, sample.sd)
    p = "no p for one run" if sample.p is None else f"p={sample.p:.2g}"
    runs = "unknown from one run" if sample.sd is None else f"{needed or f'more than {proof.MAX_RUNS}'} in all"
    if sample.mean >= target:
        runs = "never, at this mean"
    power = f"p < {proof.ALPHA} nine times in ten if the true mean and sd are these"
    told = f"{sample} {p} against {target}\nruns that the target is likely to need ({power}): {runs}\n{proof.PEEKING}"
    return vars(sample) | dict(target=target, runs_needed=needed, warning=proof.PEEKING), told, 0


@command(
    "Run scripts in turn on this machine, and compare times and losses of each with those of the one after it, with "
    "95% intervals. Name the newest first.",
    arg("scripts", nargs="+", metavar="SCRIPT", help="a record, a log or a script"),
    arg("--pairs", type=count, default=6, help="rounds, of one run of each script (default: %(default)s)"),
    arg("--seed", type=count, default=1, help="of the first round; each next one is higher (default: 1)"),
    arg("--nproc_per_node", type=count, default=1, metavar="N", help="processes of each run; above 1 with torchrun"),
    arg("--out", type=Path, metavar="FOLDER", help="for race.json and the logs (default: logs/race-TIME)"),
    arg("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments"),
    usage="%(prog)s [options] NEWEST OLDER [OLDER ...] [-- FLAGS ...]",
    epilog="FLAGS after -- go to all scripts, such as -- --num_iterations 100 --val_loss_every 0.",
)
def command_race(args: argparse.Namespace) -> Outcome:
    if args.out and args.resume:
        raise ToolError("--out begins a race, --resume goes on with one: give one of them")
    numbers, folders = (args.pairs, args.seed, args.nproc_per_node), dict(out=args.out, resume=args.resume)
    found = race.race(args.scripts, *numbers, args.flags, args.root, **folders)
    return found, race.told(found), 0


@command(
    "Loss against train time of records or logs, or the history of record times.",
    arg("records", metavar="RECORD", nargs="*", help="records or logs (default: all ranked records)"),
    arg("--anchor", type=Path, metavar="FILE", help="JSON of a run that wrote no log, such as the CPU anchor's"),
    arg("--history", action="store_true", help="the history instead"),
    arg("--follow", action="store_true", help="logs: draw anew whenever one has grown, until all runs are over"),
    arg("-o", "--output", type=Path, metavar="FILE.png", help="default: curves.png or history.png"),
)
def command_plot(args: argparse.Namespace) -> Outcome:
    if args.history and (args.records or args.anchor):
        raise ToolError("--history draws all records: give it alone, or leave it out")
    if args.follow and (args.history or not args.records):
        raise ToolError("--follow draws logs: name some, without --history")
    path = args.output or Path("history.png" if args.history else "curves.png")
    anchor, found = plots.read_result(args.anchor) if args.anchor else None, {}
    if args.history:
        found = plots.plot_history(args.root, path)
    elif args.follow:
        for growing in logs.follow([*map(Path, args.records)]):
            if all(log.curve for log in growing):
                found = plots.plot_curves([plots.curve_of_logs([log]) for log in growing], anchor, path)
                say(f"{path}: step {', '.join(str(max(log.curve)) for log in growing)}", sys.stderr)
        if not found:
            raise ToolError(f"{args.records[0]}: no validation yet, and its run is over; nothing to draw")
    else:
        found = plots.plot_curves(plots.curves_of(args.records, args.root), anchor, path)
    return dict(file=str(path)) | found, str(path), 0


@command(
    "Print a JSON line for each step line of a log, for dashboards; a resumed run repeats some steps.",
    arg("log", type=Path, metavar="LOG"),
    arg("--follow", action="store_true", help="go on as it grows, until the run is over"),
)
def command_jsonl(args: argparse.Namespace) -> Outcome:
    told: list[logs.Line] = []
    for [log] in logs.follow([args.log]) if args.follow else [[logs.Log(args.log, grows=True)]]:
        same = log.written[: len(told)] == told  # if not, it is another run's
        for line in log.written[same * len(told) :]:
            losses = dict(train_loss=line.train_loss, val_loss=line.val_loss)
            say(json.dumps(dict(step=line.step, **losses, train_time_ms=line.time)), sys.stdout)
        told = log.written
    return {}, "", 0


@command(
    "Rewrite the leaderboards in the records' README.md from the logs.",
    arg("--check", action="store_true", help="only say, by exit code 1, whether they are out of date"),
)
def command_table(args: argparse.Namespace) -> Outcome:
    differs = publish.rewrite_tables(args.root, args.check)
    wrong = "is out of date: run python -m records table" if args.check else "written"
    state = wrong if differs else "is up to date"
    path = args.root / "README.md"
    return dict(file=str(path), differs=differs), f"{path} {state}", 1 if differs and args.check else 0


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m records", description=INTRODUCTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for function, text, arguments, settings in COMMANDS:
        name = function.__name__.removeprefix("command_")
        settings |= dict(help=text.replace("%", "%%"), description=text)
        command = commands.add_parser(name, allow_abbrev=False, **settings)
        for names, options in arguments:
            command.add_argument(*names, **options)
        if name == "jsonl":
            command.set_defaults(json=False)  # it prints nothing else
        else:
            command.add_argument("--json", action="store_true", help="print a JSON document instead")
        command.add_argument("--root", type=Path, default=RECORDS, help="folder of the records (default: %(default)s)")
        command.set_defaults(function=function)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 a check failed, 2 something has to be mended (one line on stderr says what)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    flags: list[str] = []
    if argv[:1] == ["race"] and "--" in argv:
        at = argv.index("--")
        argv, flags = argv[:at], argv[at + 1 :]
    try:
        args = build_parser().parse_args(argv)
        args.flags = flags
        found, told, code = args.function(args)
        say(json.dumps(found, indent=1, default=str) if args.json else told, sys.stdout)
        return code
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        files = " ".join(f"-r {folder / 'requirements.txt'}" for folder in (RECORDS.parent, RECORDS))
        problem, code = f"{error}; pip install {files}", 2
    except (ToolError, OSError) as error:
        problem, code = str(error), 2
    say(f"python -m records: {problem}", sys.stderr)
    return code


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
