"""What the script computes, against formulas written down here. Numbers come from the script's own tables."""

import dataclasses
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt
from dense import randomize
from train_gpt import Adam, DistributedDataLoader, Muon, NgramTable, Ranks, StepSchedule, make_attention_settings


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_targets_and_parts_of_documents_are_those_of_a_slow_loop(gpt2):
    tokens = np.random.default_rng(0).integers(gpt2.eot_token, size=gpt2.train_seq_len + 1).astype(np.int32)
    tokens[[0, 3, 20, 51]] = gpt2.eot_token
    text = tokens.tolist()
    loader = DistributedDataLoader(gpt2, Ranks(), torch.device("cpu"))
    loader.prefixes = np.random.default_rng(1).integers(-1, 200, size=gpt2.vocab_size)
    schedule = gpt2.step_schedules[0]._replace(prefix_weight=0.125, mtp_weights=[1.0, 0.5, 0.25], sampled_classes=100)
    inputs = loader.model_inputs(schedule, tokens, loader.next_classes(schedule, 0, tokens[1:]), np.zeros((1, 1)))
    targets, classes, begin = inputs.targets.tolist(), inputs.sampled_classes.tolist(), 0
    assert len(classes) == 100
    assert inputs.loss_weights.tolist() == [1, 0.5, 0.25, 0.125, 0], "in this order"
    whole = loader.doc_starts(schedule._replace(trains=False), tokens[:-1]).tolist()
    for t, token in enumerate(text[:-1]):
        prefix = loader.prefixes[text[t + 1]]
        expected = [*[*text[t + 1 : t + 4], -2, -2][:3], prefix if prefix in classes else -1, gpt2.vocab_size]
        assert [x if x < 0 else classes[x] for x in targets[t]] == expected
        begin = t if token == gpt2.eot_token else begin
        assert whole[t] == begin, "in validation"
        assert inputs.doc_starts[t] == t - (t - begin) % gpt2.max_attn_len


def shifted(x: Tensor, shift: tuple[int, ...]) -> Tensor:
    """Return x, of which parts of the channels come from tokens before."""
    rows = torch.arange(len(x))
    parts = zip(x.tensor_split(max(1, len(shift)), dim=1), shift or (0,), strict=True)
    return torch.cat([part[torch.where(rows < n, rows, rows - n)] for part, n in parts], dim=1)


