"""Convert tokens to text incrementally, and hold back text that a later token could change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoder's output for an incomplete UTF-8 character
_CONTEXT = 4  # prompt tokens that are decoded too, so that the spaces after the prompt are right
_BYTES = 4  # of the longest character
_LONGEST = 8  # tokens that are held back as an incomplete character; more are bytes that complete none


class TextStream:
    """The text of one generated sequence.

    An incomplete UTF-8 character is held back until it is complete, and dropped if the text ends before. Text that may
    be the beginning of a stop string is held back too. The text ends just before a stop string. The tokens ``special``
    have no text; one that a stop string names ends the text nevertheless.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer: Any = tokenizer
        added = self._tokenizer.added_tokens_decoder.items()
        named = {token.content: number for number, token in added if token.special}
        self.special = {*tokenizer.all_special_ids, *named.values()}
        self._ends = {named[text] for text in stop if text in named}
        self._stop = tuple(stop)
        for length in range(_CONTEXT, _CONTEXT + _BYTES):  # one that begins inside a character can spoil what follows
            self._ids = list(prompt[-length:])
            if not self._decode(self._ids).startswith(_INCOMPLETE):
                break
        self._start, self._end = 0, len(self._ids)
        self._pending = ""
        self.text = ""
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters of the text so far, those held back included."""
        return len(self.text) + len(self._pending)

    def push(self, token: int) -> str:
        """Add a token and return the text that is now final; it is often empty."""
        if token in self._ends:
            self.stopped = True
            return self.finish()
        if token in self.special:  # has no text
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._end])
        now = self._decode(self._ids[self._start :])
        while not now.startswith(before):  # it completes a character that began in text given out, or in the prompt
            before = before[:-1]
        incomplete = now.endswith(_INCOMPLETE) or len(now) <= len(before)
        if incomplete and len(self._ids) - self._end <= _LONGEST:
            return ""
        self._start, self._end = self._end, len(self._ids)
        self._pending += now[len(before) :]
        cuts = [at for at in map(self._pending.find, self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            self._pending = self._pending[: min(cuts)]
            return self.finish()
        keep = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        return self._release(len(self._pending) - keep)

    def finish(self) -> str:
        """Return the text held back; call it at the end of the sequence."""
        return self._release(len(self._pending))

    def _release(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
