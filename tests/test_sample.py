"""sample.py: its logits are those of training, what it draws, what it prints, and how it ends."""

import dataclasses
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
import train_gpt
from conftest import randomize
from sample import Reader
from shards import write_shard
from test_train import SMALL
from train_gpt import GPT, UserError

ROOT = Path(sample.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """A run of some seconds whose validation sequences are one document each, of 6 blocks."""
    rng = np.random.default_rng(0)
    words = [b"muon ", b"adam ", b"rotary ", b"window ", b"shard ", b"block\n"]
    text = b"".join(words[i] for i in rng.integers(len(words), size=500))
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    tokens[::96] = 256
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", tokens[: 96 * 20 + 1])
    data = ["--train_files", f"{tmp_path}/train.bin", "--val_files", f"{tmp_path}/val.bin", "--val_sha256", ""]
    return [*SMALL, *data, "--log_dir", str(tmp_path / "logs"), "--run_id", "mine"]


@pytest.fixture
def checkpoint(tiny, tmp_path) -> Path:
    """A model with random values, of bytes."""
    path = tmp_path / "logs" / "random.pt"
    path.parent.mkdir(exist_ok=True)
    assert train_gpt.write_model(randomize(GPT(tiny)), tiny, path) == ""
    return path


def reader_of(gpt: GPT, max_tokens: int) -> Reader:
    reader = Reader(gpt.cfg).eval()
    reader.load_state_dict(gpt.state_dict())
    reader.begin(max_tokens)
    return reader


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, without a process of its own."""
    code = sample.run_as_program([*argv])
    return code, *capsys.readouterr()


def program(*argv: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "sample.py", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, **options)


# The same logits as in training


@pytest.mark.parametrize("layout", ["LSSL", "L--S", "SSSSLL"])
def test_logits_are_those_of_the_training_forward(tiny64, random_gpt, layout, monkeypatch):
    """At each of 16 blocks' positions, with windows of 4 and 2 blocks; token by token and in pieces of any length."""
    cfg = dataclasses.replace(tiny64, attention_layout=layout, value_embed_layout="0" + "." * (len(layout) - 2) + "0")
    gpt = random_gpt(cfg)
    tokens = torch.randint(256, (129,))
    tokens[0] = cfg.eot_token
    window = train_gpt.window_blocks(cfg.num_iterations, cfg)
    assert window == 4
    with torch.no_grad():
        expected = gpt.logits(gpt.features(tokens[:-1].int(), torch.tensor(window, dtype=torch.int32)))
        loss = gpt(tokens[:-1].int(), tokens[1:], torch.tensor(window, dtype=torch.int32))
    assert expected.std() > 0.9, "the test would not see it"
    assert loss.item() == pytest.approx(F.cross_entropy(expected, tokens[1:]).item(), abs=1e-12)

    reader = reader_of(gpt, 128)
    logits = torch.stack([reader.read([token]) for token in tokens[:-1].tolist()])
    torch.testing.assert_close(logits, expected[:, :257], rtol=0, atol=1e-10)
    for size, at in itertools.product((3, 8, 20, 512), (1, 7, 8, 9, 40, 128)):
        monkeypatch.setattr(sample, "PIECE", size)
        reader.begin(128)  # forgets the text before
        torch.testing.assert_close(reader.read(tokens[:at].tolist()), expected[at - 1, :257], rtol=0, atol=1e-10)
    # How much is kept does not grow with the text
    assert {len(keys) for keys, _ in reader.kept} == {8 * {"L": 4, "S": 2}[letter] for letter in set(layout) - {"-"}}


def test_a_text_may_be_longer_than_any_sequence_of_the_training(tiny64, random_gpt):
    gpt = random_gpt(tiny64)
    tokens = torch.randint(256, (400,))
    reader = reader_of(gpt, 400)
    logits = reader.read(tokens.tolist())
    gpt.rotary = train_gpt.Rotary(tiny64.head_dim, 400)
    expected = gpt.logits(gpt.features(tokens.int(), torch.tensor(4, dtype=torch.int32)))
    torch.testing.assert_close(logits, expected[-1, :257], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_logits_in_lower_precision(tiny, random_gpt, dtype, tolerance):
    gpt = random_gpt(dataclasses.replace(tiny, dtype=dtype))
    tokens = torch.randint(256, (128,))
    expected = gpt.logits(gpt.features(tokens.int(), torch.tensor(4, dtype=torch.int32)))
    reader = reader_of(gpt, 128)
    logits = torch.stack([reader.read([token]) for token in tokens.tolist()])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected[:, :257], rtol=0, atol=tolerance)


def test_a_trained_model_scores_the_validation_text_as_its_run_did(flags):
    """From the flag to the loss: what is written, what is loaded, and every logit."""
    result = train_gpt.main([*flags, "--num_iterations", "14", "--dtype", "float64", "--save_checkpoint"])
    gpt = sample.load_model(Path(result.log).with_suffix(".pt"), CPU)
    shard = np.fromfile(gpt.cfg.val_files, dtype=np.uint16)[512:].astype(np.int64)
    window, losses = train_gpt.window_blocks(gpt.cfg.num_iterations, gpt.cfg), []
    for start in 0, 96, 192:
        tokens = torch.from_numpy(shard[start : start + 97])
        gpt.begin(96)
        logits = torch.stack([gpt.read([token]) for token in tokens[:-1].tolist()])
        gpt.begin(96)
        with torch.no_grad():  # the softmax of training sees the rows that pad the head, too
            padding = gpt.logits(gpt.features(tokens[:-1].int(), window))[:, 257:]
        losses.append(F.cross_entropy(torch.cat([logits, padding], dim=1), tokens[1:]).item())
    assert result.val_loss < 4
    assert np.mean(losses) == pytest.approx(result.val_loss, abs=1e-10)


# What is drawn


def counts(logits: torch.Tensor, num_draws: int, **options) -> np.ndarray:
    rng = torch.Generator().manual_seed(0)
    drawn = [sample.choose(logits, rng=rng, **options) for _ in range(num_draws)]
    return np.bincount(drawn, minlength=len(logits))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 4), (1.0, 100)])
