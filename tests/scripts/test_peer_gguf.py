"""The script that adds a model in llama.cpp's types to a sweep."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.measure.sweep import sweep
from neuronmm.measure.sweep_config import SweepConfig
from neuronmm.measure.sweep_points import read_points
from tiny_gguf import write_gguf

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


def test_each_type_becomes_a_point_beside_the_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import cpu_peers
    import peer_gguf

    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_peers, "ENVIRONMENTS", tmp_path / "peers")
    model, text, out = tmp_path / "tiny.BF16.gguf", tmp_path / "text.txt", tmp_path / "sweep"
    write_gguf(model, wide=64, kind=GGMLQuantizationType.BF16)
    text.write_text("".join(random.Random(0).choices([chr(33 + index) for index in range(50)], k=500)))
    base = CompressionConfig.build(**BARE, calibration=str(text), calibration_rows=4, calibration_length=32)
    sweep(model, out, SweepConfig([0.0], ["int8"], [text], base, context=64))
    monkeypatch.setattr("sys.argv", ["peer_gguf.py", str(model), str(out), "--types", "Q8_0", "Q4_0", "BF16"])
    peer_gguf.main()
    points = {point["name"]: point for point in read_points(out)}
    values = {name: point["perplexity"]["text"]["value"] for name, point in points.items()}
    assert values["llama.cpp BF16"] == values["dense"]
    assert [points[f"llama.cpp {kind}"]["bits"] for kind in ("BF16", "Q8_0", "Q4_0")] == [16, 8, 4]
    assert 0 < abs(math.log(values["llama.cpp Q8_0"] / values["dense"])) < 0.01
    assert abs(math.log(values["llama.cpp Q4_0"] / values["dense"])) > 1e-4
    (file,) = (tmp_path / "peers").glob("tiny.BF16.gguf-*.Q8_0.gguf")
    size = GGUFReader(file).tensors
    assert points["llama.cpp Q8_0"]["bytes"] == sum(int(tensor.n_bytes) for tensor in size)
    assert points["llama.cpp Q4_0"]["bytes"] < points["llama.cpp Q8_0"]["bytes"] < points["llama.cpp BF16"]["bytes"]
