"""Draw a script from its own tables and functions: python -m speedrun.drawings writes docs/drawings/*.svg."""

import dataclasses
import io
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import cycle, pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from speedrun import ROOT
from speedrun.logs import load_script
from speedrun.process import ToolError, packages

with packages("tools"):
    import numpy as np
    import torch
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, Rectangle
    from matplotlib.path import Path
    from matplotlib.ticker import EngFormatter

FOLDER = ROOT / "docs" / "drawings"
INK, SOFT, RULE, BLUE, ORANGE, VIOLET, TEAL = LIGHT = "#22211f #6b6861 #d5d2ca #1d5c8f #b3541e #7b4a93 #1f756f".split()
DARK = "#dcdad5 #a09d96 #44464c #74b3ec #f0a067 #c69add #6cc5bd".split()
COLORS = BLUE, ORANGE, VIOLET, TEAL, INK
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
STYLE: Any = {"svg.fonttype": "none", "font.family": "DejaVu Sans"}
STYLE |= dict.fromkeys(("font.size", "axes.titlesize", "figure.labelsize"), 9.4)  # points: 12.5 pixels
STYLE |= {"legend.frameon": False, "legend.handlelength": 1, "legend.borderaxespad": 0, "legend.columnspacing": 1}
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "xtick.bottom", "ytick.left"), False)
STYLE |= dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), SOFT) | {"text.color": INK, "axes.grid": True}
STYLE |= dict.fromkeys(("axes.edgecolor", "grid.color"), RULE) | {"axes.titlelocation": "left", "axes.axisbelow": True}
STYLE |= {"lines.linewidth": 1.4, "patch.linewidth": 0.8, "lines.markersize": 5, "legend.loc": "lower right"}
STREAM, LAYER, READERS = 96, 108, 330  # columns: the residual stream, layers, who reads their outputs
DOCUMENTS, BLOCK, REDUCED = (5, 7, 20), 4, 96  # of `masks`: tokens; windows are so much smaller than gpt2's last ones


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, label: str = "", **more: Any) -> None:
    """Draw a box, with a label in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, **dict(facecolor=(color, 0.15), edgecolor=color) | more))
    axes.text(x + width / 2, y + height / 2, label, ha="center", va="center_baseline")


def subplots(figure: Figure, height: float, rows: int = 1, columns: int = 1, note: str = "") -> Any:
    """Return axes on a figure as wide as a phone, of so many pixels. The note stands below them."""
    figure.set_size_inches(390 / 96, height / 96)
    figure.supxlabel(note, x=0, ha="left", color=SOFT)
    return figure.subplots(rows, columns, sharex=columns == 1)


def build(script: ModuleType, cfg: Any, world_size: int) -> tuple[Any, list[Any], Any]:
    """Return a model, and the optimizers and the table of n-grams of its first rank, of tensors without memory."""
    ranks = script.Ranks(0, world_size, 0, world_size)
    with torch.device("meta"):
        gpt = script.GPT(cfg)
    return gpt, script.build_optimizers(gpt, ranks), script.NgramTable(cfg, ranks, torch.device("meta"))


KEY = """Windows: positions in the first and in the last stage.
Bars: widths of queries and keys (blue), of values (violet).
n: n-grams. e: a row of a value table. x0: the embedding.
first: the input of layer 0. gate: one for each head.
The head's mix also reads what the last layer's attention
and MLPs read. Counted, but not used: post[0] without
attention, resid[0] beside a skip."""


def layers(script: ModuleType, _: Any, figure: Figure) -> str:
    """Draw the layers of each preset, and what reads what"""
    figure.set_layout_engine("none")
    axes, y, words = figure.add_axes((0, 0, 1, 1)), 0.0, []
    for name, cfg in script.PRESETS.items():
        axes.text(0, y + 10, f"{name}: width {cfg.model_dim}", weight="bold", va="center_baseline")
        y = draw_gates(script, cfg, axes, draw_stream(script, cfg, axes, y + 26))
        for i, row in enumerate(cfg.layers):
            default = row._field_defaults
            fields = [f"{key} {value}" for key, value in row._asdict().items() if value != default.get(key, 0)]
            words.append(f"{name}, layer {i}: {', '.join(fields)}.")
    axes.text(0, y, KEY, color=SOFT, va="top")
    figure.set_size_inches(390 / 96, (y + 130) / 96)
    axes.set(xlim=(0, 390), ylim=(y + 130, 0))
    axes.axis("off")
    return " ".join(words)


def draw_stream(script: ModuleType, cfg: Any, axes: Axes, y: float) -> float:
    """Draw the residual stream downwards. Left of it stands what is added, on its right are layers and readers."""
    outputs, tops, tables, begin = dict[int, float](), list[float](), list[tuple[float, float]](), y + 17
    readers = list[tuple[str, list[int], tuple[float, float]]]()  # color, layers that are read, where they are read

    def line(color: str, *points: tuple[float, float], style: str = "->", linewidth: float = 1) -> None:
        how: dict[str, Any] = dict(arrowstyle=style, mutation_scale=7, joinstyle="miter", linewidth=linewidth)
        axes.add_patch(FancyArrowPatch(path=Path(points), color=color, **how))

    def part(label: str, width: float, color: str, reads: bool = True, adds: bool = True) -> float:
        box(axes, LAYER, y, width, 22, color, label)
        if reads:
            line(INK, (STREAM, y + 6), (LAYER, y + 6))
        if adds:
            line(INK, (LAYER, y + 17), (STREAM, y + 17))
        return y + 28

    def add_left(y: float, labels: Sequence[str]) -> None:
        x = STREAM - 10.0
        for label in labels:
            x -= 10 + 5.5 * len(label)
            box(axes, x, y - 9, 8 + 5.5 * len(label), 18, ORANGE if label == "n" else SOFT, label)
        line(INK, (STREAM - 12, y), (STREAM, y))

    y = part(f"embedding{', smear' if cfg.smear_gate_inputs else ''}, norm: x0", 190, SOFT, reads=False)
    for i, row in enumerate(cfg.layers):
        tops.append(y)
        y += 6
        if row.ngram_input:
            add_left(y + 8, ["n"])
            y += 20
        if not i:
            outputs[-1] = y
            axes.text(LAYER + 2, y - 9, "first", color=SOFT, va="center_baseline")
            y += 6
        if row.shift:
            y = part(f"shift by {' '.join(map(str, row.shift))} tokens", 190, SOFT)
        ways = list[tuple[str, float, float]]()  # to attention
        for label, width, color, of in ("MUDD", 130, VIOLET, row.mudd), ("its input", 110, BLUE, row.attn_input):
            if of is not None:
                readers.append((color, [-1, of] if label == "MUDD" else [of], (LAYER + width, y + 11)))
                ways.append((color, LAYER + width - 10, y + 22))
                y = part(label, width, color, *[label == "MUDD"] * 2)
        for color, x, begin_y in ways:
            line(color, (x, begin_y), (x, y))
        if row.attention:
            sizes = [str(stage.windows[script.ATTENTION[row.attention].window]) for stage in cfg.stages]
            words = f"{row.attention} {'-'.join(dict.fromkeys((sizes[0], sizes[-1])))}"
            axes.text(LAYER + 5, y + 11, words, va="center_baseline")
            for color, is_half, bar in (BLUE, row.half_qk, y + 5), (VIOLET, row.half_v, y + 12):
                box(axes, LAYER + 107, bar, 12 if is_half else 24, 5, color, facecolor=(color, 0.7))
            x = LAYER + 138
            for label, width, is_there in ("XSA", 30, row.xsa), ("gate", 33, row.head_gate), ("e", 16, row.value_embed):
                if is_there:
                    box(axes, x, y + 2, width, 18, VIOLET if label == "e" else SOFT, label)
                    x += width + 3
            tables += [(x - 3, y + 11)] * row.value_embed
            y = part("", 134, BLUE, reads=row.attn_input is None)
        if row.skip is not None:
            readers.append((ORANGE, [row.skip], (LAYER + 100, y + 11)))
            y = part("skip", 100, ORANGE, reads=False)
        if added := ["n"] * row.ngram + ["x0" if row.mudd is None else "first"] * row.x0:
            y += 0 if row.attention else 14
            add_left(y - 3, added)
        if row.mlps:
            y = part("MLP" if row.mlps == 1 else f"{row.mlps} MLPs", 44 * row.mlps, TEAL)
        outputs[i] = y = max(y, tops[i] + 20)
        axes.text(0, (tops[i] + y) / 2, str(i), color=SOFT, va="center_baseline")
    for first, end in pairwise([*(i for i, row in enumerate(cfg.layers) if row.gate_net), len(cfg.layers)]):
        top, height = tops[first] + 8, outputs[end - 1] - tops[first] - 10
        line(TEAL, (STREAM, top - 6), (24, top - 6), (24, top))
        box(axes, 16, top, 16, height, TEAL)
        axes.text(24, top + height / 2, "gate network", ha="center", va="center", rotation=90)
    y += 8
    if mixed := cfg.layers[-1].head_mix:
        readers.append((ORANGE, [-1, *mixed], (LAYER + 130, y + 11)))
        y = part("mix for the head", 130, ORANGE)
    for x, (color, of, (end_x, end_y)) in zip(np.linspace(READERS, 380, len(readers)), readers, strict=True):
        sources = [(STREAM, outputs[it]) for it in of] + (tables if of[1:] == [*mixed] else [])
        for start, row_y in sources:
            line(SOFT, (start, row_y), (x, row_y), style="-", linewidth=0.6)
            axes.plot(x, row_y, "o", color=color, markersize=4)
        line(color, (x, min(row_y for _, row_y in sources)), (x, end_y), (end_x, end_y))
    line(INK, (STREAM, begin), (STREAM, y + 12), linewidth=1.6)
    box(axes, 16, y + 12, 160, 22, INK, f"norm, head of {cfg.padded_vocab:,}")
    if cfg.pointer_dim:
        line(INK, (STREAM, y + 4), (260, y + 4), (260, y + 12))
        box(axes, 190, y + 12, 140, 22, INK, f"norm, pointer of {cfg.pointer_dim}")
    return y + 56


def draw_gates(script: ModuleType, cfg: Any, axes: Axes, y: float) -> float:
    """Draw how many values the gates of each layer have, and who makes them."""
    numbers, made = range(len(cfg.layers)), dict[tuple[str, int], tuple[str | None, str]]()
    axes.text(0, y, "values of gates, made by", va="center_baseline")
    for x, color, maker in (170, VIOLET, script.MUDD), (222, TEAL, script.GATE_NET), (316, SOFT, script.PARAMETER):
        axes.text(x, y, maker, color=color, va="center_baseline")
        for i in numbers:
            made |= {(gate, i): (color, str(len(it))) for gate, it in script.gate_inits(i, maker, cfg).items()}
    for gate in ["layer", *(it for it in script.MAKERS if {(it, i) for i in numbers} & made.keys())]:
        y += 18
        axes.text(0, y, gate, va="center_baseline")
        for i in numbers:
            fill, count = made.get((gate, i), (None, str(i) if gate == "layer" else "·"))
            if fill:
                axes.plot(STREAM + 28 * i, y, "o", color=(fill, 0.25), markersize=11.5, markeredgewidth=0)
            axes.text(STREAM + 28 * i, y, count, color=INK if fill else SOFT, ha="center", va="center_baseline")
    return y + 30


def schedules(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw the numbers of each step of gpt2, and of Muon"""
    words, panels = list[str](), dict[str, dict[str, Any]]()
    for row in cfg.step_schedules:
        muon = script.schedule_muon(row.step, row.lr_factor, cfg)
        more = {"tokens a step": cfg.batch_sequences * row.seq_len}
        more |= {"Muon: momentum": muon.momentum, "Muon: fast_share": muon.fast_share}
        for title, value in (more | row._asdict()).items():
            of_many = {f"+{i}": it for i, it in enumerate(value, 1)} if isinstance(value, list) else value
            curves = of_many if isinstance(of_many, dict) else {"": value}
            if title == "sampled_classes":
                curves = {"": value or cfg.padded_vocab}
            for label, number in (
                curves.items() if title not in ("step", "stage", "trains", "updates", "seq_len") else ()
            ):
                values = panels.setdefault(title, {}).setdefault(str(label), [0.0] * cfg.num_iterations)
                values[row.step] = float(getattr(number, "size", number))  # of a window its size
    ends = [0, *script.stage_ends(cfg)]
    note = f"Stages end at {', '.join(map(str, ends[1:]))}.\nema_rates: a line while a row of emas is updated."
    all_axes = subplots(figure, 80 * len(panels) + 90, len(panels), note=note)
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for color, (label, values) in zip(cycle(COLORS), curves.items(), strict=False):
            if title in ("tied", "ema_rates"):  # 0 between updates
                on = [any(values[i : i + cfg.common_interval]) for i in range(len(values))]
                height = float(label or 1)
                values = curves[label] = [height if it else height - 1 if title == "tied" else np.nan for it in on]
            axes.plot(values, color=color, label=label)
            named = f"{title} {label}".rstrip()
            words.append(f"{named}: {values[0]:.6g}, at most {np.nanmax(values):.6g}, at last {values[-1]:.6g}.")
        ticks = [np.nanmin([*curves.values()]), np.nanmax([*curves.values()])]
        axes.set_yticks(ticks, [f"{it:.3g}" if it < 1000 else f"{it:,.0f}" for it in ticks])
        axes.set_title(title, pad=5)
        if len(curves) > 1 and title != "ema_rates":
            axes.legend(bbox_to_anchor=(1, 1.03), ncols=5)
    axes.set_xticks(ends, [str(it) if it == ends[-1] or ends[-1] - it > 100 else "" for it in ends])
    axes.set(xlim=(0, ends[-1]), xlabel="step")
    return f"Stages end at steps {', '.join(map(str, ends[1:]))}. {' '.join(words)}"


