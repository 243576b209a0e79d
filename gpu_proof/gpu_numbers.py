"""Compare what the kernels for a GPU compute with what the CPU path computes: loss and gradients of a small model."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_proof import gpu_graphs, pretend_gpu
from gpu_proof.randomize import randomize
from records.process import ROOT, own_process

INTRODUCTION = """Run the kernels that torch.compile generates for a GPU (compute capability 9.0) on this CPU, by
Triton's interpreter: loss, validation loss and every gradient of a small model with random parameters, Newton-Schulz.
Compare them with the eager CPU path in the same precision, and both with that path in float64.

    python -m gpu_proof gpu_numbers [--fp8] [--script FILE] [--out FILE]

All other flags are those of train_gpt.py. On Linux, with torch's CPU build and gpu_proof/requirements.txt; a minute.
Exit codes: 0 they agree, 1 they do not, 2 bad input or something is missing, 130 interrupted."""
# The process of a comparison: pretend, then import torch
CHILD = "from gpu_proof import pretend_gpu; pretend_gpu.install(90); "
CHILD += "import sys; from gpu_proof import gpu_numbers; gpu_numbers.child(*sys.argv[1:])"
# Five blocks of tokens. The third document fills blocks 1 to 3, so that blocks are seen whole and in part, and both
# windows cut off both kinds. The last slice of the head is shorter than the others
SEQ_LEN, DOCUMENTS, WINDOWS, WEIGHTS = 640, (0, 50, 100, 560), (440, 190), (1.0, 0.5, 0.2, 0.3)
MODEL = dict(attention_layout="LSPL", value_embed_layout="0.1.", skip_layout="...0", model_dim=128, max_doc_len=2048)
MODEL |= dict(source_layout="...1", xsa_layout=".x..", gate_layout="...x", dc_layout="...x", dc_keys=100, gate_layer=2)
MODEL |= dict(mudd_layers="10", sign_rows=31, prefix_file="")
MODEL |= dict(num_heads=2, head_dim=64, bigram_rows=61, vocab_size=500, eot_token=499, lm_head_slice=256)
MODEL |= dict(window_tokens=512, batch_factors=1, lr_factors=1, extension_steps=0)
MODEL |= dict(train_seq_len=SEQ_LEN, val_seq_len=SEQ_LEN, batch_tokens=SEQ_LEN, val_tokens=SEQ_LEN)
MODEL |= dict(preset="gpt2", device="cuda", seed=1)
FP8 = {"lm_head_fp8", "mlp_fp8"}  # what may be in FP8


def results(model: Callable[..., Tensor], params: dict[str, Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the loss, the validation loss and the gradients. The last two inputs are the weights of these losses."""
    *inputs, weights, val_weights = inputs
    loss = model(*inputs, weights)
    grads = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        return dict(loss=loss.detach(), validation=model(*inputs, val_weights)) | dict(zip(params, grads, strict=True))


