"""mini trains in FP8's rounding as without it; how many numbers saturate or become zero. Products are in float32."""

import dataclasses
import sys
from collections import defaultdict

import pytest
import torch
from torch import Tensor

import train_gpt


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype, use_fast_accum: bool) -> Tensor:
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


@pytest.mark.slow
def test_mini_trains_in_fp8(script_flags, tmp_path, monkeypatch):
    flags = "--preset mini --seed 1 --dtype float32 --num_iterations 20 --val_tokens 8192 --no-save_checkpoint"
    flags += f" --batch_tokens 512 --train_seq_len 512 --log_dir {tmp_path} --cpu_threads 1"
    without = train_gpt.main([*flags.split(), *script_flags, "--run_id=without"])["val_loss"]
    counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    quantize, resolve = train_gpt.quantize, train_gpt.resolve

    def counted(t: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
        q, caller = quantize(t, scale, dtype), sys._getframe(1)
        if dtype.itemsize == 1:
            saturated = (t * scale).abs() > torch.finfo(dtype).max * 1.0001  # rows are scaled to end there
            flushed = (q.float() == 0) & (t != 0)
            name = f"{caller.f_code.co_qualname.removesuffix('.<locals>.<genexpr>')}, line {caller.f_lineno}"
            counts[name] += torch.stack([saturated.sum(), flushed.sum(), (t != 0).sum()])
        return q

    monkeypatch.setattr(train_gpt, "quantize", counted)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    fp8 = dict(lm_head_fp8=True, layers_fp8=True)
    monkeypatch.setattr(train_gpt, "resolve", lambda cfg: dataclasses.replace(resolve(cfg), **fp8))
    found = train_gpt.main([*flags.split(), *script_flags, "--run_id=fp8"])["val_loss"]
    for name, (saturated, flushed, numbers) in counts.items():
        assert saturated <= 1e-6 * numbers, name
        assert flushed <= 0.02 * numbers, name
    names = {name.partition(",")[0] for name in counts}
    functions = "HeadLoss.forward FP8Linear.forward FP8Linear.backward ReluSquaredMLP.forward ReluSquaredMLP.backward"
    assert names == {*functions.split(), "relu_squared_rows", "relu_squared_backward"}
    assert found != without
    assert abs(found - without) < 0.05, "all 182 steps differed by 0.016 at most, of eight seeds"
