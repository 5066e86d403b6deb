"""A tokenizer for tiny models: one token per word."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} w4{% endfor %}{% if add_generation_prompt %} w5{% endif %}"


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer: ``w3`` to ``w63`` have the ids 3 to 63, BOS is 1, EOS 2; the chat template adds w3 and w4."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast
