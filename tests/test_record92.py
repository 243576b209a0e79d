"""The root is equal in mathematics to public record 92: its schedules, to 1e-8, and a whole small run.

The run from data to the last validation has every mechanism; in it rounding grows to 1e-6. No number has FP8. Milestone
92's `golden.json` says what the public small model is; its other numbers held at commit 655ba79. `./test.sh --idea`
leaves all of it out.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as m
from data.shards import write_shard
from world_worker import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.published]
FOLDER = ROOT / "records" / "gpt2" / "92_ANVIL2"
RECORD92 = dataclasses.replace(m.PRESETS["gpt2"], num_iterations=1194, pointer_dim=0)  # the pointer came after it
H = 6
KINDS = ["xsa", "head_gate", "x0", "ngram", "skip"]  # the public order of factors: by kind, then by layer
# Public places of our factors of the nets `last` and `out`
LAST = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 9, 13, 10, 11]
OUT = [0, 1, 2, 4, 3, 5, 7, 6, 8, 9]
TABLES = ["1", "2", "8", "10"]  # layers with value embeddings


class Golden:
    """The numbers of a file."""

    def __init__(self, stem: str, file: str):
        self.info = json.loads((FOLDER / "golden.json").read_text())[stem]
        self.arrays = np.load(FOLDER / file)
        self.loaded: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.loaded:
            self.loaded[name] = self.arrays[name]
        return self.loaded[name]

    def compare(self, name: str, ours, index=...) -> None:
        """Compare an array, or its part at `index`, relative to the array's largest entry."""
        whole = self[name]
        theirs = whole[index]
        ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
        assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        if whole.dtype.kind != "f":
            assert np.array_equal(ours, theirs), name
            return
        worst = np.abs(ours - theirs).max(initial=0) / (np.abs(whole).max(initial=0) or 1)
        assert worst <= (1e-6 if name.startswith("run/") else 1e-8), (name, index, worst)


@pytest.fixture(scope="module")
def model() -> Golden:
    return Golden("model", "golden.npz")


@pytest.fixture(scope="module")
def optim() -> Golden:
    return Golden("optim", "golden_optim.npz")


# ---- Public names and layouts ----------------------------------------------------------------------------------------
def rotated(head_dim: int) -> np.ndarray:
    """Return the public channel of each of ours: the record rotates pairs (2 j, 2 j + 1), we (j, j + D / 4)."""
    n = head_dim // 4
    return np.array([2 * j for j in range(n)] + [2 * j + 1 for j in range(n)] + [*range(2 * n, head_dim)])


def factor_places(net) -> np.ndarray:
    """Return the public place of each factor of a net that layers share."""
    own = [(KINDS.index(kind), i, k) for (i, kind), count in net.sizes.items() for k in range(count)]
    order = sorted(own)
    return np.array([order.index(entry) for entry in own])