def test_tokens_come_as_often_as_the_softmax_says(temperature, top_k):
    logits = torch.tensor([2.0, 0.5, 3.0, 1.0, -1.0, 2.5, 0.0])
    p = np.exp(logits.numpy().astype(float) / temperature)
    if 0 < top_k < 7:
        p[np.argsort(p)[:-top_k]] = 0
    expected = 4000 * p / p.sum()
    seen = counts(logits, 4000, temperature=temperature, top_k=top_k)
    assert np.all(seen[expected == 0] == 0)
    kept = expected > 0
    chi_square = np.sum((seen[kept] - expected[kept]) ** 2 / expected[kept])
    assert chi_square < 22.5  # 6 degrees of freedom: p < 0.001


def test_greedy():
    logits = torch.tensor([2.0, 0.5, 3.0, 2.999])
    for options in dict(temperature=0, top_k=0), dict(temperature=5.0, top_k=1), dict(temperature=1e-300, top_k=0):
        assert counts(logits, 50, **options).tolist() == [0, 0, 50, 0]


def test_rows_that_pad_the_head_are_never_drawn(tiny, random_gpt):
    gpt = random_gpt(tiny)
    with torch.no_grad():
        gpt.lm_head.weight[257:] = 100 * gpt.lm_head.weight[:63]
    reader = reader_of(gpt, 1)
    assert reader.read([256]).shape == (257,)


