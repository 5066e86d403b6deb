"""The disk space and memory that a run checks for before it begins are what it needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from compression_runs import config
from neuronmm.compression import memory, pipeline, tensor_files
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.convert import convert
from neuronmm.compression.pipeline import compress
from neuronmm.compression.reader import Reader
from neuronmm.compression.recover import recover
from neuronmm.models import UserError

SMALL = 12_000  # bytes that lie there whatever the model's size: a generator's state, twice, and the text

INT8 = {"factor_dtype": "int8"}
KINDS = [
    {},
    {"allocation": "global"},
    {"method": "fisher", "calibration_length": "100"},
    INT8,
    {"recover": "factors"},
    {"recover": "factors"} | INT8,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(kind.values()) or "plain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_never_has_more_tensors_on_the_disk_than_it_checked_room_for(
    kind: dict[str, str],
    dtype: torch.dtype,
    dense: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, save, most = dense(dtype=dtype), tensor_files.save_file, [0]
    settings = config(**{"method": "whitened", "calibration": str(text), **kind})

    def watched(tensors: Any, path: Path, **kwargs: Any) -> None:
        save(tensors, path, **kwargs)
        most.append(sum(map(_content, (tmp_path / "out.partial").rglob("*.*"))))

    monkeypatch.setattr(tensor_files, "save_file", watched)

    def refused_with_less(make: Callable[[Path], Any], small: int) -> None:
        make(tmp_path / "out")
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as patched, pytest.raises(UserError, match="of disk free, about"):
            patched.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=max(most) - small - 1))
            make(tmp_path / "again")

    refused_with_less(lambda out: compress(source, out, settings), 0)
    assert max(most) > 1.5 * Reader(source).total_bytes(), "the largest moment was not seen"
    if settings.recover == "off":
        return
    compress(source, tmp_path / "low", config(method="whitened", calibration=str(text)))
    most[:] = [0]
    shutil.rmtree(tmp_path / "out")
    refused_with_less(
        lambda out: recover(tmp_path / "low", out, settings.recover, factor_dtype=settings.factor_dtype), SMALL
    )
    assert max(most) > 1.5 * Reader(tmp_path / "low").total_bytes(), "the largest moment was not seen"


def test_missing_space_is_named_in_a_unit_that_shows_it(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, usage = dense(), shutil.disk_usage(tmp_path)
    needed = 2 * Reader(source).total_bytes()
    kilobytes = rf"{needed / 1000:.1f} kB"
    for free, has, lacks in ((0, "0 bytes", kilobytes), (7, "7 bytes", kilobytes), (needed - 1, kilobytes, "1 byte")):
        monkeypatch.setattr(memory.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with pytest.raises(UserError, match=f"{tmp_path}: {has} of disk free, about {kilobytes} needed, {lacks} more;"):
            compress(source, tmp_path / "out", config())


def test_moments_in_a_store_need_no_room_beside_the_output(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, usage = dense(dtype=torch.bfloat16), shutil.disk_usage(tmp_path)
    settings = config(method="whitened", calibration=str(text), allocation="global")
    free = 2 * Reader(source).total_bytes()
    monkeypatch.setattr(
        pipeline, "stored_bytes", lambda linears, gradients: free // 2 + 1
    )  # more than this tiny checkpoint
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(UserError, match="of disk free, about"):
        compress(source, tmp_path / "out", settings)
    compress(source, tmp_path / "out", settings, store=tmp_path / "store")
    free -= 1
    with pytest.raises(UserError, match="1 byte more"):
        compress(source, tmp_path / "again", settings, store=tmp_path / "store")


@pytest.mark.parametrize("form", ["pivoted", "two"])
def test_a_conversion_never_holds_more_tensors_on_the_disk_than_it_asked_room_for(
    form: Any, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"pivoted": "two", "two": "pivoted"}[form]
    compress(dense(), tmp_path / "low", config(method="svd", targets="all", form=other))
    save, most, usage = tensor_files.save_file, [0], shutil.disk_usage(tmp_path)

    def watched(tensors: Any, path: Path, **kwargs: Any) -> None:
        save(tensors, path, **kwargs)
        most.append(sum(map(_content, (tmp_path / "out.partial").rglob("*.*"))))

    monkeypatch.setattr(tensor_files, "save_file", watched)
    convert(tmp_path / "low", tmp_path / "out", form)
    assert max(most) > Reader(tmp_path / "out").total_bytes(), "the largest moment was not seen"
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=max(most) - 1))
    with pytest.raises(UserError, match="of disk free, about"):
        convert(tmp_path / "low", tmp_path / "again", form)
    assert not (tmp_path / "again.partial").exists()


@pytest.mark.parametrize(("gpu", "host"), [(0, 0), (0, 1), (1, 0)])
def test_a_recovery_on_a_gpu_needs_memory_there_and_here(
    gpu: int, host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU holds the model, the training's state and one pass, and the host the dense model's states.

    The model passes through main memory.
    """
    free = {"cpu": 4 * 1000 + 500 - host, "cuda": 4 * 1000 + 16 * 100 + 300 - gpu}
    monkeypatch.setattr(memory, "free_memory", lambda device: free[str(device)])
    settings = config(recover="factors")

    def check() -> None:
        memory.check_room(tmp_path / "out", 0, 0, 1000, 100, (500, 300), settings, "cuda")

    if gpu or host:
        with pytest.raises(UserError, match=f"recover: .* of {'GPU memory' if gpu else 'memory'} free.* 1 byte more"):
            check()
    else:
        check()


