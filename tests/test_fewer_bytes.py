"""The records about gpt2's speed on GPUs, FewerBytes and those after it, train as ThreeTables does.

In float64 they are equal to 1e-10, with 1, 2, 3 and 8 processes. In bf16 they round elsewhere: their losses differ from
ThreeTables' by less than twice what its own do if initial values change by half a bf16 step.
Learning rates are so small there that this shows the forward passes alone. What bf16 does to the backward passes and to
Muon's step is in test_gpu.py, which CPUs run, too, in test_head.py and in test_optimizers.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from public_records import load
from test_three_tables import config, randomize, run, write_text
from world_worker import Run

pytestmark = pytest.mark.slow  # these scripts are frozen
BEFORE = "2026-11-25_ThreeTables"
NEWER = "2026-11-26_FewerBytes", "2026-11-26_HalfTraffic", "2026-11-26_FusedMLP", "2026-11-26_FewerPasses"


def train(ranks: tuple, name: str, dtype: str, sequences: int | str, folder: str, noise: float = 0.0) -> dict:
    """Train a small gpt2 as one of the processes. Rank 0 saves losses and parameters under the number of processes."""
    m = load(name)
    ranks = m.Ranks(*ranks)
    if ranks.world_size > 1:
        m.init_distributed()
    rate = 1e-3  # at gpt2's own rates rounding grows up to a hundredfold a step
    trainer = m.Trainer(config(m, "gpt2", dtype, Path(folder), rate, batch_tokens=64 * int(sequences)), ranks)

    @torch.no_grad()
    def change(gpt: torch.nn.Module) -> None:
        randomize(gpt)
        generator = torch.Generator().manual_seed(4)
        for p in gpt.parameters():
            p.mul_(1 + noise * (2 * torch.rand(p.shape, generator=generator) - 1))
        for optimizer in trainer.optimizers:
            if "values" in optimizer.state:
                optimizer.state["values"].copy_(optimizer.param_shard)

    losses = run(m, trainer, change)
    found = dict(losses=losses, params={name: p.detach() for name, p in trainer.gpt.named_parameters()})
    if ranks.world_size > 1:
        if ranks.rank == 0:
            torch.save(found, f"{folder}/{name} {ranks.world_size}.pt")
        torch.distributed.destroy_process_group()
    return found


def test_in_float64_they_are_equal_with_any_number_of_processes(tmp_path: Path):
    write_text(tmp_path)
    newest, sequences = NEWER[-1], {2: 8, 3: 6, 8: 8}  # of a step, by the number of processes

    def start(n: int) -> Run:
        return Run([[newest, "float64", sequences[n], tmp_path]] * n, tmp_path / f"{n}", target=train)

    runs = {n: start(n) for n in (2, 3)}
    expected = {n: train((), BEFORE, "float64", n, tmp_path) for n in (6, 8)}
    found = [(name, 8, train((), name, "float64", 8, tmp_path)) for name in NEWER]
    for n in sequences:
        several = runs.get(n) or start(n)  # eight only when the others have ended
        assert several.wait(timeout=300) == [0] * n, several.text("err")
        found.append((f"{newest} {n}", sequences[n], torch.load(tmp_path / f"{newest} {n}.pt")))
    for name, number, own in found:
        want = expected[number]
        assert want["losses"][-1] != want["losses"][0]
        np.testing.assert_allclose(own["losses"], want["losses"], rtol=1e-10, err_msg=name)
        assert own["params"].keys() == want["params"].keys()
        for parameter, values in want["params"].items():
            assert (own["params"][parameter] - values).norm() <= 1e-8 * values.norm(), (name, parameter)


def test_in_bf16_they_differ_less_than_rounding_does(tmp_path: Path):
    write_text(tmp_path)
    before, moved = (np.array(train((), BEFORE, "bfloat16", 6, tmp_path, x)["losses"]) for x in (0.0, 2**-9))
    for name in NEWER:
        losses = np.array(train((), name, "bfloat16", 6, tmp_path)["losses"])
        assert np.abs(losses - before).mean() <= 2 * np.abs(moved - before).mean(), name
