"""Write the line of records as static pages, which need no server and no network."""

import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from speedrun import race, records
from speedrun.logs import TRACKS, read_json, read_text
from speedrun.process import ToolError, packages, printable

with packages("tools"):
    import jinja2
    from markdown_it import MarkdownIt
    from markupsafe import Markup
    from mdit_py_plugins.anchors import anchors_plugin
    from mdit_py_plugins.gfm import gfm_plugin
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

MARKDOWN = MarkdownIt("commonmark").use(gfm_plugin).use(anchors_plugin, max_level=6)  # as GitHub shows it
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    autoescape=True,
    trim_blocks=True,
)
TAG = re.compile(r"""<!--.*?-->|<[a-z](?:[^"'>]|"[^"]*"|'[^']*')*>""", re.DOTALL | re.IGNORECASE)  # or a comment
SCRIPTS, SCRIPTS_BEGIN = "compare.js", "const DATA = "  # the file that shows that a folder holds this site
UNCOLORED = re.compile(r'<span class="(?!c|k|s|m|nf|nc)\w+">(.*?)</span>')  # tokens that style.css gives no color


# ---- Scripts and records


@functools.cache
def color(code: str) -> str:
    """Return Python as HTML, with as many lines."""
    html = highlight(code, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
    return UNCOLORED.sub(r"\1", html if code.endswith("\n") else html.removesuffix("\n"))


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
        self.seconds = self.race = None
        if self.info.ranked:
            logs = records.record_logs(folder)
            self.steps = logs[0].num_steps
            self.loss = race.Sample([log.val_loss for log in logs])
            self.seconds = race.Sample([log.train_time / 1000 for log in logs])
            self.race = records.race_before(folder, before)
            self.standing = "measured here"
        else:
            steps = re.search(r"num_iterations: \w+ = (\d+)", read_text(folder / records.SCRIPT))
            self.steps = self.public["steps"] if self.public else steps and int(steps[1])
            is_port = re.match("milestone|open proposal", self.info.kind)
            self.standing = "ported, not run on eight GPUs" if is_port else "not run on eight GPUs"


def position(value: float, low: float, high: float) -> float:
    """Return where a value is on a logarithmic axis, in percent."""
    return 100 * math.log(value / low) / math.log(high / low) if high > low else 0.0


TEMPLATES.globals |= dict(interval=race.interval, position=position, summary=race.summary)


# ---- Pages


class Tag(HTMLParser):
    """The attributes of a tag, of which there are none in a comment."""

    def __init__(self, text: str):
        super().__init__()
        self.name, self.attributes = "", dict[str, str]()
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.name, self.attributes = name, {key: value or "" for key, value in attributes}

    def __str__(self) -> str:
        return f"<{self.name}" + "".join(f' {key}="{escape(value)}"' for key, value in self.attributes.items()) + ">"


def target_of(link: str, source: Path, top: Path) -> tuple[Path, str] | None:
    """Return the file in the repository to which a page's link leads, and the anchor; None if it leads out of it."""
    try:
        parts = urlsplit(link)
        path = unquote(parts.path)
        start = top if path.startswith("/") else source.parent
        target = (start / path.lstrip("/")).resolve() if path else source
        if parts.scheme or parts.netloc or not target.is_relative_to(top):
            return None
        if target.is_dir() and (target / records.PAGE).is_file():
            target /= records.PAGE
        return target, unquote(parts.fragment)
    except (ValueError, OSError):  # no address, or a name that is too long for a file
        return None


def markdown_of(source: Path) -> str:
    """Return the text of a page, or a list of the pages in a folder that has none of its own."""
    if source.is_file():
        return read_text(source)
    names = sorted(path.name for path in source.glob("*.md"))
    return "\n".join([f"# {source.name}\n", *(f"- [{name}]({quote(f'{source.name}/{name}')})" for name in names)])


class Site:
    """The files of the site by their place in it. All templates get `shared`."""

    def __init__(self, top: Path, **shared: Any):
        self.top, self.shared = top, shared
        self.files = dict[Path, bytes]()
        self.anchors = dict[Path, set[str] | None]()  # by file of the repository; of pages only
        self.links = dict[tuple[Path, str], tuple[Path, str]]()  # by page and address: target and anchor

    def place_of(self, source: Path) -> Path:
        """Return where a file or the list of a folder is in the site: in no hidden folder, which GitHub leaves out."""
        path = source.relative_to(self.top)
        if source.is_dir():
            path /= "README.html"
        elif source.suffix == ".md":
            path = path.with_suffix(".html")
        return Path(*(part.lstrip(".") for part in path.parts))

    def add(self, place: Path, template: str, **values: Any) -> None:
        values |= dict(up=os.path.relpath(".", place.parent))
        self.files[place] = TEMPLATES.get_template(template).render(self.shared, **values).encode()

    def add_source(self, source: Path, template: str = "page.html", **values: Any) -> None:
        """Add a file of the repository, Markdown as a page."""
        place, self.anchors[source] = self.place_of(source), None
        if source.suffix == ".md" or source.is_dir():
            self.add(place, template, body=self.html_of(markdown_of(source), source, place), **values)
        else:
            self.files[place] = source.read_bytes()

    def add_linked(self) -> None:
        """Add what pages link to, and what that links to."""
        while sources := {target for target, _ in self.links.values() if target.exists()} - self.anchors.keys():
            for source in sorted(sources):
                self.add_source(source)

    def html_of(self, text: str, source: Path, place: Path) -> Markup:
        """Return Markdown of a page as HTML for a place of the site."""
        anchors = self.anchors[source] = set[str]()

        def with_addresses(match: re.Match[str]) -> str:
            tag = Tag(match[0])
            anchors.update(value for key, value in tag.attributes.items() if key in ("id", "name"))
            links = {key: value for key, value in tag.attributes.items() if key in ("href", "src")}
            for key, link in links.items():
                tag.attributes[key] = self.address_of(link, source, place)
            return str(tag) if links else match[0]

        html = TAG.sub(with_addresses, MARKDOWN.render(text))
        return Markup(html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>"))

    def address_of(self, link: str, source: Path, place: Path) -> str:
        """Return where a link leads from this place of the site, and note it; one that leads out stays as it is."""
        if (found := target_of(link, source, self.top)) is None:
            return link
        self.links[source, link] = target, anchor = found
        if not target.exists():
            return link
        address = quote(os.path.relpath(self.place_of(target), place.parent))
        return f"{address}#{quote(anchor)}" if anchor else address

    def broken_links(self) -> Iterator[str]:
        for (source, link), (target, anchor) in self.links.items():
            anchors = self.anchors.get(target)
            if not target.exists():
                yield f"{source.relative_to(self.top)}: its link {link} leads to no file"
            elif anchor and anchors is not None and anchor not in anchors:
                yield f"{source.relative_to(self.top)}: its link {link} leads to no anchor of that page"


def check_output(output: Path) -> None:
    """Raise ToolError unless the folder is new or empty, or holds the site from before."""
    is_site = (output / SCRIPTS).is_file() and read_text(output / SCRIPTS).startswith(SCRIPTS_BEGIN)
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not (is_site or is_free):
        raise ToolError(f"{output}: holds other files than this site; name a new or an empty folder with -o")


def write_site(root: Path, output: Path) -> int:
    """Write the pages of all records, and what they link to; return how many files that makes."""
    check_output(output)
    root = root.resolve()
    line = records.lineage(root)
    if not line:
        raise ToolError(f"{root}: has no whole record")
    scripts = {records.name_of(folder): records.read_script(str(folder), root)[1] for folder in line}
    scripts["root"] = read_text(root.parent / records.SCRIPT).rstrip("\n")
    data, public, start, index = compare(scripts), read_json(records.PUBLIC), root / records.PAGE, Path("index.html")
    by_evidence = {f"public record {it['number']}": it for it in public["records"]}
    described = [Record(folder, line[:i], data, by_evidence) for i, folder in enumerate(line)]
    site = Site(root.parent, names=list(scripts), records=described, tracks=TRACKS, public=public)
    site.files[Path(SCRIPTS)] = f"{SCRIPTS_BEGIN}{json.dumps(data, separators=(',', ':'))};\n".encode()
    story = read_text(start).partition("\n## The line so far\n")[2].partition("\n## ")[0]
    length = len(data["scripts"]["root"])
    site.add(index, "index.html", story=site.html_of(story, start, index), length=length)
    site.add(Path("compare.html"), "compare.html")
    for source in start, root / "NOTES.md", root / "RULES.md":
        site.add_source(source)
    for folder, record in zip(line, described, strict=True):
        site.add_source(folder / records.PAGE, "record.html", record=record)
    site.add_linked()
    for problem in site.broken_links():
        print(printable(problem), file=sys.stderr)
    for place, content in site.files.items():  # first what shows that the folder holds this site
        (output / place).parent.mkdir(parents=True, exist_ok=True)
        (output / place).write_bytes(content)
    return len(site.files)
