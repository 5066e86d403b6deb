"""Malformed files, one kind of damage at a time. Every command ends with one line that says what is wrong and where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compression_runs import edit_tensors
from fuzzing import ends_well, memory_limit, time_limit
from neuronmm.cli import main
from tiny_models import fill_tiny, make_tiny, pivoted_spec, tiny_checkpoint, write_checkpoint
from word_tokenizer import word_tokenizer

Capture = pytest.CaptureFixture[str]
Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
WORDS = " ".join(f"w{3 + i % 60}" for i in range(300))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    make_tiny().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def low(tmp_path: Path) -> Path:
    folder = tmp_path / "low"
    tiny_checkpoint(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    make_tiny().save_pretrained(folder, max_shard_size="10KB")
    word_tokenizer().save_pretrained(folder)
    return folder


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands that read a dense model, by name."""
    out, text = folder.parent / "out", folder.parent / "text.txt"
    text.write_text(WORDS)
    small = ["--method", "svd", "--align", "2", "--force"]
    return {
        "generate": ["generate", str(folder), "--prompt", "w9", "--max-new-tokens", "2"],
        "evaluate": ["evaluate", str(folder), "--text", str(text), "--context", "20", "--json"],
        "compress": ["compress", str(folder), "-o", str(out), *small],
    }


@pytest.fixture
def fitted(dense: Path, tmp_path: Path) -> list[str]:
    """A compression with calibration text, in rows short enough for a tiny model; a test may append options."""
    recipe = tmp_path / "short.yaml"
    recipe.write_text("calibration_rows: 4\ncalibration_length: 20\nmethod: asvd\n")
    return ["compress", str(dense), "-o", str(tmp_path / "out"), "--align", "2", "--recipe", str(recipe)]


def last_line(command: list[str], capsys: Capture) -> str:
    """Run a command that must fail and return its error line."""
    with time_limit(), memory_limit():
        status = main(command)
    out, err = capsys.readouterr()
    last = err.rstrip("\n").split("\n")[-1]
    assert status == 2 and out == "" and "Traceback" not in err, (status, out, err)
    assert last.startswith(f"neuronmm {command[0]}: error: ")
    return last


def assert_refused(folder: Path, capsys: Capture, message: str, only: tuple[str, ...] = ()) -> None:
    """Check that every command refuses the model in ``folder`` with ``message`` and writes nothing."""
    for name, command in commands(folder).items():
        if not only or name in only:
            assert message in last_line(command, capsys)
    assert not (folder.parent / "out").exists() and not (folder.parent / "out.partial").exists()


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [None]}, "config.json: architectures has to be a list of names"),
        ({"architectures": 5}, "config.json: architectures has to be a list of names"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "the RoPE type 'spiral' is not among"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE of type 'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "has 1 numbers"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: "),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: "),
        ({"rope_scaling": 4.0}, "config.json: rope_scaling: "),
        ({"num_key_value_heads": 0}, "config.json: num_key_value_heads: "),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 KV heads"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"vocab_size": 0}, "config.json: vocab_size: "),
        ({"pad_token_id": 64}, "pad_token_id 64 is not in the vocabulary of 64"),
        ({"num_hidden_layers": ...}, "config.json: num_hidden_layers: Field required"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers: "),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers: "),
        ({"num_hidden_layers": 4000}, "model.layers.2.input_layernorm.weight is in no shard"),
        ({"hidden_size": 10**6}, "config.json and weights disagree"),
        ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps: "),
        ({"layer_types": ["sliding_attention"] * 2}, "config.json: layer_types.0: "),
        ({"transformers_weights": "../other.safetensors"}, "config.json: transformers_weights: "),
        ({"num_labels": 10**30}, "config.json: num_labels: "),
        ({"quantization_config": "fp8"}, ""),
    ],
    ids=str,
)
def test_config_json(changes: dict[str, Any], message: str, dense: Path, capsys: Capture) -> None:
    edit_json(dense / "config.json", **changes)
    assert_refused(dense, capsys, message)


def test_a_config_json_that_is_a_list(dense: Path, capsys: Capture) -> None:
    (dense / "config.json").write_text("[]")
    assert_refused(dense, capsys, "config.json: not a JSON object")
    assert "not a JSON object" in last_line(["predict", str(dense / "config.json")], capsys)


