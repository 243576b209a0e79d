"""Measure train_gpt.py: `python -m benchmarks --help`, and README.md beside this file.

Reading order: measure (what each figure is), command (what is measured when, and the report). anchor_cpu
and study stand apart.
"""

import sys

from records.process import ROOT

sys.path.append(str(ROOT / "data"))
