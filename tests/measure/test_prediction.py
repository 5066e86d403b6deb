"""Where ``predict`` finds a model's sizes and ranks; it reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuronmm.measure.config import PredictionConfig
from neuronmm.measure.prediction import _decoders, predict
from neuronmm.models import UserError
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.gguf_file import unpack
from tiny_gguf import write_gguf
from tiny_models import tiny_checkpoint

QUERIES = f"{LAYERS}.1.self_attn.q_proj"


def with_rank(folder: Path, rank: int) -> Path:
    """Write a compressed checkpoint whose config.json gives the queries of layer 1 this rank."""
    tiny_checkpoint(folder, linears=(*TARGETS["mlp"], "self_attn.q_proj"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ranks"][QUERIES] = rank
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rank", [33, 1 << 64])
def test_a_rank_that_no_linear_can_have_is_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{QUERIES} has 32 inputs, so its rank cannot be {rank};"):
        predict(with_rank(tmp_path / "out", rank))


def test_what_no_neuron_host_runs_is_not_predicted(tmp_path: Path) -> None:
    folder = with_rank(tmp_path / "out", 4)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"format": 3, "weights": "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="dense weights are stored in int8, which no Neuron host runs"):
        predict(folder)
    assert predict(folder, ratio=0.2)["compressed"]["weight_bytes"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_predicted_as_the_checkpoint_in_it(tied: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tied=tied)
    (tmp_path / "folder").mkdir()
    unpack(tmp_path / "model.gguf", tmp_path / "folder")
    models = (tmp_path / "model.gguf", tmp_path / "folder", tmp_path / "folder" / "config.json")
    file, *others = ({**predict(model), "model": None} for model in models)
    assert others == [file, file] and file["dense"]["weight_bytes"] > file["compressed"]["weight_bytes"] > 0


def test_only_the_config_of_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, linears=TARGETS["mlp"])
    asked = []

    def download(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert predict("somebody/model")["dense"] == predict(tmp_path)["dense"]
    assert asked == [("somebody/model", ["config.json"])]


def test_a_linear_whose_factors_are_more_weights_is_predicted_as_the_dense_one(tmp_path: Path) -> None:
    _, low, _, _ = _decoders(PredictionConfig(with_rank(tmp_path / "low", 8)))
    _, high, _, _ = _decoders(PredictionConfig(with_rank(tmp_path / "high", 31)))
    assert dict(low.ranks[1])["q"] == 8
    assert dict(high.ranks[1]) == {name: rank for name, rank in low.ranks[1] if name != "q"}


def test_every_core_has_whole_heads(tmp_path: Path) -> None:
    """9 query and 3 key heads on 2 cores: 6 and 2 on each, as the hosts have them, zeros included."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    others = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes | others))
    one, two = (predict(tmp_path, parallel=cores)["dense"]["cache_bytes"] for cores in (1, 2))
    assert two == one * 2 / 3
    for cores in (5, 16):
        with pytest.raises(
            UserError, match=rf"--tp {cores}: has to divide the intermediate size, 1536, .* the 9 heads"
        ):
            predict(tmp_path, parallel=cores)
