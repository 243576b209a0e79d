"""Show runs as one page that asks for nothing outside: losses, plans, settings, and a text coloured by bits.

    python -m speedrun view logs/RUN_ID.txt               writes logs/RUN_ID.html
    python -m speedrun view LOG OTHER_LOG -o page.html    compares runs

If a run's model lies beside its log, it writes a sample, and each token has its bits where validation begins. Exit
codes: 0; 2 something has to be mended, one line says what; 130 interrupted.
"""

import argparse
import codecs
import contextlib
import dataclasses
import json
from collections import defaultdict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speedrun import needs

with needs.packages("race", "site"):
    import numpy as np
    import torch

    import train_gpt
    from speedrun import pages, plots, store
    from speedrun.logs import Log, ToolError
    from speedrun.mixture import Mixture, find_model
    from speedrun.model import Model, choose, generate, run, tokenizer
    from train_gpt import PRESETS, TABLES, Hyperparameters, UserError

PROGRAM = "python -m speedrun view"
SCORED = 2000  # tokens: more make a page slow
PROMPT, SAMPLE, NAMED = 24, 200, 3  # tokens: of a prompt, that follow it, and that are named of those expected
LOSS = "validation loss"
Piece = namedtuple("Piece", "text bits told")  # some characters, the bits of their tokens, a line for each of these


def newest_record(log: Log) -> dict[str, list[Log]]:
    """Return the newest record of the log's track, if it validated on the same tokens."""
    folders = [it for it in store.lineage(store.RECORDS) if log.track and store.is_on_board(it, log.track)]
    logs = store.record_logs(folders[-1]) if folders else []
    is_same = logs and plots.track_of(logs[0]) == plots.track_of(log)
    return {f"record {store.short_name(folders[-1].name)}": logs} if is_same else {}


def charts(runs: Mapping[str, Log]) -> list[Any]:
    """Draw losses beside the record's, and plans that train_gpt.py makes of the settings, if they are not constant."""
    first, lines = next(iter(runs.values())), defaultdict[tuple[str, str], Any](lambda: defaultdict(list))
    for name, logs in ({name: [log] for name, log in runs.items()} | newest_record(first)).items():
        if all(log.curve for log in logs):
            curve = plots.curve_of(name, ("", None), [log.curve for log in logs])
            lines["seconds", LOSS][name] = [*zip(curve.seconds, curve.mean, strict=True)]
            lines["steps", LOSS][name] = [*zip(curve.steps, curve.mean, strict=True)]
        lines["steps", "training loss"][name] = [(it.step, it.train_loss) for it in logs[0].training if it.train_loss]
    for name, log in runs.items():
        with contextlib.suppress(UserError), train_gpt.refusing("settings of another script"):
            cfg = Hyperparameters(**log.configuration)
            for plan in cfg.plans if log.configuration.keys() == vars(cfg).keys() else ():
                lines["steps", "factor on learning rates"][name].append((plan.step, plan.lr_factor))
                lines["steps", "thousand tokens"][name].append((plan.step, cfg.batch_sequences * plan.seq_len / 1000))
                for kind, window in plan.windows.items():
                    lines["steps", "attention window"][f"{name}: {kind}"].append((plan.step, window.reach))
    told = {key: its for key, its in lines.items() if len({y for line in its.values() for _, y in line}) > 1}
    targets = {LOSS: plots.track_of(first)[1]}
    return [pages.chart(its, x, y, target=targets.get(y)) for (x, y), its in told.items()]


def differing(logs: Sequence[Log]) -> dict[str, list[str]]:
    """Return the settings that differ from the first run's preset, if this script has it, or among runs."""
    every = [dataclasses.asdict(PRESETS[name]) for name in PRESETS if name == logs[0].track]
    every += [dict(log.configuration) for log in logs]
    for its in every:  # rows of tables one by one
        its |= {f"{name} {i}": row for name in TABLES for i, row in enumerate(its.pop(name, ()))}
    rows = {name: [json.dumps(its.get(name)) for its in every] for its in every for name in its}
    return {name: row for name, row in rows.items() if len({*row}) > 1 and name not in ("run_id", "log_dir")}


