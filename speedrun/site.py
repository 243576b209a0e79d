"""Write the line of records, and all that its pages link to, as static pages for which no server is needed."""

import io
import itertools
import json
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace as Entry
from typing import Any

from speedrun import needs, plots, proof, publish, rules, store
from speedrun.logs import read_json, read_text
from speedrun.pages import render

with needs.packages("site"):
    from markdown_it import MarkdownIt
    from markupsafe import Markup
    from mdit_py_plugins.anchors import anchors_plugin
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MARKDOWN = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=4)
UNREAD = {tokenize.COMMENT, tokenize.NL}
F_STRING, END = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))  # from Python 3.12 on
PLAIN = re.compile(r'<span class="(?!c|k|s|m|nf|nc)\w+">(.*?)</span>')  # tokens that need no color


def count_tokens(script: str) -> int:
    """Return how many tokens a reader reads: Python's, without comments, docstrings and layout."""
    count, depth, before = 0, 0, tokenize.NEWLINE
    for kind, *_ in tokenize.generate_tokens(io.StringIO(script).readline):
        depth += (kind == F_STRING) - (kind == END)  # an f-string is one token, as in Python 3.11
        is_docstring = kind == tokenize.STRING and before in LAYOUT
        count += not (depth or is_docstring or kind in LAYOUT | UNREAD)
        before = before if kind in UNREAD else kind
    return count


