"""evaluate.py: scores of packed documents, answers and bits that anybody can check by hand, and what it refuses."""

import dataclasses
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import evaluate
import sample
import train_gpt
from test_sample import model  # noqa: F401  a fixture
from test_train import SMALL_GPT2

QUESTIONS = [("ab", ["cd", "c"], 0), ("", ["b\n" * 20, "abc", "xyz"], 1), ("f" * 30, ["g", "naïve", "g h"], 2)]


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_packed_documents_score_as_one_at_a_time(preset, tiny64, random_gpt, monkeypatch):
    """Smear, bigrams and key offset cross documents, but not the tokens before one. A long text is cut."""
    cfg = train_gpt.resolve(train_gpt.parse_args([*SMALL_GPT2, "--dtype=float64"])) if preset == "gpt2" else tiny64
    gpt = random_gpt(dataclasses.replace(cfg, window_tokens=(1000,) * len(cfg.window_tokens), final_window_tokens=1000))
    gpt.rotary.set_stage(0, gpt.cfg)
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


@pytest.fixture
def successors(monkeypatch) -> types.SimpleNamespace:
    """A model by which each byte has the next higher one behind it with p = 1/2, else one of 512."""
    rows = (
        torch.full((513, 513), 0.5 / 512).log().scatter(1, torch.arange(1, 514).remainder(513)[:, None], math.log(0.5))
    )
    monkeypatch.setattr(sample, "features", lambda gpt, tokens: torch.tensor(tokens))
    monkeypatch.setattr(sample, "logits_of", lambda gpt, x: rows[x])
    return types.SimpleNamespace(cfg=types.SimpleNamespace(eot_token=256, vocab_size=257))


def test_answers_and_bits_by_hand(successors):
    """A successor costs 1 bit, any other byte 10, a space before an ending, too. The mean decides, not the sum."""
    assert evaluate.compress(successors, "abcd", 96, "")["bits_per_byte"] == pytest.approx((10 + 1 + 1 + 1) / 4)
    questions = [
        ("x", ["abcdef", "z"], 0),
        ("x", ["ace", "abc"], 1),
        ("x", ["ace", "abc"], 0),
        ("\x1f", ["!", "!b"], 0),
    ]
    found = evaluate.answer(successors, questions, 96, "")
    assert found == dict(
        questions=4, right=3, accuracy=0.75, standard_error=pytest.approx(0.2165, abs=1e-4), chance=0.5
    )


def run(capsys, *argv: str) -> tuple[int, str, str]:
    return sample.run("evaluate.py", evaluate.evaluate, argv), *capsys.readouterr()


def test_program_scores_files_and_hellaswag(model, tmp_path, capsys, monkeypatch):  # noqa: F811
    """From the flags to JSON; the hub has Parquet, with labels as text."""
    lines = [dict(ctx=ctx, endings=endings, label=label) for ctx, endings, label in QUESTIONS]
    (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "t.txt").write_bytes("naïve\r\n".encode())
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(capsys, "--choices", "q.jsonl", "--text", "t.txt")[1])
    assert (found["choices"]["q.jsonl"]["questions"], found["texts"]["t.txt"]["bytes"]) == (3, 8)
    table = types.SimpleNamespace(to_pylist=lambda: [line | dict(label=str(line["label"])) for line in lines])
    parquet = types.SimpleNamespace(read_table=lambda path, columns: table)
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=parquet))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda **of: of["filename"])
    hub = json.loads(run(capsys, "--hellaswag", "--limit", "2")[1])["choices"]["HellaSwag"]
    assert hub["questions"] == 2
    monkeypatch.setattr(parquet, "read_table", lambda path, columns: 1 / 0)
    assert (
        "evaluate.py: HellaSwag cannot be fetched: division by zero; or give --choices" in run(capsys, "--hellaswag")[2]
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in run(capsys, "--hellaswag")[2]


BAD = ["{", "[" * 20_000, "[1]", '{"ctx": 5}', '{"ctx": "", "endings": ["b"], "label": 0}']
BAD += [f'{{"ctx": "a", "endings": ["b", "c"], "label": {label}}}' for label in ("2", "NaN", "-1", '"x"')]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "nothing to score: give --hellaswag"),
        ("--text nowhere", "nowhere: no such file"),
        ("--text .", ".: no such file"),
        ("--text empty", "empty: is empty"),
        ("--choices blank", "blank: has no questions"),
        ("--text logs/random.pt", "logs/random.pt: is not text in UTF-8"),
        ("--choices long --limit 1", "long: question 1 has 5000 tokens, the model reads 4092 at most"),
        ("--choices long --limit 0", "--limit 0: expected a number of at least 1"),
        ("logs/nowhere.pt --choices long", "logs/nowhere.pt: there is no such file"),
        *((f"--choices bad{i}", f"bad{i} line 2: expected ctx, a text, endings") for i in range(len(BAD))),
    ],
)
def test_what_can_be_mended_gets_one_line_and_exit_code_2(model, capsys, monkeypatch, argv, message):  # noqa: F811
    monkeypatch.chdir(model.parent.parent)
    for name, text in (dict(empty="", blank="\n \n") | {f"bad{i}": f"\n{text}" for i, text in enumerate(BAD)}).items():
        Path(name).write_text(text)
    Path("long").write_text(json.dumps(dict(ctx="a" * 4997, endings=["b", "bc"], label=0)))
    code, out, err = run(capsys, *argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"evaluate.py: {message}"), err