def test_a_config_json_of_an_impossibly_deep_model(dense: Path, capsys: Capture) -> None:
    """``predict`` reads no weights that would contradict it."""
    edit_json(dense / "config.json", num_hidden_layers=10**9)
    assert "num_hidden_layers" in last_line(["predict", str(dense)], capsys)


def test_no_hub_kernel_is_loaded_for_a_config_json(dense: Path, capsys: Capture) -> None:
    edit_json(dense / "config.json", attn_implementation="nobody/kernel", _attn_implementation="nobody/kernel")
    assert ends_well(commands(dense)["generate"], capsys)


def widen(name: str) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: t[name][None].clone()})


def flatten(name: str) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: t[name].flatten().clone()})


def store_as(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: t[name].to(dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (store_as(UP, torch.float8_e4m3fn), f"{UP} is stored as F8_E4M3, not as"),
        (store_as(EMBEDDING, torch.int64), f"{EMBEDDING} is stored as I64, not as"),
        (flatten(UP), f"{UP} has shape [1536], not [48, 32]"),
        (widen(UP), f"{UP} has shape [1, 48, 32], not [48, 32]"),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING][:9].clone()}), f"{EMBEDDING} has shape [9, 32], not [64, 32]"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "model.extra belongs to no part of the model"),
    ],
    ids=["fp8", "int64", "1-D", "3-D", "short embedding", "unknown tensor"],
)
def test_weights_of_a_wrong_kind(change: Callable[[Tensors], None], message: str, dense: Path, capsys: Capture) -> None:
    edit_tensors(dense, change)
    assert_refused(dense, capsys, message)


def test_a_scalar_factor(low: Path, capsys: Capture) -> None:
    name = "model.layers.0.mlp.up_proj.A.weight"
    edit_tensors(low, lambda t: t.update({name: torch.tensor(1.0)}))
    assert_refused(low, capsys, f"{name} has shape [], not [16, 32]", ("generate", "evaluate"))


@pytest.mark.parametrize("numbers", [[1, 7, 4, 10], [-1, 4, 7, 10], [1, 4, 7, 2**31 - 1], [1, 4, 7], []], ids=str)
def test_pivots(numbers: list[int], tmp_path: Path, capsys: Capture) -> None:
    folder, model = tmp_path / "pivoted", make_tiny()
    write_checkpoint(model, fill_tiny(model, pivoted_spec()), folder)
    word_tokenizer().save_pretrained(folder)
    assert main(commands(folder)["generate"]) == 0
    capsys.readouterr()
    name = "model.layers.1.self_attn.k_proj.pivots"
    edit_tensors(folder, lambda t: t.update({name: torch.tensor(numbers, dtype=torch.int32)}))
    wrong = "to hold increasing numbers from 0 to 15" if len(numbers) == 4 else f"shape [{len(numbers)}], not [4]"
    assert_refused(folder, capsys, f"{name} has {wrong}", ("generate", "evaluate"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", UP, "model.layers.0.input_layernorm.weight"])
def test_weights_that_are_not_finite(value: float, name: str, dense: Path, capsys: Capture) -> None:
    edit_tensors(dense, lambda t: t[name].view(-1)[3:4].fill_(value))
    assert_refused(dense, capsys, f"{name} holds NaN or infinity")
    assert main([*commands(dense)["generate"], "--temperature", "1"]) == 2


def test_weights_that_overflow(dense: Path, capsys: Capture) -> None:
    """The weights are finite, the activations overflow."""
    edit_tensors(dense, lambda t: t["model.norm.weight"].fill_(1e30))
    edit_tensors(dense, lambda t: t["lm_head.weight"].fill_(1e30))
    assert_refused(dense, capsys, "NaN or infinity: its weights overflow", ("generate", "evaluate"))
    assert main([*commands(dense)["generate"], "--temperature", "1"]) == 2


def test_a_perplexity_too_large_for_a_float(dense: Path, capsys: Capture) -> None:
    edit_tensors(dense, lambda t: t["lm_head.weight"].mul_(1e6))
    assert_refused(dense, capsys, "give a perplexity too large for a float", ("evaluate",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"5", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"weight_map": 5}', "not a safetensors index"),
        (b'{"weight_map": {"a": null}}', "not a safetensors index"),
    ],
    ids=str,
)
def test_index_json(content: bytes, message: str, sharded: Path, capsys: Capture) -> None:
    (sharded / INDEX).write_bytes(content)
    assert_refused(sharded, capsys, f"{INDEX}: {message}")


@pytest.mark.parametrize("prefix", ["{elsewhere}/", "../elsewhere/", "./../elsewhere/", "sub/../../elsewhere/"])
def test_an_index_reads_nothing_from_elsewhere(prefix: str, sharded: Path, capsys: Capture) -> None:
    elsewhere = sharded.parent / "elsewhere"
    elsewhere.mkdir()
    index = json.loads((sharded / INDEX).read_text())
    for file in set(index["weight_map"].values()):
        (sharded / file).rename(elsewhere / file)
    (sharded / "sub").mkdir()
    (sharded / "other.safetensors").touch()  # a safetensors file must exist
    index["weight_map"] = {
        name: prefix.format(elsewhere=elsewhere) + file for name, file in index["weight_map"].items()
    }
    (sharded / INDEX).write_text(json.dumps(index))
    assert_refused(sharded, capsys, "is not the name of a .safetensors file in the folder")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_checkpoint(name: str, dense: Path, capsys: Capture) -> None:
    (dense / name).rename(dense.parent / name)
    (dense / name).symlink_to(dense.parent / name)
    assert_refused(dense, capsys, f"{name}: is a link to a file outside the checkpoint")


def test_the_links_of_the_hubs_own_cache(dense: Path, tmp_path: Path, capsys: Capture) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in dense.iterdir():
        file.rename(blobs / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"blob-of-{file.name}"))
    link = tmp_path / "link"
    link.symlink_to(snapshot)  # a link to the folder itself is the user's
    for folder in (snapshot, link):
        assert ends_well(["generate", str(folder), "--prompt", "w9", "--max-new-tokens", "2"], capsys)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(Path("..", "..", "..", "config.json"))
    os.replace(blobs / "blob-of-config.json", tmp_path / "config.json")
    assert "outside the checkpoint" in last_line(["generate", str(link), "--prompt", "w9"], capsys)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[]", "null", '{"a": ', "\x00"], ids=ascii)
