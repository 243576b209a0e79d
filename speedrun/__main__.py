"""The tools around train_gpt.py: python -m speedrun COMMAND --help. A record is named by its folder or by its name.

Exit codes: 0 done, 1 a check failed, 2 something has to be mended, 130 interrupted.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

try:
    from speedrun import ROOT, plot, process, race, records
    from speedrun.logs import digest
    from speedrun.process import printable
except KeyboardInterrupt:  # these imports take a tenth of a second, or more
    print("python -m speedrun: interrupted", file=sys.stderr)
    sys.exit(130)


def say(text: str) -> None:
    """Print without the control characters that names, scripts and logs may hold."""
    print(printable(text), flush=True)


def command_race(args: argparse.Namespace) -> None:
    """Race scripts, in turn on equal seeds: one alone against the root's train_gpt.py."""
    names = args.scripts if len(args.scripts) > 1 else [*args.scripts, str(ROOT / records.SCRIPT)]
    labels, sources = zip(*(records.read_script(name, records.RECORDS) for name in names), strict=True)
    scripts = [race.Script(label, digest(source)) for label, source in zip(labels, sources, strict=True)]
    plan = race.Race(scripts, args.flags, args.pairs, args.seed, args.nproc_per_node, time.strftime("%Y-%m-%d"))
    folder = args.out or Path("logs") / time.strftime("race-%Y%m%d-%H%M%S")
    say(race.report(race.run_race(plan, sources, folder)))


def command_submit(args: argparse.Namespace) -> None:
    """Make a record of a race's first script; if the second is in no record, it becomes one before, a form."""
    for folder in records.write_record(args.name, args.folder, records.RECORDS):
        say(f"{folder}: fill in its page and {records.INFO}; then verify, table and plot: docs/submit.md has the rest")
        say("\n".join(records.verify_records([str(folder)], records.RECORDS)[0]))


def command_verify(args: argparse.Namespace) -> int:
    """Check records; exit code 1 if one fails."""
    lines, failed = records.verify_records(args.records, records.RECORDS)
    say("\n".join(lines) or "no records yet")
    return int(failed > 0)


def command_diff(args: argparse.Namespace) -> None:
    """Compare two scripts, each named by a record, a log or a file.

    One alone is compared with what it raced if it is a record, else with the root's train_gpt.py.
    """
    root, b = records.RECORDS, records.find_record(args.b, records.RECORDS)
    before = records.record_before(b.resolve(), records.lineage(root.resolve())) if b.is_dir() else None
    a = args.a or str(before or ROOT / records.SCRIPT)
    lines, removed, added = records.diff(*(records.read_script(str(it), root) for it in (a, b)))
    print(f"{removed} lines removed, {added} added", file=sys.stderr)
    say("\n".join(lines))


def command_table(args: argparse.Namespace) -> int:
    """Rewrite the boards of records/README.md, and say which of their records verify refuses."""
    is_old = records.update_boards(records.RECORDS, args.check)
    if refused := [line for line in records.verify_records([], records.RECORDS)[0] if line.startswith("FAIL")]:
        print(printable("\n".join(["the boards have records that verify refuses:", *refused])), file=sys.stderr)
    say(("out of date" if args.check else "written") if is_old else "up to date")
    return int(is_old and args.check)


def command_plot(args: argparse.Namespace) -> None:
    """Draw loss against train time of records or logs, as a PNG, or the line of records as SVGs."""
    if args.line and args.records:
        raise process.ToolError("--line draws all records; name none")
    if args.output.suffix != (ending := ".svg" if args.line else ".png"):
        raise process.ToolError(f"{args.output}: expected -o NAME{ending}")
    if args.line:
        plot.plot_line(records.RECORDS, args.output)
    else:
        plot.plot(args.records, records.RECORDS, args.output)


def command_site(args: argparse.Namespace) -> None:
    """Write the script beside its explanation, and the line of records, as pages that open without a server."""
    from speedrun import site

    say(f"{site.write_site(records.RECORDS, args.output, args.script)} files: open {args.output / 'index.html'}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speedrun", description=__doc__)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(action: Callable[[argparse.Namespace], int | None]) -> Callable:
        """Add a command; return what adds its flags."""
        name, text = action.__name__.removeprefix("command_"), action.__doc__
        added = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(action=action)
        return added.add_argument

    subparsers.add_parser("run", help="Check machine and flags, get missing data, and train: what ./run.sh starts.")
    add = command(command_race)
    add("scripts", nargs="+", metavar="SCRIPT", help="record, log or file, the newest first; after -- flags for all")
    add("--pairs", type=int, default=6, help="rounds, of one run of each script; 1 to 4 are a screen (default: 6)")
    add("--seed", type=int, default=1, help="of the first round; each next one is higher (default: 1)")
    add("--nproc_per_node", type=int, default=1, metavar="N", help="processes of each run; above 1 with torchrun")
    add("--out", type=Path, metavar="FOLDER", help="of the race, which resumes there (default: logs/race-TIME)")
    add = command(command_submit)
    add("name", metavar="NAME")
    add("folder", metavar="RACE_FOLDER", type=Path, help="of a finished race, or of the logs of one script")
    command(command_verify)("records", metavar="RECORD", nargs="*", help="(default: all)")
    add = command(command_diff)
    add("a", metavar="A", nargs="?")
    add("b", metavar="B")
    command(command_table)("--check", action="store_true", help="only say, by exit code 1, if they are out of date")
    add = command(command_plot)
    add("records", metavar="RECORD", nargs="*", help="(default: all ranked records, and the plain GPT)")
    add("--line", action="store_true", help="the train times of all records, -o NAME.svg: also NAME-dark.svg")
    add("-o", "--output", type=Path, metavar="FILE", default=Path("curves.png"), help="(default: curves.png)")
    add = command(command_site)
    add("script", metavar="SCRIPT", nargs="?", type=Path, help="beside the text, and compared (default: the root's)")
    add("-o", "--output", type=Path, metavar="FOLDER", default=Path("site"), help="(default: site)")
    subparsers.add_parser("bench", help="Time the parts of a step of train_gpt.py on this machine.")
    return parser


def tool(name: str) -> ModuleType:
    """Import a module that needs torch."""
    with process.packages():
        return importlib.import_module(f"speedrun.{name}")


def act(argv: Sequence[str] | None) -> int | None:
    """Do what the flags say, and return the exit code."""
    argv = list(argv or [])
    if argv[:1] == ["bench"]:  # which parses its own flags
        return tool("bench").main(argv[1:])
    end = argv.index("--") if argv[:1] == ["race"] and "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    with process.packages("tools"):  # to miss them now, and not after all runs of a race
        importlib.import_module("matplotlib")
        importlib.import_module("scipy.stats")
    return args.action(args)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:  # whose training ends as it would without us, so that only the import is guarded
        modules = list[ModuleType]()
        code = process.run("run.sh", lambda _: modules.append(tool("run")))
        return code or modules[0].main(argv[1:])
    return process.run("python -m speedrun", act, argv)


if __name__ == "__main__":
    sys.exit(main())
