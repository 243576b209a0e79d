"""Measure train_gpt.py: `python -m benchmarks --help`, and README.md beside this file.

Reading order: measure (what each figure is), command (what is measured when, and the report), startup (in a process of
its own). anchor_cpu and race_anchor stand apart.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(folder) for folder in (ROOT, ROOT / "data") if str(folder) not in sys.path]

# What environment.sh exports: short spinning of OpenMP's threads, freed memory that stays with the process, GPU memory
# in segments that grow
ENVIRONMENT = dict(GOMP_SPINCOUNT="10000", MALLOC_TRIM_THRESHOLD_="2147483647", MALLOC_MMAP_THRESHOLD_="33554432")
ENVIRONMENT["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
