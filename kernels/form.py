"""The storage forms of a factorised linear, in a module without torch, for readers of a checkpoint's headers."""

from enum import Enum


class Form(str, Enum):
    """The storage forms of a factorised linear; :class:`.LowRank` gives the formulas."""

    TWO = "two"
    ROWS = "rows"
    COLUMNS = "columns"
