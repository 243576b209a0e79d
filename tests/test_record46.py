"""BatchSizeSchedule is equal in mathematics to public record 46: every number that we have of it, to 1e-8 or better.

Our 11 layers are the public layers 1 to 11: layer 0 is empty there.
"""

import re
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from public_records import PublicRecord, like
from test_attention import as_dense

SMALL = dict(vocab_size=120, eot_token=119, num_heads=2, head_dim=12, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=1024, val_tokens=1024, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=12, extension_steps=3, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=192, batch_tokens=8 * 192, val_seq_len=576)
RUN |= dict(val_tokens=2 * 8 * 576, momentum_warmup_steps=4, momentum_cooldown_steps=3)


def role(name: str) -> str:
    name = re.sub(r"blocks\.(\d+)", lambda i: f"blocks.{int(i[1]) + 1}", name).replace("skip_weights", "skip_weight")
    return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "lm_head"))


SHARDS = {name: f"packing/{name}" for name in ("train_shard_0", "train_shard_1", "train_shard_2", "val_shard")}
RECORD = PublicRecord("2025-11-29_BatchSizeSchedule", role, SHARDS)
SCRIPT = RECORD.load()


def check_schedules(m: types.ModuleType, folder: Path) -> None:
    cfg, steps = RECORD.config(m, folder, device="cpu", seed=0), range(2160)
    windows = np.array([m.attention_windows(s, cfg) for s in range(2161)])
    rotary = [m.rotary_frequencies(stage, cfg, torch.float64) for stage in range(4)]
    found = {name: [getattr(m, name)(s, cfg) for s in steps] for name in ("lr_multiplier", "muon_momentum")}
    found |= dict(batch_tokens=[8 * m.train_seq_len(s, cfg) for s in steps], max_doc_len=[cfg.max_doc_len] * 2160)
    found |= dict(stage=[m.stage_of(s, cfg) for s in steps], adam_steps=[s % cfg.adam_every == 1 for s in steps])
    found |= dict(window_long_tokens=windows[:, 0], window_short_tokens=windows[:, 1])
    found |= dict(attention_scale=[rotary[m.stage_of(s, cfg)][1] for s in range(2161)])
    RECORD.compare("schedule", **found, rotary_frequencies=[np.pad(f.numpy(), (0, 32)) for f, _ in rotary])


def check_optimizers(m: types.ModuleType, folder: Path) -> None:
    """Take six steps from step 698 on with given gradients, the moments being zero before; Adam counts from 1."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
    RECORD.load_parameters(trainer.gpt)
    params = {
        name: p for name, p in trainer.gpt.named_parameters() if f"optimizer/0/grad/{role(name)}" in RECORD.numbers
    }
    assert len(params) == 13
    for t, step in enumerate(RECORD.numbers["optimizer/steps"]):
        now = {name: getattr(m, name)(step, trainer.cfg) for name in ("lr_multiplier", "muon_momentum")}
        RECORD.compare(f"optimizer/{t}", **now)
        for p in trainer.gpt.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in params.items():
            p.grad += like(p, RECORD.numbers[f"optimizer/{t}/grad/{role(name)}"])
        before = {name: p.detach().clone() for name, p in params.items()}
        with mock.patch.multiple(m, **{name: lambda *_, value=value: value for name, value in now.items()}):
            m.step_optimizers(trainer.optimizers, t)
        for name, p in params.items():
            if (key := f"optimizer/{t}/param/{role(name)}") in RECORD.numbers:
                RECORD.compare_digest(key, name, p)
            else:
                assert torch.equal(p, before[name]), f"Adam waits at even steps: {name}"


def check_stages(m: types.ModuleType, folder: Path) -> None:
    """Compare losses, every gradient and validations, from random parameters."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
    gpt, rotary, windows = trainer.gpt, trainer.gpt.rotary, trainer.windows
    RECORD.load_parameters(gpt)
    for step, family in {0: "stage1", 707: "stage2", 1414: "stage3", 2120: "stage4", 2160: "final"}.items():
        trainer.set_schedules(step)
        with torch.no_grad():
            loss = gpt(RECORD.tokens("val/tokens"), RECORD.tokens("val/targets"), windows)
        RECORD.compare(family, windows_tokens=windows, val_loss=loss / 1024)
        if family != "final":
            RECORD.compare(family, rotary_frequencies=rotary.sin[1].asin(), attention_scale=rotary.scale)
            tokens = RECORD.tokens(f"{family}/tokens")
            RECORD.compare_documents(tokens, f"{family}/cu_seqlens")
            loss = gpt(tokens, RECORD.tokens(f"{family}/targets"), windows)
            loss.backward()
            RECORD.compare(family, loss_sum=loss.item(), loss_mean=loss.item() / len(tokens))
            for name, p in gpt.named_parameters():
                RECORD.compare_digest(f"{family}/grad/{role(name)}", name, p.grad)
            gpt.zero_grad()


