"""speedrun evaluate: bits per byte as one token at a time says, and what it refuses."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import SMALL_GPT2, random_ngrams
from dense import randomize
from speedrun import evaluate
from speedrun.__main__ import main
from speedrun.model import Model


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_pieces_that_overlap_score_as_one_token_at_a_time(preset, tiny):
    """A text is cut into pieces of 36 tokens, of which 12 were read before."""
    cfg = train_gpt.resolve(train_gpt.parse_args(SMALL_GPT2)) if preset == "gpt2" else tiny
    stages = tuple(stage._replace(windows=dict.fromkeys(stage.windows, 1000)) for stage in cfg.stages)
    cfg = dataclasses.replace(cfg, dtype="float64", stages=stages, final_window=1000)
    gpt = Model(randomize(train_gpt.GPT(cfg)), [random_ngrams(cfg)])
    text = [*("Some text, which is read in pieces. " * 2).encode()]
    expected = []
    for i, token in enumerate(text):
        begin = max(0, i - i % 35 - 12)
        logits = gpt.next_logits([cfg.eot_token, *text[begin:i]])
        expected.append(F.cross_entropy(logits, torch.tensor(token)).item())
    torch.testing.assert_close(evaluate.losses(gpt, text, 48), torch.tensor(expected, dtype=torch.float64))


def test_program_scores_texts_or_says_what_is_wrong(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    Path("empty").touch()
    Path("text").write_bytes("\ufeffnaïve\r\n".encode())
    assert main(["evaluate", "--text", "text"]) == 0
    found = json.loads(capsys.readouterr().out)["texts"]["text"]
    assert found["bytes"] == found["tokens"] == 7
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    wrong = {"empty": "empty: is empty", "logs/random.pt": "logs/random.pt: is not text in UTF-8"}
    for name, message in wrong.items():
        code, (out, err) = main(["evaluate", "--text", name]), capsys.readouterr()
        assert (code, out, err.count("\n"), message in err) == (2, "", 1, True), err
