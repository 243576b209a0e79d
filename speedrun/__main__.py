"""Run the record tools from the command line: python -m speedrun COMMAND --help."""

import argparse
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from speedrun.needs import PIP, PYTHON
from speedrun import logs, plots, proof, publish, race, rules, tried
from speedrun.logs import RECORDS, ToolError

INTRODUCTION = (
    "Prove and compare speedrun records. A record is named by its folder, or a unique part of that. "
    "Exit codes: 0 done, 1 a check failed, 2 something has to be mended, 130 interrupted."
)
COMMANDS: list[tuple[Callable, str, tuple, dict]] = []
Outcome = tuple[str, int]  # the text and the exit code


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
    arg("--date", type=datetime.date.fromisoformat, default=datetime.date.today(), help="(default: today)"),
    arg("--race", type=Path, metavar="FILE", help="race.json against the record before, to be stored, too"),
)
def command_new(args: argparse.Namespace) -> Outcome:
    folder = publish.new_record(args.name, args.logs, args.root, args.date, args.race)
    verdict = rules.verify(folder, args.root)
    return f"{folder}\nWhat is left to do, as `{PYTHON} -m records verify {folder.name}` says:\n{verdict}", 0


@command(
    "Unified diff of two scripts, each named by a record, a log or a file.",
    arg("a", metavar="A"),
    arg("b", metavar="B"),
)
def command_diff(args: argparse.Namespace) -> Outcome:
    lines, removed, added = logs.diff(logs.read_script(args.a, args.root), logs.read_script(args.b, args.root))
    say(f"{removed} lines removed, {added} added", sys.stderr)
    return "\n".join(lines), 0


@command(
    "Check records; exit code 1 if one fails.",
    arg("records", metavar="RECORD", nargs="*", help="default: all"),
    arg("--against", metavar="recordN", help="instead hold one gpt2 log's curve against that of this public record"),
)
def command_verify(args: argparse.Namespace) -> Outcome:
    if args.against:
        if len(args.records) != 1:
            raise ToolError("--against takes one log; name it")
        told, follows = proof.against_public(logs.Log(Path(args.records[0])), args.against)
        return told, int(not follows)
    folders = [logs.find_record(name, args.root) for name in args.records] or logs.lineage(args.root)
    verdicts = [rules.verify(folder, args.root) for folder in folders]
    codes = [2 if verdict.is_unreadable else int(bool(verdict.failures)) for verdict in verdicts]
    return "\n".join(map(str, verdicts)) or "no records yet", max(codes, default=0)


@command(
    "Mean, sd, p, and how many runs the target is likely to need.",
    arg("logs", nargs="+", metavar="LOG", help="logs or records"),
)
def command_stats(args: argparse.Namespace) -> Outcome:
    found = logs.read_logs(args.logs, args.root)
    logs.require_one_experiment(found)
    track = rules.track_of(found[0])
    if found[0].configuration and (problem := rules.validation_problem(found[0], track)):
        raise ToolError(f"{found[0].path}: {problem}")
    sample = proof.describe([log.val_loss for log in found], track.target)
    if sample.sd is None:
        return f"{sample} against {track.target}; one run gives no p", 0
    needed = proof.runs_needed(track.target - sample.mean, sample.sd)
    runs = f"{needed} in all" if sample.mean < track.target else "never, at this mean"
    power = f"p < {proof.ALPHA} nine times in ten if the true mean and sd are these"
    told = f"{sample} p={sample.p:.2g} against {track.target}\nruns that the target is likely to need ({power}): {runs}"
    return f"{told}\n{proof.PEEKING}", 0


@command(
    "Run scripts in turn on this machine, and compare times and losses of each with those of the one after it and of "
    "the last one, with 95% intervals and a verdict. Name the newest first.",
    arg("scripts", nargs="+", metavar="SCRIPT", help="a record, a log, a script, or 'SCRIPT FLAGS OF ITS OWN'"),
    arg("--pairs", type=int, default=6, help="rounds, of one run of each script; 1 to 4 are a screen (default: 6)"),
    arg("--seed", type=int, default=1, help="of the first round; each next one is higher (default: 1)"),
    arg("--nproc_per_node", type=int, default=1, metavar="N", help="processes of each run; above 1 with torchrun"),
    arg("--out", type=Path, metavar="FOLDER", help="for race.json and the logs (default: logs/race-TIME)"),
    arg("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments"),
    arg("--note", metavar="TEXT", default="", help="what the idea is, for the table of `python -m speedrun tried`"),
    usage="%(prog)s [options] NEWEST OLDER [OLDER ...] [-- FLAGS ...]",
    epilog="FLAGS after -- go to all scripts, such as -- --num_iterations 100 --val_loss_every 0. An idea that is a "
    f"flag: race 'train_gpt.py --muon_lr 0.05' train_gpt.py. {proof.FASTER}",
)
def command_race(args: argparse.Namespace) -> Outcome:
    numbers, folders = (args.pairs, args.seed, args.nproc_per_node), dict(out=args.out, resume=args.resume)
    return race.told(race.race(args.scripts, *numbers, args.flags, args.root, args.note, **folders)), 0


