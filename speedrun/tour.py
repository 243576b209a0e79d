"""Put text beside the code that it names: docs/tour.md beside the script, sentences beside what a diff changes."""

import ast
import re
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
        targets = [it for target in getattr(node, "targets", ()) for it in ast.walk(target)]
        names = {it.id: it.lineno for it in targets if isinstance(it, ast.Name)}
        if section or not first or not lines[first - 1]:
            pieces.append(Piece(first, 0, names))
        else:
            pieces[-1].names.update(names)
    ends = [*(piece.first for piece in pieces[1:]), len(lines)]
    return [piece._replace(end=end) for piece, end in zip(pieces, ends, strict=True)]


def find_names(script: str) -> dict[str, int]:
    """Return all names of a script, with the lines of definitions and of members of classes; 0 for the others."""
    places = {name: line for piece in split_script(script) for name, line in piece.names.items()}
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
    pieces = [piece for piece in split_script(script) if piece.first < end and start < piece.end]
    names = {name for piece in pieces for name in piece.names}
    words = re.findall(r"\w+", "\n".join(script.split("\n")[start:end]))
    return {*words, *names, *(name.rpartition(".")[2] for name in names)}


def is_named(span: str, words: Container[str]) -> bool:
    """Return whether the text of a code span is one of these words, or a dotted name of some of them."""
    return bool(NAME.fullmatch(span)) and (span in words or all(part in words for part in span.split(".")))


class Layout:
    """Which paragraphs of the tour stand beside which code, and what is wrong with the tour.

    A section of the tour stands beside the section of the script that has its name, which ends at the colon. A
    paragraph that is the first of its section to name some of this code opens a row: the code from there on, from the
    first in the file if it names several. What follows, text and code, belongs to this row up to the next one.
    """

    def __init__(self, tokens: list[Token], script: str, top: Path):
        self.tokens, self.top, self.problems = tokens, top, list[str]()
        self.pieces, self.places = split_script(script), find_names(script)
        self.named = list[Piece]()  # by a paragraph of their section
        self.rows = [(0, 0)]  # the token and the piece with which each begins
        starts = {piece.section: i for i, piece in enumerate(self.pieces) if piece.section}
        ends = dict(pairwise([*starts.values(), len(self.pieces)]))
        section, titles = range(min([*starts.values(), len(self.pieces)])), list[str]()
        parts = [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        for start, end in pairwise([*parts, len(tokens)]):
            texts = [token for token in tokens[start:end] if token.type == "inline"]
            if tokens[start].tag == "h2":
                titles.append(texts[0].content.partition(":")[0])
                begin = starts.get(titles[-1], section.stop)
                section = range(begin, ends[begin] if titles[-1] in starts else begin)
                self.rows.append((start, begin))
            else:
                self.add_part(start, texts, section)
        titles = [title for title in titles if title != PATH]
        if titles != [*starts]:
            wrong = ", ".join(sorted({*titles} ^ {*starts})) or "order"
            self.problems.append(f"docs/tour.md: its sections are not those of train_gpt.py: {wrong}")
        for token, _ in reversed(self.rows):
            tokens.insert(token, Token("html_block", "", 0, content=ROW))

    def code(self) -> list[list[Piece]]:
        """Return the pieces of each row."""
        return [self.pieces[a:b] for a, b in pairwise([*(piece for _, piece in self.rows), len(self.pieces)])]

    def add_part(self, start: int, texts: Sequence[Token], section: range) -> None:
        """Link the names of a paragraph, list..., and open a row if it is the first to name code of its section."""
        lines = [line for text in texts for line in self.link_names(text)]
        named = [i for i in section if any(line in lines for line in self.pieces[i].names.values())]
        if new := [i for i in named if self.pieces[i] not in self.named]:
            self.named += [self.pieces[i] for i in new]
            above = self.rows[-1][1]
            if new[0] < above:
                names = (", ".join(self.pieces[i].names) for i in (new[0], above))
                self.tell(texts[0], "{} stands above {}, of the text before, in train_gpt.py".format(*names))
            self.rows.append((start, new[0]))

    def tell(self, text: Token, problem: str) -> None:
        self.problems.append(f"docs/tour.md:{text.map[0] + 1 if text.map else 0}: {problem}")

    def link_names(self, text: Token) -> Iterator[int]:
        """Let names in a text lead to the lines that define them, and yield these lines."""
        depth = 0  # in a link
        for child in text.children or []:
            depth += child.nesting if child.type.startswith("link") else 0
            name = child.content
            if child.type != "code_inline" or not NAME.fullmatch(name) or (self.top / name).exists():
                continue
            if line := self.places.get(name):
                yield line
                if not depth:
                    child.type, child.content = "html_inline", f'<a href="#L{line}"><code>{escape(name)}</code></a>'
            is_member = any(it.startswith(name.partition(".")[0] + ".") for it in self.places)
            if name not in self.places and (is_member or not is_named(name, self.places)):
                self.tell(text, f"{name} is no name of train_gpt.py")
