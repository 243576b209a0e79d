"""python -m speedrun site: pages hold what records hold, links lead somewhere, and a browser shows the diffs."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from speedrun import records, site
from speedrun.__main__ import main
from speedrun.logs import read_text

LINKS = {  # Markdown, and what the page in records/ makes of it
    "[a](mailto:a@b.c) [b](//host) [c](../../x/3)": 'mailto:a@b.c">a</a> <a href="//host">b</a> <a href="../../x/3"',
    "![d](../docs/x.png?raw=true)": 'src="../docs/x.png"',
    "[e](<../docs/my file.md>) [f](/docs/my%20file.md#Two)": '../docs/my%20file.html">e</a> <a href="../docs/my%20f',
    '<img alt="a > b" src="../docs/x.png"> <a href=nano/01_ValueEmbed>g</a>': 'href="nano/01_ValueEmbed/README.html"',
    "text[^1] [h](#a-title)\n\n[^1]: a footnote": 'href="NOTES.html#a-title"',
    "~~old~~ https://a.b/c [i](http://[": '<s>old</s> <a href="https://a.b/c">',
    "- [x] done `<a href=code.md>` nano/x.py": 'type="checkbox"',
}
BROKEN = "[](none.md)", '<img src="none.png">', "[](/docs/)", "[](RULES.md#none)", "[](#none)", "[](http://[%00)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a small repository, and return the folder of its three records."""
    for name in "nano/01_ValueEmbed", "nano/02_UNetValueEmbed", "gpt2/18_SoftCap":
        shutil.copytree(records.RECORDS / name, tmp_path / "records" / name)
        (tmp_path / "records" / name / "README.md").write_text("# A title\n\nby @somebody\n")
    (tmp_path / "docs").mkdir()
    for name in "train_gpt.py", "records/README.md", "records/RULES.md", "docs/my file.md", "docs/x.png":
        (tmp_path / name).write_text("# One\n\n<a name=Two></a>\n")
    (tmp_path / "records" / "NOTES.md").write_text("# A title\n\n" + "\n\n".join(LINKS))
    return tmp_path / "records"


def test_lines_give_back_all_scripts_and_equal_runs_are_equal():
    odd = 'x = """a < b & c\n\n\n\n</script>"""  # a\n\nprint(x)\n\n\ny = f"{x!r}"\n'
    scripts = dict(odd=odd, other=odd.replace("print", "# <b>"))
    data = site.compare(scripts)
    texts = [html.unescape(re.sub(r"</?span[^<>]*>", "", line)) for line in data["lines"]]
    for name, script in scripts.items():
        assert "\n".join(texts[number] for number in data["scripts"][name]) == script
    assert data["pairs"]["odd other"] == [(0, 0, 6), (7, 7, 4), (11, 11, 0)]


def test_pages_hold_figures_and_links_lead_where_they_do_on_github(root: Path, tmp_path: Path, capsys):
    count = site.write_site(root, folder := tmp_path / "site")
    assert (count, capsys.readouterr().err) == (sum(path.is_file() for path in folder.rglob("*")), "")
    notes, index = read_text(folder / "records/NOTES.html"), read_text(folder / "index.html")
    assert [text for text in LINKS.values() if text not in notes] == []
    texts = "0.825 (0.750 to 0.908) times that of ValueEmbed", "+50 ", "ported, not run on eight GPUs", "@somebody"
    assert [text for text in texts if text not in index] == []
    assert "69.27 s (sd 7.92, n=8), measured here" in read_text(folder / "records/nano/02_UNetValueEmbed/README.html")


def test_what_is_broken_is_named_and_the_rest_is_written(root: Path, tmp_path: Path, capsys):
    (root / "NOTES.md").write_text("\n\n".join(BROKEN))
    (root / "gpt2/20_Draft").mkdir()
    site.write_site(root, tmp_path / "site")
    draft, *lines = capsys.readouterr().err.splitlines()
    assert ["20_Draft" in draft, "20_Draft" in read_text(tmp_path / "site/index.html")] == [True, False]
    assert [line.split()[3] for line in lines] == ["none.md", "none.png", "/docs/", "RULES.md#none", "#none"]


def test_other_files_are_never_overwritten(root: Path, tmp_path: Path, capsys):
    before = sorted(tmp_path.rglob("*"))
    for name in "records", "docs", ".", "docs/x.png":
        assert main(["site", "-o", str(tmp_path / name)]) == 2
        assert re.fullmatch("python -m speedrun: .*holds other files.*\n", capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before
    site.write_site(root, tmp_path / "site")
    (tmp_path / "site/mine").touch()
    site.write_site(root, tmp_path / "site")
    assert (tmp_path / "site/mine").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (chromium := shutil.which("chromium")), reason="no browser: apt-get install chromium")
def test_a_browser_shows_our_records_and_the_diff_of_two_scripts(tmp_path: Path, capsys):
    assert main(["site", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "", "all links of our pages lead somewhere"
    fits = "innerWidth - document.documentElement.scrollWidth"  # 15: the scrollbar's
    swap = "[from.value, to.value] = [to.value, from.value], to.dispatchEvent(new Event('change'))"
    swap += ", rows.querySelectorAll('button')[2].click(), told.textContent + (rows.rows.length > 1117)"
    record, pair = "records/nano/10_LongSteps/README.html", "compare.html#nano/08_OneHead..nano/09_CopyHead"
    for address, shown in {"index.html": "15", record: "15", pair: "15+2 \u22126 linestrue"}.items():
        name, _, scripts = address.partition("#")
        page = (tmp_path / name).with_name("shown.html")
        title = f"{fits} + ({swap})" if scripts else fits
        page.write_text(f"{read_text(tmp_path / name)}<script>document.title = {title}</script>")
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
        flags += " --enable-logging=stderr --virtual-time-budget=5000 --window-size=500,800"  # no window is narrower
        command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"{page.as_uri()}#{scripts}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (f"<title>{shown}</title>" in done.stdout, ":CONSOLE" in done.stderr) == (True, False), address
