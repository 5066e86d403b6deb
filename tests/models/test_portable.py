"""Checkpoint folders that transformers 4 and 5 read identically."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from neuronmm.models.portable import make_portable, portable_config
from tiny_models import load_plain, make_tiny, make_tokens

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def rope_base(config: object) -> float:
    return getattr(config, "rope_parameters", {}).get("rope_theta") or config.rope_theta


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_the_new_names_are_read_by_this_transformers(scaling: dict | None, tmp_path: Path) -> None:
    """A config.json with only the entries of transformers 5."""
    new = {"rope_parameters": {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, **new}))
    make_portable(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert rope_base(config) == 500000.0
    assert str(getattr(config, "dtype", None) or config.torch_dtype).removeprefix("torch.") == "bfloat16"
    if scaling:
        read = getattr(config, "rope_parameters", None) or config.rope_scaling
        assert {key: read[key] for key in scaling} == scaling


def test_every_entry_has_both_names() -> None:
    new = {"rope_parameters": {"rope_theta": 1e6, **LLAMA3}, "dtype": "float16"}
    both = portable_config(new)
    assert both["rope_theta"] == 1e6 and both["rope_scaling"] == LLAMA3
    assert both["torch_dtype"] == both["dtype"] == "float16"
    assert new.keys() == {"rope_parameters", "dtype"}


def test_old_entries_stay_as_they_are() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
    assert portable_config(old) == {**old, "dtype": "bfloat16"}
    assert portable_config(portable_config(old)) == portable_config(old)


def test_a_portable_folder_gives_the_same_logits(tmp_path: Path) -> None:
    model = make_tiny("qwen2")
    model.save_pretrained(tmp_path)
    make_portable(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_plain(tmp_path)(make_tokens()).logits, model(make_tokens()).logits)


def test_the_tokenizer_files_are_readable_by_both(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    make_portable(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}


def test_a_base_beside_the_scaling_hides_neither() -> None:
    both = portable_config({"rope_theta": 5e5, "rope_parameters": LLAMA3})
    assert both["rope_theta"] == 5e5 and both["rope_scaling"] == LLAMA3
