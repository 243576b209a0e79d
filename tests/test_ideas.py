"""`./test.sh --idea` passes with ideas in the script."""

import re
import shutil
import subprocess
import sys

import pytest

from speedrun import ROOT

LION = re.search(r"^\+(class Lion.*?\n)\+\n\+\n", (ROOT / "docs/change.md").read_text(), re.M | re.S)[1]
STAGES = "tuple(row._replace(share=1 / 2) for row in GPT2_STAGES[:2])"
# Two stages, in nano with a batch that grows; a third kind of window, SwiGLU, and Lion for the embedding
IDEAS = {
    "= GPT2_STAGES": f"= {STAGES}",
    "stage in GPT2_STAGES": f"stage in {STAGES}",
    "NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)": "NANO_STAGES = tuple("
    "Stage(0.5, batch=batch, max_doc_len=0, windows=dict(long=512)) for batch in (0.5, 1))",
    '"short": Attention("short"),': '"short": Attention("short"),\n    "mid": Attention("mid"),',
    "windows=dict(short=": "windows=dict(mid=256, short=",
    'Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True, mlps=2)': 'Layer("mid",'
    " half_v=True, mlps=2)",
    '"*.c_fc"': '"*.c_fc *.c_gate"',
    "        self.c_fc =": "        self.c_gate = uniform_weight(K, K, cfg.mlp_dim)\n        self.c_fc =",
    "ReluSquaredMLP.apply(x, self.c_fc.mT.type_as(x), c_proj, fp8, self.by_kernel)": "linear("
    "F.silu(linear(x, self.c_gate.mT)) * linear(x, self.c_fc.mT), c_proj)",
    "OPTIMIZERS = {": LION.replace("\n+", "\n") + '\n\nOPTIMIZERS = {"Lion": Lion, ',
    'Group("Adam", "embed.weight"': 'Group("Lion", "embed.weight"',
    "tied_frac: float = 1.0": "tied_frac: float = 0.0",
}


@pytest.mark.frozen
def test_ideas_pass(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "logs", "__pycache__"))
    paths = folder / "train_gpt.py", folder / "tests" / "mini.py"
    for old, new in IDEAS.items():
        assert any(old in path.read_text() for path in paths), f"the script no longer has {old}"
        for path in paths:
            path.write_text(path.read_text().replace(old, new))
    command = [sys.executable, "-m", "pytest", "--idea", "-q"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-3000:]
