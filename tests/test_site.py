"""python -m speedrun site: pages hold what records hold, links lead somewhere, and a browser shows the diffs."""

import doctest
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

import train_gpt
from speedrun import ROOT, records, site, tour
from speedrun.__main__ import main
from speedrun.process import ToolError

LINKS = {  # Markdown, and what the page in records/ makes of it
    "[a](mailto:a@b.c) [b](//host) [c](../../x/3)": 'mailto:a@b.c">a</a> <a href="//host">b</a> <a href="../../x/3"',
    "[e](<../docs/my file.md>) [f](/docs/my%20file.md#Two)": '../docs/my%20file.html">e</a> <a href="../docs/my%20f',
    '<img alt="a > b" src="/docs/x.png"> <a href=nano/01_ValueEmbed>g</a>': '../docs/x.png"> <a href="nano/01_Value',
    "text[^1] [h](#a-title)\n\n[^1]: a footnote": 'href="NOTES.html#a-title"',
    "![i](../docs/x.png?raw=true) ~~j~~ https://a.b/?c&d [k](http://[": '"i" /> <s>j</s> <a href="https://a.b/?c&amp;d">',
    "[m](../.github/m.md)": 'href="../github/m.html"',
    "[l](../docs/tour.md#second)": 'href="../script.html#second"',
    "- [x] done `<a href=code.md>` nano/x.py": 'type="checkbox"',
    "<script>x()</script> <b onclick=x()>n</b> <a href='JavaScript:x()'>": "&lt;script>x()&lt;/script> <b>n</b> <a>",
}
BROKEN = "[](none.md)", '<img src="none.png">', "[](/docs/)", "[](RULES.md#none)", "[](#none)", '<a href="http://[">'

SCRIPT = '''"""A script."""

from typing import NamedTuple


# ---- First: rows ----
class Row(NamedTuple):
    """A row of record 14 (arXiv:1234.56789), see `two`:

        a drawing
    """

    size: int
    name: str = "a"
    unset: int = 0

    def area(self):
        """Square."""
        return self.size**2


ROWS: tuple = (Row(3), Row(4, name="b"))


# ---- Second ----
# Of the function
def one(x):
    return x


@property
def two(boss: Row, rows: list[Row]):
    ROWS = boss.area(), x.area(), [row.size for row in rows]  # as in records 18 and 33
    return one(ROWS)  # record 33
'''
TOUR = """# A tour

Of `train_gpt.py`.

## An hour's path

1. **One**: `one`, `Row.area`.

## First: what there is

Words. `Row.size` and `ROWS`, of `Row`.

    x^2

And `Row`.

## Second

[`one`](#second) takes x, as #18.

`two`

## Glossary

`one`
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a small repository, and return the folder of its three records."""
    for name in "nano/01_ValueEmbed", "nano/02_UNetValueEmbed", "gpt2/18_SoftCap":
        shutil.copytree(records.RECORDS / name, tmp_path / "records" / name)
        (tmp_path / "records" / name / "README.md").write_text("# A title\n\nby @somebody\n")
    shutil.copy(records.RECORDS / "nano/03_TokenPairs/race.json", tmp_path / "records/nano/02_UNetValueEmbed")
    (tmp_path / "docs").mkdir()
    (tmp_path / ".github").mkdir()
    for name in "records/README.md", "records/RULES.md", "docs/my file.md", "docs/x.png", ".github/m.md":
        (tmp_path / name).write_text("# One\n\n<a name=Two></a>\n")
    (tmp_path / "train_gpt.py").write_text(SCRIPT)
    (tmp_path / "docs" / "tour.md").write_text(TOUR)
    (tmp_path / "records" / "NOTES.md").write_text("# A title\n\n" + "\n\n".join(LINKS))
    return tmp_path / "records"