def test_files_beside_the_weights(name: str, content: str, dense: Path, capsys: Capture) -> None:
    (dense / name).write_text(content)
    assert_refused(dense, capsys, f"{name}: not ")


@pytest.mark.parametrize("ends", ["x", [None], {"a": 1}, 1.5, True])
def test_end_tokens_that_are_no_tokens(ends: Any, dense: Path, capsys: Capture) -> None:
    edit_json(dense / "generation_config.json", eos_token_id=ends)
    line = last_line(commands(dense)["generate"], capsys)
    assert "generation_config" in line or "disagree" in line


def test_a_tokenizer_of_another_model(dense: Path, fitted: list[str], capsys: Capture) -> None:
    content = json.loads((dense / "tokenizer.json").read_text())
    content["model"]["vocab"]["w9"] = content["model"]["vocab"]["w3"] = 64
    (dense / "tokenizer.json").write_text(json.dumps(content))
    assert_refused(dense, capsys, "the tokenizer gives token 64", ("generate", "evaluate"))
    text = str(dense.parent / "text.txt")
    assert "the tokenizer gives token 64" in last_line([*fitted, "--calibration", text], capsys)


def test_an_adapter(dense: Path, capsys: Capture) -> None:
    (dense / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
    assert_refused(dense, capsys, "holds an adapter")


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content }}", "{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"]
)
def test_a_chat_template_that_fails(
    template: str, dense: Path, fitted: list[str], capsys: Capture, tmp_path: Path
) -> None:
    (dense / "chat_template.jinja").write_text(template)
    assert "chat template" in last_line([*commands(dense)["generate"], "--chat"], capsys)
    assert "chat template" in last_line(fitted, capsys)
    text = tmp_path / "rows.jsonl"
    text.write_text('{"text": "w9"}\n{"messages": [{"role": "user", "content": "w9"}]}\n')
    assert "rows.jsonl:2: the model's chat template" in last_line([*fitted, "--calibration", str(text)], capsys)


