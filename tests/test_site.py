"""python -m speedrun site: pages hold what records hold, links lead somewhere, and a browser shows the diffs."""

import html
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from speedrun import ROOT, records, site
from speedrun.logs import read_text
from speedrun.process import ToolError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LINKS = {  # Markdown, and what the page in records/ makes of it
    "[a](mailto:a@b.c)": 'href="mailto:a@b.c"',
    "![b](../docs/x.png?raw=true)": 'src="../docs/x.png"',
    "[c](<../docs/my file.md>)": 'href="../docs/my%20file.html"',
    "[d](../docs)": 'href="../docs/index.html"',
    "text[^1]\n\n[^1]: a footnote": 'href="NOTES.html#fn1"',
    "[e](/docs/x.md#Two)": 'href="../docs/x.html#Two"',
    "[f](../../issues/3) [g](//host) [h](http://[)": 'href="../../issues/3">f</a> <a href="//host">g</a> <a href="http://[',
    '<img alt="a > b" src="../docs/x.png"> <a href=nano/01_ValueEmbed>i</a>': 'href="nano/01_ValueEmbed/README.html"',
    "~~old~~ https://a.b/c": '<s>old</s> <a href="https://a.b/c">',
    "- [x] done": 'type="checkbox"',
    "`<a href=code.md>` <nobody@b.c> nano/x.py": "<code>&lt;a href=code.md&gt;</code>",
}
BROKEN = "[1](none.md)", '<img src="none.png">', "[2](RULES.md#none)", "[3](#none)", "[4](<%00> 'x')", f"[5]({'x' * 999})"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a small repository of three records, and return its records."""
    for name in "nano/01_ValueEmbed", "nano/02_UNetValueEmbed", "gpt2/18_SoftCap":
        shutil.copytree(records.RECORDS / name, tmp_path / "records" / name)
        for path in (tmp_path / "records" / name).glob("README.md"):
            path.write_text("# A title\n\nby @somebody\n")
    (tmp_path / "docs").mkdir()
    for name in "train_gpt.py", "records/README.md", "records/RULES.md", "docs/my file.md", "docs/x.png", "docs/x.md":
        (tmp_path / name).write_text("# One\n\n## Two <a name=Two></a>\n")
    (tmp_path / "records" / "NOTES.md").write_text("# Notes\n\n" + "\n\n".join(LINKS))
    return tmp_path / "records"


def test_lines_and_equal_runs_give_back_all_scripts():
    odd = 'x = """a < b & c\n\n\n\n</script>"""  # a\n\nprint(x)\n\n\ny = f"{x!r}"\n'
    scripts = {name: records.read_script(name, records.RECORDS)[1] for name in ("SoftCap", "Sub3Min")}
    scripts |= dict(odd=odd, other=odd.replace("print", "# </script>"))
    data = site.compare(scripts)
    texts = [html.unescape(re.sub(r"</?span[^<>]*>", "", line)) for line in data["lines"]]
    for name, script in scripts.items():
        assert "\n".join(texts[number] for number in data["scripts"][name]) == script
    for a, b in itertools.combinations(scripts, 2):
        (x, y), old, new = (data["scripts"][name] for name in (a, b)), [], []
        for (i, j, n), (next_i, next_j, _) in itertools.pairwise([(0, 0, 0), *data["pairs"][f"{a} {b}"]]):
            old += y[j : j + n] + x[i + n : next_i]
            new += x[i : i + n] + y[j + n : next_j]
        assert (old, new) == (x, y)


def test_pages_hold_figures_and_links_lead_where_they_lead_on_github(root: Path, tmp_path: Path, capsys):
    assert site.write_site(root, tmp_path / "site") == len([*(tmp_path / "site").glob("**/*.*")])
    assert capsys.readouterr().err == ""
    index, notes = (read_text(tmp_path / "site" / name) for name in ("index.html", "records/NOTES.html"))
    page = read_text(tmp_path / "site/records/nano/02_UNetValueEmbed/README.html")
    assert [text for text in LINKS.values() if text not in notes] == []
    assert "0.825 (0.750 to 0.908) times that of ValueEmbed" in index
    assert [text for text in ("69.27 s", "@somebody", "+50 −47 lines", "ported, not run on eight GPUs", "GELU")] == []
    assert "69.27 s (sd 7.92, n=8)" in page


def test_what_is_broken_is_named_and_the_rest_is_written(root: Path, tmp_path: Path, capsys):
    (root / "NOTES.md").write_text("\n\n".join(BROKEN))
    shutil.copytree(root / "nano" / "02_UNetValueEmbed", draft := root / "nano" / "03_Draft")
    (draft / "record.json").write_text(read_text(draft / "record.json").replace("nano/01_ValueEmbed", "gpt2/18_SoftCap"))
    (draft / "README.md").write_text("# Draft\n\n<say why>\n")
    site.write_site(root, tmp_path / "site")
    lines = capsys.readouterr().err.splitlines()
    assert lines == []
    assert "02_UNetValueEmbed" in (index := read_text(tmp_path / "site" / "index.html")) and "Draft" not in index


def test_other_files_are_never_overwritten(root: Path, tmp_path: Path):
    for name in "records", "docs", ".", "docs/x.png":
        with pytest.raises(ToolError, match="holds other files"):
            site.write_site(root, tmp_path / name)
    (tmp_path / "site").mkdir()
    site.write_site(root, tmp_path / "site")
    (tmp_path / "site" / "mine").touch()
    site.write_site(root, tmp_path / "site")
    assert (tmp_path / "site" / "mine").exists()


def shown(page: Path, script: str = "", address: str = "") -> str:
    """Return the document that a browser makes of a page in a narrow window, with a script at its end."""
    copy = page.with_name(f"copy-of-{page.name}")
    copy.write_text(f"{read_text(page)}<script>{script}</script>")
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
    flags += " --window-size=500,800 --disable-background-networking --no-first-run"  # it makes no narrower window
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={page.parent / 'profile'}", f"{copy.as_uri()}{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    return done.stdout
