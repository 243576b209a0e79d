"""Score a model that a run with --save_checkpoint wrote: on HellaSwag, on choices of your own, on any text.

    python -m speedrun evaluate --hellaswag                          the newest model in logs/, 10,042 questions
    python -m speedrun evaluate logs/RUN_ID.pt --choices FILE.jsonl  a question a line: ctx, endings, label (from 0)
    python -m speedrun evaluate logs/RUN_ID.pt --text FILE           bits per byte, which models of all tokens share

An answer is the ending whose tokens have the lowest mean loss after the context and a space. What the last validation
knows of the tokenizer, `canon_file`, is known here, too, if the file is there. The result, a JSON object, goes to
stdout, all else to stderr. Exit codes: 0; 2 something has to be mended, one line says what; 130 interrupted.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speedrun import needs

with needs.packages():
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from tqdm import tqdm

    import sample
    from data import texts
    from sample import Model
    from train_gpt import UserError

PROGRAM = "python -m speedrun evaluate"
HELLASWAG: dict[str, Any] = dict(
    repo_id="Rowan/hellaswag", filename="data/validation-00000-of-00001.parquet", repo_type="dataset"
)
HELLASWAG |= dict(revision="218ec52e09a7e7462a5400043bb9a69a41d06b76")
LENGTH = 4096  # tokens that the model reads at a time, or val_seq_len: in plain PyTorch attention takes memory
OVERLAP = 1024  # tokens of a long text that the model reads again, before those to be scored
SLICE = 512  # tokens whose logits exist at a time
# Smear, n-grams, key offset and token shift give a token something of those before it, even of another document, and
# the first two of a sequence have n-grams of their own. The last of so many documents of one token is the same anywhere
RUN_UP = 8  # end-of-text tokens before a document's others: the last is its own, 1 for the key, 4 for nano's shift
Document = tuple[list[int], int]  # tokens, and how many of them are only context
Question = tuple[str, list[str], int]  # context, endings and the number of the right one


def pack(documents: Sequence[Document], length: int) -> Iterator[Sequence[Document]]:
    """Yield as many documents in turn as fit into a sequence of `length` tokens, with their run-ups."""
    begin = used = 0
    for end, (tokens, _) in enumerate(documents):
        used += RUN_UP + len(tokens)
        if used > length and end > begin:
            yield documents[begin:end]
            begin, used = end, RUN_UP + len(tokens)
    yield documents[begin:]


@torch.inference_mode()
def score(model: Model, documents: Sequence[Document], length: int, name: str) -> list[float]:
    """Return the summed loss of each document's tokens, without those of its context, in nats."""
    found: list[float] = []
    options = dict(total=sum(RUN_UP + len(tokens) for tokens, _ in documents), unit="tok", unit_scale=True)
    with tqdm(**options, desc=name, disable=None) as bar:
        for packed in pack(documents, length):
            read: list[int] = []
            places: list[Tensor] = []  # of the tokens to score, for each document
            for tokens, context in packed:
                read += [model.cfg.eot_token] * RUN_UP + tokens
                places.append(torch.arange(len(read) - len(tokens) + context, len(read)))
            x, losses = model.features(read), []
            targets = torch.tensor(read, device=x.device)
            for some in torch.cat(places).to(x.device).split(SLICE):
                logits = model.logits(x, targets, some - 1).double()
                losses.append(F.cross_entropy(logits, targets[some], reduction="none").cpu())
            found += [part.sum().item() for part in torch.cat(losses).split([len(place) for place in places])]
            bar.update(len(read))
            if not math.isfinite(sum(found)):
                raise UserError("the model's losses are not finite: its training diverged")
    return found


def parse_question(question: Any, where: str) -> Question:
    try:
        ctx, endings, label = question["ctx"], question["endings"], int(str(question["label"]))  # HellaSwag has texts
        if isinstance(endings, list) and 0 <= label < len(endings) and len(endings) > 1:
            ctx, *endings = map(texts.without_surrogates, (ctx, *endings))
            return ctx, endings, label
    except (TypeError, KeyError, ValueError):
        pass
    wanted = "ctx, a text, endings, a list of two or more texts, and label, the number of the right one, from 0"
    raise UserError(f"{where}: expected an object with {wanted}")


def read_text(path: Path) -> str:
    try:
        if text := texts.read_text(path):
            return text
        raise UserError(f"{path}: is empty")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8 or UTF-16") from None


