"""What the script computes, against formulas written down here. Numbers come from the script's own tables."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt
from dense import randomize
from train_gpt import PRESETS, Adam, Muon, Plan, Ranks, Reader, Settings


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_schedules_turn_in_the_steps_that_the_configuration_names(preset: str):
    cfg = PRESETS[preset]
    plans = [Plan(step, cfg) for step in range(cfg.num_iterations)]
    cooldown = int(cfg.scheduled_steps * (1 - cfg.cooldown_frac))
    assert [now.lr == now.stage.lr for now in plans].index(False) == cooldown + 1
    end = min(cfg.num_iterations - cfg.momentum_cooldown_steps + 1, cfg.num_iterations)
    highest = [now.step for now in plans if now.momentum == cfg.muon_momentum]
    assert highest == [*range(cfg.momentum_warmup_steps, end)]
    assert [now.step for now in plans if now.two_rails][:1] == [cfg.slow_rail_from] * (cfg.slow_rail_from > 0)


def test_yarn_slows_what_turned_less_than_once_and_keeps_what_turned_32_times():
    now, cfg = Plan(0, PRESETS["gpt2"]), PRESETS["gpt2"]
    for window in cfg.stages[0].windows:
        sizes, tables = [stage.windows[window] for stage in cfg.stages], []
        for now.index in range(len(sizes)):
            tables.append(train_gpt.rotary_frequencies(window, now)[0])
        for old, new, before, after in zip(sizes, sizes[1:], tables, tables[1:], strict=False):
            turns = old * before / (2 * torch.pi)
            close(after[turns <= 1], before[turns <= 1] * old / new)
            close(after[turns >= 32], before[turns >= 32])


def hash_of(tokens: list[int], factors: tuple[int, ...], modulus: int, first: int, t: int) -> int:
    """Hash the tokens that end with the t-th, in 32 bits."""
    hashed = 0
    for token, factor in zip(tokens[t::-1], factors, strict=False):
        hashed ^= token * factor
    return ((hashed + 2**31) % 2**32 - 2**31) % modulus if t + 1 >= len(factors) else first


def test_rows_targets_and_parts_of_documents_are_those_of_a_slow_loop(gpt2):
    tokens = np.random.default_rng(0).integers(gpt2.eot_token, size=gpt2.train_seq_len + 1).astype(np.int32)
    tokens[[0, 3, 20, 51]] = gpt2.eot_token
    text, last = tokens.tolist(), gpt2.ngram_rows // (gpt2.ngram_order - 1) - 1
    rows, signs = train_gpt.find_ngrams(tokens[:-1], gpt2)
    now, reader = Plan(0, gpt2), Reader(gpt2, Ranks(), torch.device("cpu"))
    reader.prefixes = np.random.default_rng(1).integers(-1, 200, size=gpt2.vocab_size)
    now.prefix, now.num_next, now.classes = 0.5, 3, 100
    targets, classes = reader.targets(now, 0, tokens)
    ids, begin = reader.doc_ids(now, tokens[:-1]), 0
    for t, token in enumerate(text[:-1]):
        for k, (for_rows, for_signs) in enumerate(train_gpt.HASHES[: gpt2.ngram_order - 1]):
            read = text if k else [last, *text[1:]]  # the first one as in the record
            assert rows[k, t] == k * (last + 1) + hash_of(read, for_rows, last, last, t)
            assert signs[k, t] == hash_of(text, for_signs, gpt2.sign_rows, 0, t)
        prefix = reader.prefixes[text[t + 1]]
        expected = [*[*text[t + 1 : t + 4], -2, -2][:3], prefix if prefix in classes else -1]
        assert [x if x < 0 else classes[x] for x in targets[t]] == expected
        begin = t if token == gpt2.eot_token else begin
        assert ids[t] - ids[max(t - 1, 0)] == (t > 0 and (t - begin) % gpt2.segment == 0)


def test_the_sweep_of_classes_repeats_none_before_all_have_come():
    targets = np.arange(0, 20011 * 200, 20011) % 2048  # the sweep meets them first
    offset, seen = 0, {*targets.tolist()}
    for _ in range(2):
        classes, offset = train_gpt.choose_classes(targets, 400, offset, 2048)
        others = {*classes.tolist()} - {*targets.tolist()}
        assert (len(others), others & seen) == (200, set())
        seen |= others


def attend_slowly(cfg, attn, x: Tensor, value_embed: Tensor | None, docs: Tensor, now: Plan, f: dict) -> Tensor:
    """Return attention's output. A head of a token sees all heads of all tokens but for a mask."""
    T, H, D, layer, kind = len(x), cfg.num_heads, cfg.head_dim, attn.layer, attn.layer.attention
    n, t, h = 1 + (kind == "paired"), torch.arange(T)[:, None], torch.arange(H)
    window = train_gpt.window_of(kind)
    frequencies, scale = train_gpt.rotary_frequencies(window, now)
    qk = torch.einsum("gdc,tc->tgd", attn.qk_w.view(2 * H, D, -1)[:, : D // (1 + layer.half_qk)], x)
    qk = F.rms_norm(qk, qk.shape[-1:]).unflatten(1, (2, H))
    if kind != "alike":
        z = torch.complex(*qk[..., : D // 2].chunk(2, dim=-1))
        z = z * torch.exp(-1j * (n * t + h % n)[:, None, :, None] * frequencies)
        qk = torch.cat([z.real, z.imag, qk[..., D // 2 :]], dim=-1)
    q, k = qk.unbind(1)
    late = dict(long=D // 2, alike=0).get(kind, D)  # from this channel on a key is the token before's
    k = torch.cat([k[..., :late], torch.cat([k[:1], k[:-1]])[..., late:]], dim=-1)
    v = attn.lambdas[0] * torch.einsum("hdc,tc->thd", attn.v_w.view(H, D, -1)[:, : D // (1 + layer.half_v)], x)
    if value_embed is not None:
        factor = f["value_gate"][h * 2 // H].transpose(0, 1) if "value_gate" in f else 1
        if attn.value_gate is not None:
            w = attn.value_gate.shape[1] // 2
            factor = 2 * (torch.cat([x[:, :w], value_embed[:, :w]], 1) @ attn.value_gate.T).sigmoid()[..., None]
        v = v + factor * value_embed.view(T, H, D)[..., : v.shape[-1]] + (f["value"].view_as(v) if "value" in f else 0)
    place, group = (n * t + h // (H // n)).flatten(), (docs[:, None] * H + h % (H // n)).flatten()
    back = place[:, None] - place
    seen = (back >= 0) & (back <= now.windows[window]) & (group[:, None] == group)
    weights = (scale * q.flatten(0, 1) @ k.flatten(0, 1).T).masked_fill(~seen, -torch.inf).softmax(1)
    y = (weights @ v.flatten(0, 1)).view_as(v)
    if "xsa" in f:
        y = y - f["xsa"].transpose(0, 1).tanh() * (y * v).sum(2, keepdim=True) / v.square().sum(2, keepdim=True) * v
    y = y * f["head_gate"].transpose(0, 1) if "head_gate" in f else y
    return f["post"][0] * attn.lambdas[1] * y.flatten(1) @ attn.c_proj.view(-1, H, D)[..., : v.shape[-1]].flatten(1).T


@pytest.mark.published  # the record's mathematics, which an idea may change
@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
@torch.no_grad()
def test_layers_are_dense_ones(request, preset: str):
    """Each layer on what it gets in a forward pass, what its nets read, the smear, and the head's mix."""
    cfg = dataclasses.replace(request.getfixturevalue(preset), dtype="float64")
    gpt, now, calls, nets = randomize(train_gpt.GPT(cfg)), Plan(0, cfg), [], {}
    tokens = np.random.default_rng(0).integers(cfg.eot_token, size=cfg.train_seq_len + 1)
    tokens[[0, 5, 6, 40]] = cfg.eot_token
    [[inputs]], _ = Reader(cfg, Ranks(), torch.device("cpu")).make([now], [[tokens]])
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, args, out: calls.append((*args, *out)))
    for i, net in gpt.gate_nets.items():
        net.register_forward_pre_hook(lambda _, args, i=int(i): nets.update({i: args[0]}))
    ngrams = torch.randn(len(inputs.rows), len(tokens) - 1, cfg.model_dim, dtype=torch.float64)
    found, before = gpt.features(inputs, ngrams, Settings.of(now, torch.device("cpu"))), None
    for i, block in enumerate(gpt.blocks):
        x, read, x0, ngram, skipped, value_embed, _, f, out, m = calls[i]
        x = f["resid"][0] * x if skipped is None else x + block.skip_lambda.sigmoid() * f["skip"][0] * skipped
        if block.attn is not None:
            x = x + attend_slowly(cfg, block.attn, train_gpt.norm(read), value_embed, inputs.doc_ids, now, f)
        x = x + sum(f[kind][0] * source for kind, source in dict(x0=x0, ngram=ngram).items() if kind in f)
        close(m, F.rms_norm(x, x.shape[-1:]))
        close(out, f["resid"][1] * x + sum(mlp(m, f["post"][1]) for mlp in block.mlps))
        assert i == 0 or i not in nets or torch.equal(nets[i], before)
        before = out
    if w := cfg.smear_gate_inputs:
        e = gpt.embed(inputs.tokens)
        e[1:] += gpt.smear_lambda * (e[1:, :w] @ gpt.smear_gate.T).sigmoid() * e[:-1].clone()
        close(calls[0][2], F.rms_norm(e, e.shape[-1:]))
    if mudd := cfg.layers[-1].mudd:
        tables = [table(inputs.tokens) for table in gpt.value_embeds.values()]
        factors = gpt.head_net(out)[0]["out"].repeat_interleave(cfg.model_dim // cfg.mix_groups, dim=2)
        sources = [calls[0][0], *(calls[i][-2] for i in mudd), *tables, m, train_gpt.norm(read)]
        out = out + (factors * torch.stack(sources)).sum(0)
    close(found, F.rms_norm(out, out.shape[-1:]))


def matrices() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(scale * torch.randn(6, 4).double()) for name, scale in dict(a=1, b=10).items()}


def stepped(optimizer, cfg):
    """Yield for each update of two matrices its plan, the mean gradients, and the values before and after."""
    total, before = 0, torch.stack(optimizer.params).detach()
    for now in (Plan(step, cfg) for step in range(cfg.num_iterations)):
        optimizer.add([*(grads := torch.randn_like(before))])
        total = total + grads / cfg.batch_sequences
        if now.is_due(optimizer.groups[0]):
            optimizer.reduce()
            optimizer.update(now)
            after = torch.stack(optimizer.params).detach()
            yield now, total, before, after
            total, before = 0, after


def test_adam_takes_sums_and_knows_how_often_it_has_stepped(gpt2):
    cfg = dataclasses.replace(gpt2, dtype="float64", batch_tokens=2 * gpt2.train_seq_len)
    for group in [group for group in cfg.groups if group.optimizer == "Adam"]:
        m = v = 0
        for count, (now, g, p, after) in enumerate(stepped(Adam(matrices(), [group] * 2, {}, cfg, Ranks()), cfg), 1):
            n = group.every[now.step >= cfg.rare_from] / group.every[0]
            beta1, beta2, lr = group.beta1**n, group.beta2**n, group.lr * now.lr
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            rate = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
            close(after, p - rate * m / (v.sqrt() + cfg.adam_eps) - group.decay * n * lr**2 * p * (m * p > 0))


@pytest.mark.published
def test_muon_steps_on_two_rails(gpt2):
    """With the record's 0.85, 0.4385 and 0.98. Matrices of a stack have norms and lanes of their own."""
    cfg = dataclasses.replace(gpt2, dtype="float64")
    group = next(group for group in cfg.groups if group.optimizer == "Muon")
    fast = slow = lanes = 0
    for now, g, p, after in stepped(Muon(matrices(), [group, group._replace(lr=2.0)], {}, cfg, Ranks()), cfg):
        beta, share = (0.85, 0.4385) if now.two_rails else (now.momentum, 1)
        fast, slow = beta * fast + (1 - beta) * g, 0.98 * slow + 0.02 * g
        mean = share * fast + (1 - share) * slow
        u = train_gpt.whiten(now.momentum * mean + (1 - now.momentum) * g, torch.float64)
        lanes = group.beta2 * lanes + (1 - group.beta2) * u.square().mean(2, keepdim=True)
        even = u / lanes.sqrt()
        u = even * u.norm(dim=(1, 2), keepdim=True) / even.norm(dim=(1, 2), keepdim=True)
        lr, factors = cfg.muon_lr * now.lr, torch.tensor([group.lr, 2.0])[:, None, None]
        close(after, p - factors * lr * (u + group.decay * lr * p * (slow * p >= 0)))


@pytest.mark.parametrize("size", [(64, 64), (48, 160)], ids=str)
def test_singular_values_become_1_and_vectors_stay(size: tuple):
    """From 0.003 of the norm on. Each matrix of a stack has its own norm; a zero one stays zero."""
    u, _, vh = torch.linalg.svd(torch.randn(4, *size, dtype=torch.float64), full_matrices=False)
    norms = torch.tensor([1e-4, 1, 1e15, 0]).view(4, 1, 1)
    s = torch.logspace(-2, 0, size[0], dtype=torch.float64)
    x = train_gpt.whiten(norms * (u * s) @ vh, torch.float64)
    assert (u[:3].mT @ x[:3] @ vh[:3].mT - torch.eye(size[0])).abs().max() < 0.01
    assert not x[3].any()


@pytest.mark.parametrize("window", [13, 100])
def test_averages_tick_and_blend_as_their_rows_say(gpt2, window: int):
    """Also in a run that is shorter than their windows."""
    cfg, n = dataclasses.replace(gpt2, dtype="float64"), gpt2.num_iterations
    start = max(0, n - window)
    for names in dict.fromkeys(row.names for row in cfg.averages):
        rows = [row._replace(window=window, rate=0.2) for row in cfg.averages if row.names == names]
        adam = Adam(matrices(), [cfg.groups[-1]] * 2, dict(enumerate(rows)), cfg, Ranks())
        values = torch.randn(n, *adam.param_shard.shape, dtype=torch.float64)
        for step in range(n):
            adam.param_shard.copy_(values[step])
            adam.tick(step)
        adam.finish()
        blended = values[-1]
        for row in rows:
            due = [s for s in range(start, n) if (s - row.offset % n) % row.every == 0 or s >= n - row.at_end]
            average = values[due[0]]
            for s in due:
                average = average.lerp(values[s], 0.2)
            blended = blended.lerp(average, row.blend)
        close(adam.param_shard, blended * values[-1].norm() / blended.norm() if row.same_norm else blended)