def test_a_text_ends_with_its_document(tiny, random_gpt):
    reader = reader_of(random_gpt(tiny), 1)
    script = iter([7, 8, tiny.eot_token, 9])
    assert list(sample.generate(reader, [1, 2], 10, lambda logits: next(script))) == [7, 8]
    assert reader.position == 5, "the document's first token, the prompt, and what was drawn"
    assert list(sample.generate(reader, [], 3, lambda logits: 7)) == [7, 7, 7]
    assert list(sample.generate(reader, [1], 0, lambda logits: 7)) == []


# What is printed


def test_text_is_the_same_with_the_same_seed(checkpoint, capsys):
    first, again, other, greedy, top_1 = (
        run(capsys, str(checkpoint), "--tokens", "40", "--prompt", "x = ", *options.split())
        for options in ("--seed 1", "--seed 1", "--seed 2", "--temperature 0", "--top_k 1")
    )
    assert first[0] == 0
    assert first[1] == again[1] != other[1]
    assert greedy[1] == top_1[1]
    assert all(text.startswith("x = ") for _, text, _ in (first, other, greedy))
    assert "seed 1]" in first[2]
    assert str(checkpoint) in first[2]


def test_a_seed_that_is_not_given_is_said(checkpoint, capsys):
    _, text, errors = run(capsys, str(checkpoint), "--tokens", "40")
    seed = re.search(r"seed (\d+)\]", errors)[1]
    assert run(capsys, str(checkpoint), "--tokens", "40", "--seed", seed)[1] == text


def test_newest_model_is_the_default(checkpoint, capsys, monkeypatch):
    monkeypatch.chdir(checkpoint.parent.parent)
    newer = Path("logs/newer.pt")
    newer.write_bytes(checkpoint.read_bytes())
    os.utime(checkpoint, (1, 1))
    assert run(capsys, "--tokens", "1")[2].startswith("logs/newer.pt, ")
    os.utime(newer, (0, 0))
    assert run(capsys, "latest", "--tokens", "1")[2].startswith("logs/random.pt, ")


def test_text_is_printed_as_it_comes(capsys):
    """Characters as soon as they are complete; broken ones, and what would command a terminal, as U+FFFD."""
    seen = []

    def pieces():
        for byte in "é€😀".encode() + b"\xff\x1b[\x07\r\tz\n\xe2\x82":
            yield bytes([byte])
            seen.append(capsys.readouterr().out)

    sample.write(pieces())
    assert seen[:9] == ["", "é", "", "", "€", "", "", "", "😀"]
    assert seen[9:] == ["\ufffd", "\ufffd", "[", "\ufffd", "\ufffd", "\t", "z", "\n", "", ""]
    assert capsys.readouterr().out == "\ufffd\n"


def test_prompt_that_is_not_ascii(checkpoint, capsys, monkeypatch):
    read = []
    generate = sample.generate
    monkeypatch.setattr(sample, "generate", lambda gpt, prompt, *a: (read.extend(prompt), generate(gpt, prompt, *a))[1])
    _, text, _ = run(capsys, str(checkpoint), "--prompt", "naïve 😀", "--tokens", "0")
    assert text == "naïve 😀\n"
    assert read == list("naïve 😀".encode())
    done = program(str(checkpoint), "--prompt", "ï", "--tokens", "0", env=os.environ | dict(PYTHONIOENCODING="ascii"))
    assert done.stdout == "ï\n".encode()


def test_gpt2_tokens(tiny, monkeypatch):
    """With a stand-in of tiktoken, which needs the network for its vocabulary."""
    cfg = dataclasses.replace(tiny, vocab_size=50257, eot_token=50256)
    gpt2 = types.SimpleNamespace(
        encode_ordinary=lambda text: [len(word) for word in text.split()],
        decode_single_token_bytes=lambda token: b"\xe2" if token == 1 else b"\x82\xac",
    )
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding={"gpt2": gpt2}.get))
    encode, decode = sample.tokenizer(cfg)
    assert encode("a bc") == [1, 2]
    assert b"".join(map(decode, [1, 2])).decode() == "€"

    def offline(name):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=offline))
    with pytest.raises(UserError, match="cannot get GPT-2's vocabulary: no network"):
        sample.tokenizer(cfg)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="pip install -r data"):
        sample.tokenizer(cfg)
    with pytest.raises(UserError, match="vocab_size 300 with eot_token 256"):
        sample.tokenizer(dataclasses.replace(tiny, vocab_size=300))


