"""Draw docs/mask.png: python -m docs.draw_mask, in the root and with the extra `race`.

The picture shows what `document_block_mask` says of 8,192 tokens, with the windows of gpt2's second stage. The
documents are made up: 690 tokens on average, and cut as gpt2 cuts them.
"""

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from train_gpt import Hyperparameters, document_block_mask

STAGE, TOKENS = 1, 8192
KINDS = {"skipped": "0.92", "seen in part: masked token by token": "#8fc1e3", "seen whole: no mask": "#005b9f"}

cfg = Hyperparameters()
lengths = torch.empty(100).exponential_(1 / 690, generator=torch.Generator().manual_seed(1)).long() + 1
lengths = lengths.clamp(max=cfg.stages[STAGE].max_doc_len)
doc_ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[:TOKENS]
figure, N = Figure(figsize=(10.4, 5.6), layout="constrained"), TOKENS // cfg.block_size
panels = figure.subplots(1, 2, sharey=True)
for panel, name in zip(panels, ("long", "short"), strict=True):
    window = cfg.stages[STAGE].windows[name]
    mask = document_block_mask(doc_ids, torch.tensor(window, dtype=torch.int32), cfg.block_size)
    kinds = torch.zeros(N, N)
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    for kind, (counts, keys) in enumerate(lists, start=1):
        assert counts is not None
        assert keys is not None
        for query in range(N):
            kinds[query, keys[0, 0, query, : counts[0, 0, query]].long()] = kind
    panel.imshow(kinds, ListedColormap([*KINDS.values()]), extent=(0, TOKENS, TOKENS, 0))
    share = (kinds > 0).sum() / (N * (N + 1) / 2)
    panel.set_title(f"{name} window of {window:,} tokens: {share:.0%} of the causal blocks", fontsize=10)
    panel.set_xlabel("key token")
panels[0].set_ylabel("query token")
figure.suptitle(f"Blocks of {cfg.block_size} keys that each block of queries sees", fontsize=11)
patches = [Patch(facecolor=color, edgecolor="0.6", label=name) for name, color in KINDS.items()]
figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
figure.savefig(Path(__file__).parent / "mask.png", dpi=110)
