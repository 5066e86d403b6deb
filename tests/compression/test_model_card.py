"""The model card: metadata that the hub accepts, what was removed, and nothing of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from compression_runs import config
from neuronmm.compression import model_card
from neuronmm.compression.convert import convert
from neuronmm.compression.pipeline import compress

REPORT: dict[str, Any] = {
    "model": "meta-llama/Llama-3.2-1B",
    "method": "fisher",
    "targets": "mlp",
    "version": "0.1.0",
    "parameters": {"dense": 1235814400, "compressed": 1074000000},
    "bytes": {"dense": 2471645608, "compressed": 2148000000},
    "asked_ratio": 0.2,
    "realised_ratio": 0.2,
    "model_ratio": 0.131,
    "fidelity": None,
}


def card_of(folder: Path, warnings: list[str] | None = None, **changes: Any) -> tuple[ModelCard, str]:
    """Return the card that a report gives, as the hub's library reads it."""
    model_card.write({**REPORT, **changes}, folder, warnings or [])
    content = (folder / "README.md").read_text(encoding="utf-8")
    return ModelCard(content), content


def test_the_metadata_are_the_hubs(tmp_path: Path) -> None:
    card, content = card_of(tmp_path)
    assert card.data.to_dict() == {
        "base_model": "meta-llama/Llama-3.2-1B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["neuronmm", "svd", "low-rank", "compressed"],
    }
    assert "13.10% of the model" in content and "1,235,814,400 | 1,074,000,000" in content
    assert "nats" not in content and "Warning" not in content


@pytest.mark.parametrize(
    "model", ["/home/me/secret/Llama.gguf", "secret/deep/Llama.gguf", "Llama.gguf", "~/Llama.gguf"]
)
def test_a_local_model_is_named_without_its_path(model: str, tmp_path: Path) -> None:
    card, content = card_of(tmp_path, model=model)
    assert card.data.base_model is None and "base_model" not in content
    assert "`Llama.gguf`" in content and "secret" not in content


def test_a_local_folder_that_reads_like_an_id_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama" / "Llama-3.2-1B").mkdir(parents=True)
    assert card_of(tmp_path)[0].data.base_model is None


def test_strings_of_unknown_origin_stay_code_on_one_line(tmp_path: Path) -> None:
    evil = "x`\n---\nlicense: mit\n---\n<script>"
    card, content = card_of(tmp_path, [evil], model=evil, method=evil, targets=evil, version=evil)
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert "\nlicense" not in content.split("---", 2)[2]


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    model_card.write(REPORT, tmp_path, [])
    assert (tmp_path / "README.md").read_text() == "mine"


def test_compress_and_convert_write_one(dense: Callable[..., Path], tmp_path: Path) -> None:
    report = compress(dense(), tmp_path / "out", config(ratio=0.3))
    convert(tmp_path / "out", tmp_path / "other", "pivoted")
    for folder in (tmp_path / "out", tmp_path / "other"):
        content = (folder / "README.md").read_text()
        assert ModelCard(content).data.library_name == "transformers"
        assert "README.md" in json.loads((folder / "compression_report.json").read_text())["files"]
        assert "nats per token" in content and str(tmp_path) not in content
    assert f"{report['parameters']['compressed']:,}" in (tmp_path / "out" / "README.md").read_text()
    again = compress(dense(), tmp_path / "out", config(ratio=0.4), force=True)
    assert f"{again['parameters']['compressed']:,}" in (tmp_path / "out" / "README.md").read_text()
