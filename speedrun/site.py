"""Write the script beside its explanation and the line of records as static pages: no server, no network."""

import ast
import contextlib
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

from speedrun import TRACKS, drawings, race, records, tour
from speedrun.logs import load_script, read_json, read_text
from speedrun.process import ToolError, packages, printable

with packages("tools"):
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markdown_it import MarkdownIt
    from markdown_it.rules_core import StateCore
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
# GitHub shows these tags as text (https://github.github.com/gfm/#disallowed-raw-html-extension-)
DISALLOWED = re.compile(r"<(?=/?(title|textarea|style|xmp|iframe|noembed|noframes|script|plaintext)\b)", re.IGNORECASE)
FILES = "files.json"  # the list of the site's files, which shows that a folder holds one
TOUR, SCRIPT_PAGE = Path("docs/tour.md"), Path("script.html")
UNCOLORED = re.compile(r'<span class="(?!c|k|s|m|nf|nc)\w+">(.*?)</span>')  # tokens that style.css gives no color


def filter_tags(state: StateCore) -> None:
    """Show those tags as text."""
    for token in [it for block in state.tokens for it in (block, *(block.children or []))]:
        if token.type in ("html_block", "html_inline"):
            token.content = DISALLOWED.sub("&lt;", token.content)


MARKDOWN.core.ruler.push("filter_tags", filter_tags)


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


class Record:
    """A record as templates show it. One that was not timed here has no seconds."""

    def __init__(self, folder: Path, line: Sequence[Path], data: dict[str, Any], public: dict[str, dict]):
        self.key, self.info, self.track = records.name_of(folder), records.read_info(folder), TRACKS[folder.parent.name]
        self.number, _, self.name = folder.name.partition("_")
        self.page = f"records/{self.key}/README.html"
        self.authors = sorted({*re.findall(r"(?<!\w)@[\w.-]*\w", read_text(folder / records.PAGE))}, key=str.lower)
        self.public = public.get(self.info.evidence)
        self.lines = len(data["scripts"][self.key])
        before = records.record_before(folder, line)
        if before:
            self.before = records.name_of(before)
            equal = sum(length for *_, length in data["pairs"][f"{self.before} {self.key}"])
            self.removed, self.added = len(data["scripts"][self.before]) - equal, self.lines - equal
        self.steps: int | None = self.public["steps"] if self.public else None
        self.seconds = self.race = None
        self.standing = "ported, not run on eight GPUs"
        if self.info.ranked:
            logs = records.read_logs(folder)
            self.steps = logs[0].num_steps
            self.loss = race.Sample([log.val_loss for log in logs])
            self.seconds = race.Sample([log.train_time / 1000 for log in logs])
            self.race = records.race_against(before, folder, line) if before else None
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
            elif name in ("href", "src") and not re.match(r"\s*javascript:", value, re.IGNORECASE):
                return f' {name}="{escape(self.address_of(value, source, place))}"'
            return "" if name in ("href", "src") or name.startswith("on") else attribute[0]

        tokens = MARKDOWN.parse(text) if isinstance(text, str) else text
        html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        html = TAG.sub(lambda tag: ATTRIBUTE.sub(with_address, tag[0]), html)
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

    def write(self, output: Path) -> None:
        """Write the files, and remove those that the site had before and has no more."""
        names = sorted(map(str, self.files))
        old = read_json(output / FILES)["files"] if (output / FILES).is_file() else []
        output.mkdir(parents=True, exist_ok=True)
        (output / FILES).write_text(json.dumps(dict(files=sorted({*names, *old}))) + "\n")  # should this be stopped
        for name in {*old} - {*names}:
            if (output / name).resolve().is_relative_to(output.resolve()):
                (output / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it holds other files
                    (output / name).parent.rmdir()
        for place, content in self.files.items():
            (output / place).parent.mkdir(parents=True, exist_ok=True)
            (output / place).write_bytes(content)
        (output / FILES).write_text(json.dumps(dict(files=names)) + "\n")

    def broken_links(self) -> Iterator[str]:
        for (source, link), (target, anchor) in self.links.items():
            if not target.is_file():
                yield f"{source.relative_to(self.top)}: its link {link} leads to no file or page"
            elif anchor and anchor not in self.anchors.get(target, {anchor}):
                yield f"{source.relative_to(self.top)}: its link {link} leads to no anchor of its page"


def add_script(site: Site, path: Path) -> None:
    """Add the page of a script beside the tour; raise ToolError if the tour does not fit the root's."""
    source = site.top / TOUR
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
    if layout.problems and path == site.top / records.SCRIPT:
        raise ToolError(f"{TOUR}: does not fit {records.SCRIPT} in {len(layout.problems)} places, see above")
    pages = {it.public["number"]: it.page for it in site.shared["records"] if it.public}
    lines = tour.link_code(script, color(script).split("\n"), pages)
    texts = [tour.link_words(site.html_of(it, source, SCRIPT_PAGE), layout.places, pages) for it, _ in layout.rows()]
    site.anchors[source] |= {f"L{i + 1}" for i in range(len(lines))}
    tables = {
        name: it for name, it in vars(module).items() if isinstance(it, tuple) and it and hasattr(it[0], "_fields")
    }
    site.add(SCRIPT_PAGE, "script.html", texts=texts, layout=layout, lines=lines, tables=tables)


def check_output(output: Path) -> None:
    """Raise ToolError unless the folder is new or empty, or holds the site from before."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not is_free and not (output / FILES).is_file():
        raise ToolError(f"{output}: holds other files than this site; name a new or an empty folder with -o")


def write_site(root: Path, output: Path, copy: Path | None = None) -> int:
    """Write the pages of all records and of the root's script, and what they link to; return how many files that makes.

    copy: a script that takes the root's place beside the tour, and is compared with it.
    """
    check_output(output)
    root = root.resolve()
    line = records.lineage(root)
    if not line:
        raise ToolError(f"{root}: has no whole record")
    scripts = {records.name_of(folder): records.read_script(str(folder), root)[1] for folder in line}
    scripts["root"] = read_text(root.parent / records.SCRIPT).rstrip("\n")
    if copy:
        scripts[copy.name] = read_text(copy).rstrip("\n")
    for name, script in scripts.items():
        ast.parse(script, name)  # one that is no Python is named
    data = compare(scripts)
    public = read_json(records.PUBLIC)
    by_evidence = {f"public record {it['number']}": it for it in public["records"]}
    found = [Record(folder, line, data, by_evidence) for folder in line]
    site = Site(root.parent, scripts=data["scripts"], records=found, tracks=TRACKS, public=public, race=race)
    site.files[Path("compare.js")] = f"const DATA = {json.dumps(data, separators=(',', ':'))};\n".encode()
    start, index = root / records.PAGE, Path("index.html")
    story = read_text(start).partition("\n## The line so far\n")[2].partition("\n## ")[0]
    site.add(index, "index.html", story=site.html_of(story, start, index))
    site.add(Path("compare.html"), "compare.html")
    add_script(site, copy or root.parent / records.SCRIPT)
    for source in start, root / "NOTES.md", root / "RULES.md":
        site.add_source(source)
    for folder, record in zip(line, found, strict=True):
        site.add_source(folder / records.PAGE, "record.html", record=record)
    site.add_linked()
    for problem in site.broken_links():
        print(printable(problem), file=sys.stderr)
    site.write(output)
    return len(site.files)
