"""BigramsSignTrick is equal in mathematics to public record 83: every number that we have of it, to 1e-8 or better."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from public_records import PublicRecord

pytestmark = pytest.mark.slow
SMALL = dict(vocab_size=120, eot_token=119, num_heads=6, head_dim=16, model_dim=96, bigram_rows=1920, bigram_dim=24)
SMALL |= dict(sign_rows=32, mask_block=16, batch_tokens=768, train_seq_len=768, val_seq_len=768, val_tokens=768)
SMALL |= dict(window_tokens=(48, 112, 176, 208), final_window_tokens=320)
SMALL |= dict(dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=13, extension_steps=4, mask_block=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=(28, 64, 64, 64), train_seq_len=96, batch_tokens=8 * 96)
RUN |= dict(val_seq_len=288, val_tokens=2 * 8 * 288, momentum_warmup_steps=4, momentum_cooldown_steps=3)
RUN |= dict(batches="run/{}/inputs", loss="loss_per_token")
STEPS = SMALL | dict(vocab_size=32, eot_token=31, num_heads=4, head_dim=4, model_dim=16, bigram_rows=480, bigram_dim=4)
# As many factors as the public arrays have, with those that no layer uses
STEPS |= dict(attention_layout="S" * 14, source_layout="." * 14, xsa_layout="x" * 14, skip_layout="." * 13 + "3")
STEPS |= dict(value_embed_layout=".01234" + "." * 8, mudd_layers="7" + "3" * 10)
STATES = dict(s1=200, val_s1=250, s2=640, val_s2=750, s3_tied=917, s3=1100, val_s3=1250, ext=1380, val_final=1385)
# Which of our parameters stand for the public ones in the optimizers' steps: names, or patterns
MEMBERS = {"attn.qkv_w": r"blocks\.0\.attn\.(qk|v)_w", "attn.c_proj.weight": r"blocks\.0\.attn\.c_proj"}
MEMBERS |= {f"mlp.{kind}.weight": rf"blocks\.0\.mlp\.{kind}" for kind in ("c_fc", "c_proj")}
MEMBERS |= {f"{kind}.weight": rf"{kind}(\.weight)?" for kind in ("embed", "bigram_embed", "lm_head")}
MEMBERS |= {"smear_gate.weight": "smear_gate", "skip_gate.weight": "skip_gate", "value_embeds": "value_embeds.*"}
MEMBERS |= dict(attn_gates=r".*\.gate", value_gates=r".*\.value_gate", xsa_alphas=r".*xsa_alpha")
MEMBERS |= {f"{kind}_lambdas": rf".*\.{kind}_lambdas?" for kind in ("resid", "post", "x0", "bigram")}
MEMBERS |= {f"mudd_{kind}": rf".*\.{kind}" for kind in ("w1", "w2", "b2")}
MEMBERS["scalars"] = r".*attn\.lambdas|smear_lambda|skip_weights"


def place(name: str) -> tuple[str, int]:
    """Return the public name of a parameter, and where it begins in that array, or which layer's it is."""
    if found := re.fullmatch(
        r"blocks\.(\d+)\.(?:(resid|post|x0|bigram)_lambdas?|(attn)\.lambdas|attn.(xsa)_alpha)", name
    ):
        return f"{found[2] or found[3]}_lambdas" if not found[4] else "xsa_alphas", int(found[1])
    if name.endswith(("qk_w", "v_w")):
        return re.sub("qk_w|v_w", "qkv_w", name), 2 * 96 * 96 * name.endswith("v_w")
    name = name.replace("skip_weights", "skip_lambda").replace("nets.", "mudd.")
    return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0


def reorder(name: str, values: np.ndarray, public: bool) -> np.ndarray:
    """Reorder queries and keys: dimensions that rotate together are neighbours in public, a quarter head apart here.

    The first matrix of an MLP is transposed.
    """
    if name.endswith("c_fc"):
        return values.reshape((96, 384) if public else (384, 96)).T
    if not name.endswith("qk_w"):
        return values
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15])  # from 8 on they do not rotate
    return values.reshape(2, 6, 16, 96)[:, :, np.argsort(order) if public else order]


SHARDS = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
SHARDS |= dict(pack_0="pack/shard0", pack_1="pack/shard1")
RECORD = PublicRecord("2026-05-20_BigramsSignTrick", place, SHARDS, reorder)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers


def test_schedules(tmp_path: Path):
    RECORD.compare_schedules(tmp_path, schedule=dict(device="cpu", seed=0))


@pytest.mark.parametrize("first", [0, 914])
def test_optimizers(first: int, tmp_path: Path):
    """Take six steps from the first one on, and six across the untying."""
    cfg = RECORD.config(tmp_path, **STEPS)
    cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
    RECORD.compare_steps(SCRIPT.Trainer(cfg, SCRIPT.Ranks()), first, MEMBERS)


def test_states(tmp_path: Path):
    RECORD.compare_states(RECORD.trainer(tmp_path, **SMALL), STATES, 917, "mudd_sample")


def test_packing(tmp_path: Path):
    cfg = RECORD.config(tmp_path, **SMALL | dict(vocab_size=200, eot_token=199, bigram_rows=1280))
    RECORD.compare_packing(tmp_path, cfg, dict(bigram_rows=15 * 50304, sign_rows=8192), [256, 512, 768])


ROOT_11, B2 = 1.1**0.5, {"nets.out.b2": [0, -5, 0, 0, 0]}
B2["nets.last.b2"] = [*[0] * 6, 20, 20, 10 * ROOT_11, 10, 0, 0.5, 10 * ROOT_11, 10]
FIRST = B2 | dict(attn=[0.5, 1], skip_weights=-1.5, resid_lambdas=ROOT_11, post_lambdas=1)
STD = dict(embed=0.005, lm_head=0.005, value_embeds=0.01, w1=(3 * 96) ** -0.5)
STD |= dict.fromkeys(["qk_w", "v_w", "attn.c_proj", "c_fc"], 0.5 * 96**-0.5)


def test_first_values(tmp_path: Path):
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), FIRST | dict(bigram_lambda=0.05), STD)


STORED = dict(bfloat16=r"(embed|bigram_embed|value_embeds\.\d)\.weight|lm_head|nets\..*|.*gate")
STORED["float32"] = r".*(qk_w|v_w|c_proj|c_fc|lambdas?|xsa_alpha|skip_weights)"


def test_precision(tmp_path: Path):
    RECORD.check_precision(tmp_path, STORED, **SMALL)


@pytest.mark.parametrize("size", [8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)
