"""What is measured, and how: `python -m benchmarks --help`, and README.md beside this file.

Reading order: measure (what each figure is), command (what is measured when, and the report), startup (a process of its
own), then anchor_cpu and race_anchor, which stand apart.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(folder) for folder in (ROOT, ROOT / "data") if str(folder) not in sys.path]
