"""evaluate.py: scores of packed documents, answers and bits that anybody can check by hand, and what it refuses."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from speedrun import evaluate
import sample
import train_gpt
from test_sample import model  # noqa: F401  a fixture
from test_train import SMALL_GPT2

QUESTIONS = [("ab", ["cd", "c"], 0), ("", ["b\n" * 20, "abc", "xyz"], 1), ("f" * 30, ["g", "naïve", "g h"], 2)]


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_packed_documents_score_as_one_at_a_time(preset, tiny64, random_gpt, monkeypatch):
    """Smear, bigrams and key offset cross documents. A long text is cut into pieces of 40 tokens, 10 of them again."""
    cfg = train_gpt.resolve(train_gpt.parse_args([*SMALL_GPT2, "--dtype=float64"])) if preset == "gpt2" else tiny64
    stages = tuple(stage._replace(window=1000) for stage in cfg.stages)
    gpt = random_gpt(dataclasses.replace(cfg, stages=stages, final_window=1000))
    documents = [([*ctx.encode(), *end.encode()], len(ctx)) for ctx, ends, _ in QUESTIONS for end in ends]

    def alone(tokens: list[int], context: int) -> float:
        losses = []
        for i in range(context, len(tokens)):
            logits = sample.next_logits(gpt, [cfg.eot_token] * evaluate.RUN_UP + tokens[:i])
            losses.append(F.cross_entropy(logits, torch.tensor(tokens[i])).item())
        return sum(losses)

    assert [len(packed) for packed in evaluate.pack(documents, 96)] == [5, 2, 1]
    text = "Some text, which is read in pieces. " * 2
    pieces = [([*text[max(0, i - 10) : i + 26].encode()], min(i, 10)) for i in range(0, len(text), 26)]
    bits = sum(alone(*piece) for piece in pieces) / len(text) / math.log(2)
    assert evaluate.compress(gpt, text, 40, "")["bits_per_byte"] == pytest.approx(bits, abs=1e-9)
    for run_up in 4, 3:  # with 3, a key comes from the sequence's second token, or from one that saw another document
        monkeypatch.setattr(evaluate, "RUN_UP", run_up)
        expected = pytest.approx([alone(*document) for document in documents], abs=1e-9)
        assert (evaluate.score(gpt, documents, 96, "") == expected) == (run_up == 4)


def test_answers_and_bits_by_hand(monkeypatch):
    """The byte after a byte costs 1 bit, any other 10, so does the space before an ending. The mean decides."""
    successor = torch.arange(1, 514).remainder(513)[:, None]
    rows = torch.full((513, 513), 0.5 / 512).log().scatter(1, successor, math.log(0.5))
    monkeypatch.setattr(sample, "features", lambda gpt, tokens: torch.tensor(tokens))
    monkeypatch.setattr(sample, "logits_of", lambda gpt, x: rows[x])
    gpt = SimpleNamespace(cfg=SimpleNamespace(eot_token=256, vocab_size=257))
    assert evaluate.compress(gpt, "abcd", 96, "")["bits_per_byte"] == pytest.approx((10 + 1 + 1 + 1) / 4)
    questions = [("x", ["abcdef", "z"], 0), ("x", ["ace", "abc"], 1), ("x", ["ace", "abc"], 0), ("@", ["!x", "!"], 1)]
    found, error = evaluate.answer(gpt, questions, 96, ""), pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert found == dict(questions=4, right=3, accuracy=0.75, standard_error=error, chance=0.5)


FAIR = dict(ctx="a", endings=["b", "c"], label=0)
ODD = [None, True, -1, 2, 0.9, 1e999, float("nan"), 10**300, "", "1", "bc", "\ud800", [], ["b"], ["b", 5], ["b", None]]
ODD += [["b", "\udfff"], [["b"], ["c"]], {}, {"a": "b", "c": "d"}, [1, 2]]
EXPECTED = dict(ctx="a text", endings="a list of two or more texts", label="the number of the right one")


@pytest.mark.parametrize("field", FAIR)
def test_odd_values_are_refused_by_file_line_and_field(field, tmp_path):
    """All others than a text, a list of texts and a whole number; and a field that is not there."""
    path, fair = tmp_path / "questions", json.dumps(FAIR)
    allowed = dict(ctx=["", "1", "bc"], endings=[["b", ""]], label=[0])[field]
    lines = [json.dumps(FAIR | {field: value}) for value in ODD if value not in allowed]
    for line in [*lines, json.dumps({name: FAIR[name] for name in FAIR if name != field})]:
        path.write_text(f"{fair}\n\n{line}")
        with pytest.raises(train_gpt.UserError) as refused:
            list(evaluate.read_questions(path))
        assert re.fullmatch(rf"{path} line 3: {field} is .*: expected {EXPECTED[field]}.*", str(refused.value))
    path.write_text("\n".join(json.dumps(FAIR | {field: value}) for value in allowed))
    assert len(list(evaluate.read_questions(path))) == len(allowed)


BAD = ["{", "[" * 20_000, "[1]", "5", '"ctx"', "null"]


def test_program_scores_files_and_hellaswag_or_says_what_is_wrong(model, capsys, monkeypatch):  # noqa: F811
    """From the flags to JSON, or one line and code 2. The hub has Parquet, with labels as text."""
    monkeypatch.chdir(model.parent.parent)
    lines = [dict(ctx=ctx, endings=endings, label=label) for ctx, endings, label in QUESTIONS]
    files = {f"bad{i}": f"\n{text}" for i, text in enumerate(BAD)} | dict(empty="", blank="\n \n", text="naïve\r\n")
    files["long"] = json.dumps(dict(ctx="a" * 4997, endings=["b", "bc"], label=0))
    for name, text in (files | dict(good="\n\n".join(map(json.dumps, lines)))).items():
        Path(name).write_bytes(text.encode())

    def run(argv: str) -> tuple[int, str, str]:
        return sample.run("evaluate.py", evaluate.evaluate, argv.split()), *capsys.readouterr()

    found = json.loads(run("--choices good --text text")[1])
    assert (found["choices"]["good"]["questions"], found["texts"]["text"]["bytes"]) == (3, 8)
    table = SimpleNamespace(to_pylist=lambda: [line | dict(label=str(line["label"])) for line in lines])
    parquet = SimpleNamespace(read_table=lambda path, columns: table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda **of: of["filename"])
    assert json.loads(run("--hellaswag --limit 2")[1])["choices"]["HellaSwag"]["questions"] == 2
    parquet.read_table = lambda path, columns: 1 / 0
    wrong = {"--hellaswag": "HellaSwag cannot be fetched: division by zero; or give --choices"}
    wrong |= {"--text nowhere": "nowhere: no such file", "--text empty": "empty: is empty"}
    wrong |= {"": "nothing to score: give --hellaswag", "--text logs/random.pt": "logs/random.pt: is not text in UTF-8"}
    wrong |= {"logs/no.pt --text text": "logs/no.pt: there is no such", "--choices blank": "blank: has no questions"}
    wrong |= {"--choices long": "long: question 1 has 5000 tokens, the model", "--choices x --limit 0": "--limit"}
    wrong |= {f"--choices bad{i}": f"bad{i} line 2: expected a JSON object with ctx" for i in range(len(BAD))}
    for argv, message in wrong.items():
        code, out, err = run(argv)
        assert (code, out, err.count("\n"), err[: len(message) + 13]) == (2, "", 1, f"evaluate.py: {message}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "-m pip install pyarrow" in run("--hellaswag")[2]
