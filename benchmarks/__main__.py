"""Measures train_gpt.py on this machine: python -m benchmarks --help."""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in run.sh, and before torch loads OpenMP

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())
