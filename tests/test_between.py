"""A record that only carries ideas of gpt2 is, without them, the record before: one training, to rounding.

One of them carries no idea, but another form: its presets are those of the record before, here gpt2's.
"""

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from public_records import load
from test_records import TUNED, UNTIMED

pytestmark = pytest.mark.slow  # these scripts are frozen
SMALL = dict(vocab_size=257, eot_token=256, model_dim=16, num_heads=2, head_dim=8, block_size=8, max_doc_len=40)
SMALL |= dict(train_seq_len=64, batch_tokens=64, val_seq_len=128, val_tokens=128, num_iterations=12, val_loss_every=0)
SMALL |= dict(extension_steps=3, final_window_tokens=120, momentum_warmup_steps=4, momentum_cooldown_steps=3)
SMALL |= dict(device="cpu", dtype="float64", cpu_threads=1, seed=1)
# Settings of both where an idea has no switch: NorMuon's axis and the optimizer of the smear's gate, gates of 55
BOTH = dict(CautiousAdam=dict(muon_beta2=0.0, gate_inputs=0), VeSkipGates=dict(gate_inputs=0))
# Settings that turn an idea off, other than nano's
WITHOUT = dict(SteppedWindows=dict(window_tokens=(108,)), BatchSizeSchedule=dict(stage_growth=(1, 1, 1, 1)))
WITHOUT |= dict(CautiousAdam=dict(scalar_beta1=0.65, scalar_beta2=0.95))
*IDEAS, _, _, FORM, _ = itertools.pairwise([TUNED, *UNTIMED])  # the last is nano's


def small(m: ModuleType, folder: Path, **changes):
    """Return the preset gpt2 with what of SMALL it has, and with windows of a sixteenth."""
    preset, windows = m.PRESETS["gpt2"], m.PRESETS["gpt2"].window_tokens
    windows = tuple(tokens // 16 for tokens in windows) if isinstance(windows, tuple) else windows // 16
    changes |= dict(train_files=f"{folder}/script.bin", val_files=f"{folder}/script_val.bin", window_tokens=windows)
    known = {name: value for name, value in (SMALL | changes).items() if hasattr(preset, name)}
    return m.resolve(dataclasses.replace(preset, **known))


def losses(m: ModuleType, cfg) -> list[float]:
    """Train, and return the losses of all steps and of the last validation."""
    trainer, log = m.Trainer(cfg, m.Ranks()), m.RunLog(cfg, is_main=False)
    with mock.patch.object(m, "gc"):
        m.train(trainer, m.plan_data(cfg), log)
    return [loss for curve in log.curves.values() for _, loss, _ in curve]


@pytest.mark.parametrize(("older", "newer"), [*IDEAS, FORM])
def test_without_its_ideas_a_record_is_the_one_before(older: str, newer: str, corpus: Path):
    before, after, idea = load(older), load(newer), newer[11:]
    cfg = small(before, corpus, **BOTH.get(idea, {}))
    without = dataclasses.asdict(after.PRESETS["nano"]) | dataclasses.asdict(cfg) | WITHOUT.get(idea, {})
    same = small(after, corpus) if (older, newer) == FORM else after.Hyperparameters(**without)
    expected = losses(before, cfg)
    assert losses(after, same) == pytest.approx(expected, rel=0, abs=1e-12 if (older, newer) == FORM else 1e-9)
    assert expected[11] < expected[0] - 0.5
