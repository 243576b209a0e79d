"""Public records 83 and 89: their numbers, in golden.npz beside a record, and how our scripts are compared with them.

Every number there is what the public script gave in float64, at its own size. Of large arrays the file keeps what
`digest` makes of them, samples, or their sums over rows and columns, in turn summed with the weights of `project`.
Public tables of embeddings have rows that no token reads. Parameters were drawn from a seed and rounded: the file has
the seed, and what a new draw misses. NumPy may one day draw other numbers: a checksum tells.
"""

import dataclasses
import functools
import importlib.util
import re
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import train_gpt
from shards import write_shard
from world_worker import ROOT

SIGN_TRICK, DOWN_PROJECTION = "2026-05-20_BigramsSignTrick", "2026-07-17_FP8DownProjection"  # records 83 and 89
# Our names of the schedules, by those of the public numbers
NAMES = dict(lr="lr_multiplier", mtp="mtp_weights", attn_scale="attention_scale", adam_step="adam_steps")
NAMES |= dict(yarn_freq="rotary_frequencies", window_long_tokens="window_long", window_short_tokens="window_short")
VOCAB_SIZE = 120  # rows of the public tables of embeddings that ours have, too
# What rotates together are neighbours in public, and a quarter of a head apart here; from 8 on nothing rotates
ROTARY_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15])


def load(name: str) -> types.ModuleType:
    """Import a record's script, once, or the root's."""
    if name == "train_gpt.py":
        return train_gpt
    module_name, path = f"record_{name[11:]}", ROOT / "records" / name / "train_gpt.py"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def digest(x: np.ndarray) -> np.ndarray:
    """Return sum, norm, sum of entry i times cos(i), and 13 of the entries."""
    samples = x.flat[np.linspace(0, x.size - 1, 13).astype(int)]
    return np.array([x.sum(), np.linalg.norm(x), x.ravel() @ np.cos(np.arange(x.size)), *samples])


def project(sums: np.ndarray) -> float:
    """Return the sum of a gradient's sums, times cos(i)."""
    return sums.ravel() @ np.cos(np.arange(sums.size))


def norm(x: np.ndarray) -> float:
    return np.sqrt(np.square(x).sum())  # not by BLAS, whose threads would fight over the cores


