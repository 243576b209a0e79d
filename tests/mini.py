"""The preset mini: gpt2's rows in small, so that tests run every mechanism of gpt2 on a CPU.

Each kind of row is there once. It proves nothing for gpt2.
"""

from typing import Any

import train_gpt
from train_gpt import GPT2_EMAS, GPT2_STAGES, NANO, Hyperparameters, Layer

LAYERS = (
    Layer("paired", half_qk=True, gate_net=True, value_embed=True, x0=True, ngram=True),
    Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True, mlps=2),
    Layer("long", xsa=True, head_gate=True),
    Layer(None, gate_net=True, skip=1, x0=True, mlps=0),
    Layer("long", value_embed=True, attn_input=3, head_gate=True, x0=True, ngram=True, mudd=3, head_mix=(3, 2, 1)),
)
STAGES = tuple(
    stage._replace(
        max_doc_len=stage.max_doc_len // 2,
        windows={kind: tokens // 8 for kind, tokens in stage.windows.items()},
        extra_steps=stage.extra_steps // 5,
        sampled_classes=tuple(min(count, 192) for count in stage.sampled_classes),
    )
    for stage in GPT2_STAGES
)
EMAS = tuple(row._replace(window=row.window // 6, rate=6 * row.rate) for row in GPT2_EMAS)
TEXT = "train_files val_files vocab_size eot_token prefix_file canon_file val_loss_every val_seq_len "
TEXT += "val_lm_head_slice device cpu_threads save_checkpoint"
MINI: dict[str, Any] = {name: NANO[name] for name in TEXT.split()} | dict(
    layers=LAYERS,
    stages=STAGES,
    emas=EMAS,
    batch_tokens=1024,
    lm_head_slice=1024,
    train_seq_len=1024,
    preset="mini",
    val_tokens=65_536,
    target_loss=0.0,
    num_iterations=182,
    segment=1280,
    final_window=192,
    model_dim=96,
    head_dim=16,
    mlp_dim=352,
    gate_net_dim=16,
    block_size=32,
    attn_scale=0.17,
    short_attn_scale=0.26,
    ngram_rows=16384,
    pointer_dim=16,
    pointer_block=256,
    val_pointer_block=1024,
    muon_lr=0.04,
    momentum_warmup_steps=30,
    momentum_cooldown_steps=5,
    slow_momentum_from=78,
    long_interval_from=52,
)
train_gpt.PRESETS["mini"] = Hyperparameters(**MINI)
