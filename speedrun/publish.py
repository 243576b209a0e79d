"""Make a record's folder, and write the tables of records and races."""

import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from speedrun import store
from speedrun.logs import Log, ToolError, markdown, printable, read_json, read_text
from speedrun.proof import Sample, Script, interval, read_race
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
    """Make the folder from finished logs of one script, and its race."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ToolError(f"{name!r} is no name for a record: take letters, digits, '-' and '.'")
    line = store.lineage(root)
    if taken := [name_of(path) for path in line if store.short_name(path.name).lower() == name.lower()]:
        raise ToolError(f"{taken[0]} has that name: choose another, or remove it first")
    if not paths or len({Path(path).name for path in paths}) < len(paths):
        raise ToolError("name the logs of its runs, which need names of their own")
    own = [Log(Path(path)) for path in paths]
    require_one_experiment(own)
    before, track = line[-1] if line else None, store.track_of(own[0])
    last = max((path.name for path in line if path.parent.name == track.name), default="00_")
    number, letter = re.findall(r"^(\d+)([a-z]?)_", last)[0]
    number = number + chr(ord(letter or "a") + 1) if track.lettered else f"{int(number) + 1:02}"
    folder = root / track.name / f"{number}_{name}"
    raced = race and read_race(race)
    what = (raced and raced.note) or "<say in one line what it is>"
    card = dict(date=str(datetime.date.today()), what=what, kind="idea", after=before and name_of(before), ranked=True)
    texts = {log.name: log.stored for log in own}
    files = {PAGE: README.format(name), SCRIPT: own[0].source + "\n", CARD: json.dumps(card, indent=1) + "\n"}
    if race and raced:  # with the logs of the record before
        files[RACE] = read_text(race)
        hashes = [*map(sha256_of, store.rivals(line, store.board_of(own[0])))]
        others = [run for run in raced.runs if raced.hashes[run.script] in hashes]
        older = [race.with_name(f"{raced.run_id(run.seed, run.script)}.txt") for run in others]
        texts |= {f"{OLDER}/{path.name}": Log(path).stored for path in older if path.is_file()}
    folder.mkdir(parents=True)
    for name, text in (files | {RUNS: store.joined(texts)}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def told(script: Script) -> str:
    """Return a script's record or file, the beginning of its SHA-256, and its own flags."""
    name, _, flags = script.name.partition(" ")
    path = Path(name)
    name = path.parent.name if path.name == SCRIPT and path.parent.name else path.stem
    return f"{store.short_name(name)} {script.sha256[:6]} {flags}".strip()


def races(root: Path) -> str:
    """Return a row for each comparison of the races below logs/ and records/, the newest last."""
    rows = set[tuple[str, ...]]()
    paths = sorted({*Path("logs").glob(f"**/{RACE}"), *root.glob(f"*/*/{RACE}")})
    for path in {read_text(path): path for path in paths}.values():  # several records may have the same race
        try:
            race = read_race(path)
            date = race.date or (store.read_card(path.parent).date if path.is_relative_to(root) else "")
        except ToolError as error:
            print(error, file=sys.stderr)
            continue
        for (a, b), found in race.compared():
            figures = str(found["n"][0]), interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
            note = race.note.replace("\n", " ")
            rows.add((date, told(race.scripts[a]), told(race.scripts[b]), *figures, found["verdict"], note))
    if not rows:
        raise ToolError(f"no race has a pair yet below logs and {root}")
    table = [("date", "script", "against", "n", "time", "loss", "verdict", "note"), *sorted(rows)]
    widths = *(max(map(len, column)) for column in [*zip(*table, strict=True)][:-2]), 0, 0
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def row(folder: Path, own: list[Log], ratio: str, product: float | None) -> list[str]:
    sample = Sample([log.val_loss for log in own], store.track_of(own[0]).target)
    times = Sample([log.train_time / 1000 for log in own])
    figures = f"{own[0].num_steps:,}|{sample.mean:.4f} (sd {sample.sd:.4f}, n={sample.n})|{sample.p:.1g}"
    figures += f"|{times.mean:.2f} (sd {times.sd:.2f})|{ratio}|" + ("" if product is None else f"{product:.3f}")
    peak = max(log.peak_mib or 0 for log in own)
    hardware = "; ".join(sorted({log.hardware or "not stated" for log in own}))
    what = store.read_card(folder).what
    return [link(folder), cell(what), *figures.split("|"), f"{peak:,}" if peak else "", cell(hardware)]


def leaderboards(root: Path) -> str:
    """Return the tables of all tracks and machines with records, and of the public history."""
    boards: dict[str, list[list[str]]] = {}
    newest: dict[str, tuple[str, float | None]] = {}  # of each leaderboard, with its train time in times of the first's
    cards = {folder: store.read_card(folder) for folder in store.lineage(root)}
    for i, folder in enumerate(cards):
        if not cards[folder].ranked:
            continue
        own, ratio = store.record_logs(folder), ""
        require_one_experiment(own)
        board = store.board_of(own[0])
        before, product = newest.get(board, ("", 1.0))
        if before:  # or else it opens its leaderboard
            rival, found = record_race(folder, [*cards][:i], board)
            ratio = interval(found["train_time"], ".3f") + f", against {rival}" * (rival != before)
            product = product * found["train_time"]["ratio"] if product and rival == before else None
        newest[board] = name_of(folder), product
        boards.setdefault(board, []).append(row(folder, own, ratio, product))
    head = "record|what|steps|val_loss, mean|p|train time (s)|times the one before (95%)|times the first"
    head += "|peak memory (MiB)|hardware"
    parts = []
    for board in sorted(boards, reverse=True):
        target = TRACKS[board.split()[0]].target
        parts += [f"### {cell(board)}: at most {target}, measured here", markdown(head, boards[board])]
    for track in TRACKS:
        unranked = [it for it in cards.items() if it[0].parent.name == track and it[1].kind == ONE_CARD]
        if rows := [[link(folder), cell(card.what)] for folder, card in unranked]:
            parts += [f"### {track}: {ONE_CARD}, no whole run", markdown("record|what", rows)]
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
        from speedrun import page_tables, texts  # which import torch

        pages[page] = page_tables.TABLES
        pages[page.with_name("running.md")] = {"texts": texts.table}
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
