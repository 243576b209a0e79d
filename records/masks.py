"""Draw the attention mask: which blocks of keys each block of queries sees in a sequence of a run's own data."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from records.logs import ToolError
from records.plots import new_figure, save

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from train_gpt import Hyperparameters

UNSEEN, PARTIAL, FULL = range(3)
COLOURS = ((0.93, 0.93, 0.93), (0.55, 0.76, 0.90), (0.0, 0.36, 0.62))  # of these three
DOCUMENT = "#D55E00"
NAMES = {"L": "long window", "S": "short window", "P": "paired heads, short window"}


def listed_blocks(mask: "BlockMask") -> "np.ndarray":
    """Read a BlockMask as its kernel does: (query blocks, key blocks) of UNSEEN, PARTIAL and FULL.

    Each row of indices is valid up to its count; the entries behind that are junk.
    """
    import numpy as np

    num_blocks = mask.kv_indices.size(-2)
    seen = np.full((num_blocks, num_blocks), UNSEEN, dtype=np.uint8)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for value, counts, indices in (
        (PARTIAL, mask.kv_num_blocks, mask.kv_indices),
        (FULL, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for query, (count, keys) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].numpy(), strict=True)):
            seen[query, keys[:count]] = value
    return seen


def read_sequence(cfg: "Hyperparameters", sequence: int) -> "Tensor":
    """Return the tokens of a validation sequence."""
    import torch

    import train_gpt

    number = cfg.val_tokens // cfg.val_seq_len
    if sequence >= number:
        raise ToolError(f"--sequence {sequence}: there are {number}, 0 to {number - 1}")
    plan = train_gpt.plan_batches(cfg.val_files, [cfg.val_seq_len] * (sequence + 1), 1, cfg)
    [[(tokens, _)]] = train_gpt.read_batches(plan[-1:], [0], cfg, torch.device("cpu"))
    return tokens


def block_masks(cfg: "Hyperparameters", tokens: "Tensor", windows: Sequence[int]) -> dict[str, "BlockMask"]:
    """Build the model's masks for FlexAttention, by their letter in `attention_layout`."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    import train_gpt

    with torch.device("meta"):  # no parameter is needed
        gpt = train_gpt.GPT(dataclasses.replace(cfg, device="cuda", dtype="float32"))
    masks = gpt.attention_masks(tokens, torch.tensor(windows, dtype=torch.int32))
    return {letter: mask for letter, mask in masks.items() if isinstance(mask, BlockMask)}


def plot_masks(flags: Sequence[str], sequence: int, path: Path) -> dict[str, Any]:
    """Draw the masks of the last validation of a run with these flags, and return what the picture shows."""
    import train_gpt

    try:
        cfg = train_gpt.parse_args(flags)
        tokens = read_sequence(cfg, sequence)
    except train_gpt.UserError as error:
        raise ToolError(str(error)) from None
    starts = (tokens == cfg.eot_token).nonzero().flatten().tolist()
    windows = train_gpt.attention_windows(cfg.num_iterations, cfg)
    what = f"validation sequence {sequence} at step {cfg.num_iterations}"
    found: dict[str, Any] = dict(preset=cfg.preset, what=what, block_size=cfg.block_size, windows=list(windows))
    found |= dict(num_tokens=len(tokens), documents=starts)
    edges = sorted({0, *starts, len(tokens)})
    masks = block_masks(cfg, tokens, windows)
    figure, panels = new_figure(len(masks), 5.2, 5.9, sharey=True)
    for panel, (letter, mask) in zip(panels, masks.items(), strict=True):
        seen = listed_blocks(mask)
        layers = [i for i, other in enumerate(cfg.attention_layout) if other == letter]
        partial, full = int((seen == PARTIAL).sum()), int((seen == FULL).sum())
        share = (partial + full) / (len(seen) * (len(seen) + 1) // 2)
        found[letter] = dict(layers=layers, partial=partial, full=full, share=share)
        draw_mask(panel, seen, edges)
        farthest = int((seen != UNSEEN).sum(1).max())
        of_tokens = farthest * cfg.block_size // (1 + (letter == "P"))  # two slots a token
        reach = f"at most {farthest} blocks = {of_tokens:,} tokens"
        panel.set_title(f"{NAMES[letter]}: {reach}, {share:.1%} of the causal blocks", fontsize=9)
    panels[0].set_ylabel("query token")
    add_legend(figure)
    figure.suptitle(f"Blocks of {cfg.block_size} keys that each query block sees: {cfg.preset}, {what}", fontsize=11)
    save(figure, path, found)
    for letter, mask in masks.items():  # too long for the picture's metadata
        found[letter]["blocks"] = ["".join(map(str, row)) for row in listed_blocks(mask).tolist()]
    return found


def draw_mask(panel, seen: "np.ndarray", edges: Sequence[int]) -> None:
    """Draw `seen` over tokens, and a triangle around each document's causal pairs."""
    import numpy as np

    colours = np.array(COLOURS)[seen]
    colours[np.triu_indices(len(seen), 1)] = 1  # the future
    size = edges[-1]
    panel.imshow(colours, extent=(0, size, size, 0), interpolation="nearest")
    for start, end in pairwise(edges):
        panel.plot([start, start, end, start], [start, end, end, start], color=DOCUMENT, linewidth=0.8)
    panel.grid(False)
    panel.set_xlabel("key token")
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.locator_params(nbins=5)


def add_legend(figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    meanings = ("not seen: skipped", "seen in part: masked token by token", "seen whole: no mask needed")
    patches = [Patch(facecolor=COLOURS[i], edgecolor="0.6", linewidth=0.5, label=meanings[i]) for i in range(3)][::-1]
    handles = [*patches, Line2D([], [], color=DOCUMENT, linewidth=0.8, label="a document's causal pairs")]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=4, fontsize=9)
