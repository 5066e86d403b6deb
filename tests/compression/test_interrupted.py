"""Kills, power cuts and damage: a resumed run gives the same bytes, and OUT is never incomplete."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Collection
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compression_runs import EVERYTHING, SMALL, Interrupted, compress_in, config, stop_at, tensors, weights
from neuronmm.compression import calibration_store, tensor_files
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.compression.workspace import Workspace
from neuronmm.models import UserError

ALL: dict[str, Any] = {
    **SMALL, **EVERYTHING, "method": "fisher", "form": "pivoted", "targets": "all", "recover": "factors",
    "calibration_rows": 16,
}  # fmt: skip
"""Settings of a run that writes every kind of file."""

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "100 bytes": lambda data: b"\0" * 100,
    "no tensors": lambda data: b"\x02\0\0\0\0\0\0\0{}",
    "list": lambda data: b"[]",
}
"""Kinds of damage to a file. The last one is for JSON, the two before it are for tensors."""


def stop_before_the_second_move(source: Path, out: Path, settings: CompressionConfig) -> None:
    """Start to replace ``out`` and stop between the two moves, when there is no ``out``."""
    replace = os.replace

    def crash(old: Path, new: Path) -> None:
        if new == out:
            raise Interrupted
        replace(old, new)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(os, "replace", crash)
        compress(source, out, settings, force=True)
    assert not out.exists()


@pytest.fixture
def reference(dense: Callable[..., Path], text: Path, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, bytes]]:
    """Return a model, the settings of a run and the files that it writes without interruption."""
    source, settings = dense(), {**ALL, "calibration": str(text)}
    compress(source, tmp_path / "whole", config(**settings))
    return source, settings, weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("stage", "count"), [("measuring gradients", 3), ("measuring spectra", 2), ("compressing", 8), ("recovering", 3)]
)
def test_a_damaged_file_counts_as_missing(
    stage: str, count: int, reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path
) -> None:
    source, settings, expected = reference
    out, work, interrupted = tmp_path / "out", tmp_path / "out.partial", tmp_path / "copy"
    with pytest.raises(Interrupted):
        compress(source, out, config(**settings), progress=stop_at(stage, count))
    work.rename(interrupted)
    files = [file for file in sorted(interrupted.iterdir()) if file.suffix in (".json", ".safetensors")]
    assert len(files) > 2
    for file in files:
        for how in ("empty", "half", "list") if file.suffix == ".json" else list(DAMAGES)[:-1]:
            shutil.copytree(interrupted, work)
            (work / file.name).write_bytes(DAMAGES[how](file.read_bytes()))
            compress(source, out, config(**settings), resume=True)
            assert weights(out) == expected, (file.name, how)
            shutil.rmtree(out)


def test_states_that_cannot_be_read_after_all_begin_with_the_first_layer(
    reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their header was read, and then the disk fails."""
    source, settings, expected = reference
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", config(**settings), progress=stop_at("compressing", 8))
    load, asked, done = Workspace.load, list[str](), list[float]()

    def fails(self: Workspace, name: str, needed: Collection[str] = ()) -> dict[str, Tensor] | None:
        asked.append(name)
        return None if name.startswith("hidden-") else load(self, name, needed)

    def progress(stage: str, fraction: float) -> None:
        done.extend([fraction] if stage == "compressing" else [])

    monkeypatch.setattr(Workspace, "load", fails)
    compress(source, tmp_path / "out", config(**settings), resume=True, progress=progress)
    assert "hidden-00001" in asked, "the first layer was not finished, so nothing is tested"
    assert weights(tmp_path / "out") == expected and sum(done) == pytest.approx(1)


