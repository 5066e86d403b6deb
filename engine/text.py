"""Convert tokens to text incrementally; text that a later token could change is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete UTF-8 character
_CONTEXT = 4  # prompt tokens that are decoded too, so that the text continues the prompt with the right spaces


class TextStream:
    """The text of one generated sequence.

    An incomplete UTF-8 character is held back until it is complete, and dropped if it never is. Text that may be the
    beginning of a stop string is held back too. The text ends just before a stop string.
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
        """Add a token and return the text that is now final; it is often empty."""
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
        """Return the text held back; call it at the end of the sequence."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
