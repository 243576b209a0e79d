"""speedrun view: one page with a run's figures, settings and text, whose bits are the model's loss."""

import html
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from data.shards import write_shard
from speedrun import view
from speedrun.__main__ import main
from speedrun.counts import ORDERS
from speedrun.mixture import load_mixture, write_mixture
from speedrun.model import load_model
from synthetic_logs import log_text
from test_site import in_browser, shown

SPAN = re.compile(r'<span class="b(\d)"(?: tabindex="0")? title="([^"]*)">([^<]*)</span>')


@pytest.fixture
def page(flags, corpus, tmp_path) -> tuple[str, dict, bytes]:
    """Train a small model, and return its page, its result, and the tokens that it validated on."""
    text = "if a < b & '\"' in \"</pre><script>\":\n    é = '😀'\n".encode() * 9
    write_shard(tmp_path / "val.bin", tokens := np.array([256, *text[:288]]))
    own = f"--val_files={tmp_path}/val.bin --val_seq_len=288 --muon_lr=0.05 --run_id=<b>"
    result = train_gpt.main([*flags, *own.split()])
    assert main(["view", result["log"]]) == 0
    return (tmp_path / "logs" / "<b>.html").read_text(), result, bytes(tokens[1:].tolist())


def test_a_page_has_the_figures_of_a_run_and_each_token_with_its_bits(page):
    text, result, tokens = page
    assert f"<td>{result['val_loss']:.4f}</td>" in text
    assert re.search(r'<th scope="row">muon_lr</th><td>0.075</td><td>0.05</td>', text)
    assert (text.count("<svg"), "<b>" in html.unescape(text)) == (4, True), "two of validation, training, plan"
    found = [[html.unescape(part) for part in span] for span in SPAN.findall(text.partition("data-walk")[2])]
    assert "".join(part for *_, part in found).replace("↵", "") == tokens.decode("utf-8", "replace")
    bits = [float(line.rpartition(" bits;")[0].split()[-1]) for _, told, _ in found for line in told.splitlines()]
    losses = load_model(Path(result["log"]).with_suffix(".pt"), "cpu").losses([256, *tokens])
    assert bits == pytest.approx((losses / math.log(2)).tolist(), abs=0.006)
    assert re.search(r"^'<': \d+\.\d\d bits; expected '.+' \d+%, '.+' \d+%, '.+' \d+%$", found[5][1])
    assert not re.search(r"</pre><script>|(src|href)=.http|url\(.?http", text)


def test_a_text_that_is_another_by_now_is_not_shown(page, tmp_path, capsys):
    _, result, _ = page
    write_shard(tmp_path / "val.bin", np.array([256, *b"x" * 288]))
    assert main(["view", result["log"]]) == 0
    assert "val.bin: another text by now" in (tmp_path / "logs" / "<b>.html").read_text()


def test_a_mixture_expects_what_it_scores(model):
    path, text = model.with_suffix(".mixture"), [256, *b"a text, a text, a text"]
    write_mixture(path, [model.with_suffix("")], np.array(text), np.full((3, len(ORDERS) + 1, 3), 1 / 3))
    expected = torch.stack([*view.expected(load_mixture(path, "cpu"), text)])
    assert expected.sum(1).numpy() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(-expected[range(22), text[1:]].log(), load_mixture(path, "cpu").losses(text))


def test_runs_are_compared_and_those_of_other_scripts_get_no_plans(tmp_path, capsys):
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for i, path in enumerate(paths):
        path.write_text(log_text(seed=i))
    paths[0].with_suffix(".pt").touch()
    assert main(["view", *map(str, paths), "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert '<th scope="row">seed</th><td>null</td><td>0</td><td>1</td>' in text
    assert (text.count("<svg"), "record " in text, "a.pt: is no model, or damaged" in text) == (3, True, True)
    for name, message in {"none.txt": "none.txt", "cut.txt": "not a log, or cut short"}.items():
        (tmp_path / "cut.txt").write_text(log_text()[:50])
        code, (out, err) = main(["view", str(tmp_path / name)]), capsys.readouterr()
        assert (code, err.count("\n"), message in err) == (2, 1, True), (out, err)


@pytest.mark.slow
@in_browser
def test_a_browser_shows_it_without_errors(page, tmp_path):
    walk = """const walk = () => document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}))
        document.querySelector("[data-walk] span").focus(); walk(); walk()"""
    dom = shown(tmp_path / "logs" / "<b>.html", walk)  # no error in the console
    assert re.search(r'<output class="told">\' \': ', dom), "the third character"
