"""The scripts of records/: each still trains, is what its record says, and differs from the others by ideas alone."""

import ast
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

import pack_nano
import train_gpt
from conftest import randomize
from test_compile import capturing_compiler, count_calls
from test_masks import listed_blocks
from test_world_size import finish, free_ports, start

RECORDS = Path(train_gpt.__file__).parent / "records"
NAMES = sorted(path.parent.name for path in RECORDS.glob("20*/train_gpt.py"))
V14, V15, V18, V20, V21 = (
    "2024-12-04_ValueEmbed",
    "2024-12-08_UNetValueEmbed",
    "2025-01-04_SoftCap",
    "2025-01-16_Sub3Min",
    "2025-01-26_BatchSize",
)
SHARDED = "2026-11-21_ShardedOptimizers"
PAIRS = "2026-11-21_TokenPairs"
NORM = "2026-11-21_WrittenNorm"


def script(name: str) -> str:
    return (RECORDS / name / "train_gpt.py").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    """A record's script as a module."""
    spec = importlib.util.spec_from_file_location("record_" + name[11:], RECORDS / name / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture
def record(name: str) -> ModuleType:
    return load(name)


def small(record: ModuleType, **changes):
    """The nano preset of a record, some thousand times less work, in double precision."""
    shape = dict(num_iterations=8, model_dim=32, num_heads=2, head_dim=16, block_size=8, window_tokens=36, seed=0)
    lengths = dict(train_seq_len=64, batch_tokens=128, val_seq_len=64, val_tokens=128)
    machine = dict(device="cpu", dtype="float64", compile=False, cpu_threads=1)
    return dataclasses.replace(record.PRESETS["nano"], **{**shape, **lengths, **machine, **changes})


# What a record is


def test_root_script_is_the_newest_record_or_says_that_it_is_not():
    root = Path(train_gpt.__file__).read_text(encoding="utf-8")
    marked = any(line.startswith("Unreleased") for line in ast.get_docstring(ast.parse(root)).splitlines())
    assert (root == script(NAMES[-1])) != marked, "mark it by a line `Unreleased: ...` in its docstring, or unmark it"


def test_a_record_stands_on_its_own(name: str):
    """It imports the standard library and three packages, and nothing from this repository."""
    imported = set()
    for node in ast.walk(ast.parse(script(name))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "numpy", "tqdm"}


# Published: records 14 (the log's layout), 15, 18, 20 and 21
@pytest.mark.parametrize(
    ("name", "parameters", "steps", "batch_tokens", "val_seq_len", "windows"),
    [
        (V14, 625_803_306, 1530, 524_288, 65_536, {56: 64, 57: 128, 1530: 1792}),
        (V15, 394_002_486, 1480, 524_288, 65_536, {54: 64, 55: 128, 1480: 1792}),
        (V18, 275_742_772, 1390, 524_288, 65_536, {102: 1, 103: 2, 1389: 14}),
        (V20, 275_598_388, 1393, 524_288, 65_536, {103: 1, 104: 2, 1342: 14}),
        (V21, 275_598_388, 1770, 393_216, 262_144, {131: 1, 132: 2, 263: 3, 1704: 13, 1705: 14, 1769: 14}),
        (SHARDED, 275_598_388, 1770, 393_216, 262_144, {131: 1, 132: 2, 1705: 14}),
        (PAIRS, 275_598_388, 1770, 393_216, 262_144, {131: 1, 132: 2, 1705: 14}),
        (NORM, 275_598_388, 1770, 393_216, 262_144, {131: 1, 132: 2, 1705: 14}),
    ],
)
def test_gpt2_preset_is_the_public_record(name, parameters, steps, batch_tokens, val_seq_len, windows):
    record = load(name)
    cfg = record.PRESETS["gpt2"]
    with torch.device("meta"):
        assert sum(p.numel() for p in record.GPT(cfg).parameters()) == parameters
    assert (cfg.num_iterations, cfg.batch_tokens, cfg.val_seq_len) == (steps, batch_tokens, val_seq_len)
    window = record.attention_window if name in (V14, V15) else record.window_blocks
    assert {step: window(step, cfg) for step in windows} == windows
    cooldown = 600 if name in (V14, V15) else 0.4 * steps
    last = 0.1 if name >= V20 else 0.0
    first_slower = steps - math.floor(cooldown)
    assert record.lr_multiplier(first_slower, cfg) == pytest.approx(1, abs=1e-3)
    assert record.lr_multiplier(steps - 1, cfg) == pytest.approx(last + (1 - last) / cooldown, abs=1e-6)


# That it still trains

GOLDEN = {
    V14: (5.2462, 3.8945, 3.0719, 2.8432, 2.7959),
    V15: (5.2670, 3.8922, 3.0612, 2.8449, 2.8017),
    V18: (5.2676, 3.8979, 3.0714, 2.8507, 2.8038),
    V20: (5.2853, 3.9739, 3.1277, 2.8688, 2.8098),
    V21: (5.2853, 3.9739, 3.1277, 2.8688, 2.8097),
    SHARDED: (5.2853, 3.9739, 3.1277, 2.8688, 2.8097),
    PAIRS: (5.5040, 4.4499, 3.4895, 3.0864, 2.9431),
    NORM: (5.4344, 4.7741, 4.0855, 3.6290, 3.4120),
}


@pytest.fixture(scope="session")
def nano_data(tmp_path_factory) -> Path:
    if importlib.metadata.version("torch").split("+")[0] != pack_nano.TRACK_TORCH:
        pytest.skip(f"another torch packs another corpus than the track's, of torch {pack_nano.TRACK_TORCH}")
    folder = tmp_path_factory.mktemp("nano")
    pack_nano.main(["--out", str(folder)])
    return folder


def test_first_losses_are_the_golden_ones(name: str, record: ModuleType, nano_data: Path, tmp_path: Path):
    """The nano preset, 5 steps in fp32 on one thread, seed 1; validation after each."""
    flags = "--preset nano --device cpu --dtype float32 --cpu_threads 1 --num_iterations 5 --val_loss_every 1 --seed 1"
    data = ["--train_files", f"{nano_data}/nano_train_*.bin", "--val_files", f"{nano_data}/nano_val_*.bin"]
    result = record.main([*flags.split(), *data, "--val_tokens", "8192", "--log_dir", str(tmp_path)])
    (_, first, _), *curve = result.val_curve
    assert first == pytest.approx(math.log(384 if name < NORM else 320), abs=1e-4)  # rows of the head
    assert [loss for _, loss, _ in curve] == pytest.approx(GOLDEN[name], abs=0.01)


@pytest.fixture
def loss_of(nano_data: Path, tmp_path: Path) -> Callable[[str, str], float]:
    """The loss of a record's nano preset with flags, after 20 steps in double precision."""

    def train(name: str, flags: str) -> float:
        short = "--preset nano --device cpu --dtype float64 --cpu_threads 1 --num_iterations 20 --seed 1"
        data = ["--train_files", f"{nano_data}/nano_train_*.bin", "--val_files", f"{nano_data}/nano_val_*.bin"]
        data += ["--val_tokens", "8192", "--log_dir", str(tmp_path), "--run_id", name]
        return load(name).main([*short.split(), *data, *flags.split()]).val_loss

    return train


def test_sharding_the_optimizers_changes_nothing_else(loss_of):
    """Record 21 and ours are one training: equal to rounding."""
    losses = [loss_of(name, "--model_dim 64") for name in (V21, SHARDED)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0] < 4


def test_slices_order_and_relu_squared_change_nothing_but_rounding(loss_of):
    """TokenPairs without pairs of tokens and the one before it are one training."""
    flags = "--model_dim 64 --num_heads 2 --attention_layout LS --value_embed_layout 01 --block_size 64 --muon_lr 0.025"
    flags += " --momentum_warmup_steps 100 --embed_lr 0.6 --adam_beta1 0.8 --batch_tokens 2048"
    before, after = loss_of(SHARDED, flags), loss_of(PAIRS, flags + " --bigram_rows 0 --lm_head_slice 300")
    assert after == pytest.approx(before, abs=1e-9)
    assert after < 4


def test_the_norm_written_out_changes_nothing_but_rounding(loss_of):
    """TokenPairs and WrittenNorm are one training, with the settings of the former and a head that both pad alike."""
    flags = "--vocab_size 384 --cooldown_frac 0.7 --muon_lr 0.035 --muon_momentum 0.95 --embed_lr 0.4 --head_lr 0.008"
    flags += " --adam_beta2 0.95 --batch_tokens 3072"
    before, after = (loss_of(name, flags) for name in (PAIRS, NORM))
    assert after == pytest.approx(before, abs=1e-9)
    assert after < 4


def test_record_20_is_record_21_but_for_its_numbers():
    """On a CPU, where the head is not FP8: the same loss and gradients to the last bit, from the same parameters."""
    results = []
    for record in load(V20), load(V21):
        torch.manual_seed(0)
        gpt = record.GPT(small(record))
        results.append(loss_and_grads(gpt, gpt, window=2))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def loss_and_grads(gpt, model: Callable, window: int) -> list[Tensor]:
    torch.manual_seed(0)
    randomize(gpt)
    tokens = torch.randint(256, (65,))
    tokens[[20, 50]] = gpt.cfg.eot_token
    gpt.zero_grad(set_to_none=True)
    loss = model(tokens[:-1].int(), tokens[1:], torch.tensor(window, dtype=torch.int32))
    loss.backward()
    return [loss.detach(), *(p.grad for p in gpt.parameters())]


@pytest.mark.slow
def test_three_processes_train_what_one_does(name: str, nano_data: Path, tmp_path: Path):
    """20 steps in double precision; 6 sequences a step, 5 of validation, matrices that 3 does not divide."""
    flags = "--preset nano --device cpu --dtype float64 --cpu_threads 1 --num_iterations 20 --val_loss_every 0 --seed 1"
    shape = "--model_dim 32 --num_heads 2 --head_dim 16 --train_seq_len 128 --batch_tokens 768 --val_seq_len 1024"
    data = ["--train_files", f"{nano_data}/nano_train_*.bin", "--val_files", f"{nano_data}/nano_val_*.bin"]
    command = [f"records/{name}/train_gpt.py", *flags.split(), *shape.split(), "--val_tokens", "5120", *data]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=3", f"--master_port={free_ports(1)[0]}"]
    losses = []
    for run_id, before in ("one", []), ("three", launcher):
        finish([start([*before, *command, "--log_dir", tmp_path, "--run_id", run_id])], timeout=120)
        losses.append(json.loads((tmp_path / f"{run_id}.json").read_text())["val_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0] < 5


# What they do


def dense(mask, T: int) -> Tensor:
    """(T, T): which tokens see which, by a BlockMask's lists and its function of elements."""
    block_size = mask.BLOCK_SIZE[0]
    q, kv = torch.arange(T)[:, None], torch.arange(T)[None, :]
    blocks = torch.zeros(T // block_size, T // block_size, dtype=torch.bool)
    elements = mask.mask_mod(None, None, q, kv)
    for kind, lists in zip(("partial", "full"), listed_blocks(mask), strict=True):
        for row, columns in enumerate(lists):
            blocks[row, columns] = True
            for column in columns if kind == "full" else ():
                part = elements[row * block_size :, column * block_size :][:block_size, :block_size]
                assert part.all(), "a block that is not masked has to be visible as a whole"
    return elements & blocks.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)


@pytest.mark.parametrize("name", [V14, V15, V18])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_masks_of_the_older_records(name: str, window: int, seed: int):
    """Windows by token in 14, by token and block in 15, by block in 18; windows of `window` half blocks or blocks."""
    record, T, block_size = load(name), 96, 8
    torch.manual_seed(seed)
    docs = (torch.rand(T) < [0.0, 0.02, 0.1, 0.5][seed]).cumsum(0, dtype=torch.int32)
    tokens = window if name == V18 else window * block_size // 2
    mask = record.document_block_mask(docs, torch.tensor(tokens, dtype=torch.int32), block_size)
    q, kv = torch.arange(T)[:, None], torch.arange(T)[None, :]
    expected = (q >= kv) & (docs[q] == docs[kv])
    blocks_back = q // block_size - kv // block_size
    if name == V18:
        expected &= blocks_back < window
    else:
        expected &= q - kv < tokens
    if name == V15:
        expected &= blocks_back < -(-tokens // block_size)
    assert torch.equal(dense(mask, T), expected)


def test_plain_momentum_and_lerp_give_muon_one_direction():
    """m <- mu m + g of record 14 is a multiple of the lerp form of record 15, which Newton-Schulz does not see."""
    after = []
    for name in V14, V15:
        record = load(name)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(12, 8, dtype=torch.float64))
        muon = record.Muon([("p", p)], lr=0.1, world=record.World(), dtype=torch.float64)
        for _ in range(4):
            p.grad = torch.randn(12, 8, dtype=torch.float64)
            muon.step()
        after.append(p.detach())
    torch.testing.assert_close(*after, rtol=0, atol=1e-6)
    torch.manual_seed(0)
    assert (after[0] - torch.randn(12, 8, dtype=torch.float64)).abs().max() > 0.05


@pytest.mark.parametrize("use_flex", [False, True])
def test_each_compiles_as_one_graph_for_every_window(record: ModuleType, use_flex: bool, monkeypatch):
    """Training in windows of 1 to 3; FlexAttention is captured, not run as a kernel, which no CPU has for training."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    gpt = record.GPT(small(record))
    gpt.use_flex = use_flex
    graphs, compiled = capturing_compiler()
    model = compiled(gpt)
    for window in 1, 2, 3:
        actual = loss_and_grads(gpt, model, window)
        if not use_flex:  # eager FlexAttention ignores the lists of blocks
            torch.testing.assert_close(actual, loss_and_grads(gpt, gpt, window), rtol=1e-8, atol=1e-10)
    assert len(graphs) == 1
    layout = getattr(gpt.cfg, "attention_layout", "LL")
    assert count_calls(graphs[0], "flex_attention") == len(layout.replace("-", "")) * use_flex


# That their differences are their ideas


def sections(source: str) -> dict[str, list[str]]:
    """A script's lines by the first word of its sections' titles."""
    found: dict[str, list[str]] = {"Head": []}
    lines = source.splitlines()
    for i, line in enumerate(lines):
        if i and lines[i - 1].startswith("# -----"):
            found[line.removeprefix("# ").split(":")[0]] = []
        found[list(found)[-1]].append(line)
    return found


@pytest.mark.parametrize(
    ("older", "newer", "changed", "most"),
    [
        (V14, V15, {"Head", "Configuration", "Model", "Optimizers", "Data", "Run"}, 160),
        (V15, V18, {"Head", "Configuration", "Model", "Optimizers", "Schedules", "Run"}, 160),
        (V18, V20, {"Head", "Configuration", "Model", "Optimizers", "Schedules", "Run"}, 170),
        (V20, V21, {"Head", "Configuration", "Model"}, 60),
        (V21, SHARDED, {"Head", "Optimizers", "Run"}, 200),
        (PAIRS, NORM, {"Head", "Configuration", "Model", "Optimizers", "Run"}, 120),
    ],
)
def test_neighbours_differ_by_their_ideas(older: str, newer: str, changed: set[str], most: int):
    """What they share is the same text: only these sections change, and of Run no more than a few lines."""
    before, after = sections(script(older)), sections(script(newer))
    titles = ["Head", "Configuration", "Model", "Optimizers", "Data", "Schedules", "Run"]
    assert list(before) == list(after)
    assert [title for title in after if title != "Checkpoints"] == titles
    counts = {
        title: sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)
        for title in before
        if (diff := list(difflib.unified_diff(before[title], after[title], n=0)))
    }
    assert set(counts) == changed
    assert sum(counts.values()) < most
    assert counts.get("Run", 0) <= 8
    assert counts["Head"] <= 12


def test_all_neighbours_are_compared():
    """But for TokenPairs: it also has checkpoints, faults and samples, in all sections but Schedules."""
    assert [V14, V15, V18, V20, V21, SHARDED, PAIRS, NORM] == NAMES
    before, after = sections(script(SHARDED)), sections(script(PAIRS))
    assert [title for title in after if title != "Checkpoints"] == list(before)
    assert before["Schedules"] == after["Schedules"]
    assert len(script(PAIRS).splitlines()) - len(script(SHARDED).splitlines()) < 180