@torch.inference_mode()
def expected(model: Model | Mixture, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield for each token of a sequence but the first the probabilities (V,) of all that may stand there."""
    if isinstance(model, Model):
        for z in model.predictions(tokens):
            yield from z.double().softmax(1).cpu()
        return
    for mixed, _ in model.read(tokens):
        yield torch.from_numpy(np.exp(mixed))


def pieces(model: Model | Mixture, tokens: Sequence[int]) -> Iterator[Piece]:
    """Yield the characters of a sequence, without its first token, with the tokens that they take."""
    _, decode = tokenizer(model.cfg)
    names = [repr(decode(i))[1:] for i in range(model.cfg.eot_token)] + ["end of text"]
    decoder, bits, lines = codecs.getincrementaldecoder("utf-8")("replace"), 0.0, list[str]()
    for token, p in zip(tokens[1:], expected(model, tokens), strict=True):
        is_end, own = token == model.cfg.eot_token, -p[token].log2().item()
        told = ", ".join(f"{names[it]} {p[it]:.0%}" for it in p.topk(NAMED).indices.tolist())
        lines.append(f"{names[token]}: {own:.2f} bits; expected {told}")
        bits += own
        if text := decoder.decode(b"\n" if is_end else decode(token)):
            yield Piece(text, bits, "\n".join(lines))
            bits, lines = 0.0, []
    yield Piece(decoder.decode(b"", True), bits, "\n".join(lines))  # what a cut character has left


def read_model(path: Path, log: Log) -> dict[str, Any]:
    """Return what a model writes and scores, or why it cannot."""
    try:
        _, model = find_model(path, "auto")
        cfg, (_, decode) = model.cfg, tokenizer(model.cfg)
        lengths = [(cfg.val_seq_len, 0)] * (cfg.val_tokens // cfg.val_seq_len)
        val = train_gpt.plan_batches(cfg.val_files, lengths, 1, cfg)
        if train_gpt.hash_tokens(val, cfg, targets=False) != log.val_sha256:
            return dict(problem=f"{cfg.val_files}: another text by now")
        [[sequence]] = train_gpt.plan_batches(cfg.val_files, [(length := min(SCORED, cfg.val_seq_len), 0)], 1, cfg)
        tokens = train_gpt.read_sequence(*sequence, cfg).tolist()
    except UserError as error:  # another script's, or without its text
        return dict(problem=str(error))
    scored, prompt = [*pieces(model, tokens)], [token for token in tokens[:PROMPT] if token != cfg.eot_token]
    chooser = partial(choose, temperature=0.8, top_k=50, rng=torch.Generator().manual_seed(0))
    texts = dict(prompt=prompt, sample=generate(model, prompt, min(SAMPLE, length - PROMPT), chooser))
    told = {name: b"".join(map(decode, its)).decode("utf-8", "replace") for name, its in texts.items()}
    return told | dict(pieces=scored, file=path.name, tokens=length)


def view(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="(default: beside the first log)")
    args = parser.parse_args(argv)
    try:
        runs = {str(path.with_suffix("")): Log(path) for path in args.logs}
    except ToolError as error:
        raise UserError(str(error)) from None
    files = {name: path for name in runs for kind in (".pt", ".mixture") if (path := Path(name + kind)).exists()}
    models = {name: read_model(path, runs[name]) for name, path in files.items()}
    page = dict(runs=runs, charts=charts(runs), settings=differing([*runs.values()]), models=models)
    path = args.output or args.logs[0].with_suffix(".html")
    path.write_text(pages.render("view.html", **page), encoding="utf-8")
    print(path)


main = partial(run, PROGRAM, view)