def test_gpt2_vocabulary():
    """tiktoken's own, where it is at hand."""
    pytest.importorskip("tiktoken")
    try:
        encode, decode = sample.tokenizer(train_gpt.PRESETS["gpt2"])
    except UserError as error:
        pytest.skip(str(error))
    text = "The meaning of naïve 😀 <|endoftext|>"
    tokens = encode(text)
    assert tokens[:3] == [464, 3616, 286]
    assert 50256 not in tokens, "text is no command"
    assert b"".join(map(decode, tokens)).decode() == text


# How it ends


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nowhere.pt", "nowhere.pt: there is no such file; train a model with --save_checkpoint"),
        ("latest", "no model in logs: train one with --save_checkpoint"),
        ("LICENSE", "LICENSE: not a sound checkpoint: "),
        (".", ".: not a sound checkpoint: "),
        ("random.pt --temperature -1", "--temperature -1.0: expected a number of at least 0"),
        ("random.pt --temperature nan", "--temperature nan: expected a number of at least 0"),
        ("random.pt --tokens many", "argument --tokens: invalid int value"),
        ("random.pt --top_k=-5", "--top_k -5: expected a number of at least 0"),
        ("random.pt --promt x", "unrecognized arguments: --promt x; --help lists the flags"),
        ("cut.pt", "cut.pt: not a sound checkpoint: "),
        ("list.pt", "list.pt: not what --save_checkpoint writes"),
        ("older.pt", "only one of it and this train_gpt.py has head_dim, rope_base; use that one"),
        ("refused.pt", "of another train_gpt.py: --head_dim 15: expected a multiple of 4; use that one"),
        ("shape.pt", "of another train_gpt.py: Error(s) in loading state_dict for Reader: size mismatch"),
        ("lacks.pt", "of another train_gpt.py: Error(s) in loading state_dict for Reader: Missing key(s)"),
    ],
)
def test_what_can_be_mended_gets_one_line_and_exit_code_2(checkpoint, capsys, monkeypatch, argv, message):
    whole = checkpoint.read_bytes()
    monkeypatch.chdir(checkpoint.parent)
    Path("LICENSE").write_text("not a model")
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    torch.save([1], "list.pt")
    saved = torch.load("random.pt", weights_only=True)
    cfg, model = saved["configuration"], saved["model"]
    older = {name: value for name, value in cfg.items() if name != "head_dim"} | {"rope_base": 1024}
    for name, configuration in (
        ("older", older),
        ("refused", cfg | {"head_dim": 15}),
        ("shape", cfg | {"model_dim": 64}),
        ("lacks", cfg | {"attention_layout": "LSSLLL", "value_embed_layout": "0....0"}),
    ):
        torch.save(dict(configuration=configuration, model=model), f"{name}.pt")
    code, text, errors = run(capsys, *argv.split())
    assert (code, text) == (2, "")
    assert errors.startswith("sample.py: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert len(errors) < 250


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(checkpoint, capsys):
    code, _, errors = run(capsys, str(checkpoint), "--device", "cuda")
    assert code == 2
    assert "sees no GPU; use --device cpu" in errors


def test_a_reader_that_leaves_ends_it_quietly(checkpoint):
    command = [sys.executable, "sample.py", str(checkpoint), "--tokens", "100000", "--top_k", "1", "--prompt", "a"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in errors
    assert "Broken" not in errors


def test_ctrl_c(checkpoint):
    command = [sys.executable, "sample.py", str(checkpoint), "--tokens", "1000000", "--top_k", "1", "--prompt", "a"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().endswith("sample.py: interrupted\n")
    assert b"Traceback" not in errors


# What a run saves, and what run.sh shows at its end


def test_a_run_saves_its_model_only_if_told_to(flags, tmp_path, capsys):
    train_gpt.main(flags)
    assert not [*(tmp_path / "logs").glob("*.pt*")]
    result = train_gpt.main([*flags, "--run_id", "version.2", "--save_checkpoint"])
    path = tmp_path / "logs" / "version.2.pt"
    assert f"model: {path}\n" in capsys.readouterr().out
    assert f"model: {path}\n" in Path(result.log).read_text()
    assert [*(tmp_path / "logs").glob("*.pt*")] == [path]
    saved = torch.load(path, weights_only=True)
    assert saved["configuration"]["seed"] == 5
    assert saved["configuration"]["dtype"] == "float32"
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in saved["model"].values())
    cfg = train_gpt.Hyperparameters(**saved["configuration"])
    GPT(cfg).load_state_dict(saved["model"])


def test_a_full_disk_loses_the_model_and_not_the_result(flags, tmp_path):
    """No file may grow beyond half of the model; the log with the script in it is longer, and ends, too."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    command = [sys.executable, "train_gpt.py", *flags, "--save_checkpoint"]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step:4/4 val_loss" in done.stdout
    assert len(re.findall(r"^model: not saved: .+$", done.stdout, re.M)) == 1
    assert not [*(tmp_path / "logs").glob("*.pt*")]


@pytest.mark.parametrize("options", ["", "--no-save_checkpoint"])
def test_a_training_on_a_cpu_ends_with_a_sample(flags, tmp_path, capsys, options):
    code, out, errors = run(capsys, "--train", *flags, *options.split())
    assert code == 0
    assert "step:4/4 val_loss" in out
    path = tmp_path / "logs" / "mine.pt"
    assert path.exists() == ("\nWhat it writes:\n" in out) == ("\nMore of it: " in out) == (options == "")
    assert ("tokens/s" in errors) == (options == "")


def test_a_training_ends_well_if_no_sample_can_be_shown(flags, capsys):
    code, out, errors = run(capsys, "--train", *flags, "--vocab_size", "300")
    assert code == 0
    assert "step:4/4 val_loss" in out
    assert errors.splitlines()[-1].startswith("sample.py: vocab_size 300 with eot_token 256")
    assert "More of it" not in out


def test_exit_codes_after_train_are_those_of_training(flags, capsys, monkeypatch):
    code, _, errors = run(capsys, "--train", *flags, "--num_iterations", "1000")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("train_gpt.py: ")
    assert run(capsys, "--train", *flags, "--foo")[0] == 2

    def stop(error: BaseException):
        def evaluate(*_):
            raise error

        monkeypatch.setattr(train_gpt, "evaluate", evaluate)

    stop(train_gpt.NonFiniteLoss("loss nan"))
    code, _, errors = run(capsys, "--train", *flags, "--run_id", "nan")
    assert (code, errors) == (3, "train_gpt.py: loss nan\n")
    stop(KeyboardInterrupt())
    code, _, errors = run(capsys, "--train", *flags, "--run_id", "stop")
    assert (code, errors) == (130, "train_gpt.py: interrupted\n")


def test_run_sh_ends_with_a_sample_and_a_command_that_works(flags, tmp_path):
    """Called from another folder: the command works there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "NPROC")}
    options = dict(cwd=tmp_path, capture_output=True, text=True, timeout=120)
    environment["PYTHON"] = sys.executable
    done = subprocess.run([ROOT / "run.sh", *flags], env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert "step:4/4 val_loss" in done.stdout
    assert "\nWhat it writes:\n\n" in done.stdout
    [command] = re.findall(r"^More of it: (.+)$", done.stdout, re.M)
    assert done.stdout.endswith(f"{command}\n")
    again = subprocess.run(["bash", "-c", f"{command} --tokens 9"], env=os.environ, **options)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("The ")