class Names:
    """Translate between our parameters and the public arrays."""

    def __init__(self, gpt, head_dim: int):
        self.turn = rotated(head_dim)
        self.nets = dict(early=gpt.gate_nets["0"], mid=gpt.gate_nets["4"])

    def to_public(self, ours: dict, rest: dict | None = None) -> dict[str, np.ndarray]:
        """Return ours under public names. rest: the public values of what we do not have; by default 0."""
        ours = {name: t.detach().numpy() if isinstance(t, torch.Tensor) else t for name, t in ours.items()}
        rest = rest or {}
        public: dict[str, np.ndarray] = {}
        for kind, shape in dict(attn=11, resid=11, post=11).items():
            key = f"{kind}_lambdas"
            rows = rest.get(key, np.zeros((shape, 2))).copy()
            for name, t in ours.items():
                if found := re.fullmatch(rf"blocks\.(\d+)\.({'attn.lambdas' if kind == 'attn' else key})", name):
                    rows[int(found[1])] = t
            public[key] = rows
        for name, t in ours.items():
            if name.endswith("qk_w"):
                v = ours[name.replace("qk_w", "v_w")]
                qk = t.reshape(2, H, -1, v.shape[1])
                back = np.argsort(self.turn)
                public[name.replace("qk_w", "qkv_w")] = np.concatenate([qk[:, :, back].reshape(2, *v.shape), v[None]])
            elif name.endswith(("lambdas", "v_w")):
                continue
            elif name.endswith(".c_fc"):
                public[self.rename(name)] = t.T
            elif found := re.fullmatch(r"(gate_nets\.\d+|blocks\.10\.mudd_net|head_net)\.(w1|w2|b2|w2g)", name):
                net = {"gate_nets.0": "gates.early", "gate_nets.4": "gates.mid", "head_net": "mudd.out"}
                net = net.get(found[1], "mudd.last")
                public[f"{net}.{found[2]}"] = t if found[2] == "w1" else t[np.argsort(self.order(net))]
            else:
                public[self.rename(name)] = t
        return public

    def order(self, net: str) -> np.ndarray:
        """Return the public place of each factor."""
        fixed = {"mudd.last": LAST, "mudd.out": OUT}
        return np.array(fixed[net]) if net in fixed else factor_places(self.nets[net.split(".")[1]])

    def rename(self, name: str) -> str:
        name = re.sub(r"value_embeds\.(\d+)", lambda found: f"value_embeds.{TABLES.index(found[1])}", name)
        name = name.replace("mlps.0", "mlp").replace("mlps.1", "mlp2").replace("blocks.6.skip", "skip")
        scalars = name.endswith(("lambda", "gate_scale", ".weight"))
        return name if scalars else f"{name}.weight"

    def load(self, trainer, public: dict[str, np.ndarray]) -> None:
        """Set parameters to public values, tables to their first rows."""
        gpt, table = trainer.gpt, trainer.table
        turn = self.turn

        @torch.no_grad()
        def put(p, x):
            p.copy_(torch.from_numpy(np.array(x[: len(p)] if p.ndim else x)).view(p.shape))

        with torch.no_grad():
            table.rows.copy_(torch.from_numpy(public["ngram_embed.weight"]))
        for name, p in gpt.named_parameters():
            if found := re.fullmatch(r"blocks\.(\d+)\.(attn\.lambdas|(resid|post)_lambdas)", name):
                key = "attn_lambdas" if "attn" in found[2] else found[2]
                put(p, public[key][int(found[1])])
            elif name.endswith("qk_w"):
                qk = public[name.replace("qk_w", "qkv_w")][:2]
                put(p, qk.reshape(2, H, -1, qk.shape[-1])[:, :, turn].reshape(p.shape))
            elif name.endswith("v_w"):
                put(p, public[name.replace("v_w", "qkv_w")][2])
            elif name.endswith(".c_fc"):
                put(p, public[self.rename(name)].T)
            elif found := re.fullmatch(r"(gate_nets\.\d+|blocks\.10\.mudd_net|head_net)\.(w1|w2|b2|w2g)", name):
                net = {"gate_nets.0": "gates.early", "gate_nets.4": "gates.mid", "head_net": "mudd.out"}
                net = net.get(found[1], "mudd.last")
                x = public[f"{net}.{found[2]}"]
                put(p, x if found[2] == "w1" else x[self.order(net)])
            elif name == "embed.weight" and name not in public:
                put(p, public["lm_head.weight"])
            else:
                put(p, public[self.rename(name)])
        for optimizer in trainer.optimizers:  # which keep values of their own
            if "values" in optimizer.state:
                optimizer.state["values"].copy_(optimizer.param_shard)


def start_of(golden: Golden) -> dict[str, np.ndarray]:
    """Return the public parameters before the first step, when the embedding is the head."""
    scale = golden.info["param_scale_log2"]
    names = [n for n in scale if f"param/{n}" in golden.arrays and n != "embed.weight"]
    return {n: golden[f"param/{n}"] * 2.0 ** -scale[n] for n in names}


def live(name: str, t: np.ndarray) -> np.ndarray:
    """Return what is read of a public array: half heads leave out the rest."""
    found = re.fullmatch(r"blocks\.(\d+)\.attn\.(qkv_w|c_proj\.weight)", name)
    if not found:
        return t.ravel()
    layer = m.GPT2_LAYERS[int(found[1])]
    v_parts = 1 + layer.half_v
    if found[2] == "c_proj.weight":
        return t.reshape(len(t), H, v_parts, -1)[:, :, 0].ravel()
    parts = [1 + layer.half_qk] * 2 + [v_parts]
    return np.concatenate([w.reshape(H, n, -1, t.shape[-1])[:, 0].ravel() for w, n in zip(t, parts, strict=True)])