def attend_slowly(
    cfg, attn, row, x: Tensor, value_embed: Tensor | None, mudd: Tensor | None, docs: Tensor, schedule: StepSchedule, f
) -> Tensor:
    """Return attention's output. A head of a token sees all heads of all tokens but for a mask."""
    T, H, D, kind = len(x), cfg.num_heads, cfg.head_dim, row.attention
    n, t, h = 1 + (kind == "paired"), torch.arange(T)[:, None], torch.arange(H)
    window, scale, frequencies = schedule.windows[dict(paired="short", nope="long").get(kind, kind)]
    qk = torch.einsum("gdc,tc->tgd", attn.qk_w.view(2 * H, D, -1)[:, : D // (1 + row.half_qk)], x)
    qk = F.rms_norm(qk, qk.shape[-1:]).unflatten(1, (2, H))
    if kind != "nope":
        z = torch.complex(*qk[..., : D // 2].chunk(2, dim=-1))
        z = z * torch.exp(-1j * (n * t + h % n)[:, None, :, None] * frequencies)
        qk = torch.cat([z.real, z.imag, qk[..., D // 2 :]], dim=-1)
    q, k = qk.unbind(1)
    late = dict(long=D // 2, nope=0).get(kind, D)  # from this channel on a key is the token before's
    k = torch.cat([k[..., :late], torch.cat([k[:1], k[:-1]])[..., late:]], dim=-1)
    v = attn.lambdas[0] * torch.einsum("hdc,tc->thd", attn.v_w.view(H, D, -1)[:, : D // (1 + row.half_v)], x)
    if value_embed is not None:
        factor = 1 if f.value_embed is None else f.value_embed[h * 2 // H].transpose(0, 1)
        if attn.value_gate is not None:
            w = attn.value_gate.shape[1] // 2
            factor = 2 * (torch.cat([x[:, :w], value_embed[:, :w]], 1) @ attn.value_gate.T).sigmoid()[..., None]
        v = v + factor * value_embed.view(T, H, D)[..., : v.shape[-1]]
    v = v if mudd is None else v + mudd.view_as(v)
    place, group = (n * t + h // (H // n)).flatten(), (docs[:, None] * H + h % (H // n)).flatten()
    back = place[:, None] - place
    seen = (back >= 0) & (back <= window) & (group[:, None] == group)
    weights = (scale * q.flatten(0, 1) @ k.flatten(0, 1).T).masked_fill(~seen, -torch.inf).softmax(1)
    y = (weights @ v.flatten(0, 1)).view_as(v)
    if f.xsa is not None:
        y = y - f.xsa.transpose(0, 1).tanh() * (y * v).sum(2, keepdim=True) / v.square().sum(2, keepdim=True) * v
    y = y if f.head_gate is None else y * f.head_gate.transpose(0, 1)
    return f.post[0] * attn.lambdas[1] * y.flatten(1) @ attn.c_proj.view(-1, H, D)[..., : v.shape[-1]].flatten(1).T


@pytest.mark.published  # the record's mathematics, which an idea may change
@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
@torch.no_grad()
def test_layers_are_dense_ones(request, preset: str):
    """Each layer on what it gets in a forward pass, what its nets read, the smear, and the head's mix."""
    sizes = dict(num_heads=6, head_dim=8, model_dim=48)  # with two heads a pair's places are their numbers
    cfg = dataclasses.replace(request.getfixturevalue(preset), dtype="float64", **sizes)
    gpt, schedule, calls, nets = randomize(train_gpt.GPT(cfg)), cfg.step_schedules[0], [], {}
    computed, given = [], []  # gates
    tokens = np.random.default_rng(0).integers(cfg.eot_token, size=cfg.train_seq_len + 1)
    tokens[[0, 5, 6, 40]] = cfg.eot_token
    [[inputs]], _ = DistributedDataLoader(cfg, Ranks(), torch.device("cpu")).load_cycle([schedule], [[tokens]])
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, args, out: calls.append((args, out)))
    for i, net in gpt.gate_nets.items():
        net.register_forward_pre_hook(lambda _, args, i=int(i): nets.update({i: args[0]}))
        net.register_forward_hook(lambda _, args, out: computed.extend(chain(*(own.values() for own in out.values()))))
    rows = torch.randn(1 + inputs.ngram_index.max(), cfg.model_dim, dtype=torch.float64)
    ngrams = rows[inputs.ngram_index]
    found = gpt.hidden_states(inputs, make_attention_settings(schedule, cfg, torch.device("cpu")), rows)
    first, outputs = calls[0][1].block_input, [made.output for _, made in calls]
    tables = {int(i): table(inputs.tokens) for i, table in gpt.value_embeds.items()}
    ngram = (ngrams * gpt.signs[inputs.sign_index] if cfg.sign_rows else ngrams).sum(0)
    for i, (row, block) in enumerate(zip(cfg.layers, gpt.blocks, strict=True)):
        (x, net_gates, sources, _), made = calls[i]
        x0, mudd, f = sources.x0, None, block.all_gates(x, net_gates)
        given += net_gates.values()
        if i == 0:
            x = x + (f.ngram[0] * ngram if row.ngram_input else 0)
            close(first, x)
            x = shifted(x, row.shift)
        else:
            assert torch.equal(x, outputs[i - 1])
        if row.mudd is not None:
            read = torch.stack([first, outputs[row.mudd], x])
            x, x0, mudd = x + (f.to_stream * read).sum(0), first, (f.to_values * read).sum(0)
        read = x if row.attn_input is None else outputs[row.attn_input]
        close(made.attn_input, F.rms_norm(read, x.shape[-1:]))
        x = f.resid[0] * x if row.skip is None else x + block.skip_lambda.sigmoid() * f.skip[0] * outputs[row.skip]
        if block.attn is not None:
            args = cfg, block.attn, row, made.attn_input, tables.get(i), mudd, inputs.doc_starts, schedule, f
            x = x + attend_slowly(*args)
        x = x + (f.x0[0] * x0 if row.x0 else 0) + (f.ngram[0] * ngram if row.ngram else 0)
        close(made.mlp_input, F.rms_norm(x, x.shape[-1:]))
        close(made.output, f.resid[1] * x + sum(mlp(made.mlp_input, f.post[1]) for mlp in block.mlps))
        assert i == 0 or i not in nets or torch.equal(nets[i], outputs[i - 1])
    assert all(torch.equal(a, b) for a, b in zip(given, computed, strict=True)), "each layer gets its own gates"
    if w := cfg.smear_gate_inputs:
        e = gpt.embed(inputs.tokens)
        e[1:] += gpt.smear_lambda * (e[1:, :w] @ gpt.smear_gate.T).sigmoid() * e[:-1].clone()
        close(sources.x0, F.rms_norm(e, e.shape[-1:]))
    if row.head_mix:
        out = made.output
        factors = gpt.head_net(out)[i]["head_mix"].repeat_interleave(cfg.model_dim // cfg.mix_groups, dim=2)
        read = [first, *(outputs[i] for i in row.head_mix), *tables.values(), made.mlp_input, made.attn_input]
        outputs.append(out + (factors * torch.stack(read)).sum(0))
    close(found, F.rms_norm(outputs[-1], x.shape[-1:]))


def matrices() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(scale * torch.randn(6, 4).double()) for name, scale in dict(a=1, b=10).items()}


def stepped(optimizer, cfg):
    """Yield for each update of two matrices its plan, the mean gradients, and the values before and after."""
    total, before = 0, torch.stack(optimizer.params).detach()
    for schedule in cfg.step_schedules:
        grads = torch.randn_like(before) * (torch.arange(before.size(2)) > 0)  # what has none does not decay in Adam
        take = torch._foreach_add_ if optimizer.accumulates else torch._foreach_copy_
        take(optimizer.grad_views, [*grads])
        total = total + grads / cfg.batch_sequences
        if optimizer.is_due(schedule):
            train_gpt.step_optimizers([optimizer], schedule._replace(tied=False))
            after = torch.stack(optimizer.params).detach()
            yield schedule, total, before, after
            total, before = 0, after


def test_adam_takes_sums_and_knows_how_often_it_has_stepped(gpt2):
    """Two parameters share a buffer, of one group or of two."""
    cfg = dataclasses.replace(gpt2, dtype="float64", batch_tokens=2 * gpt2.train_seq_len)
    groups = [group for group in cfg.groups if group.optimizer == "Adam"]
    for pair in [*zip(groups, groups, strict=True), (groups[4], groups[-2]), (groups[-1], groups[5])]:
        m, v, adam = 0, 0, Adam(matrices(), [*pair], {}, cfg, Ranks())
        for count, (schedule, g, p, after) in enumerate(stepped(adam, cfg), 1):
            interval, first = (pair[0].update_interval[i] for i in (schedule.step >= cfg.long_interval_from, 0))
            n = interval / first
            beta1, beta2, lr, decay = (
                torch.tensor([getattr(group, name) for group in pair], dtype=torch.float64)[:, None, None]
                for name in ("beta1", "beta2", "lr", "decay")
            )
            beta1, beta2, lr = beta1**n, beta2**n, lr * schedule.lr_factor
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            close(torch.stack(adam.views(adam.state["exp_avg"])), m)
            rate = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
            close(after, p - rate * m / (v.sqrt() + cfg.adam_eps) - decay * n * lr**2 * p * (m * p > 0))


def test_muon_has_two_momenta_and_decays_along_the_slow_one(gpt2):
    """Tall matrices, which have a neuron for each row. Other tests have the Newton-Schulz steps."""
    cfg = dataclasses.replace(gpt2, dtype="float64")
    group = next(group for group in cfg.groups if group.optimizer == "Muon")
    fast, slow, squares, decayed = 0, 0, torch.zeros(2, 6, 1).double(), []
    for schedule, g, p, after in stepped(Muon(matrices(), [group] * 2, {}, cfg, Ranks()), cfg):
        momentum = schedule.updates[group.name].momentum
        beta, share = (0.85, 0.4385) if schedule.step >= cfg.slow_momentum_from else (momentum, 1)
        fast, slow = beta * fast + (1 - beta) * g, 0.98 * slow + 0.02 * g
        m = share * fast + (1 - share) * slow
        u = train_gpt.zeropower_via_newtonschulz5(momentum * m + (1 - momentum) * g, torch.float64)
        squares = group.beta2 * squares + (1 - group.beta2) * u.square().mean(2, keepdim=True)
        even = u / squares.sqrt()
        u = even * (u.norm(dim=(1, 2), keepdim=True) / even.norm(dim=(1, 2), keepdim=True))
        rate = cfg.muon_lr * schedule.lr_factor
        close(after, p - group.lr_mul * rate * (u + group.decay * rate * p * (slow * p >= 0)))
        decayed.append((slow * p >= 0) != (fast * p >= 0))
    assert torch.stack(decayed).any(), "the momenta differ in signs"


def test_rows_of_ngrams_step_by_an_adam_without_momentum_and_with_one_v_a_row(gpt2):
    """In three cycles of other tokens. Rows that none reads stay as they are, but their v decays, too."""
    sizes = dict(ngram_rows=300, batch_tokens=2 * gpt2.train_seq_len)
    cfg = dataclasses.replace(gpt2, **sizes, dtype="float64", prefix_file="")
    table = NgramTable(cfg, Ranks(), torch.device("cpu"))
    loader = DistributedDataLoader(cfg, Ranks(), torch.device("cpu"))
    expected, v = table.rows.normal_().clone(), torch.zeros(300, dtype=torch.float64)
    for step in 1, 3, 15:
        schedule = cfg.step_schedules[step]._replace(sampled_classes=0)
        tokens = torch.randint(9, (cfg.batch_sequences, 129)).numpy()
        _, exchange = loader.load_cycle([schedule], [[*tokens]])
        sums = torch.randn(len(exchange.recv_ids), cfg.model_dim, dtype=torch.float64)
        rate, decay, _, beta2 = schedule.updates[table.group.name]
        v *= beta2
        for i, grad in zip(exchange.recv_ids.tolist(), sums / cfg.batch_sequences, strict=True):
            v[i] += (1 - beta2) * grad.square().mean()
            u = rate * grad / (v[i].sqrt() + cfg.adam_eps)
            expected[i] -= u + decay * expected[i] * (u * expected[i] > 0)
        table.grads[: len(sums)] = sums
        table.update(table.send(exchange)(), exchange, schedule)
        close(table.v[:, 0], v)
        close(table.rows, expected)
        assert not table.grads.any()


@pytest.mark.parametrize("size", [(64, 64), (48, 160)], ids=str)
def test_singular_values_become_1_and_vectors_stay(size: tuple):
    """From 0.003 of the norm on. Each matrix of a stack has its own norm; a zero one stays zero."""
    u, _, vh = torch.linalg.svd(torch.randn(4, *size, dtype=torch.float64), full_matrices=False)
    norms = torch.tensor([1e-4, 1, 1e15, 0]).view(4, 1, 1)
    s = torch.logspace(-2, 0, size[0], dtype=torch.float64)
    x = train_gpt.zeropower_via_newtonschulz5(norms * (u * s) @ vh, torch.float64)
    assert (u[:3].mT @ x[:3] @ vh[:3].mT - torch.eye(size[0])).abs().max() < 0.01
    assert not x[3].any()


@pytest.mark.parametrize("window", [13, 100])
def test_emas_move_and_blend_as_their_rows_say(gpt2, window: int):
    """Also in a run that is shorter than their windows, and whose steps are no multiple of `update_interval`."""
    cfg, n = dataclasses.replace(gpt2, dtype="float64"), gpt2.num_iterations - 2
    start = max(0, n - window)
    for i, patterns in enumerate(dict.fromkeys(row.patterns for row in cfg.emas)):
        rows = [row._replace(window=window, rate=0.2) for row in cfg.emas if row.patterns == patterns]
        group = cfg.groups[-1]._replace(keep_norm=i % 2 == 0)
        adam = Adam(matrices(), [group] * 2, dict(enumerate(rows)), cfg, Ranks())
        values = torch.randn(n, *adam.param_shard.shape, dtype=torch.float64)
        for step in range(n):
            adam.param_shard.copy_(values[step])
            rates = [row.rate_at(step, n) for row in rows]
            adam.update_emas(cfg.step_schedules[step]._replace(ema_rates=rates))
        adam.blend_emas()
        blended = values[-1]
        for row in rows:
            due = [s for s in range(start, n) if (s - row.offset % n) % row.interval == 0 or s >= n - row.at_end]
            average = values[due[0]]
            for s in due:
                average = average.lerp(values[s], 0.2)
            blended = blended.lerp(average, row.blend)
        close(adam.param_shard, blended * values[-1].norm() / blended.norm() if group.keep_norm else blended)
