"""speedrun evaluate: scores of packed documents, answers and bits to check by hand, and what it refuses."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import sample
import train_gpt
from conftest import SMALL_GPT2, random_ngrams
from dense import randomize
from speedrun import evaluate
from speedrun.__main__ import main

QUESTIONS = [("ab", ["cd", "c"], 0), ("", ["b\n" * 20, "abc", "xyz"], 1), ("f" * 30, ["g", "naïve", "g h"], 2)]


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_packed_documents_score_as_one_at_a_time(preset, tiny, monkeypatch):
    """Smear, n-grams, keys and shifts cross documents. A text is cut into pieces of 36 tokens, 11 of them again."""
    cfg = train_gpt.resolve(train_gpt.parse_args(SMALL_GPT2)) if preset == "gpt2" else tiny
    stages = tuple(stage._replace(windows=dict.fromkeys(stage.windows, 1000)) for stage in cfg.stages)
    cfg = dataclasses.replace(cfg, dtype="float64", stages=stages, final_window=1000)
    gpt = sample.Model(randomize(train_gpt.GPT(cfg)), [random_ngrams(cfg)])
    documents = [([*ctx.encode(), *end.encode()], len(ctx)) for ctx, ends, _ in QUESTIONS for end in ends]

    def alone(tokens: list[int], context: int) -> float:
        losses = []
        for i in range(context, len(tokens)):
            logits = gpt.next_logits([cfg.eot_token] * evaluate.RUN_UP + tokens[:i])
            losses.append(F.cross_entropy(logits, torch.tensor(tokens[i])).item())
        return sum(losses)

    assert [len(packed) for packed in evaluate.pack(documents, 96)] == [5, 2, 1]
    text = "Some text, which is read in pieces. " * 2
    pieces = [([*text[max(0, i - 11) : i + 25].encode()], min(i, 11)) for i in range(0, len(text), 25)]
    bits = sum(alone(*piece) for piece in pieces) / len(text) / math.log(2)
    assert evaluate.compress(gpt, text, 44, "")["bits_per_byte"] == pytest.approx(bits, abs=1e-9)
    least = dict(nano=8, gpt2=4)[preset]  # with less, a key is of one of the first two tokens, or saw another document
    for run_up in least, least - 1:
        monkeypatch.setattr(evaluate, "RUN_UP", run_up)
        expected = pytest.approx([alone(*document) for document in documents], abs=1e-9)
        assert (evaluate.score(gpt, documents, 96, "") == expected) == (run_up == least)


def test_answers_and_bits_by_hand():
    """The byte after a byte costs 1 bit, any other 10, so does the space before an ending. The mean decides."""
    successor = torch.arange(1, 514).remainder(513)[:, None]
    rows = torch.full((513, 513), 0.5 / 512).log().scatter(1, successor, math.log(0.5))
    gpt = SimpleNamespace(cfg=SimpleNamespace(eot_token=256, vocab_size=257))
    gpt.features, gpt.logits = torch.tensor, lambda x, tokens, places: rows[x[places]]
    assert evaluate.compress(gpt, "abcd", 96, "")["bits_per_byte"] == pytest.approx((10 + 1 + 1 + 1) / 4)
    questions = [("x", ["abcdef", "z"], 0), ("x", ["ace", "abc"], 1), ("x", ["ace", "abc"], 0), ("@", ["!x", "!"], 1)]
    found, error = evaluate.answer(gpt, questions, 96, ""), pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert found == dict(questions=4, right=3, accuracy=0.75, standard_error=error, chance=0.5)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_questions_are_read_as_windows_saves_them_and_in_spite_of_an_odd_line(encoding, tmp_path, capsys):
    path = tmp_path / "questions"
    lines = ['{"ctx": "é", "endings": ["b", "\\ud83d"], "label": 0}', "null", ""]
    path.write_bytes("\r\n".join(lines).encode(encoding))
    assert list(evaluate.read_questions(path)) == [("é", ["b", "\ufffd"], 0)]
    assert capsys.readouterr().err == f"note: {path}: 1 lines are null, left out\n"
    assert evaluate.read_text(path)[-6:] == "\nnull\n"


QUESTION, WANTED = dict(ctx="a", endings=["b", "c"], label=0), "expected an object with ctx, a text"
BAD = {"5": WANTED, "{}": WANTED, '{"ctx': "is no JSON: Unterminated string", "[" * 100_000: "is JSON in too many"}
ODD = dict(ctx=[None, 1], endings=["bc", ["b"], ["b", 5], {"a": 1, "b": 2}], label=[True, -1, 2, 0.9, 1e999, ""])
BAD |= {json.dumps(QUESTION | {name: value}): WANTED for name, values in ODD.items() for value in values}


@pytest.mark.parametrize("bad", BAD)
def test_odd_questions_are_refused_by_file_and_line(bad, tmp_path):
    path = tmp_path / "questions"
    path.write_text(f"{json.dumps(QUESTION)}\n\n{bad}")
    with pytest.raises(train_gpt.UserError, match=rf"^{path} line 3: {BAD[bad]}"):
        list(evaluate.read_questions(path))


def test_program_scores_files_and_hellaswag_or_says_what_is_wrong(model, capsys, monkeypatch):
    """From the flags to JSON, or one line and code 2. The hub has Parquet, with labels as text."""
    monkeypatch.chdir(model.parent.parent)
    lines = [dict(ctx=ctx, endings=endings, label=label) for ctx, endings, label in QUESTIONS]
    long = json.dumps(dict(ctx="a" * 4997, endings=["b", "bc"], label=0))
    files = dict(empty="", text="naïve\r\n", good="\n\n".join(map(json.dumps, lines)), long=long)
    for name, text in files.items():
        Path(name).write_bytes(text.encode())

    def run(argv: str) -> tuple[int, str, str]:
        return main(["evaluate", *argv.split()]), *capsys.readouterr()

    found = json.loads(run("--choices good --text text")[1])
    assert (found["choices"]["good"]["questions"], found["texts"]["text"]["bytes"]) == (3, 7)
    table = SimpleNamespace(to_pylist=lambda: [line | dict(label=str(line["label"])) for line in lines])
    parquet = SimpleNamespace(read_table=lambda path, columns: table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda **of: of["filename"])
    assert json.loads(run("--hellaswag --limit 2")[1])["choices"]["HellaSwag"]["questions"] == 2
    parquet.read_table = lambda path, columns: 1 / 0
    wrong = {"--hellaswag": "HellaSwag cannot be fetched: ZeroDivisionError('division by zero'); or give --choices"}
    wrong |= {"--text nowhere": "[Errno 2] No such file or directory: 'nowhere'", "": "nothing to score: give --hella"}
    wrong |= {"--text logs/random.pt": "logs/random.pt: is not text in UTF-8", "--choices empty": "empty: is empty"}
    wrong |= {"--choices long": "long: question 1 has 5000 tokens, the model", "--choices x --limit 0": "--limit"}
    for argv, message in wrong.items():
        code, out, err = run(argv)
        assert (code, out, err.count("\n"), message in err) == (2, "", 1, True), err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "-m pip install pyarrow" in run("--hellaswag")[2]