def read_questions(path: Path) -> Iterator[Question]:
    skipped = 0
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            question = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: is no JSON: {str(error).partition(': line')[0]}; mend or remove it") from None
        except RecursionError:
            raise UserError(f"{where}: is JSON in too many brackets; mend or remove it") from None
        if question is None:
            skipped += 1
        else:
            yield parse_question(question, where)
    if skipped:
        print(f"note: {path}: {skipped} lines are null, left out", file=sys.stderr)


def hellaswag() -> Iterator[Question]:
    """Fetch the questions of HellaSwag's validation set (arXiv:1905.07830). The hub has them as Parquet."""
    try:
        from huggingface_hub import hf_hub_download
        from pyarrow import parquet

        table = parquet.read_table(hf_hub_download(**HELLASWAG), columns=["ctx", "endings", "label"])
    except ImportError as error:
        raise UserError(f"{error}: {needs.PIP} pyarrow huggingface_hub, or give --choices FILE.jsonl") from None
    except Exception as error:  # a download fails in many ways
        raise UserError(f"HellaSwag cannot be fetched: {error!r:.200}; or give --choices FILE.jsonl") from None
    return (parse_question(question, f"HellaSwag {i}") for i, question in enumerate(table.to_pylist()))


def answer(model: Model, questions: Sequence[Question], length: int, name: str) -> dict:
    """Return how many questions the model answers rightly."""
    encode, _ = sample.tokenizer(model.cfg)
    documents: list[Document] = []
    most = length - RUN_UP
    for number, (ctx, endings, _) in enumerate(questions, start=1):
        context = encode(ctx)
        documents += [([*context, *encode(f" {ending}")], len(context)) for ending in endings]
        if (longest := max(len(tokens) for tokens, _ in documents[-len(endings) :])) > most:
            raise UserError(f"{name}: question {number} has {longest} tokens, the model reads {most} at most")
    losses = iter(score(model, documents, length, name))
    sizes, right = iter(len(tokens) - context for tokens, context in documents), 0
    for _, endings, label in questions:
        means = [next(losses) / next(sizes) for _ in endings]
        right += means.index(min(means)) == label
    n, chance = len(questions), sum(1 / len(endings) for _, endings, _ in questions)
    error = (right * (n - right) / n) ** 0.5 / n
    return dict(questions=n, right=right, accuracy=right / n, standard_error=error, chance=chance / n)


def compress(model: Model, text: str, length: int, name: str) -> dict:
    """Return the model's bits per byte of a text, which it reads in pieces that overlap."""
    tokens = sample.tokenizer(model.cfg)[0](text)
    overlap = min(OVERLAP, length // 4)
    starts = range(0, len(tokens), step := length - RUN_UP - overlap)
    documents = [(tokens[max(0, i - overlap) : i + step], min(i, overlap)) for i in starts]
    nats = sum(score(model, documents, length, name))
    size = len(text.encode())
    return dict(bytes=size, tokens=len(tokens), bits_per_byte=nats / math.log(2) / size, loss=nats / len(tokens))


def evaluate(argv: Sequence[str] | None) -> None:
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, **form)  # type: ignore[arg-type]
    sample.add_model(parser)
    add = parser.add_argument
    add("--hellaswag", action="store_true", help="fetch its validation questions; needs pyarrow")
    add("--choices", type=Path, metavar="FILE", action="append", default=[], help="questions in JSON lines; repeatable")
    add("--text", type=Path, metavar="FILE", action="append", default=[], help="any text; repeatable")
    add("--limit", type=int, metavar="N", help="only the first N questions of each set")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit}: expected a number of at least 1")
    if not (args.hellaswag or args.choices or args.text):
        raise UserError("nothing to score: give --hellaswag, --choices FILE or --text FILE")
    texts = {str(path): read_text(path) for path in args.text}
    sets = {str(path): list(read_questions(path))[: args.limit] for path in args.choices}
    if args.hellaswag:
        sets["HellaSwag"] = list(hellaswag())[: args.limit]
    if empty := [name for name, questions in sets.items() if not questions]:
        raise UserError(f"{empty[0]}: has no questions")
    path, model = sample.find_model(args.model or args.file, args.device)
    length, start = min(LENGTH, model.cfg.val_seq_len), time.perf_counter()
    found: dict = dict(model=str(path), parameters=model.size, ngram_rows=model.cfg.ngram_rows, dtype=model.cfg.dtype)
    found["canon_file"] = model.cfg.canon_file
    found["choices"] = {name: answer(model, questions, length, name) for name, questions in sets.items()}
    found["texts"] = {name: compress(model, text, length, name) for name, text in texts.items()}
    print(json.dumps(found | dict(seconds=round(time.perf_counter() - start, 1)), indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    return sample.run(PROGRAM, evaluate, argv)
