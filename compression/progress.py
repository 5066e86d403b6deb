"""How a long run tells what it is doing."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a stage's name and the further share of it that is done; the shares of a stage add up to 1."""
