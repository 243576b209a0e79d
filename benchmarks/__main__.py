"""Measure train_gpt.py on this machine: python -m benchmarks --help."""

import contextlib
import ctypes
import importlib
import os
import sys

import needs
from records.process import ENVIRONMENT

# Before torch loads OpenMP; the last as the script's own `main` does
os.environ |= ENVIRONMENT | dict(PYTORCH_ALLOC_CONF="expandable_segments:True") | os.environ
with contextlib.suppress(AttributeError, OSError):  # the C library has read its variables already; only glibc has these
    for name, option in dict(MALLOC_TRIM_THRESHOLD_=-1, MALLOC_MMAP_THRESHOLD_=-3).items():
        ctypes.CDLL(None).mallopt(option, int(os.environ[name]))

if __name__ == "__main__":
    name, *argv = sys.argv[1:] if sys.argv[1:2] == ["study"] else ["command", *sys.argv[1:]]
    with needs.packages("records/requirements.txt" if name == "study" else "requirements.txt"):
        command = importlib.import_module(f"benchmarks.{name}")
    sys.exit(command.main(argv))
