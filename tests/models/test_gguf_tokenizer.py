"""What a GGUF file's header leaves to llama.cpp: where a text begins, and all tokens that end one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuronmm.models.documents import read_object
from neuronmm.models.gguf_file import unpack
from neuronmm.models.load import end_tokens, load_config, load_tokenizer
from tiny_gguf import write_gguf

BOS, EOS, LAST = 59, 60, 61
"""The tokens that :func:`write_gguf` gives the header; the last one is special, too."""


def unpacked(tmp_path: Path, **options: Any) -> Path:
    write_gguf(tmp_path / "model.gguf", **options)
    folder = tmp_path / "model"
    folder.mkdir()
    unpack(tmp_path / "model.gguf", folder)
    return folder


@pytest.mark.parametrize(
    ("pre", "flag", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("llama-bpe", False, False),
        ("llama-bpe", True, True),
        ("default", None, False),
        ("default", True, True),
    ],
)
def test_a_text_of_llama_3_begins_with_bos_unless_the_header_denies_it(
    pre: str, flag: bool | None, begins: bool, tmp_path: Path
) -> None:
    entries = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(unpacked(tmp_path, pre=pre, tokenizer=entries))
    ids = tokenizer('AB!"').input_ids
    assert ids == [BOS] * begins + tokenizer('AB!"', add_special_tokens=False).input_ids
    assert len(ids) == 3 + begins


@pytest.mark.parametrize(
    ("last", "entries", "ends"),
    [
        ("<pad>", {}, [EOS]),
        ("<|im_end|>", {}, [EOS, LAST]),
        ("<|endoftext|>", {"eot_token_id": 7, "eom_token_id": LAST}, [EOS, 7, LAST]),
        ("<pad>", {"eot_token_id": EOS, "eom_token_id": 64}, [EOS]),  # one twice, one outside the vocabulary
        ("<pad>", {"eot_token_id": True}, [EOS]),
    ],
)
def test_a_text_ends_with_every_token_that_ends_one(
    last: str, entries: dict[str, int], ends: list[int], tmp_path: Path
) -> None:
    folder = unpacked(tmp_path, special=("<s>", "</s>", last), tokenizer=entries)
    assert read_object(folder / "generation_config.json")["eos_token_id"] == ends
    assert end_tokens(folder, load_config(folder), load_tokenizer(folder)) == frozenset(ends)
