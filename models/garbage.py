"""Python's search for garbage, while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collected() -> Iterator[None]:
    """Let Python look for no garbage in the block.

    It looks after a number of new objects, through all that exist. When torch and transformers are imported, and when
    the vocabulary of a tokenizer is read, nearly all of some hundred thousand objects stay. The search finds little
    then, and takes a fifth of the time of the imports and half of that of the tokenizer.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
