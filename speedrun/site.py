"""Write the script beside its explanation and the line of records as static pages: no server, no network."""

import ast
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from speedrun import drawings, race, records, tour
from speedrun.logs import TRACKS, load_script, read_json, read_text
from speedrun.process import ToolError, packages, printable

with packages("tools"):
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from markupsafe import Markup
    from mdit_py_plugins.anchors import anchors_plugin
    from mdit_py_plugins.gfm import gfm_plugin
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

MARKDOWN = MarkdownIt("commonmark").use(gfm_plugin).use(anchors_plugin, max_level=6)  # as GitHub shows it
TEMPLATES = Environment(loader=PackageLoader("speedrun"), undefined=StrictUndefined, autoescape=True)
TAG = re.compile(r"""<[a-z](?:[^"'>]|"[^"]*"|'[^']*')*>""", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""\s([\w-]+)=("[^"]*"|'[^']*'|[^\s>]+)""")
SPAN = re.compile(r"`([A-Za-z_][\w.]*)`")  # of code, a name
SCRIPTS, SCRIPTS_BEGIN = "compare.js", "const DATA = "  # the file that shows that a folder holds this site
TOUR, SCRIPT_PAGE = Path("docs/tour.md"), Path("script.html")
UNCOLORED = re.compile(r'<span class="(?!c|k|s|m|nf|nc)\w+">(.*?)</span>')  # tokens that style.css gives no color


# ---- Scripts and records