def planned(cfg) -> tuple[dict, dict, dict, dict, list[int]]:
    """Return under public names what is planned: at all, of steps and the last validation, of steps, of tables' steps.

    Last come the steps at which tables are updated.
    """
    ends, N = m.stage_ends(cfg), cfg.num_iterations
    plans = [*cfg.plans, m.plan_validation(N, cfg)]
    names = "lm_head", "ngrams", "blocks.0.attn.qk_w", "value_embeds.1.weight"
    head, tables, muon, values = (m.group_of(name, cfg) for name in names)
    momenta = [plan.updates[muon.names].beta1 for plan in cfg.plans]
    slow = [plan.has_slow_momentum for plan in cfg.plans]
    of_steps = {
        "lr": [plan.updates[muon.names].rate / cfg.muon_lr for plan in cfg.plans],
        "batch_tokens": [plan.seq_len * 8 for plan in cfg.plans],
        "adam_step": [head.names in plan.updates for plan in cfg.plans],
        "table_step": [tables.names in plan.updates for plan in cfg.plans],
        "tied": [m.is_tied(plan.step, head, cfg) for plan in cfg.plans],
        "max_doc_len": [plan.max_doc_len for plan in cfg.plans],
        "rail_beta": momenta,
        "lookahead": momenta,
        "fast_beta": [0.85 if is_slow else momentum for is_slow, momentum in zip(slow, momenta, strict=True)],
        "fast_weight": [0.4385 if is_slow else 1.0 for is_slow in slow],
    }
    whole = {
        "boundaries": [*zip([0, *ends], ends, strict=False)],
        "split_step": max(plan.step for plan in cfg.plans if plan.ties),
    }
    chain = {
        "stage": [plan.stage for plan in plans],
        "window_short": [plan.windows["short"].reach for plan in plans],
        "window_long": [plan.windows["long"].reach for plan in plans],
        "candidates": [plan.candidates for plan in plans],
        "prefix_weight": [plan.prefix_weight for plan in plans],
        "mtp": [plan.next_weights + [0.0] * (3 - len(plan.next_weights)) for plan in plans],
        "mtp_count": [len(plan.next_weights) for plan in plans],
    }
    for width, kind in dict(wide="long", narrow="short").items():
        whole[f"yarn_freq_{width}"] = np.stack([windows[kind].frequencies for windows in m.plan_windows(cfg)])
        chain[f"attn_scale_{width}"] = [plan.windows[kind].attn_scale for plan in plans]
    due = {group: [plan.step for plan in cfg.plans if group.names in plan.updates] for group in (values, tables)}
    assert due[values] == due[tables]
    of_values, of_tables = ([plans[step].updates[group.names] for step in steps] for group, steps in due.items())
    lrs = [values.lr * plans[step].lr_factor for step in due[values]]
    sparse = {
        "value_embed_betas": [(update.beta1, update.beta2) for update in of_values],
        "table_wd_mult": [update.decay / lr**2 / 0.005 for update, lr in zip(of_values, lrs, strict=True)],
        "ngram_beta2": [update.beta2 for update in of_tables],
    }
    return whole, chain, of_steps, sparse, due[values]


def test_schedules(model, optim):
    """Of all steps, and the model's also of the last validation; updates where they are due."""
    cfg = dataclasses.replace(RECORD92, prefix_file="p")
    assert m.num_tokens(1194, cfg) == sum(plan.seq_len * 8 for plan in cfg.plans) == 328_663_040
    whole, chain, of_steps, sparse, due = planned(cfg)
    chain["stage"] = [stage + model["schedule/stage"][0] for stage in chain["stage"]]
    for golden in model, optim:
        known = {name.removeprefix("schedule/") for name in golden.arrays if name.startswith("schedule/")}
        parts = (whole, ...), (chain, ...), (of_steps, slice(cfg.num_iterations)), (sparse, due)
        for numbers, index in parts:
            for name, ours in numbers.items():
                if name in known:
                    golden.compare(f"schedule/{name}", ours, index)
                    known.remove(name)
        assert all(name.startswith("tick/") for name in known), known


