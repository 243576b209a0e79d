"""The root is equal to public record 92, to 1e-8: schedules, and a small run from data to the last validation."""

import dataclasses
import hashlib
from fnmatch import fnmatch

import numpy as np
import pytest
import torch

import train_gpt as m
from data.shards import write_shard
from golden import Golden
from speedrun import ROOT

pytestmark = pytest.mark.published
RECORD92 = dataclasses.replace(m.PRESETS["gpt2"], num_iterations=1194, pointer_dim=0)  # the pointer came after it
# What the averages rescale to its norm before: by names of parameters, and one of those that are updated together
NORMS = {
    "embed.weight": "embed.weight",
    "lm_head.weight": "lm_head.weight",
    "*.mlps.*": "blocks.0.mlps.0.c_fc",
    "*.qk_w": "blocks.0.attn.qk_w",
    "*.v_w *.attn.c_proj": "blocks.0.attn.v_w",
}


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden("92_ANVIL2")


def test_schedules(golden):
    cfg = dataclasses.replace(RECORD92, prefix_file="p")
    assert m.num_tokens(1194, cfg) == sum(schedule.seq_len * 8 for schedule in cfg.step_schedules) == 328_663_040
    golden.compare_schedule(cfg)


def test_hashes(golden):
    tokens = golden["hash/tokens"].astype(np.int32)
    golden.compare("hash/rows", m.ngram_row_ids(tokens, RECORD92))
    golden.compare("hash/sign_rows", m.sign_row_ids(tokens, RECORD92))


def test_prefixes(golden):
    cfg = dataclasses.replace(RECORD92, prefix_file=f"{ROOT}/data/gpt2_prefixes.bin")
    table = np.pad(m.read_prefixes(cfg), (0, 47), constant_values=-1).astype("<i4")
    assert hashlib.sha256(table).hexdigest() == golden.facts["prefixes_sha256"]


def name_there(name: str) -> str:
    """Return a parameter's name in golden.npz, which is older than the names of gates."""
    return name.replace("gates.resid", "resid_lambdas").replace("gates.post", "post_lambdas")


class SmallRun:
    """Train as the public run did, and sum up the gradients of each step."""

    def __init__(self, golden: Golden, folder):
        facts, self.golden = golden.facts, golden
        for name in "train_0", "train_1", "val":
            write_shard(folder / f"{name}.bin", golden[f"data/{name}"].astype(np.int64))
        golden["data/prefixes"].tofile(folder / "prefixes")
        golden["data/canon"].tofile(folder / "canon")
        files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val.bin", log_dir=str(folder))
        files |= dict(prefix_file=f"{folder}/prefixes", canon_file=f"{folder}/canon")
        tables = dict(stages=m.GPT2_STAGES, emas=m.GPT2_EMAS)
        for name, rows in tables.items():
            tables[name] = tuple(row._replace(**new) for row, new in zip(rows, facts[name], strict=True))
        up = (facts["config"]["mlp_dim"] / facts["config"]["model_dim"]) ** 0.5
        lr_mul_of = {m.MLP_LR_MUL: up, 2 * m.MLP_LR_MUL: 2 * up}
        tables["groups"] = tuple(row._replace(lr_mul=lr_mul_of.get(row.lr_mul, row.lr_mul)) for row in m.GPT2_GROUPS)
        fixed = dict(device="cpu", dtype="float64", seed=0, compile=False, run_id="golden")
        self.cfg = m.resolve(dataclasses.replace(RECORD92, **fixed | files | tables | facts["config"]))
        self.trainer = m.Trainer(self.cfg, m.Ranks())
        self.trainer.warm_up()
        gpt, table = self.trainer.gpt, self.trainer.table
        gpt.signs.copy_(golden.tensor("data/signs"))
        self.params = {name_there(name): p for name, p in gpt.named_parameters()} | {"ngrams": table.rows}
        with torch.no_grad():
            for name, p in self.params.items():
                start = "lm_head" if name in ("embed.weight", "lm_head.weight") else name
                p.copy_(golden.tensor(f"start/{start}"))
        for optimizer in self.trainer.optimizers:  # some have a master copy
            optimizer.master.copy_(optimizer.param_shard)
        self.grads = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.losses: list[float] = []
        self.add_gradients, self.trainer.run_add_gradients = self.trainer.run_add_gradients, self.observed

    def observed(self, inputs, attn_settings):
        """Do what a trainer does for a sequence, and keep its loss, and its gradients beside those before."""
        views = [
            pair for o in self.trainer.optimizers for pair in zip(map(name_there, o.names), o.grad_views, strict=True)
        ]
        ids, table = self.trainer.table.exchange.recv_ids, self.trainer.table
        before, rows_before = [view.clone() for _, view in views], table.grads.clone()
        loss = self.add_gradients(inputs, attn_settings)
        self.losses.append(loss.item())
        for (name, view), old in zip(views, before, strict=True):
            self.grads[name] += view - old
        self.grads["ngrams"].index_add_(0, ids, (table.grads - rows_before)[: len(ids)])
        return loss

    def digest(self, name: str, values: dict, rest: int = 1) -> np.ndarray:
        """Return sum, norm and some entries of an array of the record; rest: a factor on what we do not have of it."""
        t = torch.cat([values[ours].flatten() for ours in self.golden.facts["parameters"][name]]).detach().numpy()
        if f"live/{name}" in self.golden.arrays:
            t = t[self.golden[f"live/{name}"]]
        if f"rest/{name}" in self.golden.arrays:
            t = np.append(t, rest * self.golden[f"rest/{name}"].astype(float))
        return np.array([t.sum(), np.linalg.norm(t), *t[self.golden[f"index/{name}"]]])

    def evaluate(self, step: int) -> float:
        return self.trainer.evaluate(step)

    def norms(self) -> np.ndarray:
        """Return those of NORMS. The record's MLPs have a matrix that nothing reads."""
        norms = []
        for globs in NORMS:
            own = [p.flatten() for name, p in self.params.items() if any(fnmatch(name, glob) for glob in globs.split())]
            beside = [self.golden.tensor("frozen_c_fc").flatten()] if "mlps" in globs else []
            norms.append(torch.cat([*own, *beside]).norm().item())
        return np.array(norms)