def check_packing(m: types.ModuleType, folder: Path) -> None:
    cfg = RECORD.config(m, folder, **RUN)
    plans, cpu = m.plan_data(cfg), torch.device("cpu")
    for step, batch in enumerate(m.read_batches(plans["train"], range(8), cfg, cpu)):
        inputs, targets = (torch.stack(rows) for rows in zip(*batch, strict=True))
        RECORD.compare(f"packing/{step}", inputs=inputs, targets=targets)
        for rank, tokens in enumerate(inputs):
            RECORD.compare_documents(tokens, f"packing/{step}/cu_seqlens", rank)
    assert step == 11
    validation = torch.stack([tokens for [(tokens, _)] in m.read_batches(plans["val"], [0], cfg, cpu)])
    RECORD.compare("packing/val0", inputs=validation[:8])
    RECORD.compare("packing/val1", inputs=validation[8:])


def check_run(m: types.ModuleType, folder: Path, ranks=None) -> None:
    """Train from data to the last validation, after a warm-up, as one of any number of processes."""
    cfg, ranks = RECORD.config(m, folder, **RUN), ranks or m.Ranks()
    trainer, plans, losses, validations = m.Trainer(cfg, ranks), m.plan_data(cfg), [], []
    trainer.warm_up()
    RECORD.load_parameters(trainer.gpt)
    batches = m.read_batches(plans["train"], range(ranks.rank, 8, ranks.world_size), cfg, trainer.device)
    for step in range(13):
        validations += [trainer.evaluate(step, plans["val"])] if step in RECORD.numbers["run/val_steps"] else []
        losses += [trainer.train_step(step, next(batches)).item()] if step < 12 else []
        for name, p in trainer.gpt.named_parameters():
            if (key := f"run/{step}/digest/{role(name)}") in RECORD.numbers:
                RECORD.compare_digest(key, name, p)
    found = {name: [getattr(m, name)(s, cfg) for s in range(12)] for name in ("lr_multiplier", "muon_momentum")}
    windows = np.array([m.attention_windows(s, cfg) for s in range(13)]) // cfg.block_size
    RECORD.compare("run", **found, train_loss_mean=losses, val_loss=validations)
    RECORD.compare("run", window_long_blocks=windows[:, 0], window_short_blocks=windows[:, 1])


CHECKS = [check_schedules, check_optimizers, check_packing, check_stages, check_run]


