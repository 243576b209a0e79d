"""Put docs/tour.md beside the script: each paragraph beside the code that it names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.process import packages

with packages("tools"):
    from markdown_it.token import Token

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
SECTION = re.compile(r"# ---- (.+?)(:| --)")
BOARD = "records/README.html"
NUMBER = r"(?:[Rr]ecords?\s|(?<![&\w])#)(\d\d?)\b"  # of a public record
WORDS = re.compile(rf"<a .*?</a>|(?:`|<code>)([\w.]+)(?:`|</code>)|arXiv:(\d+\.\d+)|{NUMBER}|<[^>]*>", re.DOTALL)
CODE = re.compile(r'<span class="(?:c|s|nf|nc).*?</span>|<[^>]*>|&#?\w+;|\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*')


class Piece(NamedTuple):
    """Lines of a script that are shown as one: a definition without its methods, or statements without a gap."""

    first: int  # indexes of its first line, and of that behind its last one
    end: int
    names: dict[str, int]  # what it defines, and the numbers of these lines
    about: str = ""  # first line of its docstring
    section: str = ""  # it is the comment that opens this section


@cache
def split_script(script: str) -> list[Piece]:
    """Return the pieces of a script, in order. Comments belong to what follows them."""
    lines, nodes, pieces = script.split("\n"), list[tuple[Any, str]](), list[Piece]()
    for node in ast.parse(script).body:
        nodes.append((node, ""))
        if isinstance(node, ast.ClassDef | ast.If):
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            nodes += [(it, owner) for it in node.body if isinstance(it, ast.FunctionDef)]
    for node, owner in nodes:
        first = min(it.lineno for it in (node, *getattr(node, "decorator_list", ()))) - 1
        while first and re.match(r"\s*#(?! ----)", lines[first - 1]):
            first -= 1
        if section := SECTION.match(lines[first - 1]) if first else None:
            pieces.append(Piece(first - 1, first, {}, section=section[1]))
        if name := getattr(node, "name", ""):
            about = (ast.get_docstring(node) or "").partition("\n")[0]
            pieces.append(Piece(first, 0, {owner + name: node.lineno}, about))
            continue
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", ())
        parts = [part for target in targets for part in ast.walk(target)]
        names = {part.id: part.lineno for part in parts if isinstance(part, ast.Name)}
        if section or not first or not lines[first - 1]:
            pieces.append(Piece(first, 0, names))
        else:
            pieces[-1].names.update(names)
    ends = [*(piece.first for piece in pieces), len(lines)][1:]
    return [piece._replace(end=end) for piece, end in zip(pieces, ends, strict=True)]


def find_names(script: str) -> dict[str, int]:
    """Return the lines of a script's definitions, and of members of classes, which need not name their class."""
    places = {name: line for piece in split_script(script) for name, line in piece.names.items()}
    for owner in [node for node in ast.parse(script).body if isinstance(node, ast.ClassDef)]:
        for node in ast.walk(owner):
            match node:
                case ast.AnnAssign(target=ast.Name(id=member)) | ast.Attribute(attr=member, ctx=ast.Store()):
                    places.setdefault(f"{owner.name}.{member}", node.lineno)
                    places.setdefault(member, node.lineno)
    return places


def link_words(html: str, places: Mapping[str, int], pages: Mapping[int, str]) -> str:
    """Let names lead to lines, papers to arXiv, numbers of public records to their pages, or else to the board."""

    def lead(found: re.Match[str]) -> str:
        name, paper, number = found.groups()
        page = f"https://arxiv.org/abs/{paper}" if paper else number and pages.get(int(number), BOARD)
        target = f"#L{places[name]}" if name in places else page
        return f'<a href="{target}">{found[0]}</a>' if target else found[0]

    return WORDS.sub(lead, html)


