"""torch.compile sees the model as one training and one validation graph, and no more while the window grows.

The backend here captures and runs the graphs without generating code: it takes neither a GPU nor a C++ compiler.
"""

import dataclasses
import itertools
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

import train_gpt
from train_gpt import GPT, Batch, Shard, World

CPU = torch.device("cpu")
TWO_LAYERS = dict(attention_layout="LS", value_embed_layout="0.")
FP8 = dict(lm_head_fp8=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Else the graphs of one test count towards the limit on recompilations in the next."""
    torch._dynamo.reset()


@pytest.fixture
def cfg(tiny):
    """The gpt2 preset's structure and windows of 1 to 14 blocks, in 16 and 32 blocks of 8 tokens."""
    lengths = dict(batch_tokens=256, train_seq_len=128, val_seq_len=256, val_tokens=256, window_tokens=112)
    layouts = dict(attention_layout="LSSSLSS-SSSL", value_embed_layout="012......012")
    vocabulary = dict(vocab_size=128, eot_token=127)  # no larger, as FP8 is slow on CPUs
    return dataclasses.replace(tiny, **lengths, **layouts, **vocabulary, num_iterations=14)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses to train on a CPU, for want of a backward kernel; as a graph it can be captured and run.

    It then goes the way of eager FlexAttention, which heeds the mask of elements and ignores the lists of blocks.
    """
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)


def capturing_compiler() -> tuple[list[torch.fx.GraphModule], Callable]:
    """As `train` compiles, but for the backend: the graphs that it has captured, and the compiler."""
    graphs: list[torch.fx.GraphModule] = []
    run_eagerly = torch._dynamo.lookup_backend("aot_eager")  # with autograd's graphs, forward and backward

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return run_eagerly(graph, inputs)

    return graphs, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend=backend)


def count_calls(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(node.op == "call_function" and name in str(node.target) for node in graph.graph.nodes)


@pytest.fixture
def batches(cfg, tmp_path: Path) -> Callable:
    """batches(seq_len, sequences): endless batches from the real reader, whose tensors are views of a buffer."""
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=1024).astype("<u2")
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(train_gpt.SHARD_HEADER_BYTES) + tokens.tobytes())
    plan = itertools.repeat(Batch(Shard(str(path), 1024, ""), 0, 256), 100)
    return lambda seq_len, sequences: train_gpt.read_batches(plan, seq_len, sequences, cfg.vocab_size, CPU)


@pytest.mark.parametrize(
    ("use_flex", "changes"),
    [
        pytest.param(False, TWO_LAYERS, id="gathered"),
        pytest.param(True, TWO_LAYERS | FP8, id="flex-fp8"),
        pytest.param(False, FP8, id="gathered-fp8-12-layers", marks=pytest.mark.slow),
        pytest.param(True, FP8, id="flex-fp8-12-layers", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("flex_on_cpu")
def test_all_graphs_are_there_after_the_warm_up(cfg, batches, use_flex: bool, changes: dict):
    """A run in small: warm-up, then a step and a validation in every window from 1 to 14 blocks."""
    cfg = dataclasses.replace(cfg, **changes)
    gpt = GPT(cfg)
    gpt.use_flex = use_flex
    graphs, compiled = capturing_compiler()
    muon_graphs, compiled_muon = capturing_compiler()
    graphs_before = train_gpt.late_events()[0]
    model, orthogonalize = compiled(gpt), compiled_muon(train_gpt.zeropower_via_newtonschulz5)
    optimizers = muon, _ = train_gpt.build_optimizers(gpt, cfg, World(), orthogonalize)
    train_gpt.warm_up(gpt, model, optimizers, cfg, World())

    training, validation = graphs
    num_attention_layers = len(cfg.attention_layout.replace("-", ""))
    for graph in graphs:
        assert count_calls(graph, "flex_attention") == use_flex * num_attention_layers
        calls = [node.target for node in graph.graph.nodes if node.op == "call_method"]
        assert "item" not in calls, "a tensor's value in Python breaks no graph, but makes the host wait for the device"
    norms = 2 + len(cfg.attention_layout) + 2 * num_attention_layers  # embedding, head; MLPs; attention
    assert count_calls(training, "autograd_function_apply") == 1 + len(cfg.attention_layout) + norms  # head, MLPs
    assert count_calls(validation, "autograd_function_apply") == count_calls(validation, "scaled_mm") == 0
    assert len(muon_graphs) == len(muon.param_groups)
    num_graphs = len(graphs) + len(muon_graphs)
    assert train_gpt.late_events()[0] == graphs_before + num_graphs

    window = torch.ones((), dtype=torch.int32)
    sequences = batches(cfg.train_seq_len, [0, 1])
    for step in range(cfg.num_iterations + 1):
        window.fill_(train_gpt.window_blocks(step, cfg))
        val_loss = train_gpt.evaluate(model, itertools.islice(batches(cfg.val_seq_len, [0]), 1), window, World())
        assert math.isfinite(val_loss)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * train_gpt.lr_multiplier(step, cfg)
        for group in muon.param_groups:
            group["momentum"] = train_gpt.muon_momentum(step, cfg)
        train_gpt.train_step(model, next(sequences), window)
        train_gpt.step_optimizers(optimizers)
        gpt.zero_grad(set_to_none=True)
    assert window == 14
    assert len(graphs) + len(muon_graphs) == num_graphs
    assert train_gpt.late_events()[0] == graphs_before + num_graphs


def loss_and_grads(gpt: GPT, model: Callable, seq_len: int, window: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(gpt.cfg.vocab_size, (seq_len + 1,))
    tokens[[20, 50, 51, 90]] = gpt.cfg.eot_token
    gpt.zero_grad(set_to_none=True)
    loss = model(tokens[:-1].int(), tokens[1:], torch.tensor(window, dtype=torch.int32))
    loss.backward()
    return [loss.detach(), *(p.grad for p in gpt.parameters())]


def test_compiled_model_is_the_model_in_every_window(cfg, random_gpt):
    gpt = random_gpt(dataclasses.replace(cfg, **TWO_LAYERS, dtype="float64"))
    graphs, compiled = capturing_compiler()
    model, losses = compiled(gpt), []
    for window in 1, 2, 5, 14:
        actual, expected = (loss_and_grads(gpt, f, 128, window) for f in (model, gpt))
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)
        losses.append(actual[0].item())
    assert len(graphs) == 1
    assert len(set(losses)) == 4, "windows that make no difference test nothing"


@pytest.mark.usefixtures("flex_on_cpu")
def test_model_with_flex_attention_is_the_model_with_gathered_attention(cfg, random_gpt):
    """In windows that hold all blocks, as FlexAttention ignores the lists of blocks here: test_attention has them."""
    gpt = random_gpt(dataclasses.replace(cfg, **TWO_LAYERS, window_tokens=256, dtype="float64"))
    expected = loss_and_grads(gpt, gpt, 128, window=32)
    gpt.use_flex = True
    graphs, compiled = capturing_compiler()
    actual = loss_and_grads(gpt, compiled(gpt), 128, window=32)
    assert count_calls(graphs[0], "flex_attention") == 2
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


IMPORT = """
    import gc, os, signal, sys, threading, warnings
    import torch, torch.distributed  # these may do as they please
    from torch.nn.attention import flex_attention

    def state():
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        settings = [torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()]
        random = torch.random.get_rng_state().tolist()
        return dict(os.environ), os.getcwd(), handlers, settings, random, gc.isenabled(), threading.active_count()

    def audit(event, args):
        # args of "open": path, mode, flags
        is_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_write or event in ("subprocess.Popen", "os.system", "os.putenv", "os.mkdir", "socket.connect"):
            raise AssertionError(f"the import does {event} {args}")

    before = state()
    sys.addaudithook(audit)
    import train_gpt
    assert state() == before
    assert not torch.cuda.is_initialized()
    assert not torch.distributed.is_initialized()
    assert train_gpt.__file__ == os.path.join(sys.path[0], "train_gpt.py")
"""


def test_import_is_pure(tmp_path: Path):
    """No output, no file, no GPU, no process group, no change to environment, random numbers, threads or signals."""
    source, work = tmp_path / "source", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    shutil.copy(train_gpt.__file__, source / "train_gpt.py")
    program = f"import sys\nsys.path.insert(0, {str(source)!r})\n{textwrap.dedent(IMPORT)}"
    # Not the whole environment: what an import would set may be there already, by the import in this process
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {"HOME": str(work), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in source.iterdir()] == ["train_gpt.py"]
    assert list(work.iterdir()) == []
