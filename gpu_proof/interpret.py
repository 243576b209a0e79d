"""Run the kernels that torch.compile generates for a GPU on CPU tensors, by Triton's interpreter.

It is for a process with TRITON_INTERPRET=1 that pretends to have a GPU (pretend_gpu). The interpreter of triton 3.7 is
mended first. It keeps bf16 and FP8 as bits, which it multiplies as integers, and cuts bits off where a GPU rounds. Here
a block of such numbers is an array of float32, rounded by whatever labels an array as narrow: to nearest even, and FP8
saturates, as PTX's cvt.rn.satfinite does. Memory holds bits as ever. What is not mended raises.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as ti
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

NARROW = dict(bf16=torch.bfloat16, fp8e4nv=torch.float8_e4m3fn, fp8e5=torch.float8_e5m2)  # by Triton's names
LIBDEVICE = {name: getattr(np, name) for name in ("sqrt", "exp", "log", "log1p", "tanh", "sin", "cos")}
LIBDEVICE["pow"] = np.power
LIBDEVICE["rsqrt"] = lambda x: 1 / np.sqrt(x)
LIBDEVICE["erf"] = lambda x: torch.erf(torch.from_numpy(np.array(x))).numpy()


# ---- Narrow numbers --------------------------------------------------------------------------------------------------
def unsigned(kind: tl.dtype) -> np.dtype:
    return np.dtype(f"uint{kind.primitive_bitwidth}")


def to_bits(data: np.ndarray, kind: tl.dtype) -> np.ndarray:
    rounded = torch.from_numpy(np.array(data, np.float32)).to(NARROW[kind.name])
    return rounded.view(getattr(torch, unsigned(kind).name)).numpy()


def from_bits(bits: np.ndarray, kind: tl.dtype) -> np.ndarray:
    return torch.from_numpy(bits).view(NARROW[kind.name]).float().numpy()


def mend_narrow_numbers() -> None:
    numpy_dtype, has_room, builder = ti._get_np_dtype, TensorHandle.__post_init__, InterpreterBuilder
    load, store, atomic_rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def round_narrow(handle: TensorHandle) -> None:
        if handle.dtype.name not in NARROW:
            has_room(handle)
        elif handle.data.dtype != bool:  # comparisons keep the type of their left side
            handle.data = from_bits(to_bits(handle.data, handle.dtype), handle.dtype)

    def load_narrow(self, ptrs, mask, other, *options, **named):  # descriptors name the options
        kind = ptrs.get_element_ty()
        if kind.name not in NARROW:
            return load(self, ptrs, mask, other, *options, **named)
        zeros = np.zeros(ptrs.data.shape, unsigned(kind))
        data = from_bits(ti._interpreter.load(ptrs.data, mask.data, zeros, zeros.dtype), kind)
        return TensorHandle(data if other is None else np.where(mask.data, data, other.data), kind)

    def store_narrow(self, ptrs, value, mask, *options, **named):
        if value.dtype.name not in NARROW:
            return store(self, ptrs, value, mask, *options, **named)
        return ti._interpreter.store(ptrs.data, to_bits(value.data, value.dtype), mask.data)

    def atomic(self, op, ptrs, value, mask, *options):
        if value.dtype.name in NARROW:
            raise NotImplementedError(f"atomic {op} of {value.dtype}")
        # It would read behind a single number that was broadcast
        whole = [TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in (ptrs, value, mask)]
        return atomic_rmw(self, op, *whole, *options)

    def convert(data, source, target, mode):
        if target.primitive_bitwidth == 8:
            limit = torch.finfo(NARROW[target.name]).max
            data = data.clip(-limit, limit)  # infinities too; NaN stays
        return data.astype(ti._get_np_dtype(target))

    def bitcast(self, value, dtype):
        if {value.dtype.name, dtype.scalar.name} & NARROW.keys():
            raise NotImplementedError(f"bitcast of {value.dtype} to {dtype}")
        return TensorHandle(value.data.view(numpy_dtype(dtype)), dtype.scalar)

    ti._get_np_dtype = lambda dtype: np.dtype(np.float32) if dtype.scalar.name in NARROW else numpy_dtype(dtype)
    TensorHandle.__post_init__, ti._convert_float, builder.create_bitcast = round_narrow, convert, bitcast
    builder.create_masked_load, builder.create_masked_store = load_narrow, store_narrow
    builder.create_atomic_rmw = atomic
    builder.create_fabs = lambda self, x: self.unary_op(x, np.abs)  # clears a bit otherwise


# ---- Functions, reductions, speed ------------------------------------------------------------------------------------
def mend_libdevice() -> None:
    """Take libdevice's functions from NumPy in the block's precision, and refuse others: they return None otherwise."""

    def from_numpy(name: str) -> Callable:
        def function(*args, _semantic=None):
            if name not in LIBDEVICE or args[0].dtype not in (tl.float32, tl.float64):
                raise NotImplementedError(f"libdevice.{name} of {', '.join(str(x.dtype) for x in args)}")
            data = LIBDEVICE[name](*(x.handle.data for x in args))
            return tl.tensor(TensorHandle(data, args[0].dtype), args[0].type)

        return function

    library = vars(triton_helpers.libdevice)
    library |= {name: from_numpy(name) for name, value in library.items() if callable(value)}


def mend_reductions() -> None:
    """Combine neighbours, all at once: the interpreter calls a function for every element, a thousand times slower."""

    def combine(ops, kinds: list, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        blocks = [
            tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)))
            for data, kind in zip((*left, *right), kinds * 2, strict=True)
        ]
        result = ops.combine_fn.fn(*blocks)
        return [x.handle.data for x in (result if isinstance(result, tuple) else (result,))]

    def reduce(self, inputs):
        kinds, blocks = [x.dtype for x in inputs], [x.handle.data for x in inputs]
        whole, axis = self.axis is None, self.axis or 0
        shape = [1 if whole or i == axis else n for i, n in enumerate(blocks[0].shape)]
        if whole:
            blocks = [data.reshape(-1) for data in blocks]
        while (n := blocks[0].shape[axis]) > 1:
            blocks = combine(self, kinds, *([data.take(range(i, n, 2), axis) for data in blocks] for i in (0, 1)))
        blocks = [data.reshape(shape) if self.keep_dims else data.squeeze(axis) for data in blocks]
        return [self.to_tensor(data, kind) for data, kind in zip(blocks, kinds, strict=True)]

    def scan(self, inputs):
        kinds, step = [x.dtype for x in inputs], 1
        blocks = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        while step < len(blocks[0]):
            sums = combine(self, kinds, [np.roll(data, step, 0) for data in blocks], blocks)
            blocks = [np.concatenate([data[:step], new[step:]]) for data, new in zip(blocks, sums, strict=True)]
            step *= 2
        return [self.to_tensor(np.moveaxis(data, 0, self.axis), kind) for data, kind in zip(blocks, kinds, strict=True)]

    def refuse_narrow(method: Callable) -> Callable:
        def function(self, x):
            if x.dtype.name in NARROW:
                raise NotImplementedError(f"{method.__qualname__} of {x.dtype}")  # would round once, at the end
            return method(self, x)

        return function

    ReduceOps.generic_reduce, ScanOps.generic_scan = reduce, scan
    ReduceOps.sum, ScanOps.cumsum = refuse_narrow(ReduceOps.sum), refuse_narrow(ScanOps.cumsum)


def mend() -> None:
    """Mend all of it, and save half of the interpreter's time: patch triton.language once instead of for every call of
    a function, and check no integers for overflow.
    """
    mend_narrow_numbers()
    mend_libdevice()
    mend_reductions()
    ti._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
    ti._patch_lang = lambda function: ti._LangPatchScope()
    ti.interpreter_builder.options = dataclasses.replace(ti.interpreter_builder.options, sanitize_overflow=False)


# ---- Graphs ----------------------------------------------------------------------------------------------------------
class StandIns:
    """Know the CPU tensor that each fake CUDA tensor stands for, and run compiled graphs on those."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.launched: set[str] = set()
        launch, guards = CachingAutotuner.run, torch._C._dynamo.guards

        def run(kernel: CachingAutotuner, *args, **options):
            self.launched.add(kernel.fn.__name__)
            # As many elements per program as Inductor's masks allow: the interpreter's time goes with the programs
            sizes, reduces = kernel.configs[0].kwargs, not kernel.fn.__name__.startswith("triton_poi")
            if "XBLOCK" in sizes and "YBLOCK" not in sizes:
                sizes["XBLOCK"] = max(sizes["XBLOCK"], 128 if reduces else 4096)
            return launch(kernel, *args, **options)

        CachingAutotuner.run = run
        CompiledFxGraph.__call__ = lambda graph, inputs: self.call(graph, inputs)
        guards._empty_strided_cuda = guards._empty_strided_cpu

    def add(self, fake: Tensor, real: Tensor) -> Tensor:
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        self.known[fake.untyped_storage()._cdata] = fake, real
        return fake

    def fake(self, real: Tensor) -> Tensor:
        return self.add(torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda"), real)

    def real(self, fake: Tensor) -> Tensor:
        known, real = self.known.get(fake.untyped_storage()._cdata, (fake, None))
        if real is None:  # the gradient of the loss
            assert fake.numel() == 1
            return torch.ones(fake.shape, dtype=fake.dtype, device="cpu")
        assert (fake.shape, fake.stride(), fake.storage_offset()) == (known.shape, known.stride(), 0)
        return real

    def call(self, graph: CompiledFxGraph, inputs: list) -> list:
        """Run a compiled graph, forward or backward, on the CPU tensors, and return stand-ins of its results."""
        with _disable_current_modes():
            real = [self.real(x) if isinstance(x, Tensor) else x for x in inputs]
            results = graph.current_callable(list(real))  # type: ignore[misc]
        fakes = {id(x): fake for x, fake in zip(real, inputs, strict=True)}
        inputs.clear()
        return [self.fake(x) if isinstance(x, Tensor) and id(x) not in fakes else fakes.get(id(x), x) for x in results]