def compare_ticks(golden: Golden, folder: str, cfg) -> None:
    """The files have the first row as the original does it: at odd steps, two rates in one."""
    N = cfg.num_iterations
    found = {}
    for i, row in enumerate(cfg.emas):
        rates = np.array([row.rate_at(s, N) for s in range(N)])
        assert rates[rates > 0][0] == 1  # the first copies
        found[i] = np.where(rates > 0, row.rate, -1)
    first, rate = np.flatnonzero(found[0] > 0)[0], cfg.emas[0].rate
    for s in range(first + 1, N):
        found[0][s] = rate if s == N - 1 else (1 - (1 - rate) ** 2 if s % 2 else -1)
    assert np.array_equal(found[3], found[4])
    for label, i in dict(tail_ema=0, tail_avg=1, value_embed_avg=2, bank_blend=3).items():
        golden.compare(f"{folder}/{label}", found[i])


def test_ticks(optim):
    compare_ticks(optim, "schedule/tick", RECORD92)


def test_hashes(model):
    cfg = RECORD92
    tokens = model["hash/tokens"].astype(np.int32)
    model.compare("hash/rows", m.find_ngrams(tokens, cfg))
    model.compare("hash/sign_rows", m.find_signs(tokens, cfg))


def test_prefixes(model):
    cfg = dataclasses.replace(RECORD92, prefix_file=f"{ROOT}/data/gpt2_prefixes.bin")
    table = np.pad(m.read_prefixes(cfg), (0, 47), constant_values=-1)
    info = model.info["prefix"]
    model.compare("prefix/values", table[model["prefix/ids"]])
    assert hashlib.sha256(table.astype("<i4")).hexdigest() == info["sha256_int32_le"]


