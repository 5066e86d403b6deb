"""How a sweep creates its points: by compression, or by recovery from the compressed point."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.report import read as read_report
from neuronmm.measure import sweep as sweeping
from neuronmm.measure import sweep_points
from neuronmm.measure.statistics import Estimate
from neuronmm.measure.sweep import SweepResult
from neuronmm.measure.sweep import sweep as run_sweep
from neuronmm.measure.sweep_config import SweepConfig, parse_method
from neuronmm.models import UserError
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

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
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs that create the checkpoints of a sweep, in order, each with the folder it writes."""
    calls: list[str] = []
    for verb in ("compress", "recover"):
        call = getattr(sweep_points, verb)

        def counted(*args: Any, verb: str = verb, call: Any = call, **settings: Any) -> None:
            calls.append(f"{verb} {Path(args[1]).name}")
            call(*args, **settings)

        monkeypatch.setattr(sweep_points, verb, counted)
    return calls


def sweep(model: Path, out: Path, methods: list[str], text: Path, rows: int = 24, **options: Any) -> SweepResult:
    base = BASE.model_copy(update={"calibration_rows": rows})
    return run_sweep(model, out, SweepConfig([0.4], methods, [text], base, context=30), **options)


def test_the_mean_accuracy_has_an_error_only_if_every_task_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = {"one acc": Estimate(1, 0.1), "one acc_norm": Estimate(0.5, 0.3), "two acc_norm": Estimate(1, None)}
    result = Mock(of_model=lambda: estimates)
    monkeypatch.setattr(sweep_points, "run_evaluation", lambda _: result)
    found = sweep_points._accuracy(Path("model"), ["one.jsonl", "two.jsonl"], 1)
    assert found["value"] == 0.75 and found["standard_error"] is None
    estimates["two acc_norm"] = Estimate(1, 0.4)
    assert sweep_points._accuracy(Path("model"), ["one.jsonl"], None)["standard_error"] == pytest.approx(0.25)


def test_ratios_that_print_alike_are_two_points() -> None:
    points = SweepConfig([0.2, 0.2000001, 0.2000002], ["svd"], ["text.txt"]).points
    assert [point.folder for point in points] == ["svd-0.2", "svd-0.2000001", "svd-0.2000002"]


@pytest.mark.parametrize("words", ["lora", "factors", "factors+int8"])
def test_a_point_with_recovery_starts_from_the_one_without(
    words: str, calls: list[str], model: Path, text: Path, tmp_path: Path
) -> None:
    """Its checkpoint equals the one of a new compression, and an interrupted recovery is resumed.

    Whether training helps the 3 rows that are held out of 24 is chance and differs from processor to processor.
    """
    name, stages = f"whitened+{words}", list[str]()

    def stop(stage: str, fraction: float) -> None:
        stages.append(stage)
        if stages.count("recovering") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(model, tmp_path / "out", [name, "whitened"], text, rows=96, progress=stop)
    fractions: dict[str, float] = {}

    def count(stage: str, fraction: float) -> None:
        fractions[stage] = fractions.get(stage, 0) + fraction

    result = sweep(model, tmp_path / "out", [name], text, rows=96, resume=True, progress=count)
    assert calls == ["compress whitened-0.4", f"recover {name}-0.4", f"recover {name}-0.4"]
    assert fractions["compressing"] == pytest.approx(1) and "sampling text" not in fractions
    sweep(model, tmp_path / "alone", [name], text, rows=96)
    assert calls[3:] == [f"compress {name}-0.4"]
    for file in ("model.safetensors", "config.json"):
        one, other = (tmp_path / folder / f"{name}-0.4" / file for folder in ("out", "alone"))
        assert one.read_bytes() == other.read_bytes()
    assert read_report(one.parent)["recovery"]["kept"]
    assert result.points[2]["settings"] == parse_method(name)


def test_compress_finishes_a_point_that_it_began(calls: list[str], model: Path, text: Path, tmp_path: Path) -> None:
    def stop(stage: str, fraction: float) -> None:
        if stage == "recovering":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(model, tmp_path / "out", ["whitened+factors"], text, progress=stop)
    sweep(model, tmp_path / "out", ["whitened+factors", "whitened"], text, resume=True)
    assert calls == ["compress whitened+factors-0.4", "compress whitened-0.4", "compress whitened+factors-0.4"]


@pytest.mark.parametrize("name", ["svd+factors", "whitened+int8", "svd"])
def test_other_points_are_compressed(name: str, calls: list[str], model: Path, text: Path, tmp_path: Path) -> None:
    """The checkpoint of plain SVD names no text to train on, and int8 alone needs no training."""
    names = [name, name.partition("+")[0]] if "+" in name else [name]
    sweep(model, tmp_path / "out", names, text)
    assert sorted(calls) == sorted(f"compress {each}-0.4" for each in names)


def test_int8_alone_needs_no_text() -> None:
    """A model may take half an hour to write one; int4 is fitted to it."""
    points = SweepConfig([0.1], ["int8", "int4", "svd"], ["text"], base=BASE).points
    assert [(point.name, point.config.needs_text) for point in points] == [
        ("int8", False), ("int4", True), ("svd", False),
    ]  # fmt: skip
    assert all(point.config.ratio == 0 for point in points[:2])


def test_points_are_compressed_on_the_device_that_is_asked_for(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA GPU"):
        sweep(model, tmp_path / "out", ["svd"], text, device="cuda")
    assert not (tmp_path / "out").exists()

    def stop(*_: object, device: str, **__: object) -> None:
        raise UserError(f"compresses on {device}")

    monkeypatch.setattr(sweeping, "check_device", lambda device: None)
    monkeypatch.setattr(sweep_points, "compress", stop)
    with pytest.raises(UserError, match="compresses on cuda"):
        sweep(model, tmp_path / "out", ["svd"], text, device="cuda")


def test_the_words_of_few_bits_fit_every_recipe() -> None:
    """Pivoted factors have no int4, and a dense model has no factors to recover or to round."""
    base = BASE.model_copy(update={"form": "pivoted", "recover": "factors", "factor_dtype": "int8"})
    points = {point.name: point.config for point in SweepConfig([0.4], ["int4", "svd+int4"], ["text.txt"], base).points}
    low, dense = points["svd+int4"], points["int4"]
    assert (low.form, low.factor_dtype, low.weight_dtype, low.recover) == ("pivoted", "int8", "int4", "factors")
    assert (dense.ratio, dense.factor_dtype, dense.weight_dtype, dense.recover) == (0.0, "model", "int4", "off")
    with pytest.raises(UserError, match="ratio 0: leaves no factors"):
        _ = SweepConfig([0.0], ["svd+int4"], ["text.txt"], BASE).points
