"""Begin a run with the weights of a model that --save_checkpoint wrote: write a checkpoint of step 0 to go on from.

    python -m speedrun begin logs/MODEL.pt --run_id NEW --seed 1 [flags of train_gpt.py]
    python train_gpt.py --run_id NEW --seed 1 [the same flags] --resume logs/NEW.checkpoint

For several processes start both with torchrun: torchrun --standalone --nproc_per_node=8 -m speedrun begin ... The rows
of n-grams beside the model come along with their mean squares; optimizers, schedules and the clock begin anew. Where
embedding and head are tied, both begin as the head. Exit codes: 0; 2, and one line says what to mend; 130 interrupted.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from speedrun import needs

with needs.packages():
    import torch

    import train_gpt
    from speedrun.model import load_ngrams, read_model, run
    from train_gpt import Trainer, UserError

PROGRAM = "python -m speedrun begin"


def take_weights(trainer: Trainer, model: Path) -> None:
    """Set parameters and rows of n-grams to those of a model, in the precision of the run."""
    saved = read_model(model)
    with train_gpt.refusing(f"{model}: not a sound model for these flags"):
        theirs, state = json.loads(saved["configuration"]), saved["model"]
        for name in "ngram_rows", "ngram_order":  # else its rows would be those of other n-grams
            if theirs[name] != getattr(trainer.cfg, name):
                raise UserError(f"{model}: it has --{name} {theirs[name]}: give the same")
        if trainer.cfg.tied_frac:
            state["embed.weight"] = state["lm_head"]
        trainer.gpt.load_state_dict(state)
        for optimizer in trainer.optimizers:
            values = torch.zeros_like(optimizer.param_buffer, dtype=optimizer.values.dtype)
            for name, view in zip(optimizer.names, optimizer.views(values), strict=True):
                view.copy_(state[name])
            optimizer.values.copy_(optimizer.shard(values))
        table = trainer.table
        for part in load_ngrams(model, saved["rows"]):
            is_own = (part["ids"] >= table.first) & (part["ids"] < table.first + len(table.rows))
            table.restore(**{name: values[is_own] for name, values in part.items()})


def begin(argv: Sequence[str] | None) -> None:
    """Write the checkpoint, and no file at all if the model does not suit the flags."""
    model, *flags = argv or ["--help"]
    if model in ("-h", "--help"):
        print(__doc__)
        return
    if any(flag.startswith("--resume") for flag in flags):
        raise UserError("--resume is for the run that goes on from here: leave it out")
    source = Path(train_gpt.__file__).read_text(encoding="utf-8")
    ranks = train_gpt.init_distributed()
    data, _, log = train_gpt.agree(source, flags, ranks)
    try:
        with log.going_on():
            with train_gpt.together(ranks), train_gpt.refusing(train_gpt.CANNOT_TRAIN):
                trainer = Trainer(log.cfg, ranks)
                take_weights(trainer, Path(model))
            log.write(train_gpt.header(source, flags, log, ranks, data))
            log.write(f"begins with {model}")
            path = log.path.with_suffix(".checkpoint")
            train_gpt.save_progress(trainer, log, step=0, ms=0.0)
            if not log.saved.checksums:
                raise UserError(f"{path}: there is none, see above")
            log.write(f"to train: train_gpt.py with the same flags and --resume {path}", console=True)
    except BaseException:
        if ranks.rank == 0:
            log.path.unlink()
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROGRAM, begin, argv)
