"""Print what flags and tables mean: a line for each layer, each group of parameters and each step.

    python -m speedrun describe [flags of train_gpt.py, such as --preset gpt2]

Exit codes: 0; 2 something has to be mended, one line says what; 130 interrupted.
"""

from collections.abc import Sequence

from speedrun import needs

with needs.packages():
    import train_gpt
    from speedrun.model import run
    from train_gpt import Hyperparameters


def describe_tables(cfg: Hyperparameters) -> str:
    """Return as text what each layer has and what each step does, learning rates by the numbers of the groups."""
    lines = []
    for number, row, window, qk_dim, v_dim, factors in cfg.resolved_layers:
        made = ", ".join(f"{kind} {first} by {source}" for kind, source, first in factors)
        dims = f" in the {window} window, queries {qk_dim}, values {v_dim}" if window else ""
        lines.append(f"layer {number}: attention {row.attention}{dims}, MLPs {row.mlps}; {made}")
    for i, group in enumerate(cfg.groups):
        of_muon = f" x {cfg.muon_lr}" if group.optimizer == "Muon" else ""
        lines.append(f"group {i}: {group.optimizer} {group.names}, lr {group.lr:.4g}{of_muon} x the step's")
    numbers = {group.names: i for i, group in enumerate(cfg.groups)}
    for plan in [*cfg.plans, train_gpt.plan_validation(cfg.num_iterations, cfg)]:
        windows = ", ".join(f"{kind} {window.reach} x {window.attn_scale:.4f}" for kind, window in plan.windows.items())
        weights = " ".join(f"{weight:.3f}" for weight in plan.next_weights)
        losses = f"losses {weights}, of prefixes {plan.prefix_weight}, candidates {plan.candidates or 'all'}"
        due = " ".join(str(numbers[names]) for names in plan.updates)
        updates = f"; lr {plan.lr_factor:.6g} for groups {due}{', tied' * plan.ties}" if due else ""
        head = f"{'step' if plan.trains else 'validation'} {plan.step}: stage {plan.stage}, {plan.seq_len} tokens"
        lines.append(f"{head}, documents cut at {plan.max_doc_len or 'no length'}; {windows}; {losses}{updates}")
    return "\n".join(lines)


def describe(argv: Sequence[str] | None) -> None:
    if {"-h", "--help"} & {*(argv or ())}:
        print(__doc__)
        return
    with train_gpt.refusing("rows of layers, stages or groups do not fit each other"):
        print(describe_tables(train_gpt.parse_args(argv or [])))


def main(argv: Sequence[str] | None = None) -> int:
    return run("python -m speedrun describe", describe, argv)
