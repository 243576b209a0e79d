"""The tools around train_gpt.py: `python -m speedrun --help`. Each module's docstring says what it is for."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
