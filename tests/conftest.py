"""Shared fixtures: small configurations on the CPU, and models with random values in every parameter."""

import dataclasses
import signal
from collections.abc import Callable

import pytest
import torch

import train_gpt
from train_gpt import GPT, Hyperparameters

# The models here are so small that threads cost more than they save: with two, on a busy machine, four times the time
torch.set_num_threads(1)

# The background jobs of a shell ignore Ctrl-C, and what they start inherits that: the tests' programs are to hear it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> Hyperparameters:
    """The nano preset, some thousand times less work: 8 (training) and 16 (validation) blocks of 8 tokens."""
    return dataclasses.replace(
        train_gpt.PRESETS["nano"],
        num_iterations=8,
        batch_tokens=128,
        train_seq_len=64,
        val_seq_len=128,
        val_tokens=256,
        model_dim=32,
        num_heads=2,
        head_dim=16,
        block_size=8,
        window_tokens=32,
        seed=0,
        device="cpu",
        attention_layout="LSSL",
        value_embed_layout="0..0",
        bigram_rows=61,
        dtype="float32",
        compile=False,
        cpu_threads=1,
    )


@pytest.fixture
def tiny64(tiny: Hyperparameters) -> Hyperparameters:
    """`tiny` in double precision: what is equal in exact arithmetic is equal to 1e-10."""
    return dataclasses.replace(tiny, dtype="float64")


@torch.no_grad()
def randomize(gpt: torch.nn.Module) -> torch.nn.Module:
    """Random values in every parameter: at initialization all c_proj and the head are zero, and hide the rest."""
    for name, p in gpt.named_parameters():
        if p.ndim < 2:
            p.uniform_(0.5, 1.5)
        elif "embed" not in name:
            p.normal_(std=p.size(-1) ** -0.5)
    return gpt


@pytest.fixture
def random_gpt() -> Callable[[Hyperparameters], GPT]:
    return lambda cfg: randomize(GPT(cfg))
