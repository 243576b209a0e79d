"""What the documentation says is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_fault_table_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    defined = {
        name for path in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 20
    assert named <= defined, named - defined
