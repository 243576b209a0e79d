"""Show what a model has learned: continue a text with a model that a run with --save_checkpoint wrote.

    python sample.py                                                 the newest model in logs/
    python sample.py logs/RUN_ID.pt --prompt "class " --seed 1       this one, and the same text every time

The text goes to stdout, all else to stderr. Exit codes: 0; 2 something has to be mended, one line says what; 130
interrupted.
"""

import argparse
import codecs
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from speedrun import needs

with needs.packages():
    import torch

    import train_gpt
    from speedrun.mixture import find_model
    from speedrun.model import add_model, choose, generate, run, tokenizer
    from train_gpt import UserError

CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}  # for terminals


def write(pieces: Iterable[bytes]) -> None:
    """Print UTF-8 as it comes; print U+FFFD for what is none, and for control characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        print(decoder.decode(piece).translate(CONTROLS), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)


def sample(argv: Sequence[str] | None) -> None:
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__, **form)  # type: ignore[arg-type]
    add_model(parser)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="what to go on from; --prompt=TEXT if it begins with - ['def ' or 'The ']")
    add("--tokens", type=int, metavar="N", default=300, help="the most tokens to add [%(default)s]")
    add("--temperature", type=float, metavar="X", default=0.8, help="0: the likeliest token always [%(default)s]")
    add("--top_k", type=int, metavar="K", default=50, help="only the K likeliest tokens; 0: all [%(default)s]")
    add("--seed", type=int, metavar="N", help="the same text again [a fresh one, printed at the end]")
    args = parser.parse_args(argv)
    for name, high in dict(tokens=100_000, temperature=100, top_k=2**16, seed=2**63 - 1).items():
        if (value := getattr(args, name)) is not None and not 0 <= value <= high:
            raise UserError(f"--{name} {str(value)[:50]}: expected a number from 0 to {high}")
    path, model = find_model(args.model or args.file, args.device)
    is_code = model.cfg.train_files == train_gpt.PRESETS["nano"].train_files
    prompt = ("def " if is_code else "The ") if args.prompt is None else args.prompt
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    encode, decode = tokenizer(model.cfg)
    rng, read, generated = torch.Generator().manual_seed(seed), encode(prompt), list[int]()
    if len(read) + args.tokens > (most := model.cfg.val_seq_len):
        raise UserError(f"--prompt of {len(read)} tokens, --tokens {args.tokens}: the model reads {most} at most")
    print(f"{path}, {model.size:,} parameters, {model.cfg.ngram_rows:,} rows of n-grams", file=sys.stderr)
    start = time.perf_counter()

    def text() -> Iterator[bytes]:
        yield from map(decode, read)
        chooser = partial(choose, temperature=args.temperature, top_k=args.top_k, rng=rng)
        for token in generate(model, read, args.tokens, chooser):
            generated.append(token)
            yield decode(token)

    write(text())
    rate = f"{len(generated) / (time.perf_counter() - start):.0f} tokens/s"
    end = ", where the text ends" if len(generated) < args.tokens else ""
    print(f"[{len(generated)} tokens{end}; {rate}, seed {seed}]", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    return run("sample.py", sample, argv)


if __name__ == "__main__":
    sys.exit(main())