def test_pages_hold_figures_and_links_lead_where_they_do_on_github(root: Path, tmp_path: Path, capsys):
    site.write_site(root, folder := tmp_path / "site")
    (folder / "mine").touch()
    (root / "gpt2/18_SoftCap").rename(root / "gpt2/18_Renamed")
    assert site.write_site(root, folder) == sum(path.is_file() for path in folder.rglob("*")) - 2, "and the list"
    assert "18_SoftCap" not in (folder / site.FILES).read_text()
    assert not (folder / "records/gpt2/18_SoftCap").exists()
    (root / "gpt2/18_Renamed").rename(root / "gpt2/18_SoftCap")
    site.write_site(root, folder)
    assert capsys.readouterr().err == ""
    index, notes, _ = ((folder / it).read_text() for it in ("index.html", "records/NOTES.html", "docs/my file.html"))
    texts = "0.825 (0.750 to 0.908) times that of ValueEmbed", "+83 ", "ported, not run on eight GPUs", "@somebody"
    assert [text for text in LINKS.values() if text not in notes] + [text for text in texts if text not in index] == []
    assert "69.27 s (sd 7.92, n=8), measured" in next(folder.rglob("02_UNetValueEmbed/README.html")).read_text()


def test_what_is_broken_is_named_and_the_rest_is_written(root: Path, tmp_path: Path, capsys):
    (root / "NOTES.md").write_text("\n\n".join(BROKEN))
    (root / "gpt2/20_Draft").mkdir()
    site.write_site(root, tmp_path / "site")
    assert "20_Draft" not in (tmp_path / "site/index.html").read_text()
    lines = [line.split()[3] for line in capsys.readouterr().err.splitlines() if "20_Draft is left out" not in line]
    assert lines == ["none.md", "none.png", "/docs/", "RULES.md#none", "#none"]


def test_a_script_that_is_no_python_is_named(root: Path, tmp_path: Path):
    (root / "gpt2/18_SoftCap/train_gpt.py").write_text("def (")
    with pytest.raises(SyntaxError, match="18_SoftCap, line 1"):
        site.write_site(root, tmp_path / "site")


def test_other_files_are_never_overwritten(root: Path, tmp_path: Path, capsys):
    before = sorted(tmp_path.rglob("*"))
    for name in "records", "docs", ".", "docs/x.png":
        assert main(["site", "-o", str(tmp_path / name)]) == 2
        assert re.fullmatch("python -m speedrun: .*holds other files.*\n", capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_each_line_of_the_script_stands_once_beside_its_text(root: Path, tmp_path: Path):
    site.write_site(root, tmp_path / "site")
    page = (tmp_path / "site/script.html").read_text()
    lines = re.findall(r'<a id="L(\d+)" href="#L\1" tabindex="-1">\1</a><code>(.*?)</code></div>', page)
    numbered = [*enumerate(SCRIPT.rstrip("\n").split("\n"), 1)]
    assert [(int(number), unescape(re.sub("<.*?>", "", line))) for number, line in lines] == numbered
    rows = [(row, re.findall("<details( open)?><summary><code>(.*?)<", row)) for row in page.split("<section")[1:]]
    names = [[name + is_open for is_open, name in pieces] for _, pieces in rows]
    first, then = ["lines 1 to 2 open", "lines 3 to 5"], ["Row open", "Row.area", "ROWS"]
    assert names == [first, [], [], then, [], ["one open"], ["two open"], []]
    assert "@property" in unescape(re.sub("<.*?>", "", rows[6][0]))
    assert '<a href="#L17"><code>Row.area' in rows[1][0]
    assert '<p><a href="script.html#second"><code>one</code></a> takes' in rows[5][0]
    texts = '#L13"><code>Row.size', "<code>x^2", 'row">1</th><td>3</td><td></td>', "<td>4</td><td>b</td>"
    assert [text for text in texts if text not in rows[3][0]] == []
    assert re.findall('"col"><a href="(.*?)">(.*?)<', rows[3][0]) == [("#L13", "size"), ("#L14", "name")]


def test_names_lead_to_definitions_and_credits_to_records_and_papers(root: Path, tmp_path: Path):
    site.write_site(root, tmp_path / "site")
    page = (tmp_path / "site/script.html").read_text()
    first, second = "records/nano/01_ValueEmbed/README.html", "records/gpt2/18_SoftCap/README.html"
    assert f'takes x, as <a href="{second}">#18</a>' in page
    links = dict[int, list[tuple[str, str]]]()
    for number, line in re.findall(r'tabindex="-1">(\d+)</a><code>(.*?)</code>', page):
        links[int(number)] = re.findall('<a href="(.*?)">(.*?)</a>', line)
    assert {number: found for number, found in links.items() if found} == {
        8: [(first, "record 14"), ("https://arxiv.org/abs/1234.56789", "arXiv:1234.56789"), ("#L32", "`two`")],
        19: [("#L13", "size")],
        22: [("#L7", "Row"), ("#L7", "Row")],  # ROWS is a variable, too
        32: [("#L7", "Row"), ("#L7", "Row")],
        33: [("#L17", "area"), ("#L13", "size"), (second, "records 18")],
        34: [("#L27", "one"), (site.tour.BOARD, "record 33")],
    }
    drawn = re.findall(r'<div class="drawn">(.*?)</div></div>', page)
    assert [re.findall(r"> +(.*?)<", line) for line in drawn] == [["a drawing"]]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("takes x,", "takes `x`,", "docs/tour.md:19: train_gpt.py defines no x"),
        ("`Row.size`", "`Row.x`", "docs/tour.md:11: train_gpt.py defines no Row.x"),
        ("## Second", "## Third", "docs/tour.md: expected the sections of train_gpt.py: First, Second"),
        ("## First", "## Second\n\n## First", "docs/tour.md: expected the sections of train_gpt.py: First, Second"),
        ("[`one`](#second) takes x, as #18.", "`two`\n\n`one`", "docs/tour.md:21: one stands in train_gpt.py above"),
    ],
)
def test_a_tour_that_does_not_fit_the_script_fails(root: Path, tmp_path: Path, capsys, old, new, problem):
    (tmp_path / "docs/tour.md").write_text(TOUR.replace(old, new))
    with pytest.raises(ToolError, match=r"docs/tour.md: does not fit .* in \d places"):
        site.write_site(root, tmp_path / "site")
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.published  # an idea may leave the tour as it is
def test_the_tour_fits_the_script():
    tokens = site.MARKDOWN.parse((ROOT / "docs/tour.md").read_text())
    assert tour.Layout(tokens, (ROOT / "train_gpt.py").read_text(), ROOT).problems == []


