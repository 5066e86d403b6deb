"""Make checkpoint folders load identically on transformers 4.4x (the Trainium hosts) and 5.x.

transformers 5 renamed entries of config.json and of the tokenizer files. An older version then silently uses its
defaults (a wrong RoPE base, for example). The functions here write the entries under both names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuronmm.models.documents import read_object, write_json


def portable_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's content with its RoPE and dtype entries under both the old and the new names."""
    config = dict(config)
    rope = config.get("rope_parameters") or {}
    if rope:  # the base may be beside it
        config |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    for new, old in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        if old in config:
            config.setdefault(new, config[old])
    return config


def make_portable(folder: Path) -> None:
    """Rewrite the config.json and tokenizer_config.json of ``folder`` so that old and new versions can read them."""
    config = folder / "config.json"
    write_json(config, portable_config(read_object(config)))
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    tokenizer = read_object(path)
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = folder / "chat_template.jinja"
    if template.is_file():
        tokenizer.setdefault("chat_template", template.read_text(encoding="utf-8"))
    write_json(path, tokenizer)