@functools.cache
def read(record: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a record's public numbers, and the public parameters."""
    numbers = dict(np.load(ROOT / "records" / record / "golden.npz"))
    params = {key[6:]: x.astype(np.float64) for key, x in numbers.items() if key.startswith("param/")}
    rng, spreads = np.random.default_rng(int(numbers["seed"])), numbers["spreads"]
    bounds = numbers.get("bounds", [50] * len(spreads))
    for x, spread, bound in zip(params.values(), spreads, bounds, strict=True):
        is_uniform = record == SIGN_TRICK
        drawn = rng.integers(-bound, bound + 1, x.shape) if is_uniform else rng.standard_normal(x.shape)
        x += np.rint(spread * drawn).clip(-127, 127)
    checksum = zlib.crc32(np.concatenate([*map(np.ravel, params.values())]).astype(np.int8))
    assert checksum == numbers["checksum"], "NumPy draws other numbers than it did"
    for x, unit in zip(params.values(), numbers["units"], strict=True):
        x *= unit
    return numbers, params


def prefix_weights(m: types.ModuleType, step: int, cfg) -> list[float]:
    """Return a script's weights of the loss of the prefix, which record 83 does not have."""
    return getattr(m, "prefix_weights", lambda *_: [])(step, cfg)


@dataclasses.dataclass(frozen=True)
class PublicRecord:
    """Say which script has the mathematics of a public record, and how the names and settings of both correspond."""

    record: str  # the folder with the numbers
    script: types.ModuleType  # of the record, or another with its mathematics
    rtol: float  # of what is compared with each number: in record 89's run of 13 steps rounding grows to 7e-11
    small: dict  # settings of the public small model, and what differs in its run and in the optimizers' steps
    run: dict
    steps: dict
    across: int  # the first of six steps across the untying
    hashes: dict  # settings of hashes of a real size
    states: dict[str, int]  # the step of each state
    nets: str  # name of the samples of the factors that nets make
    members: dict[str, str]  # patterns of the names of ours that stand, one after the other, for each public array
    first: dict  # first values of vectors, by public name, 0 by default
    renames: dict[str, str] = dataclasses.field(default_factory=dict)  # patterns of our names, and what is public

    numbers = property(lambda self: read(self.record)[0])
    params = property(lambda self: read(self.record)[1])

    def place(self, name: str) -> tuple[str, int]:
        """Return the public name of a parameter, and where it begins there.

        Where a public array has the scalars of all 11 layers, the second is the layer.
        """
        scalars = r"blocks\.(\d+)\.(?:(resid|post|x0|bigram)_lambdas?|(attn)\.lambdas|attn.(xsa)_alpha)"
        if found := re.fullmatch(scalars, name):
            return f"{found[2] or found[3]}_lambdas" if not found[4] else "xsa_alphas", int(found[1])
        if name.endswith(("qk_w", "v_w")):
            return re.sub("qk_w|v_w", "qkv_w", name), 2 * 96 * 96 * name.endswith("v_w")
        for pattern, public in (self.renames | {"skip_weights": "skip_lambda", r"nets\.": "mudd."}).items():
            name = re.sub(rf"^{pattern}", public, name)
        return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0

    def reorder(self, name: str, values: np.ndarray, public: bool) -> np.ndarray:
        """Return values in the public order, or back in ours: queries and keys, and a transposed matrix of an MLP."""
        if name.endswith("c_fc"):
            return values.reshape((96, 384) if public else (384, 96)).T
        if name.endswith("qk_w"):
            return values.reshape(2, 6, 16, 96)[:, :, np.argsort(ROTARY_ORDER) if public else ROTARY_ORDER]
        return values

    def config(self, folder: Path, **changes):
        """Return the preset gpt2 with changes, and with the shards of the run in small in `folder`."""
        shards = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
        for name, key in (shards | dict(pack_0="pack/shard0", pack_1="pack/shard1")).items():
            if not (folder / f"{name}.bin").exists():
                write_shard(folder / f"{name}.bin", self.numbers[key])
        if "prefix_table" in self.numbers:
            self.numbers["prefix_table"][:VOCAB_SIZE].astype("<u2").tofile(folder / "prefixes")  # -1 is 65535
            changes = dict(prefix_file=f"{folder}/prefixes") | changes
        files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", log_dir=str(folder))
        return self.script.resolve(dataclasses.replace(self.script.PRESETS["gpt2"], **files, **changes))

    def trainer(self, folder: Path, **changes):
        return self.script.Trainer(self.config(folder, **changes), self.script.Ranks())

    def part(self, name: str, array: np.ndarray, size: int) -> np.ndarray:
        """Return a view of what ours is of a public array: a row of one for all layers, or the rows with tokens."""
        key, i = self.place(name)
        start = i * (array.size // 11) if key.endswith(("_lambdas", "_alphas")) else i
        return array.reshape(-1)[start : start + size]

    def public(self, gpt: nn.Module, unread: float, value: Callable = lambda p: p) -> dict[str, np.ndarray]:
        """Return `value` of our parameters by public names; what only those have is `unread` times its first value."""
        arrays = {key: np.array(unread * x) for key, x in self.params.items()}
        for name, p in gpt.named_parameters():
            values = self.reorder(name, value(p).detach().numpy(), public=True)
            self.part(name, arrays[self.place(name)[0]], values.size)[:] = values.flatten()
        return arrays

    def gradients(self, gpt: nn.Module) -> dict[str, np.ndarray]:
        return self.public(gpt, 0.0, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)

    def load_parameters(self, trainer, is_tied: bool) -> None:
        """Set all parameters, and the public signs of the small model."""
        gpt = trainer.gpt
        assert {self.place(name)[0] for name, _ in gpt.named_parameters()} == set(self.params)
        for name, p in gpt.named_parameters():
            values = self.part(name, self.params[self.place(name)[0]], p.numel())
            p.detach().copy_(torch.from_numpy(self.reorder(name, values, public=False)).reshape(p.shape))
        if is_tied:
            gpt.embed.weight.detach().copy_(gpt.lm_head)
        gpt.signs.copy_(torch.from_numpy(self.numbers["sign_table"]))

    def tokens(self, key: str) -> Tensor:
        return torch.from_numpy(self.numbers[key].astype(np.int64))

    def expect(self, key: str, found, row=..., scale: float | None = None) -> None:
        """Compare to 1e-8 of a scale, or each number to `rtol` of itself."""
        want = self.numbers[key][row]
        assert np.shape(found) == want.shape, key
        rtol, atol = (self.rtol, 0) if scale is None else (0, 1e-8 * scale)
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol, err_msg=f"{key} {row}")

    def schedules(self, folder: Path) -> dict:
        """Return all schedules of the preset gpt2 at all of its steps, by our names."""
        m, cfg = self.script, self.config(folder, device="cpu", seed=0)
        steps = range(cfg.num_iterations)
        stages = [m.stage_of(s, cfg) for s in range(cfg.num_iterations + 1)]
        freqs, scales = zip(*(m.rotary_frequencies(i, cfg, torch.float64) for i in range(4)), strict=True)
        windows = [m.attention_windows(s, cfg) for s in range(len(stages))]
        long, short = zip(*windows, strict=True)
        found = {name: [getattr(m, name)(s, cfg) for s in steps] for name in ("lr_multiplier", "muon_momentum")}
        found |= dict(stage=stages[:-1], batch_tokens=[8 * m.train_seq_len(s, cfg) for s in steps])
        found |= dict(max_doc_len=[cfg.max_doc_len[i] for i in stages[:-1]], window_long=long, window_short=short)
        found |= dict(adam_steps=[s % cfg.adam_every == 1 for s in steps], rotary_frequencies=torch.stack(freqs))
        found |= dict(attention_scale=[scales[stage] for stage in stages])
        next_weights = [m.mtp_weights(s, cfg) for s in steps]
        found |= dict(
            prefix_weight=[sum(prefix_weights(m, s, cfg)) for s in steps], mtp_count=[*map(len, next_weights)]
        )
        found |= dict(mtp_weights=[weights + [0] * (3 - len(weights)) for weights in next_weights])
        return found | dict(tied=[s - 1 - s % 2 < cfg.tied_frac * cfg.scheduled_steps for s in steps])


# ---- What the public numbers were computed with ----------------------------------------------------------------------
SMALL = dict(vocab_size=120, eot_token=119, num_heads=6, head_dim=16, model_dim=96, mask_block=16)
SMALL |= dict.fromkeys(("batch_tokens", "train_seq_len", "val_seq_len", "val_tokens"), 768)
SMALL |= dict(window_tokens=(48, 112, 176, 208), final_window_tokens=320)
SMALL |= dict(dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
SMALL_89 = SMALL | dict(bigram_rows=640, sign_rows=64, dc_keys=14, max_doc_len=(112, 256, 256, 256))
RUN = dict(num_iterations=13, extension_steps=4, mask_block=4, window_tokens=(12, 28, 44, 52), final_window_tokens=80)
RUN |= dict(max_doc_len=(28, 64, 64, 64), train_seq_len=96, batch_tokens=8 * 96, val_seq_len=288)
RUN |= dict(val_tokens=2 * 8 * 288, momentum_warmup_steps=4, momentum_cooldown_steps=3)
RUN_89 = RUN | dict(dc_keys=5)
STEPS_89 = dict(vocab_size=16, eot_token=15, head_dim=4, model_dim=24, bigram_rows=20, prefix_file="")
STATES_83 = dict(s1=200, val_s1=250, s2=640, val_s2=750, s3_tied=917, s3=1100, val_s3=1250, ext=1380, val_final=1385)
STATES_89 = dict(s1=200, val_s1=250, s2=600, val_s2=750, s3_tied=847, s3=1100, val_s3=1250, ext=1275, val_final=1285)
MEMBERS = {
    "attn.qkv_w": r"blocks\.0\.attn\.(qk|v)_w",
    "value_embeds": "value_embeds.*",
    "smear_gate.weight": "smear_gate",
}
MEMBERS |= {f"{kind}.weight": rf"blocks\.0\.{kind}" for kind in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
MEMBERS |= {f"{kind}.weight": rf"{kind}(\.weight)?" for kind in ("embed", "bigram_embed", "lm_head")}
MEMBERS |= {f"{kind}_lambdas": rf".*\.{kind}_lambdas" for kind in ("resid", "post")}
MEMBERS |= dict(value_gates=r".*\.value_gate", scalars=r".*attn\.lambdas|smear_lambda|skip_weights|.*\.skip_lambda")
MEMBERS_83 = MEMBERS | {f"mudd_{kind}": rf".*\.{kind}" for kind in ("w1", "w2", "b2")}
MEMBERS_83 |= {f"{kind}_lambdas": rf".*\.{kind}_lambda" for kind in ("x0", "bigram")}
MEMBERS_83 |= {"attn_gates": r".*\.gate", "xsa_alphas": r".*xsa_alpha", "skip_gate.weight": "skip_gate"}
MEMBERS_89 = MEMBERS | dict(gate_scale="gate_scale")
R = 1.1**0.5
FIRST_83 = dict(attn_lambdas=[0.5, 1], skip_lambda=-1.5, resid_lambdas=R, post_lambdas=1, bigram_lambdas=0.05)
FIRST_83 |= {"mudd.out.b2": [0, -5, 0, 0, 0], "mudd.last.b2": [*[0] * 6, 20, 20, 10 * R, 10, 0, 0.5, 10 * R, 10]}
FIRST_89 = FIRST_83 | {"gate_scale": 0.1, "gates.early.b2": [*[0] * 12, *[2.5] * 6, *[0, 0.5] * 4]}
FIRST_89["gates.mid.b2"] = [*[0] * 12, *[2.5] * 6, *[0, 0.5] * 5, 5, *[10] * 6, *[0] * 6]
STD = dict(embed=0.005, lm_head=0.005, value_embeds=0.01, w1=(3 * 96) ** -0.5)
STD |= dict.fromkeys(["qk_w", "v_w", "attn.c_proj", "c_fc"], 0.5 * 96**-0.5)
TABLES = r"(embed|bigram_embed|value_embeds\.\d+)\.weight|lm_head"  # and the rest is stored:
STORED: dict[str, str] = dict(bfloat16=rf"{TABLES}|nets\..*|.*gate")
STORED["float32"] = r".*(qk_w|v_w|c_proj|c_fc|lambdas?|xsa_alpha|skip_weights)|gate_scale"


def record_83() -> PublicRecord:
    # As many factors as the public arrays have, with those that no layer uses
    steps = dict(vocab_size=32, eot_token=31, num_heads=4, head_dim=4, model_dim=16, bigram_rows=480, bigram_dim=4)
    steps |= dict(attention_layout="S" * 14, source_layout="." * 14, xsa_layout="x" * 14, skip_layout="." * 13 + "3")
    steps |= dict(value_embed_layout=".01234" + "." * 8, mudd_layers="7" + "3" * 10)
    numbers = dict(rtol=1e-10, across=914, states=STATES_83, nets="mudd_sample", first=FIRST_83, members=MEMBERS_83)
    hashes = dict(bigram_rows=15 * 50304, sign_rows=8192)
    small = SMALL | dict(bigram_rows=1920, bigram_dim=24, sign_rows=32)
    return PublicRecord(SIGN_TRICK, load(SIGN_TRICK), small=small, run=RUN, steps=steps, hashes=hashes, **numbers)


def record_89() -> PublicRecord:
    steps = STEPS_89 | dict(attention_layout="S" * 14, value_embed_layout=".01" + "." * 5 + "111" + "." * 3)
    steps |= dict(source_layout="", xsa_layout="x" * 14, gate_layout="", dc_layout="", skip_layout="." * 13 + "3")
    members = MEMBERS_89 | {f"gate.{kind}": rf"nets\.(early|mid)\.{kind}" for kind in ("w1", "w2", "b2")}
    members |= {f"mudd.{kind}": rf"nets\.(last|out)\.{kind}" for kind in ("w1", "w2", "b2")}
    numbers = dict(rtol=1e-8, across=844, states=STATES_89, nets="net_sample", first=FIRST_89, members=members)
    numbers |= dict(hashes=dict(bigram_rows=377280, sign_rows=8192), renames={r"nets\.(early|mid)": r"gates.\1"})
    script = load(DOWN_PROJECTION)
    return PublicRecord(DOWN_PROJECTION, script, small=SMALL_89, run=RUN_89, steps=steps, **numbers)
