"""The preset mini: gpt2's rows in small, so that tests run every mechanism of gpt2 on a CPU.

Each kind of row is there once. It proves nothing for gpt2.
"""

from typing import Any

import train_gpt
from train_gpt import GPT2_EMAS, GPT2_STAGES, NANO, Hyperparameters, Layer

LAYERS = (
    Layer("paired", half_qk=True, gate_net=True, value_embed=True, x0=True, ngram_input=True),
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
TEXT = "train_files val_files vocab_size eot_token prefix_file canon_file "
TEXT += "val_logits_chunk device cpu_threads save_checkpoint"
MINI: dict[str, Any] = {name: NANO[name] for name in TEXT.split()} | dict(
    layers=LAYERS,
    stages=STAGES,
    emas=EMAS,
    preset="mini",
    target_loss=0.0,
    final_window=192,
    attn_scale=0.17,
    short_attn_scale=0.26,
    muon_lr=0.04,
)
# Its stages begin at steps 0, 2, 4, 16 and 16; updates of tables become rare at step 8, the slow momentum begins at 12.
# EMAs would begin earlier than the run
MINI |= dict(num_iterations=20, val_loss_every=8, batch_tokens=32, train_seq_len=16, max_attn_len=12)
MINI |= dict(val_seq_len=96, val_tokens=288, block_size=16, model_dim=24, num_heads=2, head_dim=12, mlp_dim=40)
MINI |= dict(gate_net_dim=6, ngram_rows=66, sign_rows=16, value_gate_inputs=6, smear_gate_inputs=6, logits_chunk=20)
MINI |= dict(momentum_warmup_steps=4, momentum_cooldown_steps=3, slow_momentum_from=12, long_interval_from=8)
MINI |= dict(pointer_dim=8, pointer_block=16, val_pointer_block=32, mix_groups=12, heads_per_matrix=2)
train_gpt.PRESETS["mini"] = Hyperparameters(**MINI)
