"""The tools around train_gpt.py: `python -m speedrun --help`. Each module's docstring says what it is for."""

import tomllib
from pathlib import Path
from types import SimpleNamespace as Track

ROOT = Path(__file__).resolve().parent.parent
# Each has the fields that tracks.toml explains, and its name
TRACKS = {
    name: Track(name=name, **fields)
    for name, fields in tomllib.loads((ROOT / "records" / "tracks.toml").read_text(encoding="utf-8")).items()
}
