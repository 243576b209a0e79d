"""The root is equal in mathematics to public record 89: its schedules, losses, gradients and steps, to 1e-8 or better.

These numbers notice what no other test does: a factor, a window, a rate or an order that changes in the middle of gpt2.
Whoever adds an idea of gpt2 to the root sets SCRIPT to the newest record's script that is without it: that record is
held from then on, in the slow tier, and the idea's own tests hold the root.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import test_record89
from public_records import load
from train_gpt import GPT2_LAYERS, GPT2_STAGES

SCRIPT = "train_gpt.py"  # or records/NAME/train_gpt.py
pytestmark = [] if SCRIPT == "train_gpt.py" else pytest.mark.slow
BEFORE = test_record89.TestRecord
# The public name of each net, and its rows in our order, which is by block. There xsa of all blocks comes first, then
# their head gates, embeds, skip and dc; in the last block attention's factors come before those of the embeddings
NETS = {
    "gate_nets.0": ("gates.early", np.r_[18:22, 0:6, 22:26, 6:18]),
    "gate_nets.4": ("gates.mid", np.r_[18:20, 0:6, 20:22, 28, 22:24, 6:12, 24:28, 12:18, 29:41]),
    "blocks.10.mudd_net": ("mudd.last", np.r_[0:9, 12, 9, 13, 10:12]),
    "head_net": ("mudd.out", np.r_[0:5]),
}
VALUE_EMBEDS = [i for i, layer in enumerate(GPT2_LAYERS) if layer.value_embed]


def with_stages(settings: dict) -> dict:
    """Return a milestone's settings, with rows for stages."""
    rows = zip(GPT2_STAGES, settings["window_tokens"], settings["max_doc_len"], strict=True)
    stages = tuple(stage._replace(window=window, max_doc_len=cut) for stage, window, cut in rows)
    gone = "mask_block final_window_tokens window_tokens max_doc_len".split()
    kept = {name: value for name, value in settings.items() if name not in gone}
    return kept | dict(stages=stages, block_size=settings["mask_block"], final_window=settings["final_window_tokens"])


class TestRecord(BEFORE):
    script = load(SCRIPT)
    small, run = with_stages(BEFORE.small), with_stages(BEFORE.run)
    steps = dict(vocab_size=16, eot_token=15, head_dim=4, model_dim=24, bigram_rows=20, prefix_file="")
    steps |= dict(layers=(*GPT2_LAYERS[:10], *GPT2_LAYERS[1::9]))  # with a row more, as many as the public arrays
    members = {name: kind for name, kind in BEFORE.members.items() if not name.startswith(("gate.", "mudd."))}
    members |= {f"gate.{kind}": rf"gate_nets\.\d\.{kind}" for kind in ("w1", "w2", "b2")}
    members |= {f"mudd.{kind}": rf".*(mudd|head)_net\.{kind}" for kind in ("w1", "w2", "b2")}
    members["scalars"] = BEFORE.members["scalars"].replace("skip_weights", r".*\.skip_lambda")
    first = BEFORE.first | {"blocks.6.skip_lambda": -1.5}
    for net, (theirs, rows) in NETS.items():
        first[f"{net}.b2"] = np.array(BEFORE.first[f"nets.{theirs.partition('.')[2]}.b2"])[rows]
    stored = dict(
        bfloat16=r"(embed|bigram_embed|value_embeds\.\d+)\.weight|lm_head|.*net.*|.*_gate|.*(qk_w|v_w|c_proj|c_fc)",
        float32=r".*lambdas?|gate_scale",
    )

    def place(self, name: str) -> tuple[str, int]:
        net, _, kind = name.rpartition(".")
        if net in NETS:
            return f"{NETS[net][0]}.{kind}", 0
        name = re.sub(r"value_embeds\.(\d+)", lambda found: f"value_embeds.{VALUE_EMBEDS.index(int(found[1]))}", name)
        return super().place(name.replace("blocks.6.skip_lambda", "skip_lambda"))

    def reorder(self, name: str, values: np.ndarray, public: bool) -> np.ndarray:
        net, _, kind = name.rpartition(".")
        if net not in NETS or kind == "w1":
            return super().reorder(name, values, public)
        rows = NETS[net][1]
        return values.reshape(len(rows), -1)[np.argsort(rows) if public else rows]

    def plan(self, pattern: str, lengths: list[int], cuts: tuple, cfg) -> list:
        return self.script.plan_batches(pattern, [*zip(lengths, cuts, strict=True)], 8, cfg)

    @pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.slow)])
    def test_states(self, tmp_path: Path, count: int):
        """Later stages have other numbers alone, which the schedules show."""
        self.compare_states(self.trainer(tmp_path, **self.small), dict([*self.states.items()][:count]))
