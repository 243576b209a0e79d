"""python -m speedrun site: pages hold what records hold, diffs and links are right, and a browser shows them."""

import html
import itertools
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from speedrun import ROOT, pages, rules, site, store
from speedrun.__main__ import main
from speedrun.logs import read_json, read_text
from speedrun.proof import interval

LINE = store.lineage(store.RECORDS)
NEWEST = store.find_record("LongSteps", store.RECORDS)
PAGE = f"records/{store.name_of(NEWEST)}/README.html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("site")
    assert main(["site", "-o", str(path)]) == 0
    return path


def test_lines_and_equal_runs_give_back_all_scripts():
    odd = 'x = """a < b & c\n\n</script>"""  # a\n\nprint(x)\n\n\ny = f"{x!r}"'
    scripts = {path.name: read_text(path / store.SCRIPT).rstrip("\n") for path in LINE[2:6]}
    scripts |= dict(odd=odd, other=odd.replace("print", "# </script>"))
    data = site.compare(scripts)
    texts = [html.unescape(re.sub(r"</?span[^>]*>", "", line)) for line in data["lines"]]
    assert not any("<" in re.sub(r"</?span[^<>]*>", "", line) for line in data["lines"])
    for name, script in scripts.items():
        assert "\n".join(texts[number] for number in data["scripts"][name]) == script
    for a, b in itertools.combinations(scripts, 2):
        (x, y), old, new = (data["scripts"][name] for name in (a, b)), [], []
        for (i, j, n), (next_i, next_j, _) in itertools.pairwise([(0, 0, 0), *data["pairs"][f"{a} {b}"]]):
            old += y[j : j + n] + x[i + n : next_i]
            new += x[i : i + n] + y[j + n : next_j]
        assert (old, new) == (x, y)


def test_tokens_are_those_that_a_reader_reads():
    script = '"""Title."""\n\ndef f(x):\n    """Text."""\n    # Why\n    return f"{x:.2f} s", "text"  # because\n'
    assert site.count_tokens(script) == 10  # def f ( x ) : return f"" , ""


def test_a_chart_escapes_names_and_says_its_values():
    drawn = pages.chart({"a<b": [(1, 4.5), (2, 3.25)]}, "steps", "loss", target=3.28)
    assert [text in drawn for text in ("a&lt;b", "a<b", "2: 3.25", "target 3.28")] == [True, False, True, True]


def test_pages_hold_what_records_hold_and_links_lead_somewhere(folder: Path):
    index, page = read_text(folder / "index.html"), read_text(folder / PAGE)
    losses = [run["val_loss"] for run in read_json(NEWEST / store.RACE)["runs"] if run["script"] == 0]
    _, found = rules.record_race(NEWEST, LINE[: LINE.index(NEWEST)], "nano")
    _, gone, come = store.diff(*(store.read_script(name, store.RECORDS) for name in ("CopyHead", "LongSteps")))
    facts = f"{statistics.fmean(losses):.4f} (sd ", interval(found["train_time"], ".3f"), f"+{come} \u2212{gone}"
    assert [text for text in facts if text not in index or text not in page] == []
    first = read_json(store.PUBLIC)["records"][0]
    told = [f"{first['train_time_s']:.1f}", f"{site.count_tokens(read_text(ROOT / store.SCRIPT)):,}", "GELU"]
    told += [f'href="records/{store.name_of(path)}/README.html"' for path in LINE]
    assert [text for text in told if text not in index] == []
    for path in folder.rglob("*.html"):
        text = re.sub("(?s)<script>.*?</script>", "", read_text(path))
        assert re.findall(r'<(?:link|script|img|iframe)[^>]*?(?:src|href)="https?:[^"]*', text) == []
        for link in re.findall(r'(?:href|src)="((?!https?:|data:)[^"]+)"', text):
            name, _, anchor = html.unescape(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.is_file(), f"{path}: {link}"
            is_pair = target.name == "compare.html" and all(it in read_text(target) for it in anchor.split(".."))
            assert is_pair or not anchor or f'id="{anchor}"' in read_text(target), f"{path}: {link}"


def shown(page: Path, script: str = "", address: str = "") -> str:
    """Return the document that a browser makes of a page in a narrow window, with a script at its end."""
    copy = page.with_name(f"copy-of-{page.name}")
    copy.write_text(f"{read_text(page)}<script>{script}</script>")
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
    flags += " --window-size=500,800 --disable-background-networking"  # it makes no narrower window
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={page.parent / 'profile'}", f"{copy.as_uri()}{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    return done.stdout


@pytest.mark.slow
@in_browser
def test_a_browser_shows_pages_and_the_diff_of_two_scripts(folder: Path):
    fits = "document.title = innerWidth - document.documentElement.scrollWidth;"  # 15: that of the scrollbar
    for page in "index.html", PAGE, "records/NOTES.html", "compare.html":
        assert "<title>15</title>" in shown(folder / page, fits), f"{page} scrolls sideways"
    assert 'class="come">    num_iterations=<span class="mi">32</span>' in shown(folder / PAGE)
    diff = shown(folder / "compare.html", address="#nano/08_OneHead..nano/09_CopyHead")
    assert ("+6 \u22122 lines" in diff, "1117 unchanged lines" in diff, "def plan_steps" in diff) == (True, True, False)
    chosen = "[from.value, to.value] = ['nano/09_CopyHead', 'nano/08_OneHead']; to.dispatchEvent(new Event('change'));"
    back = shown(folder / "compare.html", f"{chosen} rows.querySelectorAll('button')[2].click()")
    assert ("+2 \u22126 lines" in back, "1117 unchanged lines" in back) == (True, False)
    assert len(re.findall("<tr>", back)) > 1117