def masks(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw who sees whom, on three made-up documents"""
    cases, words = [], [f"Documents of {DOCUMENTS} tokens, blocks of {BLOCK}."]
    starts = torch.tensor(np.repeat(np.cumsum((0, *DOCUMENTS[:-1])), DOCUMENTS), dtype=torch.int32)
    for name in dict.fromkeys(row.attention for row in cfg.layers if row.attention):
        kind = script.ATTENTION[name]
        window = torch.tensor(cfg.stages[-1].windows[kind.window] // REDUCED)
        start = script.first_visible_keys(starts, window, kind.heads_per_pair)
        cases.append((f"{name}, window {window}", start, None))
    small = dataclasses.replace(cfg, pointer_block=2 * BLOCK, pointer_dim=4, block_size=BLOCK, dtype="float32")
    tokens = torch.arange(len(starts) + 1) ** 2 % 7
    inputs = SimpleNamespace(tokens=tokens[:-1], next_tokens=tokens[1:], doc_starts=starts)
    with patch.object(script, "attention_mask", wraps=script.attention_mask) as made:  # of which the pointer makes one
        if cfg.pointer_dim:
            script.Pointer(small)(torch.ones(len(starts), cfg.model_dim), inputs)
    for call in made.call_args_list:
        cases.append((f"pointer, blocks of {small.pointer_block}", call.args[0], call.kwargs["extra_mask_mod"]))
    note = f"""Documents of {DOCUMENTS} tokens; in pairs each is two positions.
Rows: queries. Columns: keys. Frames: blocks of {BLOCK},
full if shaded. Orange: equal to the next token."""
    rows = -(-len(cases) // 2)
    all_axes = subplots(figure, 215 * rows + 76, rows, 2, note).flat
    for axes, (title, start, condition) in zip(all_axes, cases, strict=False):
        n, blocks = len(start), script.causal_block_mask(start, BLOCK, condition)
        at, sees = torch.arange(n), script.causal_mask(start, condition)
        for head, color in enumerate((BLUE, ORANGE) if condition else (BLUE,)):
            q, keys = np.nonzero(sees(None, torch.tensor(head), at[:, None], at).numpy())
            ends = np.stack([keys, keys + 1, np.full(len(keys), np.nan)], axis=1).ravel()
            axes.plot(ends, np.repeat(q + 0.5, 3), color=color, linewidth=125 / n, solid_capstyle="butt")
        partial, full = (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)
        for fill, (counts, of) in (0, partial), (0.4, full):
            for i, count in enumerate(counts[0, 0]):
                for j in of[0, 0, i, :count].tolist():
                    box(axes, j * BLOCK, i * BLOCK, BLOCK, BLOCK, SOFT, facecolor=(INK, fill), zorder=3)
            words.append(f"{title}: {int(counts.sum())} {'full' if fill else 'partial'} blocks.")
        axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_title(title)
    return " ".join(words)


def step(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw the order of a step on two ranks, without its times"""
    _, optimizers, table = build(script, cfg, 2)
    rows, now = dict[Any, list[tuple[int, str]]](), 0
    schedule = max(cfg.step_schedules, key=lambda it: len(it.updates))

    def told(what: str, of: Any = table, result: Any = None) -> Any:
        nonlocal now
        rows.setdefault(of, []).append((now, what))
        now += 4 if what == "gradients" else 1
        return result

    def update(optimizer: Any, _: Any) -> None:
        told("update", optimizer)
        told("gather", optimizer)
        optimizer.wait_for_params = lambda: told("gathered", optimizer)

    # The trainer's own step, on parts that tell when they are called
    trainer = SimpleNamespace(cfg=cfg, optimizers=optimizers, attn_settings=(schedule.stage, None), stop_signals=[])
    trainer.run_add_gradients = lambda *_: told("gradients", "rank 0", torch.zeros(()))
    trainer.table = SimpleNamespace(exchange=0, group=table.group, wait_for_rows=lambda: None)
    trainer.table.send = lambda _: told("send", table, lambda: told("sent"))
    trainer.table.update, trainer.table.fetch = (lambda *_: told("update")), (lambda _: told("fetch"))
    sequences, base = [SimpleNamespace(tokens=[0])] * (cfg.batch_sequences // 2), script.ShardedOptimizer
    with patch.object(base, "reduce", lambda it, **_: told("reduce", it)), patch.object(base, "update", update):
        script.Trainer.train_step(trainer, schedule, sequences, 0, 1)
    note = """Blue: computed; each rank updates its half.
Orange: sums on the way to their owners, or new values
back to all; of n-grams, the rows of the next steps."""
    axes, labels, words = subplots(figure, 24 * len(rows) + 140, note=note), ["sequences, rank 0", "rank 1"], []
    for y, (of, events) in enumerate(rows.items(), 1):
        for (begin, what), (end, _) in pairwise([*events, (now, "")]):
            for rank in (0, 1) if what == "gradients" else ():
                box(axes, begin, rank - 0.4, 4, 0.8, BLUE, str(begin // 2 + rank + 1))
            if what in ("send", "fetch", "reduce", "gather", "update"):
                box(axes, begin, y - 0.4, end - begin, 0.8, BLUE if what == "update" else ORANGE)
        if of != "rank 0":
            of_matrices = [name.rpartition(".")[2] for name in of.names] if getattr(of, "by_matrix", False) else []
            names = [*dict.fromkeys(of_matrices or [group.name for group in getattr(of, "groups", [table.group])])]
            labels.append(", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more")
            words.append(f"{labels[-1]}: {', '.join(what for _, what in events)}.")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlim=(0, now), ylim=(len(labels) - 0.5, -0.6), xticks=[])
    axes.set_title(f"order, not time{'; head tied to embed' if schedule.tied else ''}")
    return " ".join(words)


def memory(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw the bytes that lie on one rank, of one and of eight"""
    sizes: dict[str, list[tuple[str, int]]] = {}
    for color, world_size in (ORANGE, 1), (BLUE, 8):
        gpt, optimizers, table = build(script, cfg, world_size)
        counted = Counter({"table of signs": sum(it.nbytes for it in gpt.buffers())})
        for it in optimizers:
            counted["parameters"] += it.param_buffer.nbytes
            counted["gradients"] += it.grad_buffer.nbytes + (it.grad_shard.nbytes if world_size > 1 else 0)
            for name, tensor in it.state.items():
                counted["EMAs" if name.startswith("ema") else "optimizer states"] += tensor.nbytes
        counted["n-gram rows"] = table.rows.nbytes + table.v.nbytes
        counted["rows of a cycle"] = table.fetched.nbytes + table.grads.nbytes
        for kind, size in [*counted.items(), ("sum", counted.total())]:
            sizes.setdefault(kind, []).append((color, size))
    note = "Not counted: activations, logits, and what\ncollectives and graphs keep."
    return draw_dots(figure, [*sizes.items()], {ORANGE: "with 1 rank", BLUE: "each of 8"}, "B", note)


def parameters(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw how many parameters each group of gpt2 has"""
    gpt, _, table = build(script, cfg, 1)
    counts = Counter({table.group.name: cfg.ngram_rows * cfg.model_dim})
    for name, p in gpt.named_parameters():
        counts[script.find_group(name, cfg).name] += p.numel()
    colors = dict(zip(dict.fromkeys(it.optimizer for it in cfg.groups), cycle(COLORS), strict=False))
    rows = [(it.name, [(colors[it.optimizer], counts[it.name])]) for it in cfg.groups]
    return draw_dots(figure, rows, {color: name for name, color in colors.items()})


def draw_dots(figure: Figure, rows: list, key: dict[str, str], unit: str = "", note: str = "") -> str:
    """Draw rows (label, [(color, number)]) on a logarithmic axis, with the numbers beside them."""
    axes, words = subplots(figure, 20 * len(rows) + 60 + 40 * bool(note), note=note), []
    amount = EngFormatter(unit)
    if not unit:
        amount.ENG_PREFIXES = amount.ENG_PREFIXES | {9: "B"}
    for color, label in key.items():
        axes.plot([], [], "o", color=color, label=label)
    for y, (label, values) in enumerate(rows):
        axes.plot([value for _, value in values], [y] * len(values), color=RULE, linewidth=3)
        for color, value in values:
            axes.plot(value, y, "o", color=color)
        amounts = [amount(float(f"{value:.3g}")) for _, value in values]
        axes.text(1.02, y, " / ".join(amounts), transform=axes.get_yaxis_transform(), va="center_baseline")
        words.append(f"{label}: {', '.join(amounts)}.")
    axes.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.xaxis.set_major_formatter(amount)
    axes.minorticks_off()
    axes.legend(bbox_to_anchor=(1, 1.01), ncols=4)
    return " ".join(words)


def softcap(script: ModuleType, _: Any, figure: Figure) -> str:
    """Draw the softcap of logits, and its slope"""
    above, below = subplots(figure, 300, 2)
    z, words = torch.linspace(-40, 40, 321, dtype=torch.float64), []
    for color, (name, cfg) in zip(cycle(COLORS), script.PRESETS.items(), strict=False):
        exps = script.softcapped_softmax(z[:, None].clone(), torch.zeros(len(z), 1, dtype=torch.int64), cfg).exps
        capped = exps[:, 0].log().numpy() + cfg.softcap_range
        slope = np.gradient(capped, z.numpy())
        above.plot(z, capped, color=color, label=name)
        below.plot(z, slope, color=color)
        steepest = f"steepest at {z[slope.argmax()]:.2g}, with a slope of {slope.max():.2g}"
        words.append(f"{name}: 0 becomes {capped[160]:.3g}, {steepest}.")
    above.set_title("l, the logit with the softcap")
    above.legend(bbox_to_anchor=(1, 1.01), ncols=4)
    below.set_title("its slope")
    below.set(xlabel="z, the logit", xlim=(-40, 40))
    return " ".join(words)


def newton_schulz(script: ModuleType, cfg: Any, figure: Figure) -> str:
    """Draw what each step of Newton-Schulz makes of singular values"""
    axes, s, rows = subplots(figure, 250), torch.logspace(-4, 0, 401, dtype=torch.float64), script.NEWTON_SCHULZ
    matrices = torch.diag_embed(torch.stack([s, (1 - s**2).sqrt()], dim=1))  # of norm 1
    for n in range(len(rows) + 1):
        with patch.object(script, "NEWTON_SCHULZ", rows[:n]):
            after = script.zeropower_via_newtonschulz5(matrices, torch.float64)[:, 0, 0]
        axes.plot(s, after, color=(BLUE if n else SOFT, (n + 2) / (len(rows) + 2)))
        axes.text(float(s[(after > 0.25).int().argmax()]) * 0.97, 0.25, str(n), ha="right", va="bottom")
    axes.set(xscale="log", xlim=(1e-4, 1), ylim=(0, None), xlabel="singular value, of a matrix of norm 1")
    axes.xaxis.set_major_formatter("{x:g}")
    last = after[s > 0.004]
    axes.set_title(f"after 0 to {len(rows)} steps; at last {last.min():.2f} to {last.max():.2f} from 0.004 on")
    return f"After {len(rows)} steps singular values from 0.004 on are from {last.min():.5g} to {last.max():.5g}."


DRAWINGS = layers, schedules, masks, step, memory, parameters, softcap, newton_schulz


def draw(script: ModuleType) -> dict[str, str]:
    """Return the drawings of a loaded script as SVGs, by name."""
    drawings, name = dict[str, str](), "layers"
    try:
        cfg = dataclasses.replace(script.PRESETS["gpt2"], dtype="bfloat16", device="cpu")  # the same on all machines
        for function in DRAWINGS:
            name, file = function.__name__, io.StringIO()
            with rc_context(STYLE | {"svg.hashsalt": name}):
                words = function(script, cfg, figure := Figure(layout="constrained"))
                metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # none
                figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            title = str(function.__doc__).removeprefix("Draw ").capitalize()
            drawings[name] = finish(file.getvalue(), name, f"<title>{title}</title>\n<desc>{escape(words)}</desc>")
    except (AttributeError, LookupError) as error:
        raise ToolError(f"{script.__name__}: lacks what the drawing {name} is made from: {error}") from None
    return drawings


def finish(svg: str, name: str, about: str) -> str:
    """Return an SVG by matplotlib with its text, in colors for light and dark paper; a page may hold several."""
    width, height = map(float, re.findall('viewBox="0 0 (.*?) (.*?)"', svg)[0])
    unwanted = r""" id="[a-z0-9.]+_\d+"| clip-path="[^"]*"|font-size: 9.4px; |font-family: 'DejaVu Sans'; """
    body = re.sub(unwanted, "", svg[svg.index('<g id="figure_1"') :]).replace(" \n", " ")
    for i, color in enumerate(LIGHT):
        body = body.replace(color, f"var(--{name}-{i})")
    light, dark = (";".join(f"--{name}-{i}:{color}" for i, color in enumerate(colors)) for colors in (LIGHT, DARK))
    style = f"#drawing-{name}{{max-width:100%;height:auto;font:9.4px {FONT};{light}}}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" id="drawing-{name}" \
role="img" width="{width / 0.75:.0f}" height="{height / 0.75:.0f}" viewBox="0 0 {width:g} {height:g}">
{about}
<style>{style}@media(prefers-color-scheme:dark){{#drawing-{name}{{{dark}}}}}</style>
{body}"""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in draw(load_script(ROOT / "train_gpt.py")).items():
        (FOLDER / f"{name}.svg").write_text(svg)
