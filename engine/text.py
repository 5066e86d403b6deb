"""Tokens to text, piece by piece: nothing is let out that a later token could change or take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a UTF-8 character to
_CONTEXT = 4  # prompt tokens decoded along, so that the text continues the prompt (its spaces included)


class TextStream:
    """The text of one generated sequence.

    Half a UTF-8 character is held back until the rest arrives (and dropped if it never does). Text that may be the
    beginning of a stop string is held back too; at a stop string the text ends just before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer: Any = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt[-_CONTEXT:])
        self._from, self._known = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain, often empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._known])
        now = self._decode(self._ids[self._from :])
        if now.endswith(_INCOMPLETE) or len(now) <= len(before):
            return ""
        self._from, self._known = self._known, len(self._ids)
        self._held += now[len(before) :]
        cuts = [at for at in map(self._held.find, self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            self._held = self._held[: min(cuts)]
            return self.finish()
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - keep)

    def finish(self) -> str:
        """The sequence has ended: return what was held back."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