@command("The table of what was raced in this folder: losses and times against another script, and verdicts.")
def command_tried(args: argparse.Namespace) -> Outcome:
    return publish.markdown("|".join(tried.COLUMNS), [map(publish.cell, row) for row in tried.read()]), 0


@command(
    "Loss against train time of records or logs, or the history of record times. Runs that validated only at their end "
    "have a thin line of their training loss, smoothed.",
    arg("records", metavar="RECORD", nargs="*", help="records or logs (default: all ranked records)"),
    arg("--anchor", type=Path, metavar="FILE", help="JSON of a run that wrote no log, such as the CPU anchor's"),
    arg("--history", action="store_true", help="the history instead"),
    arg("-o", "--output", type=Path, metavar="FILE.png", help="default: curves.png or history.png"),
)
def command_plot(args: argparse.Namespace) -> Outcome:
    path = args.output or Path("history.png" if args.history else "curves.png")
    if args.history:
        plots.plot_history(args.root, path)
    else:
        anchor = plots.read_result(args.anchor) if args.anchor else None
        plots.plot_curves(plots.curves_of(args.records, args.root), anchor, path)
    return str(path), 0


def whole_lines(path: Path, follow: bool) -> Iterator[str]:
    """Yield the lines of a log, and if asked to wait for more, until its run has ended or stopped."""
    with open(path, encoding="utf-8", errors="replace") as file:
        line, is_over = "", False
        while (more := file.readline()) or (follow and not is_over):
            line += more
            if line.endswith("\n"):
                yield line
                if re.match(r"stopped:|interrupted:|resumed|val_loss \S+ after", line):
                    is_over = not line.startswith("resumed")
                line = ""
            elif not more:
                time.sleep(1)


@command(
    "Print a JSON line for each step line of a log, for dashboards; a resumed run repeats some steps.",
    arg("log", type=Path, metavar="LOG"),
    arg("--follow", action="store_true", help="go on as it grows, until the run is over"),
)
def command_jsonl(args: argparse.Namespace) -> Outcome:
    for text in whole_lines(args.log, args.follow):
        if line := logs.Line.of(text):
            losses = dict(train_loss=line.train_loss, val_loss=line.val_loss)
            say(json.dumps(dict(step=line.step, **losses, train_time_ms=line.time)), sys.stdout)
    return "", 0


@command(
    "Rewrite the leaderboards in the records' README.md from the logs.",
    arg("--check", action="store_true", help="only say, by exit code 1, whether they are out of date"),
)
def command_table(args: argparse.Namespace) -> Outcome:
    differs = publish.rewrite_tables(args.root, args.check)
    wrong = f"is out of date: run {PYTHON} -m records table" if args.check else "written"
    return f"{args.root / 'README.md'} {wrong if differs else 'is up to date'}", int(differs and args.check)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speedrun", description=INTRODUCTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for function, text, arguments, settings in COMMANDS:
        name = function.__name__.removeprefix("command_")
        settings |= dict(help=text.replace("%", "%%"), description=text)
        command = commands.add_parser(name, allow_abbrev=False, **settings)
        for names, options in arguments:
            command.add_argument(*names, **options)
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
    args = build_parser().parse_args(argv)
    args.flags = flags
    try:
        told, code = args.function(args)
        say(told, sys.stdout)
        return code
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        files = " ".join(f"-r {folder / 'requirements.txt'}" for folder in (RECORDS.parent, RECORDS))
        problem, code = f"{error}; {PIP} {files}", 2
    except (ToolError, OSError) as error:
        problem, code = str(error), 2
    say(f"python -m speedrun: {problem}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
