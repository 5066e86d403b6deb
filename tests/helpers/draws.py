"""How many examples a property draws. The suite draws few, the same every time; ``make test-random`` a thousand."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SUITE, RANDOM = "suite", "random"
settings.register_profile(SUITE, derandomize=True, deadline=None)
settings.register_profile(RANDOM, derandomize=False, deadline=None, max_examples=1000, print_blob=True)


def examples(few: int, **more: Any) -> settings:
    """The settings of a property that draws ``few`` examples in the suite, and as many as the profile says elsewhere.

    ``more`` goes to :class:`hypothesis.settings`. The profile has to be loaded when this is called: conftest.py and
    ``--hypothesis-profile`` do that before any test is imported.
    """
    return settings(max_examples=few if settings.default.derandomize else settings.default.max_examples, **more)
