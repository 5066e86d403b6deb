"""The log-probabilities of a choice, in the shapes of OpenAI's API, as its text becomes final.

A token is listed with the piece of text in which its first character is; one whose character the end of the answer
cuts, which has no text, with the last piece. Special tokens and those cut off by a stop string are not listed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from neuronmm.engine.loop import Row
from neuronmm.engine.sampling import TokenLogprobs

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


class Logprobs:
    """The log-probabilities of one row, which come out in order, once each."""

    def __init__(self, row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        self._row, self._chat = row, chat
        self._starts: list[int] = []
        self._given = 0
        self._bytes = cache(lambda token: token_bytes(tokenizer, token))

    def note(self) -> None:
        """Note where the next token begins; to be called before it is added to the text."""
        self._starts.append(self._row.stream.length)

    def take(self) -> dict[str, Any]:
        """Return the tokens that begin in the text so far and were not taken yet."""
        first, result = self._given, self._row.result
        end = len(result.text) + (result.finish_reason in ("length", "context"))  # none begins behind the text then
        while self._given < len(self._starts) and self._starts[self._given] < end:
            self._given += 1
        special = self._row.stream.special
        places = [place for place in range(first, self._given) if self._row.logprobs[place].token not in special]
        tokens = [self._row.logprobs[place] for place in places]
        if self._chat:
            return {"content": [self._chat_token(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self._text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._starts[place] for place in places],
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by text, likeliest first; of two tokens with one text the likelier counts."""
        values: dict[str, float] = {}
        for other, value in token.top:
            values.setdefault(self._text(other), value)
        return values

    def _chat_token(self, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(other, value) for other, value in token.top]
        return {**self._entry(token.token, token.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._bytes(token))}

    def _text(self, token: int) -> str:
        """Return the text of a token; bytes that are no UTF-8 by themselves are escaped, as in OpenAI's answers."""
        content = self._bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token adds to a text; those of a special token are its name."""
    tokens: Any = tokenizer
    name = str(tokens.convert_ids_to_tokens(token))
    text = str(tokens.decode([token], clean_up_tokenization_spaces=False))
    if name.startswith("<0x") and len(name) == 6:  # SentencePiece's single bytes
        return bytes([int(name[3:5], 16)])
    if _SPACE in name:  # the decoder drops the first space of a text
        return name.replace(_SPACE, " ").encode()
    if "\N{REPLACEMENT CHARACTER}" in text and set(name) <= _BYTES.keys():
        return bytes(_BYTES[letter] for letter in name)
    return text.encode()