READERS = {
    "text": ["evaluate", "{model}", "--text", "{file}"],
    "tasks": ["evaluate", "{model}", "--tasks", "{file}"],
    "prompts": ["generate", "{model}", "--batch-file", "{file}"],
}
GOOD = {
    "calibration": '{"text": "w5"}',
    "text": '{"text": "w5"}',
    "tasks": '{"query": "w5", "choices": ["w6", "w7"], "gold": 0}',
    "prompts": '{"prompt": "w5"}',
}


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize(
    "row",
    [
        *('{"text": 5, "query": 5, "prompt": 5}', '{"text": null}', "5", "null", "[]", '"w5"', "[" * 100_000, "{"),
        '{"text": "\\ud800", "query": "\\ud800", "choices": ["a", "b"], "gold": 0, "prompt": "\\udc00"}',
        '{"messages": 5, "choices": {"a": 1}, "gold": true}',
    ],
    ids=lambda row: row[:40],
)
def test_rows(kind: str, row: str, dense: Path, fitted: list[str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{GOOD[kind]}\n{row}\n")
    reading = [*fitted, "--calibration", "{file}"] if kind == "calibration" else READERS[kind]
    assert f"{file}:2: " in last_line([part.format(model=dense, file=file) for part in reading], capsys)


def test_only_a_newline_ends_a_row(dense: Path, fitted: list[str], tmp_path: Path, capsys: Capture) -> None:
    """U+2028 and U+0085 are ordinary characters in JSON."""
    file, text = tmp_path / "prompts.jsonl", "w9 \u2028 \x85 \x0b \x0c \x1c w10"
    texts = [text, text.replace("w9", "w11")]
    for plain in (False, True):
        file = tmp_path / ("prompts.txt" if plain else "prompts.jsonl")
        lines = texts if plain else [json.dumps({"prompt": one}, ensure_ascii=False) for one in texts]
        lines = lines if plain else [line.replace("\\u000b", "\\t").replace("\\u000c", "\\t") for line in lines]
        file.write_text("\n".join(lines) + "\n")
        assert main(["generate", str(dense), "--batch-file", str(file), "--max-new-tokens", "2"]) == 0
        prompts = [json.loads(line)["prompt"] for line in capsys.readouterr().out.rstrip("\n").split("\n")]
        assert len(prompts) == 2 and all("\u2028" in prompt and "\x85" in prompt for prompt in prompts)
    rows = tmp_path / "rows.jsonl"
    row = {"text": f"{WORDS}\u2028{WORDS}\x85", "query": "w9\u2028w8", "choices": ["w6\x85", "w7"], "gold": 0}
    rows.write_text(json.dumps(row, ensure_ascii=False) + "\r\n")
    run = ["evaluate", str(dense), "--text", str(rows), "--tasks", str(rows), "--context", "20", "--json"]
    assert main(run) == 0
    assert json.loads(capsys.readouterr().out)["text"]["text_tokens"] == 600
    assert main([*fitted, "--calibration", str(rows)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not a readable recipe"),
        (b"1: 2", "1 = 1: keys should be strings"),
        (b"seed: 99999999999999999999", "seed = 99999999999999999999: input should be less than"),
        (b"seed: -1", "seed = -1"),
        (b"calibration: [Notes, Notes]", "calibration ['Notes', 'Notes']: names one text twice"),
        (b"seed: 0x" + b"f" * 9000, "seed = a very large number"),
        (b"damping: .inf", "damping = inf"),
        (b"damping: .nan", "damping = nan"),
        (b"ratio: {b: {c: [1]}}", "ratio = {'b'"),
        (b"[" * 2000, "not a readable recipe"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nratio: *b", "a recipe cannot contain references"),
        (b"x" * (1 << 17), "a recipe is a few lines"),
        (b"calibration_rows: 999999999999\ncalibration_length: 20", "GB of memory available"),
        (b"calibration_length: 100000000", "the model's context is 128 tokens"),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_recipes(content: bytes, message: str, dense: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(content)
    run = ["compress", str(dense), "-o", str(tmp_path / "out"), "--align", "2", "--recipe", str(recipe)]
    assert message in last_line(run, capsys)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_message_is_one_printable_line(dense: Path, capsys: Capture) -> None:
    edit_json(dense / "config.json", architectures=["A\nB\x1b[2J\u2028" + "x" * 9000])
    line = last_line(["predict", str(dense)], capsys)
    assert line.isprintable() and len(line) < 1100 and r"A\nB\x1b[2J\u2028" in line
