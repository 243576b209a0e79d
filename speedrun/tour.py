"""Put text beside the code that it names: docs/tour.md beside the script, and sentences beside what a diff changes."""

import ast
import re
from bisect import bisect
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.process import packages

with packages("tools"):
    from markdown_it.token import Token

PATH = "An hour's path"  # a section of the tour that has only links
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
SECTION = re.compile(r"# ---- (.+?)(:| --)")
ROW = "<!-- row -->"  # stands in the tour's HTML where a row of the page begins
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


# ---- The script


class Piece(NamedTuple):
    """Lines of a script that are shown as one: a definition without its methods, or statements without a gap."""

    first: int  # number of its first line; it ends where the next one begins
    names: dict[str, int]  # what it defines, and in which lines
    about: str = ""  # first line of its docstring
    section: str = ""  # of the comment that opens a section, which is a piece of its own: the section's name


def definitions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[ast.stmt, dict[str, int]]]:
    """Yield what a script defines in order, with names and lines. A class comes before its methods."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield node, {prefix + node.name: node.lineno}
        elif not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            names = [it for target in targets for it in getattr(target, "elts", [target])]
            yield node, {it.id: it.lineno for it in names if isinstance(it, ast.Name)}
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If):
            yield from ((it, names) for it, names in definitions(node.body) if isinstance(it, DEFINITIONS))


@cache
def split_script(script: str) -> list[Piece]:
    """Return the pieces of a script, in order. Comments belong to what follows them."""
    lines, pieces = script.split("\n"), list[Piece]()
    for node, names in definitions(ast.parse(script).body):
        first, is_definition = node.lineno, isinstance(node, DEFINITIONS)
        if isinstance(node, DEFINITIONS) and node.decorator_list:
            first = node.decorator_list[0].lineno
        while re.match(r"\s*#(?! ----)", before := lines[first - 2] if first > 1 else ""):
            first -= 1
        if section := SECTION.match(before):
            pieces.append(Piece(first - 1, {}, section=section[1]))
        elif before and not is_definition:
            pieces[-1].names.update(names)
            continue
        about = ast.get_docstring(node) if isinstance(node, DEFINITIONS) else ""
        pieces.append(Piece(first, names, (about or "").partition("\n")[0]))
    return pieces


def find_names(script: str, pieces: Sequence[Piece]) -> dict[str, int]:
    """Return all names of a script with the lines of definitions and of members of classes; 0 for the others."""
    places = {name: line for piece in pieces for name, line in piece.names.items()}
    short = Counter(name.rpartition(".")[2] for name in places)
    places |= {it: line for name, line in places.items() if short[it := name.rpartition(".")[2]] == 1}
    tree = ast.parse(script)
    for owner in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for node in ast.walk(owner):
            match node:
                case ast.AnnAssign(target=ast.Name(id=member)) | ast.Attribute(attr=member, ctx=ast.Store()):
                    places.setdefault(f"{owner.name}.{member}", node.lineno)
                    places.setdefault(member, node.lineno)
    for node in ast.walk(tree):
        for field in "id", "attr", "arg", "name", "value":
            places.setdefault(str(getattr(node, field, "")), 0)
    return places


def words_of(script: str, start: int, end: int) -> set[str]:
    """Return the words of some lines of a script, and the names of the definitions that these lines belong to."""
    words = set(re.findall(r"\w+", "\n".join(script.split("\n")[start:end])))
    pieces = split_script(script)
    for i in range(start, end):
        for name in pieces[bisect(pieces, i + 1, key=lambda piece: piece.first) - 1].names:
            words |= {name, name.rpartition(".")[2]}
    return words


def is_named(span: str, words: Container[str]) -> bool:
    """Return whether the text of a code span is one of these words, or a dotted name of some of them."""
    return bool(NAME.fullmatch(span)) and (span in words or all(part in words for part in span.split(".")))


def show(value: Any) -> str:
    """Return a value as a table shows it."""
    if isinstance(value, tuple):
        return ("; " if any(isinstance(it, tuple) for it in value) else ", ").join(map(show, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(it)}" for key, it in value.items())
    return "\N{CHECK MARK}" if value is True else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of(rows: Any) -> tuple[list[str], list[list[str]]] | None:
    """Return a table of named tuples: the fields that a row sets, and their values, "" where they are the default."""
    if not isinstance(rows, tuple) or not rows or not all(hasattr(row, "_field_defaults") for row in rows):
        return None
    defaults = rows[0]._field_defaults
    values = [{k: show(v) for k, v in row._asdict().items() if v != defaults.get(k, ...)} for row in rows]
    fields = [field for field in rows[0]._fields if any(field in row for row in values)]
    return fields, [[row.get(field, "") for field in fields] for row in values]


# ---- The tour


class Row(NamedTuple):
    """Text from this token on, and the code beside it, from this piece on; both end where the next row begins."""

    token: int
    piece: int


class Layout:
    """Which paragraphs of the tour stand beside which code, and what is wrong with the tour.

    A section of the tour stands beside the section of the script that has its name, which ends at the colon. A
    paragraph that is the first of its section to name some of this code opens a row: the code from there on, from the
    first in the file if it names several. What follows, text and code, belongs to this row up to the next one.
    """

    def __init__(self, tokens: list[Token], script: str, top: Path):
        self.tokens, self.top, self.problems = tokens, top, list[str]()
        self.num_lines = script.count("\n") + 1
        self.pieces = split_script(script)
        self.places = find_names(script, self.pieces)
        starts = {piece.section: i for i, piece in enumerate(self.pieces) if piece.section}
        ends = dict(zip(starts, [*list(starts.values())[1:], len(self.pieces)], strict=True))
        self.section = range(min([*starts.values(), len(self.pieces)]))  # pieces of the section at hand
        self.named = set[int]()  # pieces that a paragraph of their section names
        self.rows = [Row(0, 0)]
        missing = dict(starts)
        for start, texts in self.parts():
            title = texts[0].content.partition(":")[0] if tokens[start].tag == "h2" else ""
            end = self.section.stop
            if not title:
                self.add_part(start, texts)
            elif missing.get(title, -1) >= end:
                self.section = range(missing.pop(title), ends[title])
                self.rows.append(Row(start, self.section.start))
            else:
                if title != PATH:
                    self.tell(texts[0], f"the section {title} is out of order, or train_gpt.py has none of this name")
                missing.pop(title, None)
                self.section = range(end, end)
                self.rows.append(Row(start, end))
        for title, i in missing.items():
            self.problems.append(f"docs/tour.md: no section {title}, as in line {self.pieces[i].first} of train_gpt.py")
        for row in reversed(self.rows):
            tokens.insert(row.token, Token("html_block", "", 0, content=ROW))

    def code(self, tables: Container[str]) -> list[list[tuple[Piece, range, bool]]]:
        """Return for each row its pieces, the indexes of their lines, and if they are open: named, and no table."""
        ends = [*(piece.first for piece in self.pieces[1:]), self.num_lines + 1]
        pieces = []
        for i, (piece, end) in enumerate(zip(self.pieces, ends, strict=True)):
            is_open = i in self.named and not any(name in tables for name in piece.names)
            pieces.append((piece, range(piece.first - 1, end - 1), is_open or end - piece.first == 1 or i == 0))
        return [pieces[a:b] for a, b in pairwise([*(row.piece for row in self.rows), len(pieces)])]

    def parts(self) -> Iterator[tuple[int, list[Token]]]:
        """Yield where each paragraph, list or heading begins, and its texts."""
        starts = [i for i, token in enumerate(self.tokens) if token.level == 0 and token.nesting >= 0]
        for start, end in pairwise([*starts, len(self.tokens)]):
            yield start, [token for token in self.tokens[start:end] if token.type == "inline"]

    def tell(self, text: Token, problem: str) -> None:
        self.problems.append(f"docs/tour.md:{text.map[0] + 1 if text.map else 0}: {problem}")

    def add_part(self, start: int, texts: Sequence[Token]) -> None:
        """Link the names of a paragraph, and open a row if it is the first to name code of its section."""
        lines = [line for text in texts for line in self.link(text)]
        named = {i for i in self.section for line in self.pieces[i].names.values() if line in lines}
        if new := named - self.named:
            self.named |= new
            if min(new) >= self.rows[-1].piece:
                self.rows.append(Row(start, min(new)))
            else:
                name, above = (", ".join(self.pieces[i].names) for i in (min(new), self.rows[-1].piece))
                self.tell(texts[0], f"{name} stands above {above}, of the text before, in train_gpt.py")

    def link(self, text: Token) -> Iterator[int]:
        """Let names in a text lead to the lines that define them, and yield these lines."""
        children, depth = list[Token](), 0
        for child in text.children or []:
            depth += child.nesting if child.type.startswith("link") else 0
            line = self.line_of(child.content, text) if child.type == "code_inline" else 0
            if line and not depth:
                code = escape(child.content)
                child = Token("html_inline", "", 0, content=f'<a href="#L{line}"><code>{code}</code></a>')
            if line:
                yield line
            children.append(child)
        text.children = children

    def line_of(self, name: str, text: Token) -> int:
        """Return the line that defines a name; 0: it is none of the script's, or one without a definition."""
        if name in self.places or not NAME.fullmatch(name) or (self.top / name).exists():
            return self.places.get(name, 0)
        owner, *members = name.split(".")
        is_class = any(it.startswith(f"{owner}.") for it in self.places)
        if is_class or not all(part in self.places for part in [owner, *members]):
            self.tell(text, f"{name} is no name of train_gpt.py")
        return 0
