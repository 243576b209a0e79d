"""Ideas that a user may have pass the tests with --idea, and a fault does not."""

import re
import shutil
import subprocess
import sys

import pytest

from world_worker import ROOT

pytestmark = pytest.mark.slow
FILES = """model head optimizers train::warm_up_and_checkpoints_change_nothing_and_are_off_the_clock
train::log_and_result_have_their_form train::text_that_would_spoil_the_run_is_refused_before_it_starts
checkpoint::a_resumed_run_goes_on_in_its_log_with_its_seed_and_on_its_clock
benchmarks::figures_are_of_the_steps_that_train"""
LION = re.search(r"^\+(class Lion.*?\n)\+\n\+\n", (ROOT / "docs/change.md").read_text(), re.M | re.S)[1]
SWIGLU = "linear(F.silu(linear(x, self.c_gate.mT)) * linear(x, self.c_fc.mT), c_proj)"
ROW = 'Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True, mlps=2)'  # of mini
STAGES = "tuple(row._replace(share=1 / 2) for row in GPT2_STAGES[:2])"
FEWER = {  # a layer less, two stages, and nano with a batch that grows
    f"    {ROW},\n": "",
    "reads=3": "reads=2",
    "mudd=3, head_mix=(3, 2, 1)": "mudd=2, head_mix=(2, 1)",
    "= GPT2_STAGES": f"= {STAGES}",
    "stage in GPT2_STAGES": f"stage in {STAGES}",
    "NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)": "NANO_STAGES = tuple("
    "Stage(0.5, batch=batch, max_doc_len=0, windows=dict(long=512)) for batch in (0.5, 1))",
}
OTHER = {  # a third kind of window, SwiGLU, and Lion for the embedding
    '"short": Attention("short"),': '"short": Attention("short"),\n    "mid": Attention("mid"),',
    "windows=dict(short=": "windows=dict(mid=256, short=",
    ROW: 'Layer("mid", half_v=True, mlps=2)',
    '"*.c_fc"': '"*.c_fc *.c_gate"',
    "        self.c_fc =": "        self.c_gate = uniform_weight(K, K, cfg.mlp_dim)\n        self.c_fc =",
    "ReluSquaredMLP.apply(x, self.c_fc.mT.type_as(x), c_proj, fp8, self.by_kernel)": SWIGLU,
    "OPTIMIZERS = {": LION.replace("\n+", "\n") + '\n\nOPTIMIZERS = {"Lion": Lion, ',
    'Group("Adam", "embed.weight"': 'Group("Lion", "embed.weight"',
    "tied_frac: float = 1.0": "tied_frac: float = 0.0",
}
FAULT = {"(q >= kv) & ": ""}  # attention sees the tokens to come


@pytest.mark.parametrize(("edits", "code"), [(FEWER, 0), (OTHER, 0), (FAULT, 1)], ids=["fewer", "other", "fault"])
def test_ideas_pass_and_a_fault_does_not(tmp_path, edits: dict[str, str], code: int):
    """Run tests of the root with --idea in a copy of the repository whose script, or mini, has these edits."""
    folder = tmp_path / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "logs", "*.bin", "*.png", "__pycache__"))
    paths = folder / "train_gpt.py", folder / "speedrun" / "mini.py"
    for old, new in edits.items():
        sources = [path.read_text() for path in paths]
        assert any(old in source for source in sources), f"the script no longer has {old}"
        for path, source in zip(paths, sources, strict=True):
            path.write_text(source.replace(old, new))
    files = [f"tests/test_{name.replace('::', '.py::test_')}" for name in FILES.split()]
    files = [name if "::" in name else f"{name}.py" for name in files]
    command = [sys.executable, "-m", "pytest", "--idea", "-q", "-x", *files]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert run.returncode == code, run.stdout[-3000:]
    assert ("1 failed" in run.stdout) == bool(code)
