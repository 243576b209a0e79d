"""BigramsSignTrick is equal in mathematics to public record 83: every number that we have of it, to 1e-8 or better."""

import re

import numpy as np
import pytest

import test_record65
from public_records import WholeRecord, load

pytestmark = pytest.mark.slow
BEFORE = test_record65.TestRecord


class TestRecord(WholeRecord):
    record = "2026-05-20_BigramsSignTrick"
    script = load(record)
    shards = BEFORE.shards | dict(pack_0="pack/shard0", pack_1="pack/shard1")
    small = {name: value for name, value in BEFORE.small.items() if name != "block_size"}
    small |= dict(mask_block=16, bigram_rows=1920, bigram_dim=24, sign_rows=32)
    run = {name: value for name, value in BEFORE.run.items() if name not in ("block_size", "cooldown_frac")}
    run |= dict(mask_block=4, max_doc_len=(28, 64, 64, 64))
    steps = dict(vocab_size=32, eot_token=31, num_heads=4, head_dim=4, model_dim=16, bigram_rows=480, bigram_dim=4)
    # As many factors as the public arrays have, with those that no layer uses
    steps |= dict(attention_layout="S" * 14, source_layout="." * 14, xsa_layout="x" * 14, skip_layout="." * 13 + "3")
    steps |= dict(value_embed_layout=".01234" + "." * 8, mudd_layers="7" + "3" * 10)
    across, hashes = 914, dict(bigram_rows=15 * 50304, sign_rows=8192)
    states = dict(s1=200, val_s1=250, s2=640, val_s2=750, s3_tied=917, s3=1100, val_s3=1250, ext=1380, val_final=1385)
    last_tied, nets = 917, "mudd_sample"
    members = {"attn.qkv_w": r"blocks\.0\.attn\.(qk|v)_w", "value_embeds": "value_embeds.*"}
    members |= {f"{kind}.weight": rf"blocks\.0\.{kind}" for kind in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    members |= {f"{kind}.weight": rf"{kind}(\.weight)?" for kind in ("embed", "bigram_embed", "lm_head")}
    members |= {f"{kind}.weight": kind for kind in ("smear_gate", "skip_gate")}
    members |= dict(attn_gates=r".*\.gate", value_gates=r".*\.value_gate", xsa_alphas=r".*xsa_alpha")
    members |= {f"{kind}_lambdas": rf".*\.{kind}_lambdas?" for kind in ("resid", "post", "x0", "bigram")}
    members |= {f"mudd_{kind}": rf".*\.{kind}" for kind in ("w1", "w2", "b2")}
    members["scalars"] = r".*attn\.lambdas|smear_lambda|skip_weights"
    root_11 = 1.1**0.5
    first = dict(attn=[0.5, 1], skip_weights=-1.5, resid_lambdas=root_11, post_lambdas=1, bigram_lambda=0.05)
    first |= {"nets.out.b2": [0, -5, 0, 0, 0]}
    first["nets.last.b2"] = [*[0] * 6, 20, 20, 10 * root_11, 10, 0, 0.5, 10 * root_11, 10]
    std = BEFORE.std | dict(value_embeds=0.01, w1=(3 * 96) ** -0.5)
    std |= dict.fromkeys(["qk_w", "v_w"], 0.5 * 96**-0.5)
    stored = dict(bfloat16=r"(embed|bigram_embed|value_embeds\.\d)\.weight|lm_head|nets\..*|.*gate")
    stored["float32"] = r".*(qk_w|v_w|c_proj|c_fc|lambdas?|xsa_alpha|skip_weights)"

    def place(self, name: str) -> tuple[str, int]:
        scalars = r"blocks\.(\d+)\.(?:(resid|post|x0|bigram)_lambdas?|(attn)\.lambdas|attn.(xsa)_alpha)"
        if found := re.fullmatch(scalars, name):
            return f"{found[2] or found[3]}_lambdas" if not found[4] else "xsa_alphas", int(found[1])
        if name.endswith(("qk_w", "v_w")):
            return re.sub("qk_w|v_w", "qkv_w", name), 2 * 96 * 96 * name.endswith("v_w")
        name = name.replace("skip_weights", "skip_lambda").replace("nets.", "mudd.")
        return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0

    def reorder(self, name: str, values: np.ndarray, public: bool) -> np.ndarray:
        """Reorder queries and keys: what rotates together are neighbours in public, a quarter of a head apart here.

        The first matrix of an MLP is transposed.
        """
        if name.endswith("c_fc"):
            return values.reshape((96, 384) if public else (384, 96)).T
        if not name.endswith("qk_w"):
            return values
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15])  # from 8 on they do not rotate
        return values.reshape(2, 6, 16, 96)[:, :, np.argsort(order) if public else order]