@pytest.mark.published  # likewise
def test_the_examples_of_the_tour_print_what_it_says():
    fences = [it for it in site.MARKDOWN.parse((ROOT / "docs/tour.md").read_text()) if it.info == "pycon"]
    examples = [
        doctest.DocTestParser().get_doctest(it.content, vars(train_gpt).copy(), "docs/tour.md", None, it.map[0])
        for it in fences
    ]
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert len(results) >= 6
    assert sum(result.failed for result in results) == 0


@pytest.mark.published  # likewise
@pytest.mark.slow
def test_a_browser_shows_the_diff_of_two_scripts_and_unfolds_what_a_link_leads_to(tmp_path: Path, capsys):
    chromium = shutil.which("chromium") or pytest.skip("no browser: apt-get install chromium")
    assert (main(["site", "-o", str(tmp_path)]), capsys.readouterr().err) == (0, ""), "our links lead somewhere"
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    flags += f" --enable-logging=stderr --virtual-time-budget=5000 --user-data-dir={tmp_path}/profile"
    pair = "nano/08_OneHead..nano/09_CopyHead"
    page = (tmp_path / "script.html").read_text()
    name, line = re.findall('<details><summary><code>(.*?)<.*?<a id="(L.*?)"', page, re.DOTALL)[9]
    for place, anchor, text in (
        ("compare", pair, ">+6 \u22122 lines<"),
        ("records/nano/10_LongSteps/README", pair, ">+6 \u22122 lines<"),
        ("script", line, f'<details open=""><summary><code>{name}<'),
        ("script", "", "<button>open all</button>"),
    ):
        address = f"file://{tmp_path}/{place}.html#{anchor}"
        done = subprocess.run([chromium, *flags.split(), address], capture_output=True, text=True, timeout=120)
        assert (text in done.stdout, ":CONSOLE" in done.stderr) == (True, False), place
