"""The tokenizer of a GGUF file, and the tokens that end its texts.

transformers reads the vocabulary. llama.cpp, for which such files are made, knows more than their headers say: that
Llama 3 begins every text with BOS, and that a chat model ends a text with other tokens than the one in the header.
Source: ``llama_vocab::impl::load`` in https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

_BEGIN_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"}
"""Pre-tokenizers whose texts begin with BOS unless the header says otherwise."""

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
"""Special tokens that end a text in every model of the supported families that has them."""


def read_tokenizer(
    file: Path, model_type: str, entries: Mapping[str, str | float], **options: Any
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``file``.

    Args:
        file: the GGUF file.
        model_type: the family, as config.json names it.
        entries: those of the header that begin with ``tokenizer.ggml.``, without that.
        options: for ``from_pretrained``.
    """
    # without the type, transformers parses the whole header once more to find it
    known = {"tokenizer_type": model_type} if model_type in TOKENIZER_MAPPING_NAMES else {}
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, **known, **options)
    sentencepiece = entries.get("model") == "llama"
    begins = bool(entries.get("add_bos_token", sentencepiece or entries.get("pre") in _BEGIN_WITH_BOS))
    if bool(getattr(tokenizer, "add_bos_token", False)) != begins:
        tokenizer.add_bos_token = begins
    end = entries.get("eos_token_id")
    if type(end) is int and 0 <= end < len(tokenizer):  # transformers before 5 takes BOS for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer


def end_tokens(tokenizer: PreTrainedTokenizerBase, entries: Mapping[str, str | float], vocabulary: int) -> list[int]:
    """Return the ids of the tokens that end a text, those of the header first, of a model of ``vocabulary`` tokens.

    ``entries`` is as in :func:`read_tokenizer`.
    """
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [entries.get(name) for name in _ENDS] + [special.get(name) for name in _NAMES]
    return list(dict.fromkeys(token for token in named if type(token) is int and 0 <= token < vocabulary))
