"""Shows what a model has learned: continues a text with the model that a run with --save_checkpoint wrote.

    python sample.py                                                 the newest model in logs/
    python sample.py logs/RUN_ID.pt --prompt "class " --seed 1       this one, and the same text every time
    python sample.py --train [flags of train_gpt.py]                 trains in this process, then shows a sample

The text goes to stdout, all else to stderr. The last form is what run.sh does for one process: on a CPU the model is
saved unless the flags say --no-save_checkpoint. Exit codes: 0; 2 something has to be mended, one line says what; 130
interrupted; after --train those of train_gpt.py.

The model is that of train_gpt.py next to this file, and so are its logits. What differs is that it reads a text piece
by piece and keeps keys and values: a token costs one pass over the weights, not one over the text.
"""

import argparse
import codecs
import dataclasses
import functools
import math
import os
import random
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import train_gpt
from train_gpt import GPT, Hyperparameters, Rotary, UserError

PIECE = 512  # tokens of a prompt that are read at once: bounds the memory of their scores
SMALL = 10_000_000  # parameters, below which a second thread costs more than it saves (nano, busy machine: 20 times)
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}  # for terminals


class Reader(GPT):
    """GPT that reads one document piece by piece, from `begin` on; its layers are those of GPT.

    features(tokens (n,) int32, window), in blocks, goes on behind the tokens of the calls before: it gives their n rows
    of what GPT.features would give for the whole document. Keys and values stay as long as the window reaches.
    """

    def begin(self, max_tokens: int) -> None:
        """Forgets what it has read. The new document will have at most `max_tokens` tokens."""
        cfg, weight = self.cfg, self.embed.weight
        tables = Rotary(cfg.head_dim, max_tokens).to(weight.device)
        self.position, self.tables = 0, (tables.cos, tables.sin)
        self.last = torch.tensor([cfg.eot_token], dtype=torch.int32, device=weight.device)
        none = weight.new_empty(0, cfg.num_heads, cfg.head_dim)
        self.kept = deque((none, none) for letter in cfg.attention_layout if letter != "-")  # keys, values; next first

    def features(self, tokens: Tensor, window: int) -> Tensor:
        self.rotary.cos, self.rotary.sin = (table[self.position :] for table in self.tables)
        x = super().features(tokens, window)
        self.position += len(tokens)
        return x

    def bigram_hashes(self, tokens: Tensor) -> Tensor:
        before, self.last = self.last, tokens[-1:]
        return super().bigram_hashes(torch.cat([before, tokens]))[1:]

    def attention_masks(self, tokens: Tensor, window: int) -> dict[str, int]:
        return {"L": window, "S": max(1, window // 2)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        """Attention of the new q, k, v (n, H, D) over themselves and what is kept, no further back than the window."""
        k, v = (torch.cat(pair) for pair in zip(self.kept.popleft(), (k, v), strict=True))
        end, block = self.position + len(q), self.cfg.block_size
        key = torch.arange(end - len(k), end, device=q.device)
        query = key[-len(q) :, None]
        visible = (key <= query) & (key // block > query // block - window)
        scores = torch.einsum("qhd,khd->hqk", q * scale, k).masked_fill(~visible, -torch.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        self.kept.append((k[-window * block :], v[-window * block :]))
        return y

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads on, and returns the logits (vocab_size,) of the token that comes next."""
        window = train_gpt.window_blocks(self.cfg.num_iterations, self.cfg)
        for piece in torch.tensor(tokens, dtype=torch.int32, device=self.embed.weight.device).split(PIECE):
            x = self.features(piece, window)
        return self.logits(x[-1])[: self.cfg.vocab_size]


def load_model(path: Path, device: torch.device) -> Reader:
    """The model that --save_checkpoint wrote to `path`. Raises UserError if it is none, or another script's."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; train a model with --save_checkpoint") from None
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path}: not a sound checkpoint: {one_line(error)}") from None
    if not isinstance(saved, dict) or saved.keys() != {"configuration", "model"}:
        raise UserError(f"{path}: not what --save_checkpoint writes; name a file LOG_DIR/RUN_ID.pt")
    configuration = saved["configuration"]
    if differing := configuration.keys() ^ {field.name for field in dataclasses.fields(Hyperparameters)}:
        where = "only one of it and this train_gpt.py has"
        raise UserError(f"{path}: of another train_gpt.py: {where} {', '.join(sorted(differing))}; use that one")
    try:
        cfg = Hyperparameters(**configuration)
        # What was trained in bf16 is sampled in fp32 where that is faster
        dtype = "auto" if cfg.dtype == "bfloat16" else cfg.dtype
        with torch.device("meta"):  # the initial values are not needed
            gpt = Reader(dataclasses.replace(cfg, device=device.type, dtype=dtype)).eval()
        gpt.load_state_dict(saved["model"], assign=True)
    except (UserError, RuntimeError) as error:
        raise UserError(f"{path}: of another train_gpt.py: {one_line(error)}; use that one") from None
    for p in gpt.parameters():  # as CastedLinear does for every product: here once
        p.data = p.data.to(device, train_gpt.activation_dtype(gpt.cfg) if p.ndim >= 2 else p.dtype)
    if sum(p.numel() for p in gpt.parameters()) < SMALL:
        torch.set_num_threads(1)
    return gpt


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def newest_model(folder: Path) -> Path:
    try:
        return max(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    except ValueError:
        raise UserError(f"no model in {folder}: train one with --save_checkpoint, or name its file") from None


def tokenizer(cfg: Hyperparameters) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """How the text of a prompt becomes tokens, and a token bytes. Known by vocab_size and eot_token."""
    tokens = (cfg.vocab_size, cfg.eot_token)
    if tokens == (257, 256):
        return lambda text: list(text.encode("utf-8", "surrogateescape")), lambda token: bytes([token])
    if tokens != (50257, 50256):
        raise UserError(f"vocab_size {tokens[0]} with eot_token {tokens[1]} is neither bytes nor GPT-2: no tokenizer")
    try:
        import tiktoken

        gpt2 = tiktoken.get_encoding("gpt2")
    except ImportError:
        raise UserError("the model's tokens are GPT-2's: pip install -r data/requirements.txt") from None
    except Exception as error:  # of the download, in many ways
        raise UserError(f"tiktoken cannot get GPT-2's vocabulary: {one_line(error)}") from None
    return gpt2.encode_ordinary, gpt2.decode_single_token_bytes


def prompts(cfg: Hyperparameters) -> tuple[str, str]:
    """A prompt that suits what the model was trained on, and another."""
    if cfg.train_files == train_gpt.PRESETS["nano"].train_files:
        return "def ", "class "
    return ("", "The ") if cfg.vocab_size == 257 else ("The meaning of", "Once upon a time")


def choose(logits: Tensor, temperature: float, top_k: int, rng: torch.Generator) -> int:
    """A token from softmax(logits / temperature) over the `top_k` largest, all if 0; the largest at temperature 0."""
    values, tokens = logits.double().cpu().topk(min(top_k or len(logits), len(logits)))
    if temperature == 0:
        return tokens[0].item()
    return tokens[torch.multinomial(((values - values[0]) / temperature).softmax(0), 1, generator=rng)].item()


def generate(gpt: Reader, prompt: Sequence[int], num_tokens: int, chooser: Callable[[Tensor], int]) -> Iterator[int]:
    """At most `num_tokens` tokens that follow `prompt` at the beginning of a document, until it ends."""
    tokens = [gpt.cfg.eot_token, *prompt]
    gpt.begin(len(tokens) + num_tokens)
    for _ in range(num_tokens):
        token = chooser(gpt.read(tokens))
        if token == gpt.cfg.eot_token:
            return
        yield token
        tokens = [token]


def write(pieces: Iterable[bytes]) -> None:
    """Prints UTF-8 as it comes; what is none, and control characters, as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        for piece in pieces:
            print(decoder.decode(piece).translate(CONTROLS), end="", flush=True)
        print(decoder.decode(b"", final=True), flush=True)
    except BrokenPipeError:  # whoever read it has seen enough; nor shall what is buffered fail at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(gpt: Reader, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Prints the prompt, and what the model makes of it as it comes."""
    encode, decode = tokenizer(gpt.cfg)
    rng = torch.Generator().manual_seed(seed)
    chooser = functools.partial(choose, temperature=temperature, top_k=top_k, rng=rng)
    read, generated, start = encode(prompt), [], time.perf_counter()

    def text() -> Iterator[bytes]:
        yield from map(decode, read)
        for token in generate(gpt, read, num_tokens, chooser):
            generated.append(token)
            yield decode(token)

    write(text())
    end = ", where the text ends" if len(generated) < num_tokens else ""
    rate = len(generated) / (time.perf_counter() - start)
    print(f"[{len(generated)} tokens{end}; {rate:.0f} tokens/s, seed {seed}]", file=sys.stderr)


def fresh_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The options. Raises UserError for those that make no sense."""
    parser = train_gpt.ArgumentParser(
        prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", default="latest", help="a file that --save_checkpoint wrote, or latest: of logs/")
    add("--prompt", metavar="TEXT", help="what to go on from [something that suits the model]")
    add("--tokens", type=int, metavar="N", default=300, help="the most tokens to add [%(default)s]")
    add("--temperature", type=float, metavar="X", default=0.8, help="0: the likeliest token always [%(default)s]")
    add("--top_k", type=int, metavar="K", default=50, help="only the K likeliest tokens; 0: all [%(default)s]")
    add("--seed", type=int, metavar="N", help="the same text again [a fresh one, printed at the end]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[%(default)s]")
    args = parser.parse_args(argv)
    for name in ("tokens", "temperature", "top_k", "seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"--{name} {value}: expected a number of at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu")
    return args


def sample(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    path = newest_model(Path("logs")) if args.checkpoint == "latest" else Path(args.checkpoint)
    is_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    gpt = load_model(path, torch.device("cuda" if is_cuda else "cpu"))
    print(f"{path}, {sum(p.numel() for p in gpt.parameters()):,} parameters", file=sys.stderr)
    prompt = prompts(gpt.cfg)[0] if args.prompt is None else args.prompt
    seed = fresh_seed() if args.seed is None else args.seed
    show(gpt, prompt, args.tokens, args.temperature, args.top_k, seed)


def train_and_show(argv: Sequence[str]) -> None:
    """Trains as the flags say. If that left a model, as it does on a CPU, shows what it writes and how to see more."""
    on_cuda = train_gpt.is_on_cuda(train_gpt.parse_args(argv))
    result = train_gpt.main(argv if on_cuda else ["--save_checkpoint", *argv])
    path = Path(result.log).with_suffix(".pt")
    if not path.exists():
        return
    try:
        gpt = load_model(path, torch.device("cuda" if on_cuda else "cpu"))
        prompt, other = prompts(gpt.cfg)
        print(f"\nWhat it writes{f' after {prompt!r}' if prompt else ''}:\n", flush=True)
        show(gpt, prompt, num_tokens=200, temperature=0.8, top_k=50, seed=fresh_seed())
    except UserError as error:  # the training is done, and that is what counts
        print(f"sample.py: {error}", file=sys.stderr)
        return
    # run.sh has come here from where its user is
    here = os.getcwd()
    command = shlex.join([sys.orig_argv[0], sys.argv[0], str(path), "--prompt", other])
    print(f"\nMore of it: {'' if os.environ.get('OLDPWD', here) == here else f'cd {shlex.quote(here)} && '}{command}")


def run_as_program(argv: Sequence[str]) -> int:
    """What the arguments ask for, with one line for what the user can mend, and the exit code for how it ended."""
    trains = argv[:1] == ["--train"]
    name = "train_gpt.py" if trains else "sample.py"
    try:
        sys.stdout.reconfigure(encoding="utf-8")
        train_and_show(argv[1:]) if trains else sample(argv)
        return 0
    except (UserError, train_gpt.NonFiniteLoss) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run_as_program(sys.argv[1:]))
