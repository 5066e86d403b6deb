"""How a sweep makes its points: compressed, or trained from the point without recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from word_tokenizer import word_tokenizer

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.report import read as read_report
from neuronmm.measure import sweep_making
from neuronmm.measure.sweep import parse_method, sweep
from tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("fast_learning")

BASE = CompressionConfig(align=2, calibration_rows=24, calibration_length=12, **BARE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i * i % 61}" for i in range(90)))
    return tmp_path / "text.txt"


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the checkpoints of a sweep are made by, one after the other."""
    calls: list[str] = []
    for verb in ("compress", "recover"):
        call = getattr(sweep_making, verb)

        def counted(*args: Any, verb: str = verb, call: Any = call, **settings: Any) -> None:
            calls.append(f"{verb} {Path(args[1]).name}")
            call(*args, **settings)

        monkeypatch.setattr(sweep_making, verb, counted)
    return calls


@pytest.mark.parametrize("words", ["lora", "factors", "factors+int8"])
def test_a_point_with_recovery_begins_from_the_one_without(
    words: str, making: list[str], model: Path, text: Path, tmp_path: Path
) -> None:
    """Its checkpoint is what compressing anew would give, and an interrupted one is gone on with."""
    name, stages = f"whitened+{words}", list[str]()

    def stop(stage: str, share: float) -> None:
        stages.append(stage)
        if stages.count("recovering") == 4:
            raise KeyboardInterrupt

    run: dict[str, Any] = {"context": 30, "base": BASE}
    with pytest.raises(KeyboardInterrupt):
        sweep(model, tmp_path / "out", [0.4], [name, "whitened"], [text], progress=stop, **run)
    shares: dict[str, float] = {}

    def count(stage: str, share: float) -> None:
        shares[stage] = shares.get(stage, 0) + share

    result = sweep(model, tmp_path / "out", [0.4], [name], [text], resume=True, progress=count, **run)
    assert making == ["compress whitened-0.4", f"recover {name}-0.4", f"recover {name}-0.4"]
    assert shares["compressing"] == pytest.approx(1) and "sampling text" not in shares
    sweep(model, tmp_path / "alone", [0.4], [name], [text], **run)
    assert making[3:] == [f"compress {name}-0.4"]
    for file in ("model.safetensors", "config.json"):
        one, other = (tmp_path / folder / f"{name}-0.4" / file for folder in ("out", "alone"))
        assert one.read_bytes() == other.read_bytes()
    assert read_report(one.parent)["recovery"]["kept"]
    assert result["points"][2]["settings"] == parse_method(name)


def test_what_compress_began_it_ends(making: list[str], model: Path, text: Path, tmp_path: Path) -> None:
    def stop(stage: str, share: float) -> None:
        if stage == "recovering":
            raise KeyboardInterrupt

    run: dict[str, Any] = {"context": 30, "base": BASE}
    with pytest.raises(KeyboardInterrupt):
        sweep(model, tmp_path / "out", [0.4], ["whitened+factors"], [text], progress=stop, **run)
    sweep(model, tmp_path / "out", [0.4], ["whitened+factors", "whitened"], [text], resume=True, **run)
    assert making == ["compress whitened+factors-0.4", "compress whitened-0.4", "compress whitened+factors-0.4"]


@pytest.mark.parametrize("name", ["svd+factors", "whitened+int8", "svd"])
def test_other_points_are_compressed(name: str, making: list[str], model: Path, text: Path, tmp_path: Path) -> None:
    """Plain SVD keeps no text to train on, and 8 bits alone are quick."""
    names = [name, name.partition("+")[0]] if "+" in name else [name]
    sweep(model, tmp_path / "out", [0.4], names, [text], BASE, context=30)
    assert sorted(making) == sorted(f"compress {each}-0.4" for each in names)