@pytest.mark.parametrize("again", [{"resume": True}, {"force": True}], ids=str)
def test_what_an_interrupted_run_left_counts_as_free(
    again: dict[str, bool], dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is just large enough for a run is large enough for its second half, or for starting over."""
    source, out = dense(), tmp_path / "out"
    settings, usage = config(method="whitened", calibration=str(text)), shutil.disk_usage(tmp_path)
    size = 2 * Reader(source).total_bytes()

    def free(_: Path) -> Any:
        return usage._replace(
            free=size - sum(file.stat().st_size for file in tmp_path.rglob("out.partial/*.safetensors"))
        )

    def stop(stage: str, fraction: float) -> None:
        if stage == "comparing":
            raise KeyboardInterrupt

    monkeypatch.setattr(memory.shutil, "disk_usage", free)
    with pytest.raises(KeyboardInterrupt):
        compress(source, out, settings, progress=stop)
    assert free(out).free < 0.7 * size, "the run left little, so nothing is tested"
    compress(source, out, settings, **again)


def test_stored_gradients_need_no_room_again(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of all layers, from which they were measured, are gone when the run is interrupted later."""
    source, out, asked = dense(), tmp_path / "out", list[bool]()
    settings = config(method="fisher", calibration=str(text))
    monkeypatch.setattr(pipeline, "check_disk", lambda folder, needed, counted=(): asked.append("inputs-*" in counted))

    def stop(stage: str, fraction: float) -> None:
        if stage == "compressing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(source, out, settings, progress=stop)
    assert sum(asked) == 1
    compress(source, out, settings, resume=True)
    assert sum(asked) == 1 < len(asked)


def test_saved_hidden_states_have_room_beside_the_layers(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of both models, before and after a layer, in float32."""
    source, usage = dense(), shutil.disk_usage(tmp_path)
    settings = config(method="anchored", calibration=str(text), calibration_rows=40, calibration_length=64)
    tokens = 64 * compress(source, tmp_path / "first", settings)["calibration"]["rows"]
    needed = Reader(source).total_bytes() + 2 * 2 * 4 * tokens * 32
    assert needed > 2 * Reader(source).total_bytes(), "something else needs more room"
    for free, fits in ((needed - 16 * tokens - SMALL, False), (needed, True)):  # the tokens are there already
        monkeypatch.setattr(memory.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with nullcontext() if fits else pytest.raises(UserError, match="of disk free, about"):
            compress(source, tmp_path / "out", settings, resume=fits)


def test_all_hidden_states_of_a_layer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "dense only": config(refine="off"),
        "rounded": CompressionConfig(ratio=0, weight_dtype="int4"),
        "refined": config(refine="fast"),
        "anchored": config(method="anchored"),
    }
    one = 4 * 8 * 16 * 32
    for kind, copies in {"dense only": 2, "rounded": 2, "refined": 3, "anchored": 5}.items():
        monkeypatch.setattr(memory, "free_memory", lambda device, copies=copies: copies * one)
        memory.check_row_memory(8, 16, 32, settings[kind], "cpu")
        monkeypatch.setattr(memory, "free_memory", lambda device, copies=copies: copies * one - 1)
        with pytest.raises(UserError, match="choose fewer or shorter rows"):
            memory.check_row_memory(8, 16, 32, settings[kind], "cpu")


def test_kept_rows_need_memory_too(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = dense(), config(method="whitened", calibration=str(text))

    def stop(stage: str, fraction: float) -> None:
        if stage == "compressing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(source, tmp_path / "out", settings, progress=stop)
    with monkeypatch.context() as patched, pytest.raises(UserError, match="choose fewer or shorter rows"):
        patched.setattr(memory, "free_memory", lambda device: 0)
        compress(source, tmp_path / "out", settings, resume=True)
    compress(source, tmp_path / "out", settings, resume=True)


def _content(file: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, complete or partial; 0 for other files."""
    if not file.is_file() or file.suffix not in (".safetensors", ".writing"):
        return 0
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header