def child(script: str, fp8: str, *flags: str) -> None:
    """Compare, and print JSON. Triton interprets in this process, which believes in a GPU."""
    sys.path.insert(0, str(Path(script).parent))
    import train_gpt
    from gpu_proof import interpret

    torch.set_num_threads(1)
    torch.manual_seed(0)
    interpret.mend()
    stand_ins = interpret.StandIns()
    dtype = "bfloat16" if fp8 else "float32"
    small = [f"--{name}={value}" for name, value in (MODEL | dict(dtype=dtype)).items()]
    small += [f"--{'' if fp8 else 'no-'}{name}" for name in FP8]
    cfg = train_gpt.resolve(train_gpt.parse_args([*small, *flags]))
    cpu = dataclasses.replace(cfg, device="cpu", compile=False)
    eager = randomize(train_gpt.GPT(cpu))
    exact = train_gpt.GPT(dataclasses.replace(cpu, dtype="float64", **dict.fromkeys(FP8, False)))
    exact.load_state_dict(eager.state_dict())
    real = {name: t.detach() for name, t in [*eager.named_parameters(), *eager.named_buffers()]}
    tokens, narrow = torch.randint(cfg.eot_token, (SEQ_LEN + 1,)), getattr(torch, dtype)
    tokens[list(DOCUMENTS)] = cfg.eot_token
    weights = torch.tensor(WEIGHTS), torch.ones(1)  # the last one is of the prefixes; a fifth of the tokens have none
    prefixes = torch.randint(-cfg.vocab_size // 4, cfg.vocab_size, (cfg.vocab_size,)).clamp(min=-1)
    columns = train_gpt.next_targets(tokens[1:], len(WEIGHTS) - 1, prefixes)
    inputs = tokens[:-1].int(), columns, torch.tensor(WINDOWS, dtype=torch.int32), *weights

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False)

    def generated(function: Callable[..., dict[str, Tensor]], *tensors: Tensor) -> dict[str, Tensor]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return {name: stand_ins.real(fake) for name, fake in function(*map(stand_ins.fake, tensors)).items()}

    def model_results(*inputs: Tensor) -> dict[str, Tensor]:
        with pretend_gpu.building():
            gpt = train_gpt.GPT(cfg)
        for name, fake in [*gpt.named_parameters(), *gpt.named_buffers()]:
            stand_ins.add(fake, real[name])
        return results(compiled(gpt), dict(gpt.named_parameters()), inputs)

    def head(x: Tensor, w: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        with_grads = torch.is_grad_enabled()
        softcap = cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift
        scales = cfg.fp8_scales if with_grads and x.dtype == narrow else None
        return train_gpt.HeadLoss.apply(x, w, targets, weights, softcap, cfg.lm_head_slice, scales, with_grads)

    def head_results(head: Callable, x: Tensor, w: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        return results(head, dict(x=x.requires_grad_(), w=w.requires_grad_()), (x, w, *rest))

    # Of each part: the results in float64, by the eager CPU path, by the generated kernels
    parts = {"": [results(gpt, dict(gpt.named_parameters()), inputs) for gpt in (exact, eager)]}
    parts[""].append(generated(model_results, *inputs))
    G, orthogonalize = torch.randn(2, 32, 64), train_gpt.zeropower_via_newtonschulz5
    parts["Newton-Schulz"] = [{"": orthogonalize(G.double(), torch.float64)}, {"": orthogonalize(G, narrow)}]
    parts["Newton-Schulz"].append(generated(lambda G: {"": compiled(orthogonalize)(G, narrow)}, G))
    if fp8:  # from the same input the head has to give almost the same numbers
        x, w = torch.randn(SEQ_LEN, cfg.model_dim).to(narrow), eager.lm_head.detach()
        pairs = (x.double(), w.double()), (x.clone(), w.clone())
        parts["head alone: "] = [head_results(head, *pair, inputs[1], *weights) for pair in pairs]
        parts["head alone: "].append(generated(partial(head_results, compiled(head)), x, w, inputs[1], *weights))

    def apart(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    rows = []
    for part, (in_float64, by_cpu, by_gpu) in parts.items():
        for name, t in in_float64.items():
            row = dict(name=part + name, ndim=t.ndim, norm=t.norm().item(), eager=apart(by_cpu[name], t))
            rows.append(row | dict(generated=apart(by_gpu[name], t), apart=apart(by_gpu[name], by_cpu[name])))
    print(json.dumps(dict(rows=rows, kernels=len(stand_ins.launched))))


def bound(row: dict, rows: Sequence[dict], fp8: bool) -> None:
    """Add to a row what is bounded, by how much, and whether that holds.

    In float32 the two paths may be 1e-5 apart. In low precision both are off float64 by far more than that, at random:
    the generated kernels may not be worse, by 1.1 for a matrix, by 1.3 for the few numbers of a gate. The gradient of a
    scalar is a sum of positive and negative terms (once 37,000 times as large as the sum): it may be off by twice the
    eager path's worst. Before a cast to FP8 eager code rounds the product with the scale, generated code does not: 2%.
    """
    what, limit, losses = "apart", 1e-5, ("loss", "validation")
    if row["name"].startswith("head alone"):
        limit = 3e-2 if row["ndim"] == 2 else 1e-3
    elif row["name"] in losses:
        limit = 1e-3 if fp8 else limit
    elif row["ndim"] < 2:
        worst = max(other["eager"] for other in rows if other["ndim"] < 2 and other["name"] not in losses)
        what, limit = "generated", max(limit, 2 * worst)
    elif fp8:
        what, limit = "generated", (1.3 if row["name"].endswith("gate") else 1.1) * row["eager"]
    row |= dict(bounded=what, limit=limit, agrees=row[what] <= limit)  # False for NaN


def table(document: dict) -> str:
    lines = ["| what | norm | eager CPU | generated | apart | limit |", "|---|---|---|---|---|---|"]
    for row in document["rows"]:
        cells = [row["name"], *(f"{row[name]:.2e}" for name in ("norm", "eager", "generated", "apart"))]
        limit = f"{row['bounded']} {row['limit']:.1e}{'' if row['agrees'] else ': DISAGREES'}"
        lines.append(f"| {' | '.join([*cells, limit])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m gpu_proof gpu_numbers", description=INTRODUCTION, **options)
    parser.add_argument("--fp8", action="store_true", help="bfloat16 with head and MLPs in FP8, instead of float32")
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", help="default: train_gpt.py")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON")
    args, flags = gpu_graphs.parse(parser, argv)
    began = time.perf_counter()
    if problem := pretend_gpu.missing():
        parser.exit(2, f"python -m gpu_proof gpu_numbers: {problem}\n")
    try:
        command = ["-c", CHILD, str(args.script.resolve()), "fp8" * args.fp8, *flags]
        document = json.loads(own_process(command, TRITON_INTERPRET="1").splitlines()[-1])
    except RuntimeError as error:
        is_input = "UserError" in str(error) or "exit code 2" in str(error)
        parser.exit(2 if is_input else 1, f"python -m gpu_proof gpu_numbers: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "python -m gpu_proof gpu_numbers: interrupted\n")
    for row in document["rows"]:
        bound(row, document["rows"], args.fp8)
    agrees, seconds = all(row["agrees"] for row in document["rows"]), round(time.perf_counter() - began)
    document |= dict(agrees=agrees, script=str(args.script), flags=flags, fp8=args.fp8, seconds=seconds)
    document |= dict(torch=torch.__version__)
    precision = "bfloat16 and FP8" if args.fp8 else "float32"
    told = f"{args.script.name}, {precision}: {document['kernels']} kernels, {seconds} s"
    print(f"{table(document)}\n\n{told}: they {'agree' if agrees else 'DISAGREE'}")
    try:
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        parser.exit(2, f"python -m gpu_proof gpu_numbers: --out {error}\n")
    return int(not agrees)