def link_code(script: str, html: Sequence[str], pages: Mapping[int, str]) -> list[str]:
    """Return lines of colored code in which names lead to their definitions, and comments as `link_words` does.

    What the script says of a name once, such as `cfg: Hyperparameters` or `clock = Clock(cfg)`, holds everywhere.
    """
    pieces, places, kinds = split_script(script), find_names(script), defaultdict[str, list[str]](list)
    defined = {it for piece in pieces for it in piece.names} - {*re.findall(r"\n +(\w+)(?: =|:)", script)}  # variables
    names = {name: line for name, line in places.items() if name in defined or "." in name}
    for name, kind in re.findall(r"(\w+)(?::| =|\()\W*(?:\w+\[)*\W*([A-Z]\w+)", script):
        kinds[name].append(kind)
        kinds[name.removesuffix("s")].append(kind)  # one of `optimizers: Sequence[ShardedOptimizer]`

    def lead(found: re.Match[str]) -> str:
        parts = found[0].split(".")
        lines = [names.get(parts[0])]
        lines += [next(filter(None, (names.get(f"{it}.{b}") for it in kinds[a])), None) for a, b in pairwise(parts)]
        return ".".join(
            f'<a href="#L{line}">{part}</a>' if line else part for line, part in zip(lines, parts, strict=True)
        )

    linked = list[str]()
    for piece in pieces:
        owner = next(iter(piece.names), "").partition(".")[0]
        kinds["self"] = [owner, *kinds[owner]]
        linked += [link_words(CODE.sub(lead, line), names, pages) for line in html[piece.first : piece.end]]
    return linked


class Layout:
    """Which paragraphs of the tour stand beside which code, and what is wrong with the tour.

    A section of the tour stands beside the section of the script that has its name, which ends at the colon. A
    paragraph that is the first of its section to name some of this code opens a row: the code from there on, from the
    first in the file if it names several, and the section's first row all from its beginning. What follows, text and
    code, belongs to this row up to the next one. A section that the script lacks has text alone.
    """

    def __init__(self, tokens: Sequence[Token], script: str, top: Path):
        self.pieces, self.places, self.top = split_script(script), find_names(script), top
        self.problems, self.sections = list[str](), list[tuple[Any, str]]()  # anchor and title
        self.named, self.newest = list[Piece](), 0  # by a paragraph of their section, and the last row's first of them
        self.texts, self.starts = [list[Token]()], [0]  # of each row the text, and the first piece
        marks = [i for i, piece in enumerate(self.pieces) if piece.section] + [len(self.pieces)]
        sections = {self.pieces[a].section: range(a, b) for a, b in pairwise(marks)}
        section = range(marks[0])
        blocks = [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        for start, end in pairwise([*blocks, len(tokens)]):
            block = tokens[start:end]
            if block[0].tag == "h2":
                title = block[1].content.partition(":")[0]
                self.sections.append((block[0].attrGet("id"), title))
                section = sections.get(title, range(section.stop, section.stop))
                self.texts.append([])
                self.starts.append(section.start)
            else:
                self.place(block, section)
            self.texts[-1] += block
        if [title for _, title in self.sections if title in sections] != [*sections]:
            self.problems.append(f"docs/tour.md: expected the sections of train_gpt.py: {', '.join(sections)}")

    def rows(self) -> Iterator[tuple[list[Token], list[Piece]]]:
        for text, (start, end) in zip(self.texts, pairwise([*self.starts, len(self.pieces)]), strict=True):
            yield text, self.pieces[start:end]

    def place(self, block: Sequence[Token], section: range) -> None:
        """Open a row if a paragraph, list... is the first to name code of its section."""
        texts = [token for token in block if token.type == "inline"]
        lines = {line for text in texts for line in self.named_lines(text)}
        named = [piece for piece in self.pieces[section.start : section.stop] if lines & {*piece.names.values()}]
        if new := [piece for piece in named if piece not in self.named]:
            is_first = bool(self.texts[-1]) and self.texts[-1][0].tag == "h2"
            self.named += new
            self.texts.append([])
            above, self.newest = self.newest, self.pieces.index(new[0])
            self.starts.append(section.start if is_first else self.newest)
            if self.newest < above:
                self.tell(texts[0], f"{', '.join(new[0].names)} stands in train_gpt.py above what is named before")

    def tell(self, text: Token, problem: str) -> None:
        self.problems.append(f"docs/tour.md:{text.map[0] + 1 if text.map else 0}: {problem}")

    def named_lines(self, text: Token) -> Iterator[int]:
        """Yield the lines that define what a text names."""
        for name in [child.content for child in text.children or [] if child.type == "code_inline"]:
            if line := self.places.get(name):
                yield line
            elif NAME.fullmatch(name) and not (self.top / name).exists():
                self.tell(text, f"train_gpt.py defines no {name}")
