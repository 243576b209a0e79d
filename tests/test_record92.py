"""The root is equal in mathematics to public record 92: every number that we have of it.

To 1e-8, and to 1e-6 in a whole small run, in which rounding grows. None of them has FP8. `golden.json` beside the
record says what the public small models are. `./test.sh --idea` leaves all of it out.
"""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as m
from shards import write_shard
from world_worker import ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.published]
FOLDER = ROOT / "records" / "gpt2" / "92_ANVIL2"
INFO = json.loads((FOLDER / "golden.json").read_text())
H = 6
KINDS = ["xsa", "head_gate", "x0", "ngram", "skip"]  # the public order of factors: by kind, then by layer
# Public places of our factors of the nets `last` and `out`
LAST = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 9, 13, 10, 11]
OUT = [0, 1, 2, 4, 3, 5, 7, 6, 8, 9]
TABLES = ["1", "2", "8", "10"]  # layers with value embeddings
COMPARED: set[tuple[str, str]] = set()


class Golden:
    """The numbers of a file."""

    def __init__(self, stem: str):
        self.stem = stem
        self.info = INFO[stem]
        self.arrays = np.load(FOLDER / dict(model="golden.npz", optim="golden_optim.npz")[stem])
        self.loaded: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        COMPARED.add((self.stem, name))
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
    return Golden("model")


@pytest.fixture(scope="module")
def optim() -> Golden:
    return Golden("optim")


# ---- Public names and layouts ----------------------------------------------------------------------------------------
def rotated(head_dim: int) -> np.ndarray:
    """Return the public channel of each of ours: the record rotates pairs (2 j, 2 j + 1), we (j, j + D / 4)."""
    n = head_dim // 4
    return np.array([2 * j for j in range(n)] + [2 * j + 1 for j in range(n)] + [*range(2 * n, head_dim)])


def factor_places(net) -> np.ndarray:
    """Return the public place of each factor of a net that layers share."""
    wanted = enumerate(net.wanted)
    own = [(KINDS.index(kind), i, k) for i, kinds in wanted for kind in kinds for k in range(len(kinds[kind]))]
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


def params_of(golden: Golden, tied: bool) -> dict[str, np.ndarray]:
    scale = golden.info["param_scale_log2"]
    found = {n: golden[f"param/{n}"] * 2.0 ** -scale[n] for n in scale if f"param/{n}" in golden.arrays}
    if tied:
        found.pop("embed.weight", None)
    return found


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


def config(folder: Path, prefixes: np.ndarray | None = None, canon: np.ndarray | None = None, **changes):
    """Return gpt2 with other sizes, in float64 on the CPU."""
    names = dict(prefix_file="", canon_file="")
    if prefixes is not None:
        names["prefix_file"] = f"{folder}/prefixes"
        np.where(prefixes < 0, 65535, prefixes)[: changes["vocab_size"]].astype("<u2").tofile(names["prefix_file"])
    if canon is not None:
        names["canon_file"] = f"{folder}/canon"
        canon.tofile(names["canon_file"])
    fixed = dict(device="cpu", dtype="float64", seed=0, compile=False, run_id="golden", log_dir=str(folder))
    return m.resolve(dataclasses.replace(m.PRESETS["gpt2"], **fixed | names | changes))


def scaled_groups(c: dict):
    up = (c["mlp_dim"] / c["model_dim"]) ** 0.5
    rates = {m.UP: up, 2 * m.UP: 2 * up}
    return tuple(row._replace(lr=rates.get(row.lr, row.lr)) for row in m.GPT2_GROUPS)


def starts_of(inputs) -> list[int]:
    """Return where documents start, and the length."""
    ids = inputs.doc_ids.numpy()
    return [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]