def compare(scripts: dict[str, str]) -> dict[str, Any]:
    """Return each line once, as HTML; scripts as numbers of lines; for `A B` the runs of lines in which they agree."""
    html: dict[str, str] = {}
    for script in scripts.values():
        colored = highlight(script, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
        html = dict(zip(script.split("\n"), PLAIN.sub(r"\1", colored).split("\n"), strict=False)) | html
    numbers = {text: i for i, text in enumerate(html)}
    found = {name: [numbers[text] for text in script.split("\n")] for name, script in scripts.items()}
    pairs = itertools.combinations(found.items(), 2)
    blocks = {f"{a} {b}": SequenceMatcher(None, x, y).get_matching_blocks() for (a, x), (b, y) in pairs}
    return dict(lines=[*html.values()], scripts=found, pairs=blocks)


def measured(folder: Path, line: Sequence[Path]) -> dict[str, Any]:
    """Return the figures of a record whose runs are in its folder; `line` has the records before."""
    own, curve = store.record_logs(folder), plots.curve_of_runs(folder)
    _, _, steps, loss, _, seconds, *_ = publish.row(folder, own, "", None)
    axes = {"steps": curve.steps, "train time (s)": curve.seconds}
    curves = {axis: [*zip(axes[axis], curve.mean, strict=True)] for axis in axes}
    figures, board = dict(steps=steps, loss=loss, seconds=seconds, curves=curves), store.board_of(own[0])
    if not any(store.is_on_board(other, board) for other in line):
        return figures | dict(ratio="no race: it opens its leaderboard")
    name, found = rules.record_race(folder, line, board)
    race, rounds = proof.read_race(folder / store.RACE), {}
    for it in folder.parents[1] / name, folder:
        runs = race.of(race.hashes.index(rules.sha256_of(it)))
        rounds[store.short_name(it.name)] = [(run.seed - race.seed + 1, run.train_time / 1000) for run in runs]
    ratio = f"{proof.interval(found['train_time'], '.3f')} times {store.short_name(Path(name).name)}"
    return figures | dict(ratio=ratio, rounds=rounds, race=proof.standing(found))


def unmeasured(folder: Path, public: dict | None) -> dict[str, Any]:
    """Return the steps of a record that was not timed here, and losses: published ones, or of a run on one card."""
    steps = re.findall(r"num_iterations: \w+ = (\d+)", read_text(folder / store.SCRIPT))
    log = "".join(map(read_text, folder.glob("*.txt")))
    curve = public.get("curve", {}) if public else dict(re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", log, re.M))
    points = [(int(step), float(loss)) for step, loss in curve.items()]
    return dict(steps=f"{public['steps'] if public else int(steps[0]):,}", curves=dict(steps=points))


def entries(line: Sequence[Path], scripts: dict[str, str], data: dict[str, Any]) -> Iterator[Entry]:
    """Describe all records in order, for the templates."""
    public = {f"public record {record['number']}": record for record in read_json(store.PUBLIC)["records"]}
    milestone = None
    for i, folder in enumerate(line):
        name, card, track = store.name_of(folder), store.read_card(folder), store.TRACKS[folder.parent.name]
        entry = Entry(key=name, card=card, track=track, public=public.get(card.evidence), milestone=milestone)
        entry.number, _, entry.name = folder.name.partition("_")
        entry.tokens, milestone = count_tokens(scripts[name]), entry.public or milestone
        named = {*re.findall(r"(?<!\w)@[\w-]+", read_text(folder / store.PAGE))}
        entry.authors = sorted(named, key=str.lower) or ["this repository"] * ("proposal" not in card.kind)
        equal = sum(count for *_, count in data["pairs"].get(f"{card.after} {name}", ()))
        entry.gone, entry.come = (len(data["scripts"].get(it, ())) - equal for it in (card.after, name))
        vars(entry).update(measured(folder, line[:i]) if card.ranked else unmeasured(folder, entry.public))
        yield entry


def page_of(source: Path, top: Path) -> Path:
    """Return where a file lies in the site: in no hidden folder, as GitHub Pages leaves these out."""
    return Path(re.sub(r"\.md$", ".html", source.relative_to(top).as_posix().lstrip(".")))


def html_of(text: str, folder: Path, page: Path, top: Path, linked: set[Path]) -> Markup:
    """Return Markdown of a folder as HTML of a page of the site; add to `linked` what it links to."""
    tokens = MARKDOWN.parse(text)
    for token in [*tokens, *(child for parent in tokens for child in parent.children or ())]:
        for name in "href", "src":
            path, mark, anchor = str(token.attrs.get(name, "")).partition("#")
            if path and "://" not in path:
                target = (folder / path).resolve()
                linked.add(target := target / store.PAGE if target.is_dir() else target)
                token.attrs[name] = os.path.relpath(page_of(target, top), page.parent) + mark + anchor
    html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
    return Markup(html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>"))


def write_site(root: Path, out: Path) -> int:
    """Write the pages of all records, and what they link to; return how many files that makes."""
    root, line = root.resolve(), store.lineage(root.resolve())
    scripts = {store.name_of(folder): store.read_script(str(folder), root)[1] for folder in line}
    scripts["root"] = read_text(root.parent / store.SCRIPT).rstrip("\n")
    data = compare(scripts)
    records = {root / entry.key / store.PAGE: entry for entry in entries(line, scripts, data)}
    shared = dict(names=[*scripts], records=[*records.values()], tracks=store.TRACKS, public=read_json(store.PUBLIC))
    shared |= dict(a=store.name_of(line[-1]), b="root", tokens=count_tokens(scripts["root"]))
    plain = {it.name: read_json(root / it.anchor)["val_curve"][1:] for it in store.TRACKS.values() if it.anchor}
    shared["anchors"] = {name: {plots.ANCHOR: [(ms / 1000, loss) for _, loss, ms in plain[name]]} for name in plain}
    written = {Path("compare.js"): f"const DATA = {json.dumps(data, separators=(',', ':'))};\n".encode()}
    done, linked = set[Path](), {root / "NOTES.md", root / "RULES.md", *records}

    def write(page: Path, template: str, **texts: tuple[str, Path]) -> None:
        htmls = {name: html_of(text, folder, page, root.parent, linked) for name, (text, folder) in texts.items()}
        written[page] = render(template, up=os.path.relpath(".", page.parent), **shared, **htmls).encode()

    story = read_text(root / store.PAGE).partition("\n## The line so far\n")[2].partition("\n## ")[0]
    write(Path("index.html"), "index.html", story=(story, root), lost=(read_text(root / "NOTES.md"), root))
    write(Path("compare.html"), "compare.html")
    while todo := linked - done:
        for source in todo:
            if source.suffix == ".md":
                shared["record"] = records.get(source)
                template = "record.html" if source in records else "page.html"
                write(page_of(source, root.parent), template, body=(read_text(source), source.parent))
            else:
                written[page_of(source, root.parent)] = source.read_bytes()
        done |= todo
    for page, content in written.items():
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_bytes(content)
    return len(written)