@functools.cache
def color(code: str) -> str:
    """Return Python as HTML, with as many lines."""
    html = highlight(f"{code}\n", PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return UNCOLORED.sub(r"\1", html.removesuffix("\n"))


def compare(scripts: dict[str, str]) -> dict[str, Any]:
    """Return each line once, as HTML; scripts as numbers of lines; for `A B` the runs of lines in which they agree."""
    lines: dict[str, str] = {}
    for script in scripts.values():
        html = "\n\n\n".join(map(color, script.split("\n\n\n")))  # most functions are in several scripts
        for line, html_line in zip(script.split("\n"), html.split("\n"), strict=True):
            lines.setdefault(line, html_line)
    numbers = {line: i for i, line in enumerate(lines)}
    numbered = {name: [numbers[line] for line in script.split("\n")] for name, script in scripts.items()}
    blocks = {}
    for a, b in itertools.combinations(scripts, 2):
        blocks[f"{a} {b}"] = SequenceMatcher(None, numbered[a], numbered[b]).get_matching_blocks()
    return dict(lines=list(lines.values()), scripts=numbered, pairs=blocks)


def words_of(script: str, start: int, end: int) -> set[str]:
    """Return the words of some lines of a script, and the names of the definitions that these lines belong to."""
    pieces = [piece for piece in tour.split_script(script) if piece.first < end and start < piece.end]
    words = re.findall(r"\w+", "\n".join(script.split("\n")[start:end]))
    return {*words, *(name for piece in pieces for name in piece.names)}


def explain(page: str, a: str, b: str, blocks: Sequence[tuple[int, int, int]]) -> dict[str, str]:
    """Return the sentences of a page that name what a hunk of a diff changes, by the lines above it in both scripts."""
    texts: list[list[str]] = [[]]  # of a paragraph, or of the cells of a row
    for token in MARKDOWN.parse(page):
        if token.type == "inline":
            texts[-1].append(token.content)
        elif not token.type.startswith("td"):
            texts.append([])
    sentences = [it for text in texts for it in re.split(r"(?<=[.!?])\s+(?=[^a-z])", " · ".join(text))]
    names = {sentence: SPAN.findall(sentence) for sentence in sentences}
    explained, before, i, j = dict[str, str](), list[str](), 0, 0
    for i_end, j_end, length in blocks:
        words = words_of(a, i, i_end) | words_of(b, j, j_end)
        named = [it for it, spans in names.items() if any(x in words or {*x.split(".")} <= words for x in spans)]
        if named and named != before:
            html = MARKDOWN.renderInline(" ".join(named))
            explained[f"{i} {j}"] = re.sub(r"</?a\b.*?>", "", html)  # links lead on from the page alone
            before = named
        i, j = i_end + length, j_end + length
    return explained


class Record:
    """A record as templates show it. One that was not timed here has no seconds."""

    def __init__(self, folder: Path, before: Sequence[Path], data: dict[str, Any], public: dict[str, dict]):
        self.key, self.info, self.track = records.name_of(folder), records.read_info(folder), TRACKS[folder.parent.name]
        self.number, _, self.name = folder.name.partition("_")
        self.page = f"records/{self.key}/README.html"
        self.authors = sorted({*re.findall(r"(?<!\w)@[\w.-]*\w", read_text(folder / records.PAGE))}, key=str.lower)
        self.public = public.get(self.info.evidence)
        self.lines = len(data["scripts"][self.key])
        if self.info.after in data["scripts"]:
            equal = sum(length for *_, length in data["pairs"][f"{self.info.after} {self.key}"])
            self.removed, self.added = len(data["scripts"][self.info.after]) - equal, self.lines - equal
        self.steps: int | None = self.public["steps"] if self.public else None
        self.seconds = self.race = None
        self.standing = "ported, not run on eight GPUs"
        if self.info.ranked:
            logs = records.read_logs(folder)
            self.steps = logs[0].num_steps
            self.loss = race.Sample([log.val_loss for log in logs])
            self.seconds = race.Sample([log.train_time / 1000 for log in logs])
            self.race = records.race_before(folder, before)
            processor, cores = str(logs[0].hardware).partition(",")[0], self.track.max_threads
            self.standing = f"measured here on {processor}" + (f", {cores} cores" if cores else "")


# ---- Pages


class Site:
    """The files of the site by their place in it. All templates get `shared`."""

    def __init__(self, top: Path, **shared: Any):
        self.top, self.shared = top, shared
        self.files = dict[Path, bytes]()
        self.anchors = dict[Path, set[str]]()  # of a page, by its file in the repository
        self.links = dict[tuple[Path, str], tuple[Path, str]]()  # by page and address: target and anchor

    def place_of(self, source: Path) -> Path:
        """Return where a file of the repository is in the site: in no hidden folder, which GitHub leaves out."""
        if source == self.top / TOUR:
            return SCRIPT_PAGE
        path = source.with_suffix(".html") if source.suffix == ".md" else source
        return Path(*(part.lstrip(".") for part in path.relative_to(self.top).parts))

    def add(self, place: Path, template: str, **values: Any) -> None:
        values |= dict(up=os.path.relpath(".", place.parent))
        self.files[place] = TEMPLATES.get_template(template).render(self.shared, **values).encode()

    def add_source(self, source: Path, template: str = "page.html", **values: Any) -> None:
        """Add a file of the repository, Markdown as a page."""
        place = self.place_of(source)
        if source.suffix == ".md":
            self.add(place, template, body=self.html_of(read_text(source), source, place), **values)
        else:
            self.files[place] = source.read_bytes()

    def add_linked(self) -> None:
        """Add what pages link to, and what that links to."""
        while sources := {it for it, _ in self.links.values() if it.is_file() and self.place_of(it) not in self.files}:
            for source in sorted(sources):
                self.add_source(source)

    def html_of(self, text: str | Sequence[Token], source: Path, place: Path) -> Markup:
        """Return Markdown of a page, or what it was parsed to, as HTML for a place of the site."""
        anchors = self.anchors.setdefault(source, set())

        def with_address(attribute: re.Match[str]) -> str:
            name, value = attribute[1].lower(), unescape(attribute[2].strip("\"'"))
            if name in ("id", "name"):
                anchors.add(value)
            elif name in ("href", "src"):
                return f' {name}="{escape(self.address_of(value, source, place))}"'
            return attribute[0]

        tokens = MARKDOWN.parse(text) if isinstance(text, str) else text
        html = TAG.sub(
            lambda tag: ATTRIBUTE.sub(with_address, tag[0]), MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        )
        return Markup(html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>"))

    def address_of(self, link: str, source: Path, place: Path) -> str:
        """Return where a link leads from this place of the site, and note it. What leads out stays as it is."""
        try:
            parts = urlsplit(link)
            path, anchor = unquote(parts.path), unquote(parts.fragment)
            start = self.top if path.startswith("/") else source.parent
            target = (start / path.lstrip("/")).resolve() if path else source
            if (target / records.PAGE).is_file():
                target /= records.PAGE
        except (ValueError, OSError):  # no address, or a name that is too long for a file
            return link
        if parts.scheme or parts.netloc or not target.is_relative_to(self.top):
            return link
        self.links[source, link] = target, anchor
        if not target.is_file():
            return link
        address = quote(os.path.relpath(self.place_of(target), place.parent))
        return f"{address}#{quote(anchor)}" if anchor else address

    def broken_links(self) -> Iterator[str]:
        for (source, link), (target, anchor) in self.links.items():
            if not target.is_file():
                yield f"{source.relative_to(self.top)}: its link {link} leads to no file or page"
            elif anchor and anchor not in self.anchors.get(target, {anchor}):
                yield f"{source.relative_to(self.top)}: its link {link} leads to no anchor of its page"


def add_script(site: Site) -> None:
    """Add the page of the root's script beside the tour; raise ToolError if they do not fit."""
    source, path = site.top / TOUR, site.top / records.SCRIPT
    script, module, tokens = read_text(path).rstrip("\n"), load_script(path), MARKDOWN.parse(read_text(source))
    images = [it for token in tokens for it in token.children or [] if it.type == "image"]
    if places := [it for it in images if str(it.attrGet("src")).startswith(f"{drawings.FOLDER.name}/")]:
        drawn = drawings.draw(module)  # of this script, whatever the files show
        for image in places:
            if svg := drawn.get(Path(str(image.attrGet("src"))).stem):
                image.type, image.content = "html_inline", svg
    layout = tour.Layout(tokens, script, site.top)
    for problem in layout.problems:
        print(printable(problem), file=sys.stderr)
    if layout.problems:
        raise ToolError(f"{TOUR}: does not fit {records.SCRIPT} in {len(layout.problems)} places, see above")
    lines = color(script).split("\n")
    rows = [(site.html_of(tokens, source, SCRIPT_PAGE), pieces) for tokens, pieces in layout.rows()]
    site.anchors[source] |= {f"L{i + 1}" for i in range(len(lines))}
    tables = {
        name: it for name, it in vars(module).items() if isinstance(it, tuple) and it and hasattr(it[0], "_fields")
    }
    shown = dict(rows=rows, sections=layout.sections, named=layout.named, lines=lines, tables=tables)
    site.add(SCRIPT_PAGE, "script.html", **shown)


def check_output(output: Path) -> None:
    """Raise ToolError unless the folder is new or empty, or holds the site from before."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    is_site = (output / SCRIPTS).is_file() and read_text(output / SCRIPTS).startswith(SCRIPTS_BEGIN)
    if not is_free and not is_site:
        raise ToolError(f"{output}: holds other files than this site; name a new or an empty folder with -o")


def write_site(root: Path, output: Path) -> int:
    """Write the pages of the script and of all records, and what they link to; return how many files that makes."""
    check_output(output)
    root = root.resolve()
    line = records.lineage(root)
    if not line:
        raise ToolError(f"{root}: has no whole record")
    scripts = {records.name_of(folder): records.read_script(str(folder), root)[1] for folder in line}
    scripts["root"] = read_text(root.parent / records.SCRIPT).rstrip("\n")
    for name, script in scripts.items():
        ast.parse(script, name)  # one that is no Python is named
    data = compare(scripts)
    notes = data["notes"] = {}
    public = read_json(records.PUBLIC)
    by_evidence = {f"public record {it['number']}": it for it in public["records"]}
    found = [Record(folder, line[:i], data, by_evidence) for i, folder in enumerate(line)]
    for folder, record in zip(line, found, strict=True):
        if record.info.after in scripts:
            before, pair = scripts[record.info.after], f"{record.info.after} {record.key}"
            notes[pair] = explain(read_text(folder / records.PAGE), before, scripts[record.key], data["pairs"][pair])
    site = Site(root.parent, scripts=data["scripts"], records=found, tracks=TRACKS, public=public, race=race)
    site.files[Path(SCRIPTS)] = f"{SCRIPTS_BEGIN}{json.dumps(data, separators=(',', ':'))};\n".encode()
    start, index = root / records.PAGE, Path("index.html")
    story = read_text(start).partition("\n## The line so far\n")[2].partition("\n## ")[0]
    site.add(index, "index.html", story=site.html_of(story, start, index))
    site.add(Path("compare.html"), "compare.html")
    add_script(site)
    for source in start, root / "NOTES.md", root / "RULES.md":
        site.add_source(source)
    for folder, record in zip(line, found, strict=True):
        site.add_source(folder / records.PAGE, "record.html", record=record)
    site.add_linked()
    for problem in site.broken_links():
        print(printable(problem), file=sys.stderr)
    for place, content in site.files.items():  # first what shows that the folder holds this site
        (output / place).parent.mkdir(parents=True, exist_ok=True)
        (output / place).write_bytes(content)
    return len(site.files)
