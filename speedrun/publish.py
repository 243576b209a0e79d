"""Make a record's folder, compare scripts, and write the leaderboards."""

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from speedrun import store
from speedrun.logs import Log, ToolError, printable, read_json, read_text
from speedrun.proof import describe, interval, read_race
from speedrun.rules import ONE_CARD, record_race, require_one_experiment, sha256_of
from speedrun.store import CARD, OLDER, PAGE, RACE, RUNS, SCRIPT, TRACKS, name_of

BEGIN = "<!-- table leaderboards: python -m speedrun table -->"
END = "<!-- end of table -->"
README = """# {}

## What changed

<say what the script does that the one before did not>

## Why

<say why it is faster, and how you know: what you measured, what did not work, whose idea it was>
"""


def cell(text: str) -> str:
    """Quote text of a log or a page for a cell of a Markdown table."""
    return re.sub(r"[&<>|\\`\[\]\n]", lambda found: f"&#{ord(found[0])};", printable(text))


def link(folder: Path) -> str:
    return f"[{store.short_name(folder.name)}]({name_of(folder)})"


def new_record(name: str, paths: Sequence[str], root: Path, race: Path | None) -> Path:
    """Make the folder from finished logs of one script and its race, once nothing of this is known to be wrong."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ToolError(f"{name!r} is no name for a record: take letters, digits, '-' and '.'")
    line = store.lineage(root)
    if taken := [name_of(path) for path in line if store.short_name(path.name).lower() == name.lower()]:
        raise ToolError(f"{taken[0]} has that name: choose another, or remove it first")
    if not paths:
        raise ToolError("name the logs of its runs")
    if len({Path(path).name for path in paths}) < len(paths):
        raise ToolError("two of the logs have the same file name: rename one")
    own = [Log(Path(path)) for path in paths]
    require_one_experiment(own)
    if not own[0].source:
        raise ToolError(f"{own[0].path}: states no script but its SHA-256: take the log that the run wrote")
    before, folder = line[-1] if line else None, root / store.track_of(own[0]).name / next_name(name, own[0], line)
    what = (race and read_race(race).note) or "<say in one line what it is>"
    card = dict(date=str(datetime.date.today()), what=what, kind="idea", after=before and name_of(before), ranked=True)
    texts = {log.name: log.stored for log in own}
    files = {PAGE: README.format(name), SCRIPT: own[0].source + "\n", CARD: json.dumps(card, indent=1) + "\n"}
    if race:
        texts |= older_logs(race, store.rivals(line, store.board_of(own[0])))
        files[RACE] = read_text(race)
    folder.mkdir(parents=True)
    for name, text in (files | {RUNS: store.joined(texts)}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def older_logs(path: Path, before: Sequence[Path]) -> dict[str, str]:
    """Return name and text of the logs beside a race.json of the first of these records that was raced."""
    race = read_race(path)
    for sha256 in map(sha256_of, before):
        if sha256 in race.hashes:
            names = [f"{race.run_id(run.seed, run.script)}.txt" for run in race.of(race.hashes.index(sha256))]
            paths = filter(Path.is_file, map(path.with_name, names))
            return {f"{OLDER}/{path.name}": Log(path).stored for path in paths}
    return {}


def next_name(name: str, log: Log, line: Sequence[Path]) -> str:
    """Number a record after the last of its track; among numbers of public records a letter tells ours."""
    last = max((path.name for path in line if path.parent.name == log.track), default="00_")
    number, letter = re.findall(r"^(\d+)([a-z]?)_", last)[0]
    if log.track == "gpt2":
        return f"{number}{chr(ord(letter or 'a') + 1)}_{name}"
    return f"{int(number) + 1:02}_{name}"


def row(folder: Path, own: list[Log], ratio: str, product: float | None) -> list[str]:
    """Return a record's row; `ratio` is its race's, `product` its train time in times of the first's."""
    sample = describe([log.val_loss for log in own], store.track_of(own[0]).target)
    times = describe([log.train_time / 1000 for log in own])
    peaks = [log.peak_mib for log in own if log.peak_mib is not None]
    return [
        link(folder),
        cell(store.read_card(folder).what),
        f"{own[0].num_steps:,}",
        f"{sample.mean:.4f} (sd {sample.sd:.4f}, n={sample.n})",
        f"{sample.p:.1g}",
        f"{times.mean:.2f} (sd {times.sd:.2f})",
        ratio,
        "" if product is None else f"{product:.3f}",
        f"{max(peaks):,}" if peaks else "",
        cell("; ".join(sorted({log.hardware or "not stated" for log in own}))),
    ]