def test_a_kill_while_safetensors_writes_under_a_random_name(
    reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors 0.8 does; a killed run leaves that file."""
    source, settings, expected = reference
    work, killed = tmp_path / "out.partial", tmp_path / "killed"

    def stop_within(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
        if "layer" in path.name:
            (path.parent / ".tmpA1b2C3").write_bytes(b"half")
            shutil.copytree(work, killed)  # what a kill would leave: nothing tidies up after it
            raise Interrupted
        save_file(tensors, path, metadata)

    save_file = tensor_files.save_file
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(tensor_files, "save_file", stop_within)
        compress(source, tmp_path / "out", config(**settings))
    shutil.rmtree(work)
    killed.rename(work)
    assert list(work.rglob(".tmp*"))
    compress(source, tmp_path / "out", config(**settings), resume=True)
    assert weights(tmp_path / "out") == expected and not work.exists()


@pytest.mark.parametrize(("stage", "count"), [("measuring spectra", 2), ("compressing", 2)])
def test_a_damaged_file_with_moments_counts_as_missing(
    stage: str, count: int, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source, settings = dense(), config(method="fisher", calibration=str(text), allocation="global", share_a="auto")
    compress(source, tmp_path / "whole", settings)
    work, interrupted = tmp_path / "out.partial", tmp_path / "copy"
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop_at(stage, count))
    work.rename(interrupted)
    files = sorted((interrupted / "moments").iterdir())
    assert len(files) > 2
    for file in files:
        for how in ("empty", "half", "list") if file.suffix == ".json" else list(DAMAGES)[:-1]:
            shutil.copytree(interrupted, work)
            (work / "moments" / file.name).write_bytes(DAMAGES[how](file.read_bytes()))
            compress(source, tmp_path / "out", settings, resume=True)
            assert weights(tmp_path / "out") == weights(tmp_path / "whole"), (file.name, how)
            shutil.rmtree(tmp_path / "out")


def test_layers_run_again_if_their_hidden_states_are_lost(
    reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path
) -> None:
    """The embeddings must not replace the outputs of the first layers."""
    source, settings, expected = reference
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", config(**settings), progress=stop_at("compressing", 8))
    work = tmp_path / "out.partial"
    assert (work / "layer-00000.safetensors").exists() and not (work / "layer-00001.safetensors").exists()
    (work / "hidden-00001.safetensors").unlink()
    compress(source, tmp_path / "out", config(**settings), resume=True)
    assert weights(tmp_path / "out") == expected


def test_a_damaged_store_is_filled_again(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    source, store, settings = dense(), tmp_path / "store", config(calibration=str(text), share_a="auto")
    compress(source, tmp_path / "whole", settings, store=store)
    for file in sorted(store.glob("*.safetensors")):
        whole = file.read_bytes()
        for how in ("empty", "100 bytes", "half"):
            file.write_bytes(DAMAGES[how](whole))
            compress(source, tmp_path / "out", settings, store=store)
            assert weights(tmp_path / "out") == weights(tmp_path / "whole"), (file.name, how)
            assert tensors(store) and calibration_store.read_header(file) is not None
            shutil.rmtree(tmp_path / "out")
    for content in ("", "[]", '{"model'):
        (store / "run.json").write_text(content)
        with pytest.raises(UserError, match=r"its run\.json does not say what it holds"):
            compress(source, tmp_path / "out", settings, store=store)


def test_no_file_gets_its_name_before_it_is_on_the_disk(
    reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings, _ = reference
    synced: dict[tuple[int, int], tuple[int, int]] = {}
    fsync, replace, moves = os.fsync, os.replace, list[str]()

    def state(path: Path | int) -> tuple[int, int]:
        return os.stat(path).st_size, os.stat(path).st_mtime_ns

    def key(path: Path | int) -> tuple[int, int]:
        return os.stat(path).st_dev, os.stat(path).st_ino

    def watched_sync(handle: int) -> None:
        fsync(handle)
        synced[key(handle)] = state(handle)

    def watched_replace(old: Path, new: Path) -> None:
        for path in [old, *old.rglob("*")]:
            assert synced.get(key(path)) == state(path), f"{path} was not synced before it became {new}"
        replace(old, new)
        synced.pop(key(new.parent), None)
        moves.append(new.name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched_sync)
        patched.setattr(os, "replace", watched_replace)
        compress(source, tmp_path / "out", config(**settings))
    assert {"run.json", "calibration.safetensors", "layer-00001.safetensors", "recovery-AB.safetensors"} <= {*moves}
    assert moves[-1] == "out" and key(tmp_path) in synced, "the move to OUT itself is not on the disk"


@pytest.mark.parametrize("again", [{"force": True, "resume": True}, {"force": True}])
def test_a_kill_between_the_two_moves_of_a_replacement_does_not_lose_the_old_out(
    again: dict[str, bool], dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source, out = dense(), tmp_path / "out"
    settings = config(calibration=str(text))
    compress(source, out, config(method="svd"))
    old = weights(out)

    stop_before_the_second_move(source, out, settings)
    with pytest.raises(UserError, match="now back as it was; --force --resume"):
        compress(source, out, settings)
    assert weights(out) == old
    with pytest.raises(UserError, match="exists already"):
        compress(source, out, settings, resume=True)
    compress(source, out, settings, **again)
    compress(source, tmp_path / "whole", settings)
    assert weights(out) == weights(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_an_out_created_after_an_interrupted_replacement_loses_neither(
    dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source, out = dense(), tmp_path / "out"
    compress(source, out, config(method="svd"))
    old = weights(out)

    stop_before_the_second_move(source, out, config(calibration=str(text)))
    compress(source, tmp_path / "new", config(method="svd", ratio=0.4))
    (tmp_path / "new").rename(out)
    for flags in ({}, {"force": True}, {"force": True, "resume": True}):
        with pytest.raises(UserError, match="its previous content waits"):
            compress(source, out, config(calibration=str(text)), **flags)
    assert weights(tmp_path / "out.partial" / "replaced") == old


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_run_killed_at_any_moment_is_resumed_to_the_same_bytes(
    force: bool, kills: int, reference: tuple[Path, dict[str, Any], dict[str, bytes]], tmp_path: Path
) -> None:
    source, settings, expected = reference
    out, work = tmp_path / "out", tmp_path / "out.partial"
    old = {}
    if force:
        compress(source, out, config(method="svd"))
        old = weights(out)
        shutil.copytree(out, tmp_path / "old")
    context = get_context("forkserver")
    context.set_forkserver_preload(["neuronmm.compression.pipeline"])
    seed, done, length = time.time_ns(), 0, 0.0
    chance = random.Random(seed)
    for name in ("first", "timed"):  # the first one waits until the server has imported what all need
        began = time.monotonic()
        run = context.Process(target=compress_in, args=(source, tmp_path / name, settings, False))
        run.start()
        run.join()
        assert run.exitcode == 0
        length = time.monotonic() - began
    for number in range(kills):
        run = context.Process(target=compress_in, args=(source, out, settings, force))
        run.start()
        time.sleep(chance.uniform(0, length) if number else length / 4)
        run.kill()
        run.join()
        if out.exists():
            assert weights(out) in (old, expected), seed
        elif force:
            assert weights(work / "replaced") == old, seed
        if out.exists() and weights(out) == expected:
            done += 1
            shutil.rmtree(out)
            shutil.rmtree(work, ignore_errors=True)
            if force:
                shutil.copytree(tmp_path / "old", out)
    assert done < kills, "no run was killed before its end"
    compress(source, out, config(**settings), resume=True, force=force)
    assert weights(out) == expected and not work.exists(), seed
