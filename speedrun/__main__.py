"""The tools around train_gpt.py: python -m speedrun COMMAND --help. A record is named by its folder or a part of that.

Exit codes: 0 done, 1 a check failed, 2 something has to be mended, 130 interrupted.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from speedrun import needs, process, proof, publish, race, rules, store
from speedrun.logs import ToolError, printable
from speedrun.needs import PYTHON

# Commands that are modules, with flags of their own
MODULES = dict(
    check="Look at machine, data and flags before a training, and get the data; run.sh does it.",
    describe="Print what flags and tables mean: layers, groups of parameters, every step.",
    texts="Hold own texts' training against PPMd, xz and a plain GPT; draw the figures.",
    evaluate="Score a model on any text: bits per byte.",
    bench="Time the parts of a step of train_gpt.py on this machine.",
    view="Show runs as one page: losses, plans, settings, a text coloured by bits.",
    lower="Lower train_gpt.py for GPUs that are not here: graph breaks, memory, spills, predicted times.",
)
Outcome = tuple[str, int]  # the text and the exit code


def say(text: str, stream: TextIO) -> None:
    """Print without the control characters that names, scripts and logs may hold."""
    if text:
        print(printable(text), file=stream, flush=True)


def command_race(args: argparse.Namespace) -> Outcome:
    """Run scripts in turn, and compare times and losses of each with the next and the last, with 95% intervals and a
    verdict. Name the newest first."""
    settings = {name: getattr(args, name) for name in ("out", "pairs", "seed", "nproc_per_node", "note")}
    raced, lines = race.race_scripts(args.scripts, args.root, args.flags, **settings), []
    for (a, b), found in raced.compared():
        pairs = f"n={found['n'][0]} pairs from seed {found['seeds'][0]} on, 95% intervals"
        lines.append(f"{raced.scripts[a].name} against {raced.scripts[b].name}: {pairs}\n  {proof.standing(found)}")
    return "\n".join(lines), 0


def command_tried(args: argparse.Namespace) -> Outcome:
    """List what was raced, the newest last: times and losses against another script, and verdicts."""
    return publish.races(args.root), 0


def command_diff(args: argparse.Namespace) -> Outcome:
    """Compare two scripts, each named by a record, a log or a file. Without A, that is the root's train_gpt.py."""
    names = args.a or str(args.root.parent / store.SCRIPT), args.b
    lines, removed, added = store.diff(*(store.read_script(name, args.root) for name in names))
    say(f"{removed} lines removed, {added} added", sys.stderr)
    return "\n".join(lines), 0


def command_stats(args: argparse.Namespace) -> Outcome:
    """Say mean, sd and p of runs, and how many the target is likely to need."""
    found = [log for name in args.logs for log in store.record_logs(store.find_record(name, args.root))]
    rules.require_one_experiment(found)
    target = store.track_of(found[0]).target if args.target is None else args.target
    if args.target is None and (problem := rules.validation_problem(found[0], store.track_of(found[0]))):
        raise ToolError(f"{found[0].path}: {problem}; or name the target of its own: --target LOSS")
    sample = proof.Sample([log.val_loss for log in found], target)
    if sample.n == 1:
        return f"{sample} against {target}; one run gives no p", 0
    needed = proof.runs_needed(target - sample.mean, sample.sd)
    power = f"p < {proof.ALPHA} nine times in ten if the true mean and sd are these"
    needs = f"runs that the target is likely to need ({power}): {needed} in all"
    return f"{sample} p={sample.p:.2g} against {target}\n{needs}\n{proof.PEEKING}", 0


def command_verify(args: argparse.Namespace) -> Outcome:
    """Check records; exit code 1 if one fails."""
    names = [name.removesuffix(f"/{store.SCRIPT}") for name in args.records]
    folders = [store.find_record(name, args.root) for name in names] or store.lineage(args.root)
    verdicts = [rules.verify(folder, args.root) for folder in folders]
    return "\n".join(map(str, verdicts)) or "no records yet", int(any(verdict.failures for verdict in verdicts))


def command_table(args: argparse.Namespace) -> Outcome:
    """Rewrite the tables of pages that come from logs and JSON: leaderboards, and those of README and docs/gpu.md."""
    changed = publish.rewrite_tables(args.root, args.check)
    told = f"out of date: run {PYTHON} -m speedrun table" if args.check else "written"
    return f"{', '.join(changed)}: {told}" if changed else "all tables are up to date", int(
        args.check and bool(changed)
    )


