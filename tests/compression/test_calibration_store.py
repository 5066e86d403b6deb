"""Runs that share a calibration write the same checkpoints as alone, without running the model again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from compression_runs import config
from neuronmm.compression import calibration_store
from neuronmm.compression.pipeline import compress
from neuronmm.models import UserError

SETTINGS = [
    config(method="asvd", targets="all"),
    config(method="svd", targets="all", share_a="auto"),
    config(method="whitened", targets="all", ratio=0.4),
    config(method="whitened", targets="all", share_a="auto", allocation="global"),
    config(method="fisher", targets="all", share_a="auto", allocation="global", form="pivoted"),
    config(method="anchored", targets="all", allocation="global"),
    config(method="whitened", targets="all", refine="fast"),
    config(method="whitened", targets="mlp", damping=0.1),
]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("first", [1, 2, 3, 4, 6])
def test_a_run_with_a_store_writes_the_same_bytes_as_without(
    first: int, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense("qwen2")
    ordered = [SETTINGS[first], *SETTINGS]
    for number, settings in enumerate(ordered):
        compress(source, tmp_path / f"in-{number}", settings, store=tmp_path / "store")
        compress(source, tmp_path / f"alone-{number}", settings)
        assert weights(tmp_path / f"in-{number}") == weights(tmp_path / f"alone-{number}"), settings


def test_later_runs_do_not_run_the_model_but_report_its_time(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store, stages = dense(), tmp_path / "store", list[str]()
    compress(source, tmp_path / "first", config(), store=store)
    for name in ("advance", "moments_of"):
        monkeypatch.setattr(calibration_store, name, lambda *_: pytest.fail("a layer was run again"))
    settings = config(share_a="auto", allocation="global", ratio=0.4)
    files = list(store.glob("*.safetensors"))
    for file in files:
        save_file(load_file(file), file, metadata={"seconds": "1e6"})
    plain = compress(
        source, tmp_path / "second", settings, store=store, progress=lambda stage, fraction: stages.append(stage)
    )
    assert "sampling text" not in stages
    assert len(files) == 1 + 2 and 3e6 < plain["seconds"] < 3e6 + 1000


def test_a_run_that_needs_the_moments_twice_runs_each_layer_once(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, moments_of = list[str](), calibration_store.moments_of
    monkeypatch.setattr(calibration_store, "advance", lambda *_: pytest.fail("a layer was run again"))
    monkeypatch.setattr(calibration_store, "moments_of", lambda *args: calls.append("") or moments_of(*args))
    compress(dense(), tmp_path / "out", config(allocation="global", share_a="auto"))
    assert len(calls) == 2


def test_an_interrupted_run_resumes_with_its_store(dense: Callable[..., Path], tmp_path: Path) -> None:
    source, settings, seen = dense(), config(share_a="auto"), list[str]()

    def stop(stage: str, fraction: float) -> None:
        seen.append(stage)
        if seen.count("measuring spectra") == 2:  # the first of two layers is measured
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(source, tmp_path / "out", settings, store=tmp_path / "store", progress=stop)
    compress(source, tmp_path / "out", settings, store=tmp_path / "store", resume=True)
    compress(source, tmp_path / "alone", settings)
    assert weights(tmp_path / "out") == weights(tmp_path / "alone")


def test_the_store_of_another_calibration_is_refused(dense: Callable[..., Path], tmp_path: Path) -> None:
    source, store = dense(), tmp_path / "store"
    compress(source, tmp_path / "first", config(), store=store)
    before = json.loads((store / "run.json").read_text())
    with pytest.raises(UserError, match="another model, text or device"):
        compress(source, tmp_path / "second", config(seed=7), store=store)
    assert not (tmp_path / "second").exists() and json.loads((store / "run.json").read_text()) == before


def test_a_store_knows_its_model_and_its_text_by_their_content(
    dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """A fine-tuned model over the same folder, or an edited text: same names, same sizes."""
    source, settings = dense(), config(method="whitened", calibration=str(text))
    compress(source, tmp_path / "first", settings, store=tmp_path / "store")
    compress(source, tmp_path / "again", settings, store=tmp_path / "store")
    content = text.read_text()
    text.write_text(content.replace("w9", "w8"))
    with pytest.raises(UserError, match="another model, text or device"):
        compress(source, tmp_path / "second", settings, store=tmp_path / "store")
    text.write_text(content)
    compress(source, tmp_path / "third", settings, store=tmp_path / "store")
    weight = source / "model.safetensors"
    weight.write_bytes(weight.read_bytes())
    with pytest.raises(UserError, match="another model, text or device"):
        compress(source, tmp_path / "fourth", settings, store=tmp_path / "store")


def test_a_store_is_named_as_any_folder_is(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = dense(), config(method="whitened", calibration=str(text))
    monkeypatch.setenv("HOME", str(tmp_path))
    compress(source, tmp_path / "out", settings, store="~/store")
    assert (tmp_path / "store" / "run.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/store: cannot be created \(Not a directory\)"):
        compress(source, tmp_path / "second", settings, store=tmp_path / "file" / "store")
