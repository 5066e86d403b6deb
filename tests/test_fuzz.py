"""Thousands of damaged files: a command either succeeds or reports the fault in one line.

The seeds are fixed, so every run uses the same files. The study marked slow uses ten times as many other files.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from fuzzing import check_seeds, damage_bytes, damage_json, ends_well, time_limit
from neuronmm.commands import tiling
from neuronmm.compression.config import CompressionConfig
from neuronmm.models import UserError
from neuronmm.models.contents import inspect
from neuronmm.models.families import TARGETS
from neuronmm.models.source import resolve
from tiny_gguf import header_length, write_gguf
from tiny_models import fill_tiny, layer_ranks, load_plain, make_spec, make_tiny, pivoted_spec, write_checkpoint
from word_tokenizer import word_tokenizer

Capture = pytest.CaptureFixture[str]

INDEX = "model.safetensors.index.json"


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["suite", "study"])
def seeds(request: pytest.FixtureRequest) -> Callable[[int], range]:
    """``seeds(n)`` returns the seeds of n files in the suite, or of the next 10 n files in the study."""
    times: int = request.param
    return lambda count: range(count) if times == 1 else range(count, count * (1 + times))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, because the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    make_tiny(num_hidden_layers=1).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=["two", "pivoted"])
def low(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder, model = tmp_path / "low", make_tiny(num_hidden_layers=1)
    spec = make_spec(layer_ranks(TARGETS["mlp"], 1)) if request.param == "two" else pivoted_spec(1)
    write_checkpoint(model, fill_tiny(model, spec), folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_an_interruption_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Ctrl-C ends the study, during a command or in the test itself, and the file is not reported."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tiling, "run", lambda args: signal.raise_signal(signal.SIGINT))
    command = lambda: ends_well(["tiling", "--shape", "128,256,128,256"], capsys)  # noqa: E731
    for check in (command, lambda: bool(signal.raise_signal(signal.SIGINT))):
        with pytest.raises(KeyboardInterrupt):
            check_seeds(range(1), lambda seed: None, check, tmp_path / "file")


def generate(folder: Path) -> list[str]:
    return ["generate", str(folder), "--prompt", "w9 w10", "--max-new-tokens", "2", "--chat"]


@pytest.mark.parametrize("command", ["generate", "predict", "compress"])
def test_config_json(command: str, dense: Path, seeds: Callable[[int], range], tmp_path: Path, capsys: Capture) -> None:
    path = dense / "config.json"
    good = json.loads(path.read_text())
    others = {
        "predict": ["predict", str(dense), "--json"],
        "compress": ["compress", str(dense), "-o", str(tmp_path / "out"), "--method", "svd", "--align", "2", "--force"],
    }
    arguments = others.get(command, generate(dense))
    count = {"generate": 350, "predict": 500, "compress": 200}[command]
    successes = check_seeds(
        seeds(count),
        lambda seed: path.write_bytes(damage_json(good, seed)),
        lambda: ends_well(arguments, capsys),
        path,
    )
    assert count // 10 < successes  # damage to an unused entry has no effect


def test_quantization_config(low: Path, seeds: Callable[[int], range], capsys: Capture) -> None:
    path = low / "config.json"
    good = json.loads(path.read_text())
    block = good["quantization_config"]

    def write(seed: int) -> None:
        path.write_text(json.dumps(good | {"quantization_config": json.loads(damage_json(block, 6 * seed + 1))}))

    assert check_seeds(seeds(400), write, lambda: ends_well(generate(low), capsys), path)


def test_quantization_config_in_plain_transformers(low: Path, seeds: Callable[[int], range]) -> None:
    path = low / "config.json"
    good = json.loads(path.read_text())
    block = good["quantization_config"]

    def write(seed: int) -> None:
        damaged = json.loads(damage_json(block, 6 * seed + 1))
        if isinstance(damaged, dict):  # transformers itself reads the method's name
            damaged["quant_method"] = "neuronmm"
        path.write_text(json.dumps(good | {"quantization_config": damaged if isinstance(damaged, dict) else {}}))

    def check() -> bool:
        """Ignore errors of transformers' AutoConfig, which reads config.json first."""
        with time_limit():
            try:
                AutoConfig.from_pretrained(low)
            except Exception:
                return False
            try:
                load_plain(low)
            except (UserError, ValueError, RuntimeError) as error:
                assert str(error)
                return False
        return True

    assert check_seeds(seeds(300), write, check, path)


def test_the_index_of_the_shards(tmp_path: Path, seeds: Callable[[int], range], capsys: Capture) -> None:
    folder = tmp_path / "sharded"
    make_tiny(num_hidden_layers=1).save_pretrained(folder, max_shard_size="10KB")
    word_tokenizer().save_pretrained(folder)
    path = folder / INDEX
    good = json.loads(path.read_text())
    assert len(set(good["weight_map"].values())) > 2

    def check() -> bool:
        """Run the command only if the header check passes."""
        try:
            inspect(folder)
        except UserError:
            return False
        return ends_well(generate(folder), capsys)

    assert check_seeds(seeds(400), lambda seed: path.write_bytes(damage_json(good, seed)), check, path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_what_lies_beside_the_weights(name: str, dense: Path, seeds: Callable[[int], range], capsys: Capture) -> None:
    path = dense / name
    good = json.loads(path.read_text())
    write = lambda seed: path.write_bytes(damage_json(good, seed))  # noqa: E731
    assert check_seeds(seeds(100), write, lambda: ends_well(generate(dense), capsys), path)


def test_gguf(tmp_path: Path, seeds: Callable[[int], range], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_gguf(path)
    good = path.read_bytes()
    header = header_length(path)

    def write(seed: int) -> None:
        """Put two thirds of the damage into the header, since a changed weight is not detectable."""
        path.write_bytes(damage_bytes(good, seed, 4, header if seed % 3 else None))

    def check() -> bool:
        with time_limit():
            try:
                inspect(resolve(path))
            except UserError:
                return False
        return True

    assert check_seeds(seeds(400), write, check, path)


def test_recipes(tmp_path: Path, seeds: Callable[[int], range]) -> None:
    path = tmp_path / "recipe.yaml"
    settings = CompressionConfig().model_dump()
    text = "".join(f"{name}: {value}\n" for name, value in settings.items()).encode()

    def write(seed: int) -> None:
        path.write_bytes(damage_json(settings, seed) if seed % 2 else damage_bytes(text, seed))

    def check() -> bool:
        with time_limit():
            try:
                CompressionConfig.build(path)
            except UserError:
                return False
        return True

    assert check_seeds(seeds(600), write, check, path)
