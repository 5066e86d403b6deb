"""The interface through which long runs report their progress."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the further fraction of it that is done. The fractions of a stage add up to 1."""


def no_progress(stage: str, fraction: float) -> None:
    """Report nothing."""