@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_those_of_the_public_record(check, tmp_path: Path):
    check(SCRIPT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


# Replacements in the script, by the check that notices them
FAULTS = {
    check_schedules: {
        "extension one step late": [("parts * step //", "parts * (step - (step == cfg.scheduled_steps)) //")],
        "rates that rise with the stages": [("(0.33, 0.66)", "(1 / 3, 2 / 3)")],
    },
    check_optimizers: {
        "decay on the wrong side": [("(update * p >= 0)", "(update * p <= 0)")],
        "NorMuon without its axis": [("square().mean(-2, keepdim=True)", "square().mean((-2, -1), keepdim=True)")],
        "Adam at even steps": [("(step + 1) % optimizer.every", "step % optimizer.every")],
    },
    check_packing: {
        "documents one token longer": [("begins + max_doc_len", "begins + max_doc_len + 1")],
    },
    check_stages: {
        "wrong layer of the skip": [('"......3...."', '"......4...."')],
        "wrong layer of a value embedding": [('"12......012"', '"12......021"')],
        "wrong layer of the backout": [('backout_layer: str = "7"', 'backout_layer: str = "8"')],
        "heads without gates": [("self.gate).sigmoid()[:, :, None]", "self.gate).sigmoid()[:, :, None] ** 0")],
        "smear without its gate": [("self.smear_lambda * gate *", "self.smear_lambda * gate**0 *")],
        "window one token too short": [("(q - kv <= window)", "(q - kv < window)")],
        "window one token too long": [("(q - kv <= window)", "(q - kv <= window + 1)")],
        "YaRN for the last window": [
            ("if self.stage != stage_of(step, self.cfg):", "if True:"),
            ("set_stage(self.stage, self.cfg)", "set_stage(self.stage + (step == self.cfg.num_iterations), self.cfg)"),
            ("cfg.window_tokens[: stage + 1]", "(*cfg.window_tokens, cfg.final_window_tokens)[: stage + 1]"),
        ],
    },
    check_run: {
        "mean loss": [('"mean"] = "sum"', '"mean"] = "mean"')],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults])
def test_a_planted_fault_is_noticed(check, fault: str, tmp_path: Path):
    with pytest.raises(AssertionError):
        check(RECORD.faulty(FAULTS[check][fault]), tmp_path)


def test_every_parameter_has_the_optimizer_and_the_first_values_of_the_public_record(tmp_path: Path):
    """With weights 1, let a zero gradient show Muon's decay of rate 1.2 lr, then a gradient 1 Adam's rate and betas."""
    adam = {"embed|value_embeds": 0.6, "lm_head": 0.008, "lambdas|skip_weights|smear_lambda|backout_lambda": 0.04}
    rates = adam | {"qkv_w|c_proj|gate|smear_gate": 0.023, "c_fc": 0.046}
    bound, trainer = (0.75 / 24) ** 0.5, SCRIPT.Trainer(RECORD.config(SCRIPT, tmp_path, **SMALL), SCRIPT.Ranks())
    first = dict(skip_weights=[-1.5], smear_lambda=0, backout_lambda=0.5, lambdas=[1.1, 0], attention=[0.5, 0.5])
    for name, p in trainer.gpt.named_parameters():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if p.ndim < 2:
            assert p.tolist() == pytest.approx(first["attention" if "attn" in name else kind])
        elif "embed" in name:
            assert (p.mean().item(), p.std().item()) == (pytest.approx(0, abs=0.1), pytest.approx(1, abs=0.05))
        else:
            assert p.abs().max().item() == pytest.approx(bound * (kind in ("qkv_w", "c_fc")), rel=0.02)
        p.detach().fill_(1)
    for step, slope in (1, 0), (3, 1):
        for p in trainer.gpt.parameters():
            p.grad = torch.full_like(p, slope)
        SCRIPT.step_optimizers(trainer.optimizers, step)
        for name, p in trainer.gpt.named_parameters():
            ((kinds, rate),) = (pair for pair in rates.items() if set(pair[0].split("|")) & set(name.split(".")))
            change = rate * (1 - 0.95**2) ** 0.5 / (1 - 0.65**2) * slope * 0.35 / (0.05**0.5 + 1e-8)
            if kinds in adam or not slope:
                change = change if kinds in adam else rate * 1.2 * 0.023
                assert p.flatten()[[0, -1]].tolist() == pytest.approx([1 - change] * 2, abs=1e-8 * rate), name
    with torch.device("meta"):
        gpt = SCRIPT.GPT(RECORD.config(SCRIPT, tmp_path, device="cpu", dtype="bfloat16"))
    unread = 4 * 47 * 768 + 64 - 45  # of the public record: rows of embeddings, and scalars
    assert sum(p.numel() for p in gpt.parameters()) == 268_665_628 - unread
    assert sum(p.numel() for name, p in gpt.named_parameters() if re.search("qkv_w|c_fc|c_proj", name)) == 75_497_472


def test_blocks_follow_from_windows_in_tokens():
    """List no block too few and none too many, and as full those that need no mask, for windows of any size."""
    document, q, kv = (torch.arange(96) % 37 == 5).cumsum(0), torch.arange(96)[:, None], torch.arange(96)[None, :]
    for window in range(50):
        mask = SCRIPT.document_block_mask(document.int(), torch.tensor(window, dtype=torch.int32), 8)
        dense = (q >= kv) & (q - kv <= window) & (document[q] == document[kv])
        blocks = dense.view(12, 8, 12, 8).transpose(1, 2).flatten(2)
        assert torch.equal(as_dense(mask, "full_"), blocks.all(-1))
        assert torch.equal(as_dense(mask, ""), blocks.any(-1) & ~blocks.all(-1))


@pytest.mark.slow
def test_no_graph_is_compiled_after_the_warm_up(tmp_path: Path):
    """Expect one for each length of sequences, one of validation, and one for each shape of Muon's matrices."""
    assert RECORD.count_graphs(SCRIPT, tmp_path, RUN) == (3 + 1 + 4, 3 + 1 + 4)