@pytest.mark.slow
def test_a_whole_small_run(golden, tmp_path):
    run, names = SmallRun(golden, tmp_path), golden.facts["parameters"]
    cfg, trainer, val_steps = run.cfg, run.trainer, golden.facts["val_steps"]
    ends = m.stage_ends(cfg)
    assert [*map(list, zip([0, *ends], ends, strict=False))] == golden.facts["stage_steps"]
    steps = trainer.loader.steps(m.train_cycles(m.train_batches(cfg), cfg))
    for step, (schedule, inputs) in enumerate(zip(cfg.step_schedules, steps, strict=True)):
        if step in val_steps:
            golden.compare("val_loss", run.evaluate(step), val_steps.index(step))
        run.losses.clear()
        for total in run.grads.values():
            total.zero_()
        trainer.train_step(schedule, *inputs)
        golden.compare("loss", run.losses, step)
        norms = [torch.cat([run.grads[ours].flatten() for ours in names[name]]).norm() / 8 for name in names]
        golden.compare("grad_norm", norms, step)
        for name in names:
            golden.compare(f"digest/{name}", run.digest(name, run.params), step)
    golden.compare_ticks("tick", cfg)
    for kind in "fast", "slow", "exp_avg", "exp_avg_sq":
        state = {}
        for o in trainer.optimizers:
            state |= zip(map(name_there, o.names), o.views(o.state[kind]), strict=True) if kind in o.state else ()
        for name in names:
            if f"state/{kind}/{name}" in golden.arrays:
                golden.compare(f"state/{kind}/{name}", run.digest(name, state, rest=0))
    golden.compare("state/ngram_squares", trainer.table.v.flatten())
    compare_end(run)


def compare_end(run: SmallRun) -> None:
    """Compare what the averages make of the values, before and after matrices get their norms back."""
    cfg, trainer, golden, N = run.cfg, run.trainer, run.golden, run.cfg.num_iterations
    golden.compare("val_final_before_ship", run.evaluate(N))
    before = run.norms()
    for o in trainer.optimizers:
        o.groups = [row._replace(keep_norm=False) for row in o.groups]
        o.blend_emas()
    after = run.norms()
    golden.compare("norm_before", before)
    golden.compare("ratio", before / after)
    with torch.no_grad():
        for ratio, member in zip(before / after, NORMS.values(), strict=True):
            for p in next(o for o in trainer.optimizers if member in o.names).params:
                p.mul_(ratio)
    golden.compare("val_final", run.evaluate(N))
    for name in golden.facts["parameters"]:
        if f"shipped/{name}" in golden.arrays:
            golden.compare(f"shipped/{name}", run.digest(name, run.params))
    trainer.cfg = dataclasses.replace(cfg, canon_file="")
    golden.compare("val_final_unmasked", run.evaluate(N))
