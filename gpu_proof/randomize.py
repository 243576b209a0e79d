"""Draw the parameters of a model, for tests and gpu_numbers."""

import torch


@torch.no_grad()
def randomize(gpt: torch.nn.Module) -> torch.nn.Module:
    """Draw every parameter: those that start at zero hide the rest."""
    for name, p in gpt.named_parameters():
        if p.ndim < 2:
            p.uniform_(0.5, 1.5)
        else:
            p.normal_(std=1 if "embed" in name else p.size(-1) ** -0.5)
        if name.endswith(("w2", "w2g", "gate_scale")):  # or factors that grow with the stream let it explode
            p.mul_(0.1)
    return gpt