# ---- A whole small run -----------------------------------------------------------------------------------------------
def run_config(optim, folder: Path):
    """Write the data of the run, and return its configuration."""
    c = optim.info["config"]["run"]
    for i in (0, 1):
        write_shard(folder / f"train_{i}.bin", optim[f"run/shard{i}"].astype(np.int64))
    write_shard(folder / "val.bin", optim["run/val_shard"].astype(np.int64))
    lens, unit = c["rank_lens"], c["window_unit"]
    more = {52: c["growth"], 20: c["extension"], 0: 0}
    stages = tuple(
        s._replace(
            more_steps=more[s.more_steps],
            batch=n / lens[0],
            max_doc_len=d,
            windows={kind: w * unit // 128 for kind, w in s.windows.items()},
            candidates=tuple(x or [0]),
        )
        for s, n, d, x in zip(m.GPT2_STAGES, lens, c["max_doc_len"], c["candidates"], strict=True)
    )
    w = c["average_windows"]
    windows = [w[n] for n in ("tail_ema", "tail_avg", "value_embed_avg", "bank_blend", "bank_blend")]
    rates = [2 / (windows[0] + 1), 4 / 53, 4 / 53, 2 / (windows[3] // 4 + 1), 2 / (windows[3] // 4 + 1)]
    rows = zip(m.GPT2_EMAS, windows, rates, strict=True)
    emas = tuple(row._replace(window=n, rate=rate) for row, n, rate in rows)
    up = (c["mlp_dim"] / c["model_dim"]) ** 0.5
    rates_of_mlps = {m.UP: up, 2 * m.UP: 2 * up}
    groups = tuple(row._replace(lr=rates_of_mlps.get(row.lr, row.lr)) for row in m.GPT2_GROUPS)
    prefixes = optim["run/prefix_table"]
    np.where(prefixes < 0, 65535, prefixes)[: c["vocab"]].astype("<u2").tofile(folder / "prefixes")
    optim["run/canon_mask"].tofile(folder / "canon")
    sizes = dict(vocab_size=c["vocab"], eot_token=c["eot"], model_dim=c["model_dim"], num_heads=c["num_heads"])
    sizes |= dict(head_dim=c["head_dim"], mlp_dim=c["mlp_dim"], net_dim=c["gate_dim"], ngram_rows=c["ngram_rows"])
    sizes |= dict(sign_rows=c["sign_rows"], segment=c["segment_cap"], block_size=16, final_window=20 * unit)
    sizes |= dict(train_seq_len=lens[0], batch_tokens=8 * lens[0], val_seq_len=c["val_len"], stages=stages)
    sizes |= dict(val_tokens=8 * c["val_batches"] * c["val_len"], num_iterations=c["steps"], emas=emas)
    sizes |= dict(momentum_warmup_steps=c["beta_warmup_steps"], momentum_cooldown_steps=c["beta_cooldown_steps"])
    sizes |= dict(slow_momentum_from=c["rail_engage_step"], rare_from=c["period4_start"], groups=groups)
    sizes |= dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val.bin", log_dir=str(folder))
    sizes |= dict(prefix_file=f"{folder}/prefixes", canon_file=f"{folder}/canon")
    fixed = dict(device="cpu", dtype="float64", seed=0, compile=False, run_id="golden")
    return m.resolve(dataclasses.replace(RECORD92, **fixed | sizes))


def start_run(optim, folder: Path):
    cfg = run_config(optim, folder)
    trainer = m.Trainer(cfg, m.Ranks())
    trainer.warm_up()
    trainer.gpt.signs.copy_(torch.from_numpy(optim["run/sign_pool"]))
    names = Names(trainer.gpt, cfg.head_dim)
    names.load(trainer, start_of(optim))
    return cfg, trainer, names, m.plan_data(cfg)


def test_a_whole_small_run(optim, tmp_path):
    c = optim.info["config"]["run"]
    cfg, trainer, names, data = start_run(optim, tmp_path)
    gpt, table = trainer.gpt, trainer.table
    public_names = optim.info["param_names"]
    start = start_of(optim)
    ends = m.stage_ends(cfg)
    assert [*map(list, zip([0, *ends], ends, strict=False))] == c["stage_steps"]
    optim.compare("run/val_steps", c["val_steps"])

    def digest(name, t):
        t = live(name, t)
        return np.array([t.sum(), np.linalg.norm(t), *t[c["digest_index"][name]]])

    def padded(name, t):
        """Return a table with the public rows of padding, which no token reads."""
        if name not in start or t.ndim < 2 or len(t) == len(start[name]):
            return t
        return np.concatenate([t, start[name][len(t) :]])

    step_grads = {n: torch.zeros_like(p) for n, p in gpt.named_parameters()}
    step_grads["ngram_embed.weight"] = sums = torch.zeros_like(table.rows)

    def add_to(total, rows=None):
        """Return a hook that adds a gradient, and returns nothing, so that the gradient stays."""

        def add(g):
            if rows is None:
                total.add_(g)
            else:
                total.index_add_(0, rows, g.flatten(0, 1))

        return add

    for name, p in gpt.named_parameters():
        if name not in gpt.tables:
            p.register_hook(add_to(step_grads[name]))
    gradients = trainer.gradients

    def with_rows(*args):  # whose gradients add up over steps, in place
        before = {name: sums.clone() for name, sums in gpt.row_sums.items()}
        result = gradients(*args)
        for name, sums in gpt.row_sums.items():
            step_grads[name] += sums - before[name]
        return result

    trainer.gradients = with_rows
    model, losses = trainer.model, []

    def observed(inputs, ngrams, settings, canon=None):
        loss = model(inputs, ngrams, settings, canon)
        if ngrams.requires_grad:
            losses.append(loss.item())
            ngrams.register_hook(add_to(sums, requests.ids[inputs.ngram_index.flatten()]))
        return loss

    trainer.model = observed
    steps = trainer.reader.read(m.train_cycles(data["train"], cfg))
    for step, (plan, (sequences, requests)) in enumerate(zip(cfg.plans, steps, strict=True)):
        if step in c["val_steps"]:
            loss = trainer.evaluate(step, data["val"])
            optim.compare("run/val_loss", loss, c["val_steps"].index(step))
        losses.clear()
        for g in step_grads.values():
            g.zero_()
        trainer.train_step(plan, sequences, requests)
        optim.compare("run/loss_sum_ranks", losses, step)
        grads = names.to_public(step_grads)
        optim.compare("run/grad_norm", [np.linalg.norm(grads[n]) / 8 for n in public_names], step)
        values = names.to_public(dict(gpt.named_parameters()) | {"ngram_embed.weight": table.rows}, start)
        for n in public_names:
            if n.startswith(("value_embeds", "embed", "lm_head")):
                values[n] = padded("lm_head.weight" if n == "embed.weight" else n, values[n])
            optim.compare(f"run/digest/{n}", digest(n, values[n]), step)
    trainer.model = model
    compare_ticks(optim, "run/tick", cfg)
    compare_state(optim, trainer, names, digest, start)
    compare_end(optim, trainer, names, data, digest, start, padded)


def compare_state(optim, trainer, names, digest, start):
    public_names = optim.info["param_names"]
    for key, ours in dict(fast="fast", slow="slow", m="exp_avg", v="exp_avg_sq").items():
        held = {}
        for o in trainer.optimizers:
            if ours in o.state:
                held |= zip(o.names, o.views(o.state[ours]), strict=True)
        found = names.to_public(held) if held else {}
        for n in public_names:
            if f"run/state/{key}/{n}" in optim.arrays:
                t = found[n]
                if n in start and t.ndim == 2 and len(t) < len(start[n]):
                    t = np.concatenate([t, np.zeros((len(start[n]) - len(t), t.shape[1]))])
                optim.compare(f"run/state/{key}/{n}", digest(n, t))
    optim.compare("run/state/v/ngram_rows", trainer.table.v.flatten())


def compare_end(optim, trainer, names, data, digest, start, padded):
    """Compare the endgame, with all that the public norms count: also what nothing reads, and layer 7's c_fc."""
    cfg, gpt = trainer.cfg, trainer.gpt
    N = cfg.num_iterations
    optim.compare("run/val_final_before_ship", trainer.evaluate(N, data["val"]))
    order = ["embed.weight", "lm_head", "blocks.0.mlps.0.c_fc", "blocks.0.attn.qk_w", "blocks.0.attn.v_w"]
    optimizers = [next(o for o in trainer.optimizers if n in o.names) for n in order]
    final = {n: p.detach().clone() for n, p in gpt.named_parameters()}
    frozen = optim["run/frozen_c_fc"] * 2.0 ** -optim.info["param_scale_log2"]["frozen_c_fc"]
    held = dict(gpt.named_parameters())
    # What finish() makes, before matrices get their norm back
    no_norm = [row._replace(same_norm=False) for row in cfg.emas]
    for o in trainer.optimizers:
        o.emas = {i: no_norm[i] for i in o.emas}
        o.finish()

    def norms(values):
        public = names.to_public(values, start)
        qkv = [t for n, t in public.items() if n.endswith("qkv_w")]
        groups = [[padded("lm_head.weight", public[n])] for n in ("embed.weight", "lm_head.weight")]
        groups.append([*(t for n, t in public.items() if ".mlp" in n), frozen])
        groups.append([t[:2] for t in qkv])
        groups.append([*(t[2] for t in qkv), *(t for n, t in public.items() if n.endswith("attn.c_proj.weight"))])
        return np.array([np.sqrt(sum(np.square(t).sum() for t in group)) for group in groups])

    before, after = norms(final), norms(held)
    optim.compare("run/norm_before", before)
    optim.compare("run/ratio", before / after)
    with torch.no_grad():
        for ratio, o in zip(before / after, optimizers, strict=True):
            for p in o.params:
                p.mul_(ratio)
    optim.compare("run/val_final", trainer.evaluate(N, data["val"]))
    values = names.to_public(dict(held), start)
    for n in optim.info["param_names"]:
        if f"run/shipped/{n}" in optim.arrays and n != "ngram_embed.weight":
            values[n] = padded("lm_head.weight" if n == "embed.weight" else n, values[n])
            optim.compare(f"run/shipped/{n}", digest(n, values[n]))
    optim.compare("run/shipped/ngram_embed.weight", digest("ngram_embed.weight", trainer.table.rows.numpy()))
    trainer.cfg = dataclasses.replace(cfg, canon_file="")
    optim.compare("run/val_final_unmasked", trainer.evaluate(N, data["val"]))
