"""The worked changes of docs/change.md apply to train_gpt.py, touch what the page says, and train."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_gpt

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "train_gpt.py").read_text()
LION, GATE, GELU = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "change.md").read_text(), re.M | re.S)


def train_changed(diff: str, places: set[str], path: Path, cfg: train_gpt.Hyperparameters):
    """Apply a diff that touches just these classes and functions, take three steps, and return module and trainer."""
    path.write_text(SOURCE)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=path.parent, check=True)
    old, new = ({getattr(n, "name", ""): ast.dump(n) for n in ast.parse(s).body} for s in (SOURCE, path.read_text()))
    assert {name for name, _ in old.items() ^ new.items()} == places
    spec = importlib.util.spec_from_file_location("changed", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    trainer = module.Trainer(module.Hyperparameters(**dataclasses.asdict(cfg)), module.Ranks())
    rows = torch.randint(cfg.vocab_size, (cfg.batch_sequences, cfg.train_seq_len + 1))
    losses = [trainer.train_step(step, [(row[:-1].int(), row[1:]) for row in rows]).item() for step in range(3)]
    assert losses[2] < losses[0] < 6  # and so not NaN
    return module, trainer


def test_lion(tmp_path, tiny):
    module, trainer = train_changed(LION, {"Lion", "build_optimizers"}, tmp_path / "train_gpt.py", tiny)
    [lion] = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, module.Lion)]
    assert set(lion.name.split("+")) == {name for name, _ in trainer.gpt.named_parameters() if "embed" in name}
    assert lion.state["exp_avg"].any()


def test_gate(tmp_path, tiny, random_gpt):
    path, places = tmp_path / "train_gpt.py", {"CausalSelfAttention", "build_optimizers"}
    module, trainer = train_changed(GATE, places, path, tiny)
    assert all(block.attn.gate_w.any() for block in trainer.gpt.blocks), "they are trained"
    before, after = random_gpt(tiny), module.GPT(trainer.cfg)
    assert len(after.load_state_dict(before.state_dict(), strict=False).missing_keys) == len(tiny.attention_layout)
    inputs = torch.arange(64, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)
    assert torch.equal(before.features(*inputs), after.features(*inputs)), "they start as 1"
    with pytest.raises(ValueError, match=r"group in build_optimizers: blocks\.0\.attn\.gate_w"):
        train_changed(GATE.replace(', "gate_w"', ""), {"CausalSelfAttention"}, path, tiny)


def test_gelu(tmp_path, tiny):
    mlp = train_changed(GELU, {"MLP"}, tmp_path / "train_gpt.py", tiny)[1].gpt.blocks[0].mlp
    x = torch.randn(5, tiny.model_dim)
    torch.testing.assert_close(mlp(x), F.gelu(x @ mlp.c_fc.T) @ mlp.c_proj.T)
    assert not torch.allclose(mlp(x), train_gpt.MLP.forward(mlp, x))
