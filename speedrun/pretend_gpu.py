"""Pretend that one NVIDIA GPU is here: torch then lowers graphs for it, and Triton compiles their kernels.

Nothing runs there. Tensors are fake: shapes without data. All of it is for one process, which must not have imported
torch, and is written for the versions below: each pretence says what asks for it.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from speedrun import cards
from speedrun.needs import PIP

TORCH, TRITON = "2.13", "3.7.1"  # Triton's also in pyproject.toml
GPUS = {card.arch: card for card in (cards.H100, cards.RTX_4090, cards.A100)}


def missing() -> str:
    """Return what keeps this machine from pretending, and the fix, in a line; "" if nothing does. Imports no torch."""
    has = {name: importlib.metadata.version(name) for name in ("torch", "triton") if importlib.util.find_spec(name)}
    is_right = has["torch"].startswith(f"{TORCH}.") and has.get("triton") == TRITON
    if sys.platform == "linux" and is_right and shutil.which("g++"):
        return ""
    told = f"needs Linux, g++, torch {TORCH} and triton {TRITON}; here are {sys.platform}, {shutil.which('g++')}, {has}"
    return f"{told}: {PIP} 'torch=={TORCH}.*' triton=={TRITON}, in an environment of its own"


def load_guard() -> ctypes.CDLL:
    """Build pretend_guard.cpp, once per version of torch, and load it: torch asks for CUDA's hooks while it starts."""
    source, torch_folder = Path(__file__).with_name("pretend_guard.cpp"), Path(importlib.util.find_spec("torch").origin)
    torch_folder, version = torch_folder.parent, importlib.metadata.version("torch")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speedrun-pretend-gpu"
    library = cache / f"guard-{version}-{source.stat().st_mtime_ns}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = f"{library}.{os.getpid()}"  # then renamed: others may build it, too
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
        options += [f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-o", made]
        subprocess.run(["g++", source, *options], check=True)
        os.rename(made, library)
    return ctypes.CDLL(str(library))


def install(arch: int) -> None:
    """Make this process believe in a GPU of compute capability `arch`, such as 90. Call it before torch is imported."""
    assert "torch" not in sys.modules, "torch is there already"
    # Compile here and now: workers and caches would hide kernels from us
    os.environ |= dict(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    # The compiler would time whether to pad the gates' products, of 12 inputs, as it does not know the GPU's rates; an
    # H100's make it pad none, as these products wait for memory (torch._inductor.fx_passes.pad_mm, is_mm_compute_bound)
    os.environ["TORCHINDUCTOR_SHAPE_PADDING"] = "0"
    os.environ |= dict(TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1")  # which says what a kernel needs
    guard = load_guard()
    import torch

    guard.take_over()  # a CUDA build has put its own there
    kind = GPUS[arch]
    properties = SimpleNamespace(  # for Inductor's heuristics and FlexAttention's tiles
        name=kind.name, major=arch // 10, minor=arch % 10, multi_processor_count=kind.processors, warp_size=32,
        max_threads_per_multi_processor=kind.threads, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=kind.shared_limit,
        shared_memory_per_multiprocessor=kind.shared_limit + 1024, total_memory=kind.memory_mib << 20,
        L2_cache_size=kind.l2_cache << 20, gcnArchName="", is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip
    pretend_torch(torch, properties)
    pretend_constants(torch)
    pretend_triton(torch, arch)


def pretend_torch(torch, properties: SimpleNamespace) -> None:
    """Answer for the driver. Each answer is a function of its own: Dynamo tells functions apart by identity."""

    class device(contextlib.nullcontext):
        def __init__(self, index):
            super().__init__()
            self.idx, self.prev_idx = 0, -1

    class device_guard(device):  # what generated code enters
        pass

    answers = dict(  # the script asks for some, Dynamo and Inductor for the others
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
        get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8),  # Dynamo saves and restores it
        set_rng_state=lambda state, device="cuda": None,
        set_device=lambda device: None,
        _lazy_init=lambda: None,
        device=device,
        _DeviceGuard=device_guard,
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("current_device", "get_rng_state", "set_rng_state"):  # has imported them by name
        setattr(torch.cuda.random, name, answers[name])
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.nn.Module.to = lambda self, *args: self  # it cannot move fake parameters: modules are built on the GPU
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    CudaInterface.device = device
    for name in ("current_device", "device_count", "get_device_properties", "set_device"):
        setattr(CudaInterface, name, staticmethod(answers[name]))
    CudaInterface.get_raw_stream = staticmethod(lambda index: 0)
    # torch.tensor(..., device="cuda") begins as a real tensor: on the CPU
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda device: None  # a CUDA build makes a tensor there


def pretend_constants(torch) -> None:
    """Let the compiler fold constants on the CPU: it computes one element of them."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class OnCPU(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
            return func(*args, **kwargs)

    def on_cpu(method):
        def wrapped(*args):
            with OnCPU():
                return method(*args)

        return wrapped

    for name in ("_deduce_value", "_add_peephole_patterns"):
        setattr(UniformValueConstantFolder, name, on_cpu(getattr(UniformValueConstantFolder, name)))


def pretend_triton(torch, arch: int) -> None:
    """Give Triton a driver that knows its target; it has ptxas with it."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    methods = dict(
        __init__=lambda self: None,
        is_active=staticmethod(lambda: True),
        get_current_target=lambda self: GPUTarget("cuda", arch, 32),
        get_active_torch_device=lambda self: torch.device("cuda", 0),
        get_current_device=lambda self: 0,
        **dict.fromkeys(("get_benchmarker", "map_python_to_cpp_type")),  # abstract
    )
    triton.runtime.driver.set_active(type("Driver", (DriverBase,), methods)())
    triton_helpers.set_driver_to_gpu = lambda: None  # every kernel's source calls it: it would look for a real driver


def pretend_launches(precompile, launched, called) -> None:
    """Let generated code run on fake tensors, and tell three functions of it.

    precompile(kernel): a kernel (CachingAutotuner) is to be compiled; launched(kernel, args): it is run;
    called(is_backward, function) has to call and return function(), a compiled graph.
    """
    import torch
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, DebugAutotuner
    from torch._inductor.select_algorithm import extern_kernels

    def scaled_mm(a, b, *rest, out, **options):  # with `out` it knows no fake tensors; without it checks layouts
        result = torch.ops.aten._scaled_mm(a, b, *rest, **options)
        assert (result.shape, result.stride(), result.dtype) == (out.shape, out.stride(), out.dtype)

    def empty_strided(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret(t, size, stride, offset=0):
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)

    extern_kernels._scaled_mm = scaled_mm
    # These are C++ functions that look into the tensors, and generated code takes them from here
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda, guards._reinterpret_tensor = empty_strided, reinterpret
    guards.assert_size_stride = lambda *args: None  # a custom operation could be wrong about it; the script has none
    CachingAutotuner.precompile = lambda self, *args, **options: precompile(self)
    CachingAutotuner.run = DebugAutotuner.run = lambda self, *args, **options: launched(self, args)
    call = CompiledFxGraph.__call__
    CompiledFxGraph.__call__ = lambda self, inputs: called(
        bool(self.fx_kwargs["is_backward"]), lambda: call(self, inputs)
    )