# ---- Model -----------------------------------------------------------------------------------------------------------
class TestModel:
    @pytest.fixture(scope="class")
    @staticmethod
    def trainer(model, tmp_path_factory):
        c = model.info["config"]
        docs = [*c["max_doc_len"], c["max_doc_len"][2], c["max_doc_len"][2]]
        unit = c["window_unit"]
        stages = tuple(
            s._replace(
                batch=1,
                max_doc_len=n,
                windows={kind: w * unit // 128 for kind, w in s.windows.items()},
                classes=tuple(c["candidates"].get(str(x), 0) for x in s.classes),
            )
            for s, n in zip(m.GPT2_STAGES, docs, strict=True)
        )
        sizes = dict(vocab_size=c["vocab"], eot_token=c["eot"], model_dim=c["model_dim"], num_heads=c["num_heads"])
        sizes |= dict(head_dim=c["head_dim"], mlp_dim=c["mlp_dim"], net_dim=c["gate_dim"], mix_groups=c["mudd_groups"])
        sizes |= dict(ngram_rows=c["ngram_rows"], sign_rows=c["sign_rows"], segment=c["virtual_cap"], block_size=16)
        sizes |= dict(train_seq_len=c["train_len"], batch_tokens=c["train_len"], val_seq_len=c["val_len"])
        sizes |= dict(val_tokens=c["val_len"], final_window=20 * unit, stages=stages, lm_head_slice=200)
        cfg = config(tmp_path_factory.mktemp("model"), model["prefix_table"], model["canon_table"], **sizes)
        trainer = m.Trainer(cfg, m.Ranks())
        trainer.gpt.signs.copy_(torch.from_numpy(model["sign_table"]))
        return trainer

    @pytest.fixture(scope="class")
    @staticmethod
    def tokens(model, trainer):
        """Return by name the tokens of sequences, with their last targets."""
        stream = model["train/stream"].astype(np.int64)
        begins = np.flatnonzero(stream == trainer.cfg.eot_token).tolist()
        documents = [*zip(begins, [*begins[1:], len(stream)], strict=True)]
        found = {}
        for i in range(3):
            length = trainer.cfg.train_seq_len
            pieces = m.cut_sequence(m.deque(documents), length + 1, trainer.cfg.stages[i].max_doc_len)
            found[f"train{i + 1}"] = np.concatenate([stream[a:b] for a, b in pieces])
        found["val"] = model["val/stream"][: trainer.cfg.val_seq_len + 1].astype(np.int64)
        return found

    def inputs(self, trainer, now, tokens, offset=0):
        trainer.reader.offsets = [offset]
        ((inputs,),), reads = trainer.reader.make([now], [[tokens]])
        return inputs, reads

    def test_data(self, model, trainer, tokens):
        for name, t in tokens.items():
            now = m.Plan(1100, trainer.cfg, trains=name != "val")
            now.classes = 0
            inputs, _ = self.inputs(trainer, now, t)
            model.compare(f"{name}/tokens", inputs.tokens)
            model.compare(f"{name}/targets", inputs.targets[:, 0])
            cu = model[f"{name}/cu_seqlens"]
            assert starts_of(inputs) == sorted({*cu.tolist()}), name
            model.compare(f"{name}/ngram", inputs.rows.flatten())
            model.compare(f"{name}/sign", inputs.signs)

    @pytest.mark.parametrize("number", range(len(INFO["model"]["cases"])))
    def test_case(self, model, trainer, tokens, number):
        case = model.info["cases"][number]
        name, step = case["case"], case["step"]
        trains = case["kind"] == "train"
        cfg, gpt = trainer.cfg, trainer.gpt
        names = Names(gpt, cfg.head_dim)
        names.load(trainer, params_of(model, case["tied"]))
        now = m.Plan(step, cfg, trains)
        settings = m.Settings.of(now, torch.device("cpu"))
        assert (now.windows["short"], now.windows["long"]) == (case["window_short"], case["window_long"])
        for width, kind in dict(wide="long", narrow="short").items():
            frequencies, scale = m.rotary_frequencies(kind, now)
            assert np.allclose(frequencies, case[f"yarn_freq_{width}"], rtol=1e-12)
            assert np.isclose(scale, case[f"attn_scale_{width}"], rtol=1e-12)
        inputs, reads = self.inputs(trainer, now, tokens[case["data"]], case.get("sweep_offset", 0))
        ngrams = m.F.embedding(inputs.rows, trainer.table.fetch(reads)).requires_grad_()
        self.compare_samples(model, number, trainer, inputs, ngrams, settings)
        if not trains:
            canon = torch.from_numpy(m.read_canon(cfg))[inputs.tokens.long()] if "canon" in name else None
            with torch.no_grad():
                total = gpt(inputs, ngrams, settings, canon)
                model.compare("loss", total / len(inputs.tokens), number)
                self.compare_token_losses(model, name, trainer, inputs, ngrams, settings, canon)
            return
        assert np.allclose(now.weights[: now.num_next], case["mtp"], rtol=1e-12)
        assert (now.prefix, now.classes) == (case["prefix_weight"], case["candidates"])
        if case["candidates"]:
            model.compare(f"cand/{name}", inputs.classes)
        if now.prefix:
            assert int((inputs.targets[:, -1] >= 0).sum()) == case["prefix_terms"]
        with torch.no_grad():
            self.compare_token_losses(model, name, trainer, inputs, ngrams, settings, None)
        gpt.zero_grad()
        loss = gpt(inputs, ngrams, settings)
        loss.backward()
        model.compare("loss", loss, number)
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in gpt.named_parameters()}
        table = torch.zeros_like(trainer.table.rows).index_add_(0, inputs.rows.flatten(), ngrams.grad.flatten(0, 1))
        grads["ngram_embed.weight"] = table
        grads = names.to_public(grads)
        train_case = [c["case"] for c in model.info["cases"] if c["kind"] == "train"].index(name)
        want = model.arrays
        for n in model.info["param_names"]:
            grad = grads[n]
            shape = model[f"grad/{n}"].shape[1:] if f"grad/{n}" in want else None
            if "embed" in n or n == "lm_head.weight":  # public tables have rows of padding
                rows = model[f"grad/{n}:rows" if shape is None else f"grad/{n}"].shape[1]
                grad = np.concatenate([grad, np.zeros((rows - len(grad), grad.shape[1]))])
            grads[n] = grad
            if shape is not None:
                model.compare(f"grad/{n}", grad, train_case)
                continue
            model.compare(f"grad/{n}:rows", grad.sum(-1), train_case)
            model.compare(f"grad/{n}:cols", grad.sum(-2), train_case)
            k = np.arange(model[f"grad/{n}:sample"].shape[1])
            model.compare(f"grad/{n}:sample", grad.ravel()[(7919 * k) % grad.size], train_case)
        norms = [np.linalg.norm(grads[n]) for n in model.info["param_names"]]
        model.compare("grad_norm", norms, train_case)
        if case["mtp"] == [1.0]:  # weights beyond the end make no difference
            model.compare("grad_norm_clean", norms, train_case)

    def compare_token_losses(self, model, name, trainer, inputs, ngrams, settings, canon):
        cfg, gpt = trainer.cfg, trainer.gpt
        x = gpt.features(inputs, ngrams, settings)
        head = gpt.lm_head if inputs.classes is None else gpt.lm_head[inputs.classes]
        cap = (cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift)
        losses, _ = m.softcapped_cross_entropy(x @ head.T, inputs.targets, settings.weights, cap, False, canon)
        model.compare(f"token_loss/{name}", losses)

    def compare_samples(self, model, number, trainer, inputs, ngrams, settings):
        """Compare some entries on the way through the model, which say where an error is."""
        gpt = trainer.gpt
        seen = dict(block=[], attn=[], net={}, embed=[], head=[])
        hooks = [b.register_forward_hook(lambda _, a, y: seen["block"].append(y[0])) for b in gpt.blocks]
        # Ours has the layer's factor in the product
        for i, b in enumerate(gpt.blocks):
            if b.attn:

                def keep(_, a, y, i=i):
                    post = a[-1]["post"][0]
                    seen["attn"].append(y / post)

                hooks.append(b.attn.register_forward_hook(keep))
        nets = dict(early=gpt.gate_nets["0"], mid=gpt.gate_nets["4"], last=gpt.blocks[10].mudd_net, out=gpt.head_net)
        for net, module in nets.items():

            def keep_net(_, a, y, net=net):
                made = torch.cat([t for kinds in y for t in kinds.values()])  # (n, T, 1) or (n, T, groups)
                seen["net"][net] = made

            hooks.append(module.register_forward_hook(keep_net))
        hooks.append(gpt.blocks[0].register_forward_pre_hook(lambda _, a: seen["embed"].extend([a[2], a[3], a[0]])))
        hooks.append(gpt.head_net.register_forward_pre_hook(lambda _, a: seen["head"].append(a[0])))
        with torch.no_grad():
            x = gpt.features(inputs, ngrams, settings)
        for hook in hooks:
            hook.remove()
        T = len(x)
        at = [0, T // 2, T - 1]
        blocks = seen["block"]
        rms = [float(b.square().mean().sqrt()) for b in blocks]
        model.compare("block_rms", rms, (number, slice(0, 11)))
        model.compare("block_sample", torch.stack([b[at, :8] for b in blocks]), (number, slice(0, 11)))
        y = model["block_sample"][number, 11]  # the head's input before its norm
        ratio = x[at, :8].numpy() / y
        assert np.allclose(ratio, ratio[:, :1], rtol=1e-7)
        model.compare("attn_sample", torch.stack([a[at, :8] for a in seen["attn"]]), number)
        model.compare("embed_sample", torch.stack([e[at, :8] for e in seen["embed"]]), number)
        names = Names(gpt, trainer.cfg.head_dim)
        columns = []
        for net in nets:
            made = seen["net"][net][:, at]
            made = made[np.argsort(names.order(f"{'gates' if net in ('early', 'mid') else 'mudd'}.{net}"))]
            if net == "out":  # factors for all channels, and in addition those of groups
                with torch.no_grad():
                    hidden = m.F.gelu(m.linear(seen["head"][0], gpt.head_net.w1))[at]
                    by_group = 0.1 * (hidden @ gpt.head_net.w2g.flatten(0, 1).T).view(len(at), -1, made.size(-1))
                by_group = by_group.transpose(0, 1)[np.argsort(OUT)]
                columns += [(made - by_group)[:, :, 0].T, by_group.transpose(0, 1).flatten(1)]
            else:
                columns.append(made[:, :, 0].T)
        model.compare("net_sample", torch.cat(columns, 1), number)


def test_schedules(model, optim):
    cfg = m.PRESETS["gpt2"]
    ends = m.stage_ends(cfg)
    steps = range(ends[-1] + 1)
    plans = [m.Plan(s, dataclasses.replace(cfg, prefix_file="p")) for s in steps]
    adam, tables, muon = (m.row_of(name, cfg) for name in ("lm_head", "ngrams", "blocks.0.attn.qk_w"))
    values = m.row_of("value_embeds.1.weight", cfg)
    assert all(now.is_due(muon) for now in plans)
    assert m.num_tokens(1194, cfg) == sum(now.seq_len * 8 for now in plans[:-1]) == 328_663_040
    both = {
        "lr": [now.lr for now in plans],
        "batch_tokens": [now.seq_len * 8 for now in plans],
        "adam_step": [now.is_due(adam) for now in plans],
        "table_step": [now.is_due(tables) for now in plans],
        "tied": [now.tied for now in plans],
        "boundaries": [*zip([0, *ends], ends, strict=False)],
        "split_step": max(now.step for now in plans if now.tied and now.is_due(adam)),
    }
    first = model["schedule/stage"][0]
    chain = {
        "stage": [now.index + first for now in plans],
        "rail_beta": [now.momentum for now in plans],
        "window_short": [now.windows["short"] for now in plans],
        "window_long": [now.windows["long"] for now in plans],
        "max_doc_len": [now.stage.max_doc_len for now in plans],
        "candidates": [now.classes for now in plans],
        "prefix_weight": [now.prefix for now in plans],
        "mtp": [now.weights[: now.num_next] + [0.0] * (3 - now.num_next) for now in plans],
        "mtp_count": [now.num_next for now in plans],
    }
    for width, kind in dict(wide="long", narrow="short").items():
        yarn = [m.rotary_frequencies(kind, m.Plan(max(0, end - 1), cfg)) for end in ends]
        chain[f"yarn_freq_{width}"] = np.stack([f for f, _ in yarn])
        chain[f"attn_scale_{width}"] = [yarn[now.index][1] for now in plans]
    rails = [(0.85, 0.4385) if now.two_rails else (now.momentum, 1.0) for now in plans]
    optimizers = {
        "lookahead": [now.momentum for now in plans],
        "fast_beta": [beta for beta, _ in rails],
        "fast_weight": [share for _, share in rails],
        "value_embed_betas": [now.adam(values)[2:] for now in plans],
        "table_wd_mult": [now.adam(values)[1] / (values.lr * now.lr) ** 2 / 0.005 for now in plans],
        "ngram_beta2": [now.adam(tables)[3] for now in plans],
    }
    for name, ours in (both | chain).items():
        model.compare(f"schedule/{name}", ours)
    for name, ours in (both | optimizers).items():
        optim.compare(f"schedule/{name}", ours)
    for now in plans:
        assert now.updates(tables) == sum(p.is_due(tables) for p in plans[: now.step])


def fake_optimizers(params: dict, cfg):
    """Return optimizers of some parameters, as the script groups them."""

    class Holder:
        pass

    holder = Holder()
    holder.cfg = cfg
    holder.named_parameters = lambda: params.items()
    return m.build_optimizers(holder, m.Ranks())


def count_from(now, first) -> None:
    """Count updates from the first step on."""
    before = now.updates
    now.updates = lambda group: before(group) - m.Plan(first.step, first.cfg).updates(group)


def compare_ticks(golden: Golden, folder: str, cfg) -> None:
    """The files have the first row as the original does it: at odd steps, two rates in one."""
    N = cfg.num_iterations
    found = {}
    for i, row in enumerate(cfg.averages):
        rates = np.array([row.rate_at(s, N) for s in range(N)])
        assert rates[rates > 0][0] == 1  # the first copies
        found[i] = np.where(rates > 0, row.rate, -1)
    first, rate = np.flatnonzero(found[0] > 0)[0], cfg.averages[0].rate
    for s in range(first + 1, N):
        found[0][s] = rate if s == N - 1 else (1 - (1 - rate) ** 2 if s % 2 else -1)
    assert np.array_equal(found[3], found[4])
    for label, i in dict(tail_ema=0, tail_avg=1, value_embed_avg=2, bank_blend=3).items():
        golden.compare(f"{folder}/{label}", found[i])


def test_ticks(optim):
    compare_ticks(optim, "schedule/tick", m.PRESETS["gpt2"])


# ---- Data ------------------------------------------------------------------------------------------------------------
def bits_of(classes, vocab: int) -> np.ndarray:
    bits = np.zeros(vocab, bool)
    bits[classes] = True
    return np.packbits(bits, bitorder="little")


def test_batches(model, tmp_path):
    c = model.info["config"]
    for i in (0, 1):
        write_shard(tmp_path / f"train_{i}.bin", model[f"pack/shard{i}"].astype(np.int64))
    write_shard(tmp_path / "val.bin", model["pack/val_shard"].astype(np.int64))
    lens = c["pack_rank_lens"]
    counts = [[x] * 3 if isinstance(x, int) else x for x in c["pack_candidates"]]
    stages = tuple(
        m.Stage(0.2, batch=n / lens[0], max_doc_len=d, windows=dict(short=1, long=1), classes=tuple(p))
        for n, d, p in zip(lens, c["pack_max_doc"], [*counts, [0], [0]], strict=True)
    )
    sizes = dict(vocab_size=c["pack_padded_vocab"], eot_token=c["pack_bos"], stages=stages, num_iterations=15)
    sizes |= dict(train_seq_len=lens[0], batch_tokens=8 * lens[0], val_seq_len=c["pack_val_len"])
    sizes |= dict(val_tokens=16 * c["pack_val_len"], segment=c["pack_virtual_cap"], ngram_rows=c["pack_ngram_rows"])
    sizes |= dict(train_files=f"{tmp_path}/train_*.bin", val_files=f"{tmp_path}/val.bin", rare_from=8)
    cfg = config(tmp_path, **sizes)
    data = m.plan_data(cfg)
    reader = m.Reader(cfg, m.Ranks(), torch.device("cpu"))
    for step, (sequences, _) in enumerate(reader.read(m.train_cycles(data["train"], cfg))):
        s, j = step // 3, step % 3
        for rank, x in enumerate(sequences):
            model.compare(f"pack/stage{s + 1}/tokens", x.tokens, (j, rank))
            targets = model[f"pack/stage{s + 1}/targets"][j, rank]
            found = x.targets[:, 0] if x.classes is None else x.classes[x.targets[:, 0]]
            assert np.array_equal(found, targets)
            cu = model[f"pack/stage{s + 1}/cu_seqlens"][j, rank]
            assert starts_of(x) == sorted({*cu.tolist()})
            model.compare(f"pack/stage{s + 1}/ngram", x.rows.flatten(), (j, rank))
            if x.classes is not None:
                bits = bits_of(x.classes, c["pack_padded_vocab"])
                model.compare(f"pack/stage{s + 1}/candidates", bits, (j, rank))
    now = m.Plan(15, cfg, trains=False)
    for i, batch in enumerate(data["val"]):
        ((x,),), _ = reader.make([now], [[m.read_sequence(*batch[0], cfg.vocab_size)]])
        at = divmod(i, 8)
        model.compare("pack/val/tokens", x.tokens, at)
        model.compare("pack/val/targets", x.targets[:, 0], at)
        assert starts_of(x) == sorted({*model["pack/val/cu_seqlens"][at].tolist()})
        model.compare("pack/val/ngram", x.rows.flatten(), at)


def test_hashes(model):
    cfg = m.PRESETS["gpt2"]
    rows, signs = m.find_ngrams(model["hash/tokens"].astype(np.int32), cfg)
    model.compare("hash/rows", rows)
    model.compare("hash/sign_rows", signs)


def test_prefixes(model):
    cfg = dataclasses.replace(m.PRESETS["gpt2"], prefix_file=f"{ROOT}/data/gpt2_prefixes.bin")
    table = np.pad(m.read_prefixes(cfg), (0, 47), constant_values=-1)
    info = model.info["prefix"]
    model.compare("prefix/values", table[model["prefix/ids"]])
    assert hashlib.sha256(table.astype("<i4")).hexdigest() == info["sha256_int32_le"]


def test_classes(model):
    vocab = 50304
    cfg = dataclasses.replace(m.PRESETS["gpt2"], prefix_file=f"{ROOT}/data/gpt2_prefixes.bin")
    prefixes = np.pad(m.read_prefixes(cfg), (0, 47), constant_values=-1)
    offsets = {rank: vocab * rank // 8 for rank in range(8)}
    for row in model.info["cand_real"]:
        seed = row["lcg_seed"]
        targets = []
        for _ in range(row["tokens"]):
            seed = (1664525 * seed + 1013904223) % 2**32
            q = (seed >> 16) ** 4 >> 48
            targets.append(((q * q >> 16) * 50257) >> 16)
        t = np.array(targets)
        rank = row["rank"]
        assert targets[:4] == row["first_targets"]
        assert offsets[rank] == row["offset_before"]
        classes, offsets[rank] = m.choose_classes(t, row["candidates"], offsets[rank], vocab)
        assert offsets[rank] == row["offset_after"]
        assert hashlib.sha256(classes.astype("<i4")).hexdigest() == row["sha256_int32_le"]
        assert (np.isin(prefixes[t], classes) & (prefixes[t] >= 0)).sum() == row["prefix_terms"]
        if f"cand_real/rank{rank}" in model.arrays:
            model.compare(f"cand_real/rank{rank}", bits_of(classes, vocab), row["step"])
    info = model.info["cand_fallback"]
    t = model["cand_fallback/targets"].astype(np.int64)
    classes, offset = m.choose_classes(t, info["candidates"], info["offset_before"], info["V"])
    model.compare("cand_fallback/set", classes)
    assert offset == info["offset_after"]


# ---- Optimizers ------------------------------------------------------------------------------------------------------
def test_maps(optim):
    x = torch.from_numpy(optim["maps/sigma"])
    for a, b, c in m.MAPS:
        x = a * x + b * x**3 + c * x**5
    optim.compare("maps/value", x)
    for kind in ("wide", "square", "tall"):
        X = torch.from_numpy(optim[f"maps/{kind}/input"]).double()[None]
        W = m.whiten(X, torch.float64)
        optim.compare(f"maps/{kind}/whitened", W[0])
        dim = -1 if X.size(1) >= X.size(2) else -2
        lanes = torch.zeros_like(X.narrow(dim, 0, 1))
        optim.compare(f"maps/{kind}/equalized", m.equalize(W, lanes, 0.9, dim)[0])


LAYER = {"attn": 3, "narrow": 0, "half": 1}
OPT_NAMES = {
    "attn.c_proj.weight": "blocks.3.attn.c_proj",
    "half.c_proj.weight": "blocks.1.attn.c_proj",
    "mlp.c_fc.weight": "blocks.0.mlps.0.c_fc",
    "mlp.c_proj.weight": "blocks.0.mlps.0.c_proj",
    "lm_head.weight": "lm_head",
    "embed.weight": "embed.weight",
    "value_gates": "blocks.1.attn.value_gate",
    "smear_gate.weight": "smear_gate",
    "scalars": "blocks.0.attn.lambdas",
    "resid_lambdas": "blocks.0.resid_lambdas",
    "post_lambdas": "blocks.0.post_lambdas",
    "gate.w1": "gate_nets.0.w1",
    "gate.w2": "gate_nets.4.w2",
    "gate.b2": "gate_nets.0.b2",
    "gate_scale": "gate_scale",
    "mudd.w1": "blocks.10.mudd_net.w1",
    "mudd.w2": "head_net.w2",
    "mudd.w2g": "head_net.w2g",
    "mudd.b2": "blocks.10.mudd_net.b2",
}


@pytest.mark.parametrize("start", INFO["optim"]["config"]["opt"]["starts"])
def test_steps(optim, start, tmp_path):
    c = optim.info["config"]["opt"]
    D, K = c["head_dim"], c["model_dim"]
    sizes = dict(model_dim=K, num_heads=H, head_dim=D, mlp_dim=c["mlp_dim"], groups=scaled_groups(c))
    sizes |= dict(batch_tokens=16, train_seq_len=16)
    cfg = config(tmp_path, **sizes)
    with_muon = start in c["anvil_starts"]

    def tensors(kind):
        """Return ours of opt/init or, with a first axis of steps, of opt/grad."""
        found = {}
        for theirs, name in OPT_NAMES.items():
            t = torch.from_numpy(optim[f"opt/{kind}/{theirs}"]).double()
            found[name] = t.mT.contiguous() if name.endswith("c_fc") else t
        for theirs, i in LAYER.items():
            t = torch.from_numpy(optim[f"opt/{kind}/{theirs}.qkv_w"]).double()
            found[f"blocks.{i}.attn.qk_w"] = t[..., :2, :, :].reshape(*t.shape[:-3], H, 2 * D, K)
            found[f"blocks.{i}.attn.v_w"] = t[..., 2, :, :]
        return {n: t for n, t in found.items() if with_muon or m.row_of(n, cfg).optimizer == "Adam"}

    params = {n: torch.nn.Parameter(t.clone()) for n, t in tensors("init").items()}
    grads = tensors("grad")
    optimizers = fake_optimizers(params, cfg)
    views = {n: view for o in optimizers for n, view in zip(o.names, o.grad_views, strict=True)}

    def public(get, theirs):
        if theirs.endswith("qkv_w"):
            i = LAYER[theirs.split(".")[0]]
            return torch.cat([get(f"blocks.{i}.attn.qk_w").reshape(2, K, K), get(f"blocks.{i}.attn.v_w")[None]])
        t = get(OPT_NAMES[theirs])
        return t.T if theirs == "mlp.c_fc.weight" else t

    first = m.Plan(start, cfg)
    for k in range(c["steps_per_start"]):
        now = m.Plan(start + k, cfg)
        count_from(now, first)
        for o in optimizers:
            o.add([grads[n][k] for n in o.names])
        if now.tied and now.is_due(m.row_of("lm_head", cfg)):
            views["embed.weight"] += views["lm_head"]
            views["lm_head"].copy_(views["embed.weight"])
        m.step_optimizers(optimizers, now)
        for theirs in [n.removeprefix("opt/init/") for n in optim.arrays if n.startswith("opt/init/")]:
            if f"opt/from{start}/{theirs}" in optim.arrays:
                optim.compare(f"opt/from{start}/{theirs}", public(lambda n: params[n], theirs), k)

    def state(n, key):
        o = next(o for o in optimizers if n in o.names)
        return o.views(o.state[key])[o.names.index(n)]

    def lanes(name):
        o = next(o for o in optimizers if name in o.names)
        return o.state["lanes"].split(o.rows_per_param)[o.names.index(name)]

    for full in [n for n in optim.arrays if n.startswith(f"opt/state{start}/")]:
        theirs, _, key = full.removeprefix(f"opt/state{start}/").rpartition(":")
        if theirs == "embed.weight" and now.tied:  # the public table has no moments of its own yet; ours are the head's
            assert not optim[full].any()
            continue
        if theirs == "lane":
            ours = {
                "q01": lambda: torch.stack([lanes(f"blocks.{i}.attn.qk_w")[0].flatten() for i in LAYER.values()]),
                "v": lambda: torch.stack([lanes(f"blocks.{i}.attn.v_w").flatten() for i in LAYER.values()]),
                "o": lambda: torch.stack([lanes(f"blocks.{i}.attn.c_proj").flatten() for i in (3, 1)]),
                "mlp": lambda: torch.stack([lanes(f"blocks.0.mlps.0.{n}").flatten() for n in ("c_fc", "c_proj")]),
            }[key]()
        elif key == "t":
            ours = m.Plan(start + c["steps_per_start"], cfg).updates(m.row_of("lm_head", cfg))
            ours -= m.Plan(start, cfg).updates(m.row_of("lm_head", cfg))
        else:
            key = dict(m="exp_avg", v="exp_avg_sq").get(key, key)
            ours = public(lambda n, key=key: state(n, key), theirs)
        optim.compare(full, ours)


@pytest.mark.parametrize(("start", "steps"), INFO["optim"]["config"]["tables"]["starts"])
def test_tables(optim, start, steps, tmp_path):
    c = optim.info["config"]["tables"]
    V = c["vocab"]
    cfg = config(tmp_path, ngram_rows=c["rows"], model_dim=c["dim"], batch_tokens=8, train_seq_len=1)
    tokens = torch.from_numpy(optim["tables/tokens"]).long()
    ids = torch.from_numpy(optim["tables/ids"]).long()
    ve_grad, ng_grad = (torch.from_numpy(optim[f"tables/{n}/grad"]).double() for n in ("value_embeds", "ngram"))
    init = torch.from_numpy(optim["tables/value_embeds/init"]).double()
    parts = zip(TABLES, init.split(V), strict=True)
    params = {f"value_embeds.{i}.weight": torch.nn.Parameter(part.clone()) for i, part in parts}
    (o,) = optimizers = fake_optimizers(params, cfg)
    table = m.NgramTable(cfg, m.Ranks(), torch.device("cpu"))
    table.rows.copy_(torch.from_numpy(optim["tables/ngram/init"]))
    first = m.Plan(start, cfg)
    event = 0
    read, added = [], []
    for k in range(steps):
        now = m.Plan(start + k, cfg)
        count_from(now, first)
        for j, view in enumerate(o.grad_views):
            for rank in range(8):
                view.index_add_(0, tokens[k, rank], ve_grad[k, rank, j])
        read.append(ids[k].flatten())
        added.append(ng_grad[k].flatten(0, 1))
        m.step_optimizers(optimizers, now)
        if now.is_due(table.group):
            rows = torch.cat(read).numpy()
            _, reads = m.plan_reads([rows], 0, c["rows"])
            places = np.searchsorted(reads.ids, rows)
            reads = m.Reads(*(torch.from_numpy(f) if isinstance(f, np.ndarray) else f for f in reads))
            sums = torch.zeros(len(reads.ids), c["dim"], dtype=torch.float64)
            sums.index_add_(0, torch.from_numpy(places), torch.cat(added))
            table.update(reads, sums, now)
            read, added = [], []
            f = f"tables/from{start}"
            optim.compare(f"{f}/steps", start + k, event)
            optim.compare(f"{f}/value_embeds/table", torch.cat([*params.values()]), event)
            optim.compare(f"{f}/ngram/table", table.rows, event)
            optim.compare(f"{f}/ngram/v", table.v.flatten(), event)
            event += 1
    for key, name in dict(m="exp_avg", v="exp_avg_sq").items():
        optim.compare(f"tables/from{start}/value_embeds/{key}", torch.cat(o.views(o.state[name])))


def test_endgame(optim, tmp_path):
    cfg = config(tmp_path)
    names = dict(
        lm_head="lm_head",
        embed="embed.weight",
        qk_bank="blocks.0.attn.qk_w",
        vo_bank="blocks.0.attn.v_w",
        mlp_bank="blocks.0.mlps.0.c_fc",
        value_embeds="value_embeds.1.weight",
    )
    weights = {n: torch.from_numpy(optim[f"endgame/weights/{label}"]).double() / 256 for label, n in names.items()}
    labels = {n: label for label, n in names.items()}
    params = {n: torch.nn.Parameter(torch.zeros_like(w[0])) for n, w in weights.items()}
    optimizers = fake_optimizers(params, cfg)
    for k in range(298):
        for o in optimizers:
            for n, p in zip(o.names, o.params, strict=True):
                p.data.copy_(weights[n][k])
            if "values" in o.state:
                o.state["values"].copy_(o.param_shard)
            o.tick(896 + k)
    tags = {"tail-ema": [0], "tail-avg": [1], "value-embed-avg": [2], "bank-blend": [3, 4]}
    order = ["embed.weight", "lm_head", names["mlp_bank"], names["qk_bank"], names["vo_bank"]]
    for o in optimizers:
        (n,) = o.names
        for tag, rows in tags.items():
            for i in rows:
                if i in o.averages:
                    optim.compare(f"endgame/{tag}/{labels[n]}", o.views(o.state[f"average {i}"])[0])
        before = params[n].norm().item()
        if n in order:
            optim.compare("endgame/norm_before", before, order.index(n))
            blended = params[n].detach().clone()
            for i, row in o.averages.items():
                blended.lerp_(o.views(o.state[f"average {i}"])[0], row.blend)
            optim.compare("endgame/ratio", before / blended.norm(), order.index(n))
        o.finish()
        optim.compare(f"endgame/shipped/{labels[n]}", params[n])


# ---- A whole small run -----------------------------------------------------------------------------------------------
def run_config(optim, folder: Path, **changes):
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
            classes=tuple(x or [0]),
        )
        for s, n, d, x in zip(m.GPT2_STAGES, lens, c["max_doc_len"], c["candidates"], strict=True)
    )
    w = c["average_windows"]
    windows = [w[n] for n in ("tail_ema", "tail_avg", "value_embed_avg", "bank_blend", "bank_blend")]
    rates = [2 / (windows[0] + 1), 4 / 53, 4 / 53, 2 / (windows[3] // 4 + 1), 2 / (windows[3] // 4 + 1)]
    rows = zip(m.GPT2_AVERAGES, windows, rates, strict=True)
    averages = tuple(row._replace(window=n, rate=rate) for row, n, rate in rows)
    sizes = dict(vocab_size=c["vocab"], eot_token=c["eot"], model_dim=c["model_dim"], num_heads=c["num_heads"])
    sizes |= dict(head_dim=c["head_dim"], mlp_dim=c["mlp_dim"], net_dim=c["gate_dim"], ngram_rows=c["ngram_rows"])
    sizes |= dict(sign_rows=c["sign_rows"], segment=c["segment_cap"], block_size=16, final_window=20 * unit)
    sizes |= dict(train_seq_len=lens[0], batch_tokens=8 * lens[0], val_seq_len=c["val_len"], stages=stages)
    sizes |= dict(val_tokens=8 * c["val_batches"] * c["val_len"], num_iterations=c["steps"], averages=averages)
    sizes |= dict(momentum_warmup_steps=c["beta_warmup_steps"], momentum_cooldown_steps=c["beta_cooldown_steps"])
    sizes |= dict(slow_rail_from=c["rail_engage_step"], rare_from=c["period4_start"], groups=scaled_groups(c))
    sizes |= dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val.bin")
    return config(folder, optim["run/prefix_table"], optim["run/canon_mask"], **sizes | changes)


def start_run(optim, folder: Path, ranks, **changes):
    cfg = run_config(optim, folder, **changes)
    trainer = m.Trainer(cfg, ranks)
    trainer.warm_up()
    trainer.gpt.signs.copy_(torch.from_numpy(optim["run/sign_pool"]))
    names = Names(trainer.gpt, cfg.head_dim)
    public = params_of(optim, tied=True)
    rows = public["ngram_embed.weight"]
    size = ranks.world_size
    per_rank = -(-len(rows) // size)
    public["ngram_embed.weight"] = rows[ranks.rank * per_rank : (ranks.rank + 1) * per_rank]
    if size == 1:
        names.load(trainer, public)
    else:
        load_shares(names, trainer, public)
    return cfg, trainer, names, m.plan_data(cfg)


def load_shares(names, trainer, public) -> None:
    """Load parameters where an optimizer has the values of its share alone."""
    kept = {o: o.state.pop("values") for o in trainer.optimizers if "values" in o.state}
    names.load(trainer, public)
    for o, values in kept.items():
        values.copy_(o.param_shard)
        o.state = dict(values=values) | o.state


class TestRun:
    def test_one_process(self, optim, tmp_path):
        c = optim.info["config"]["run"]
        cfg, trainer, names, data = start_run(optim, tmp_path, m.Ranks())
        gpt, table = trainer.gpt, trainer.table
        public_names = optim.info["param_names"]
        start = params_of(optim, tied=True)
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

        step_grads: dict[str, torch.Tensor] = {}
        for name, p in gpt.named_parameters():
            step_grads[name] = torch.zeros_like(p)

            def add(g, name=name):
                step_grads[name] += g

            p.register_hook(add)
        sums: list[torch.Tensor] = []
        model, losses = trainer.model, []

        def observed(inputs, ngrams, settings, canon=None):
            loss = model(inputs, ngrams, settings, canon)
            if ngrams.requires_grad:
                losses.append(loss.item())
                rows = inputs.rows.flatten()

                def add(g):
                    sums[0].index_add_(0, rows, g.flatten(0, 1))

                ngrams.register_hook(add)
            return loss

        trainer.model = observed
        for step, (sequences, reads) in enumerate(trainer.reader.read(m.train_cycles(data["train"], cfg))):
            now = m.Plan(step, cfg)
            if step in c["val_steps"]:
                loss = trainer.evaluate(step, data["val"])
                optim.compare("run/val_loss", loss, c["val_steps"].index(step))
            if f"run/{step}/tokens" in optim.arrays:
                self.compare_batch(optim, step, sequences)
            sums[:] = [torch.zeros_like(table.rows)]
            losses.clear()
            for g in step_grads.values():
                g.zero_()
            trainer.train_step(now, sequences, reads)
            total = sum(losses)
            optim.compare("run/loss_sum_ranks", losses, step)
            optim.compare("run/loss_sum", total, step)
            optim.compare("run/loss_per_token", total / (8 * now.seq_len), step)
            grads = names.to_public(step_grads | {"ngram_embed.weight": sums[0]})
            optim.compare("run/grad_norm", [np.linalg.norm(grads[n]) / 8 for n in public_names], step)
            values = names.to_public(dict(gpt.named_parameters()) | {"ngram_embed.weight": table.rows}, start)
            for n in public_names:
                if n.startswith(("value_embeds", "embed", "lm_head")):
                    values[n] = padded("lm_head.weight" if n == "embed.weight" else n, values[n])
                optim.compare(f"run/digest/{n}", digest(n, values[n]), step)
            adam, tables = (m.row_of(n, cfg) for n in ("lm_head", "ngrams"))
            scalars = dict(
                batch_tokens=8 * now.seq_len,
                mtp=now.weights[: now.num_next] + [0.0] * (3 - now.num_next),
                mtp_count=now.num_next,
                candidates=now.classes,
                prefix_weight=now.prefix,
                lr=now.lr,
                fast_beta=0.85 if now.two_rails else now.momentum,
                fast_weight=0.4385 if now.two_rails else 1.0,
                lookahead=now.momentum,
                adam_step=now.is_due(adam),
                table_step=now.is_due(tables),
                tied=now.tied,
                max_doc_len=now.stage.max_doc_len,
            )
            for name, value in scalars.items():
                optim.compare(f"run/{name}", value, step)
        trainer.model = model
        N = cfg.num_iterations
        for step in range(N + 1):
            for kind in ("short", "long"):
                optim.compare(f"run/window_{kind}", m.Plan(step, cfg).windows[kind], step)
        compare_ticks(optim, "run/tick", cfg)
        self.compare_state(optim, trainer, names, digest, start)
        self.compare_end(optim, trainer, names, data, digest, start, padded)

    def compare_batch(self, optim, step, sequences):
        for rank, x in enumerate(sequences):
            optim.compare(f"run/{step}/tokens", x.tokens, rank)
            found = x.targets[:, 0] if x.classes is None else x.classes[x.targets[:, 0]]
            assert np.array_equal(found, optim[f"run/{step}/targets"][rank])
            optim.compare(f"run/{step}/ngram", x.rows.flatten(), rank)
            cu = optim[f"run/{step}/cu_seqlens"][rank]
            starts = starts_of(x)
            assert sorted({*cu.tolist()})[: len(starts)] == starts[: len({*cu.tolist()})]
            optim.compare(f"run/{step}/candidates", x.classes, rank)

    def compare_state(self, optim, trainer, names, digest, start):
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
        end = m.Plan(trainer.cfg.num_iterations, trainer.cfg)
        groups = ["lm_head", "embed.weight", "value_embeds.1.weight", "ngrams"]
        optim.compare("run/state/updates", [end.updates(m.row_of(n, trainer.cfg)) for n in groups])

        def sums(name, j=0):
            o = next(o for o in trainer.optimizers if name in o.names)
            t = o.state["lanes"].split(o.rows_per_param)[o.names.index(name)][j]
            return [t.sum().item(), t.norm().item()]

        order = (0, 2, 5, 1, 8, 3, 10)
        optim.compare("run/state/lane/qk_bank", [sums(f"blocks.{i}.attn.qk_w", j) for i in order for j in range(6)])
        both = [f"blocks.{i}.attn.{n}" for i in order for n in ("v_w", "c_proj")]
        optim.compare("run/state/lane/vo_bank", [sums(name) for name in both])
        mlps = [f"blocks.{i}.mlps.0" for i in range(11)] + ["blocks.8.mlps.1"]
        ours = [[0.0, 0.0] if "s.7." in f"{n}." else sums(f"{n}.{w}") for n in mlps for w in ("c_fc", "c_proj")]
        optim.compare("run/state/lane/mlp_bank", ours)

    def compare_end(self, optim, trainer, names, data, digest, start, padded):
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
        no_norm = [row._replace(same_norm=False) for row in cfg.averages]
        for o in trainer.optimizers:
            kept = dict(o.averages)
            o.averages = {i: no_norm[i] for i in kept}
            o.finish()
            o.kept = kept
        blended = {n: p.detach().clone() for n, p in held.items()}

        def norms(values, clean):
            public = names.to_public(values, start)
            groups = []
            qkv = [(n, t) for n, t in public.items() if n.endswith("qkv_w")]

            def counted(name, t):
                return live(name, t) if clean else t.ravel()

            def thirds(name, t, which):
                full = np.zeros_like(t)
                full[which] = t[which]
                return counted(name, full)

            table = {n: padded("lm_head.weight", public[n]) for n in ("embed.weight", "lm_head.weight")}
            groups.append([table["embed.weight"].ravel()])
            groups.append([table["lm_head.weight"].ravel()])
            mlp = [t.ravel() for n, t in public.items() if ".mlp" in n]
            groups.append(mlp if clean else [*mlp, frozen.ravel()])
            groups.append([thirds(n, t, [0, 1]) for n, t in qkv])
            vo = [thirds(n, t, [2]) for n, t in qkv]
            groups.append([*vo, *(counted(n, t) for n, t in public.items() if n.endswith("attn.c_proj.weight"))])
            return np.array([np.linalg.norm(np.concatenate(g)) for g in groups])

        for clean in (True, False):
            suffix = "_clean" if clean else ""
            before, after = norms(final, clean), norms(blended, clean)
            optim.compare(f"run/norm_before{suffix}", before)
            optim.compare(f"run/ratio{suffix}", before / after)
            with torch.no_grad():
                for n, p in held.items():
                    p.copy_(blended[n])
                for ratio, o in zip(before / after, optimizers, strict=True):
                    for p in o.params:
                        p.mul_(ratio)
            optim.compare(f"run/val_final{suffix}", trainer.evaluate(N, data["val"]))
        values = names.to_public(dict(held), start)
        for n in optim.info["param_names"]:
            if f"run/shipped/{n}" in optim.arrays and n != "ngram_embed.weight":
                values[n] = padded("lm_head.weight" if n == "embed.weight" else n, values[n])
                optim.compare(f"run/shipped/{n}", digest(n, values[n]))
        optim.compare("run/shipped/ngram_embed.weight", digest("ngram_embed.weight", trainer.table.rows.numpy()))
        trainer.cfg = dataclasses.replace(cfg, canon_file="")
        optim.compare("run/val_final_unmasked", trainer.evaluate(N, data["val"]))
        trainer.cfg = cfg
        # finish() itself: norms of all that is stored
        with torch.no_grad():
            for o in trainer.optimizers:
                o.averages = o.kept
                for n, view in zip(o.names, o.views(o.param_shard), strict=True):
                    view.copy_(final[n])
                if "values" in o.state:
                    o.state["values"].copy_(o.param_shard)
        trainer.finish()
        for o in optimizers:
            before = torch.cat([final[n].flatten() for n in o.names]).norm()
            after = torch.cat([blended[n].flatten() for n in o.names]).norm()
            for n, p in zip(o.names, o.params, strict=True):
                assert torch.allclose(p, blended[n] * (before / after), rtol=1e-10, atol=0)

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_any_number_of_processes_runs_the_same(self, optim, tmp_path, size):
        one = tmp_path / "one"
        one.mkdir()
        run = Run([[str(one)]], tmp_path / "run1", target=take_run)
        assert run.wait(timeout=400) == [0], run.text("err")
        many = tmp_path / "many"
        many.mkdir()
        run = Run([[str(many)]] * size, tmp_path / "run", target=take_run)
        assert run.wait(timeout=600) == [0] * size, run.text("err")
        want, found = (np.array(json.loads((folder / "losses.json").read_text())) for folder in (one, many))
        assert np.abs(found / want - 1).max() < 1e-10


def take_run(ranks: list[int], folder: str) -> None:
    """Be one of the processes of a run, and let the first write its losses."""
    optim = Golden("optim")
    path = Path(folder)
    ranks = m.Ranks(*ranks)
    own = path / str(ranks.rank)
    own.mkdir()
    if ranks.world_size > 1:
        m.init_distributed()
    cfg, trainer, _, data = start_run(optim, own, ranks)
    losses = []
    for step, (sequences, reads) in enumerate(trainer.reader.read(m.train_cycles(data["train"], cfg))):
        if step % 5 == 0:
            losses.append(trainer.evaluate(step, data["val"]))
        losses.append(trainer.train_step(m.Plan(step, cfg), sequences, reads).item())
    trainer.finish()
    losses.append(trainer.evaluate(cfg.num_iterations, data["val"]))
    if ranks.rank == 0:
        (path / "losses.json").write_text(json.dumps(losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_all_numbers_are_compared(model, optim):
    """Runs last, where all others ran. The tokenizer's table of what never follows has tests of its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other processes compared some: run this file alone")
    for golden in (model, optim):
        missing = [n for n in golden.arrays if (golden.stem, n) not in COMPARED and not n.startswith("canon/")]
        assert not missing, missing