def markdown(head: str, rows: Iterable[Iterable[str]]) -> str:
    names = head.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def ranked(root: Path) -> Iterator[tuple[str, Path, list[Log], str, float | None]]:
    """Yield each ranked record: leaderboard, folder, logs, its race's ratio, its train time in times of the first's."""
    newest: dict[str, tuple[str, float | None]] = {}  # of each leaderboard
    for i, folder in enumerate(line := store.lineage(root)):
        if not store.read_card(folder).ranked:
            continue
        own, ratio = store.record_logs(folder), ""
        require_one_experiment(own)
        board = store.board_of(own[0])
        before, product = newest.get(board, ("", 1.0))
        if before:  # or else it opens its leaderboard
            rival, found = record_race(folder, line[:i], board)
            ratio = interval(found["train_time"], ".3f") + f", against {rival}" * (rival != before)
            product = product * found["train_time"]["ratio"] if product and rival == before else None
        newest[board] = name_of(folder), product
        yield board, folder, own, ratio, product


def leaderboards(root: Path) -> str:
    """Return the tables of all tracks and machines with records, and of the public history."""
    boards: dict[str, list[list[str]]] = {}
    for board, folder, own, ratio, product in ranked(root):
        boards.setdefault(board, []).append(row(folder, own, ratio, product))
    head = "record|what|steps|val_loss, mean|p|train time (s)|times the one before (95%)|times the first"
    head += "|peak memory (MiB)|hardware"
    parts = []
    for board in sorted(boards, reverse=True):
        target = TRACKS[board.split()[0]].target
        parts += [f"### {cell(board)}: at most {target}, measured here", markdown(head, boards[board])]
    if unranked := [folder for folder in store.lineage(root) if store.read_card(folder).kind == ONE_CARD]:
        rows = [[link(folder), cell(store.read_card(folder).what)] for folder in unranked]
        parts += [f"### gpt2: {ONE_CARD}, no whole run", markdown("record|what", rows)]
    public = read_json(store.PUBLIC)
    source = f"[{public['credit']}]({public['url']})"
    parts.append(f"### Public history, {public['hardware']}: figures of {source}, not measured here")
    head = "#|date|name|steps|tokens per step|step_avg (ms)|train time (s)|official time (min)|val_loss"
    formats = "{number}|{date}|{name}|{steps:,}|{tokens_per_step:,}|{step_avg_ms:.2f}|{train_time_s:.2f}"
    formats += "|{official_minutes:g}|{val_loss:.4f} ({val_loss_of})"
    rows = [formats.format(**record).split("|") for record in public["records"]]
    return "\n\n".join([*parts, markdown(head, rows)])


def rewrite_tables(root: Path, check_only: bool) -> list[str]:
    """Write the tables that pages have between markers, unless `check_only`. Return the pages that had others."""
    pages = {root / "README.md": {"leaderboards": lambda: leaderboards(root)}}
    if (page := root.parent / "docs" / "gpu.md").exists():
        from speedrun import gpu_tables  # which imports torch

        pages[page] = gpu_tables.TABLES
    changed = []
    for path, tables in pages.items():
        text = new = read_text(path)
        for name, make in tables.items():
            begin = BEGIN.replace("leaderboards", name)
            if len(parts := re.split(f"(?s)(?<={begin}\n).*?(?={END})", new)) != 2:
                raise ToolError(f"{path} lacks the lines {begin} and {END}; put them where the table goes")
            new = f"\n{make()}\n\n".join(parts)
        if new != text:
            changed.append(str(path))
            if not check_only:
                path.write_text(new, encoding="utf-8")
    return changed
