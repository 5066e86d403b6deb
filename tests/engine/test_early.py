"""What is done for a model before torch is imported."""

from __future__ import annotations

import gc
import json
import mmap
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuronmm.cli import main
from neuronmm.engine import early
from neuronmm.engine.backends import BACKENDS
from neuronmm.engine.engine import load, pick_dtype
from neuronmm.kernels import pages
from neuronmm.models import UserError, source
from tiny_models import shared_spec

needs_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="nothing is got ahead")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The sizes of the memory that was got ahead, on a machine with one memory node and no GPU."""
    sizes = list[int]()
    monkeypatch.setattr(early, "get_ahead", sizes.append)
    monkeypatch.setattr(early, "_GPU", tmp_path / "no GPU")
    monkeypatch.setattr(early, "_NODES", tmp_path / "no nodes")
    monkeypatch.delenv("RANK", raising=False)
    return sizes


def prepare(model: Path | str, backend: str = "cpu", dtype: str = "auto") -> None:
    with early.imports_before(str(model), backend, dtype, None):
        pass


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("command", [["generate", "--prompt", "w9"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ([], True),
        (["--backend", "cpu"], True),
        (["--draft", "int4"], True),
        (["--dtype", "fp32"], True),
        (["--dtype", "bf16"], False),
        (["--dtype", "wrong"], False),
        (["--backend", "cuda"], False),
        (["--backend", "neuron"], False),
        (["--weight-dtype", "int8"], False),
    ],
)
def test_the_cpu_gets_memory_ahead_for_weights_as_they_are_stored(
    checkpoint: Callable[..., Path],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    options: list[str],
    ahead: bool,
) -> None:
    def load(*_: object, **__: object) -> NoReturn:
        raise UserError("the command may end here")

    monkeypatch.setattr("neuronmm.engine.engine.load", load)
    folder = checkpoint()
    assert main([command[0], str(folder), *command[1:], *options]) == 2
    assert [size for size in asked if size] == ([stored(folder)] if ahead else [])


@pytest.mark.parametrize("named", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_will_be_converted_get_none(
    checkpoint: Callable[..., Path], asked: list[int], named: str, dtype: torch.dtype
) -> None:
    """The converted weights are in memory before they move, and would not fit beside it."""
    folder = checkpoint(compressed=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": named}))
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "model.safetensors")
    prepare(folder)
    kept = pick_dtype(folder, "auto") is dtype
    assert asked == [stored(folder) if kept else 0]


def test_scales_stay_float32_beside_any_dtype(checkpoint: Callable[..., Path], asked: list[int]) -> None:
    folder = checkpoint("qwen2", spec=shared_spec(factors="int8"))
    weights = load_file(folder / "model.safetensors")
    narrow = {name: tensor if "_scale" in name else narrowed(tensor) for name, tensor in weights.items()}
    save_file(narrow, folder / "model.safetensors")
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16, torch.float32, torch.int8}
    prepare(folder, dtype="bf16")
    assert asked == [stored(folder)]


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def test_not_for_a_gpu_nor_for_several_memories_or_processes(
    checkpoint: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoint(compressed=False)
    with monkeypatch.context() as patch:
        patch.setattr(early, "_GPU", tmp_path)
        prepare(folder, "auto")
        assert asked == []
        prepare(folder, "cpu")
        assert len(asked) == 1
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        prepare(folder)
    (tmp_path / "nodes" / "node0").mkdir(parents=True)
    monkeypatch.setattr(early, "_NODES", tmp_path / "nodes")
    prepare(folder)
    assert len(asked) == 2
    (tmp_path / "nodes" / "node1").mkdir()
    prepare(folder)
    assert len(asked) == 2


def test_what_is_wrong_with_the_model_is_left_to_its_loading(
    checkpoint: Callable[..., Path], asked: list[int], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    damaged, unsupported = checkpoint("qwen2"), checkpoint("qwen3")
    (damaged / "model.safetensors").write_bytes(b"")
    config = json.loads((unsupported / "config.json").read_text())
    (unsupported / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    for model in ("someone/model", "a b", "", tmp_path, tmp_path / "file", damaged, unsupported):
        prepare(model)
    assert not any(asked)


def test_a_model_in_the_cache_of_the_hub_and_one_that_was_unpacked(
    checkpoint: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, gguf = checkpoint(compressed=False), tmp_path / "model.gguf"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    prepare("someone/model")
    assert asked == [stored(folder)]
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    prepare(gguf)
    assert asked[1:] == [0]
    shutil.copytree(folder, source._unpacked(gguf.resolve()))
    prepare(gguf)
    assert asked[2:] == [stored(folder)]


def test_garbage_is_looked_for_again_after_the_imports(asked: list[int]) -> None:
    with early.imports_before("none", "cpu", "auto", None):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        prepare("none")
        assert not gc.isenabled()
    finally:
        gc.enable()


@needs_linux
def test_the_arena_takes_it(checkpoint: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "get_ahead", pages.get_ahead)
    pages.forget()  # what an earlier test left
    taken = list[int]()
    take = pages._Ahead.take
    monkeypatch.setattr(pages._Ahead, "take", lambda self: taken.append(len(self.memory)) or take(self))
    folder = checkpoint()
    assert main(["generate", str(folder), "--prompt", "w9", "--max-new-tokens", "1", "--backend", "cpu"]) == 0
    assert taken == [stored(folder)]


@needs_linux
def test_another_backend_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronmm.engine.engine.choose", lambda *_: BACKENDS["neuron"])
    pages.get_ahead(1 << 20)
    with pytest.raises(UserError, match="no such model"):
        load("./no such model")
    assert pages._ahead is None


def test_torch_is_not_imported_before(checkpoint: Callable[..., Path]) -> None:
    code = (
        "import sys; sys.argv[0] = 'neuronmm'; from neuronmm.engine.early import imports_before\n"
        "with imports_before(sys.argv[1], 'cpu', 'auto', None): print('torch' in sys.modules)"
    )
    for model in (str(checkpoint()), "someone/model"):
        ran = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
        assert ran.stdout == "False\n"
