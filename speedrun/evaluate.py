"""Score a model that a run with --save_checkpoint wrote on any text: bits per byte, which models of all tokens share.

    python -m speedrun evaluate --text FILE                      the newest model in logs/
    python -m speedrun evaluate logs/RUN_ID.pt --text FILE       this one; --text is repeatable

What the last validation knows of the tokenizer, `canon_file`, is known here, too, if the file is there. The result, a
JSON object, goes to stdout, all else to stderr. Exit codes: 0; 2 something has to be mended, one line says what; 130
interrupted.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from speedrun import needs

with needs.packages():
    import torch
    from tqdm import tqdm

    from speedrun.mixture import Mixture, find_model
    from speedrun.model import Model, add_model, run, tokenizer
    from train_gpt import UserError

PROGRAM = "python -m speedrun evaluate"
LENGTH = 4096  # tokens that the model reads at a time, or val_seq_len: in plain PyTorch attention takes memory
OVERLAP = 1024  # tokens of a long text that the model reads again, before those to be scored


def losses(model: Model | Mixture, tokens: Sequence[int], length: int, name: str = "") -> torch.Tensor:
    """Return the loss (n,) in nats of each token of a text at the beginning of a document.

    The model reads pieces of at most `length` tokens, of which a quarter, or OVERLAP, is what it has read before. A
    mixture would count that twice, and does not read it again.
    """
    overlap = 0 if isinstance(model, Mixture) else min(OVERLAP, length // 4)
    parts = []
    for start in tqdm(range(0, len(tokens), length - 1 - overlap), desc=name, disable=None):
        context = min(start, overlap)
        read = [model.cfg.eot_token, *tokens[start - context : start + length - 1 - overlap]]
        parts.append(model.losses(read)[context:])
    return torch.cat(parts)


def read_text(path: Path) -> str:
    try:
        if text := path.read_text("utf-8-sig"):
            return text
        raise UserError(f"{path}: is empty")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8") from None


def evaluate(argv: Sequence[str] | None) -> None:
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, **form)  # type: ignore[arg-type]
    add_model(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", action="append", required=True, help="repeatable")
    args = parser.parse_args(argv)
    texts = {str(path): read_text(path) for path in args.text}
    path, model = find_model(args.model or args.file, args.device)
    length, start = min(LENGTH, model.cfg.val_seq_len), time.perf_counter()
    told: dict = dict(model=str(path), parameters=model.size, ngram_rows=model.cfg.ngram_rows, dtype=model.cfg.dtype)
    told |= dict(canon_file=model.cfg.canon_file, texts={})
    encode, _ = tokenizer(model.cfg)
    for name, text in texts.items():
        if isinstance(model, Mixture):
            model.begin()
        nats, size = losses(model, encode(text), length, name), len(text.encode())
        bits = nats.sum().item() / math.log(2) / size
        told["texts"][name] = dict(bytes=size, tokens=len(nats), bits_per_byte=bits, loss=nats.mean().item())
    print(json.dumps(told | dict(seconds=round(time.perf_counter() - start, 1)), indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROGRAM, evaluate, argv)