def command_submit(args: argparse.Namespace) -> Outcome:
    """Make a record's folder, after the newest, from finished logs of one script and their race; verify it; write
    boards and picture. Run it again after each change; it goes on with the folder."""
    mine = [folder for folder in store.record_folders(args.root) if folder.name.partition("_")[2] == args.name]
    with process.held(args.root, "another submit runs there: wait for it"):
        folder = mine[0] if mine else publish.new_record(args.name, args.logs, args.root, args.race)
        verdict = rules.verify(folder, args.root)
        if verdict.failures:
            return f"{folder}: mend this, then run {PYTHON} -m speedrun submit {args.name}\n{verdict}", 1
        publish.rewrite_tables(args.root, check_only=False)
        command_plot(argparse.Namespace(records=[], root=args.root, output=None))
    left = f"""left to do by hand:
- the root is the newest record's script: cp {folder / store.SCRIPT} {args.root.parent / store.SCRIPT}
- {args.root / store.PAGE}: "The line so far"; README.md: figures of the newest record; CHANGELOG.md
- a new track: its rules in {args.root / "RULES.md"}
- ./test.sh, then commit all of it"""
    return f"{verdict}\n{left}", 0


def command_plot(args: argparse.Namespace) -> Outcome:
    """Draw loss against train time of records or logs."""
    from speedrun import plots

    path = args.output or (Path() if args.records else args.root) / "curves.png"
    plots.plot_curves(plots.curves_of(args.records, args.root), path)
    return str(path), 0


def command_site(args: argparse.Namespace) -> Outcome:
    """Write the line of records as pages, which open without a server."""
    from speedrun import site

    return f"{site.write_site(args.root, args.output)} files: open {args.output / 'index.html'}", 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speedrun", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in MODULES.items():
        commands.add_parser(name, help=text)

    def command(function: Callable[[argparse.Namespace], Outcome], **settings: Any) -> Callable:
        name, text = function.__name__.removeprefix("command_"), function.__doc__ or ""
        settings |= dict(help=text.replace("%", "%%"), description=text)
        parser = commands.add_parser(name, allow_abbrev=False, **settings)
        parser.add_argument("--root", type=Path, default=store.RECORDS, help="where records are (default: %(default)s)")
        parser.set_defaults(function=function)
        return parser.add_argument

    usage = "%(prog)s [options] NEWEST OLDER [OLDER ...] [-- FLAGS ...]"
    epilog = "FLAGS go to all scripts. An idea may be a flag: race 'train_gpt.py --muon_lr 0.05' train_gpt.py. "
    add = command(command_race, usage=usage, epilog=f"{epilog}{race.CONTRACT} {proof.FASTER} See docs/submit.md.")
    add("scripts", nargs="+", metavar="SCRIPT", help="a record, a log, a script, or 'SCRIPT FLAGS OF ITS OWN'")
    add("--pairs", type=int, default=6, help="rounds, of one run of each script; 1 to 4 are a screen (default: 6)")
    add("--seed", type=int, default=1, help="of the first round; each next one is higher (default: 1)")
    add("--nproc_per_node", type=int, default=1, metavar="N", help="processes of each run; above 1 with torchrun")
    add("--out", type=Path, metavar="FOLDER", help="of the race, which resumes there (default: logs/race-TIME)")
    add("--note", metavar="TEXT", default="", help="what the idea is, for `tried` and the record")
    command(command_tried)
    add = command(command_diff)
    add("a", metavar="A", nargs="?")
    add("b", metavar="B")
    add = command(command_stats)
    add("logs", nargs="+", metavar="LOG", help="logs or records")
    add("--target", type=float, metavar="LOSS", help="(default: that of the logs' track)")
    command(command_verify)("records", metavar="RECORD", nargs="*", help="default: all")
    add = command(command_table)
    add("--check", action="store_true", help="only say, by exit code 1, whether they are out of date")
    add = command(command_submit)
    add("name", metavar="NAME")
    add("logs", nargs="*", metavar="LOG")
    add("--race", type=Path, metavar="FILE", help="race.json against the record before, to be stored, too")
    add = command(command_plot)
    add("records", metavar="RECORD", nargs="*", help="(default: all ranked records, and the plain GPT)")
    add("-o", "--output", type=Path, metavar="FILE", help="in the format of its ending (default: curves.png)")
    add = command(command_site)
    add("-o", "--output", type=Path, metavar="FOLDER", default=Path("site"), help="(default: %(default)s)")
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
    at = argv.index("--") if argv[:1] == ["race"] and "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:at])
    args.flags = argv[at + 1 :]
    if args.function is not command_diff:
        with needs.packages("race"):  # to miss them now, and not after all runs
            for name in "matplotlib", "psutil", "scipy.stats":
                importlib.import_module(name)
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
