"""The tools around train_gpt.py: `python -m speedrun --help`. CONTRIBUTING.md says what each module is for."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
