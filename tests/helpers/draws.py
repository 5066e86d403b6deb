"""The number of examples per property: few and fixed in the suite, a thousand random ones in ``make test-random``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SUITE, RANDOM = "suite", "random"
settings.register_profile(SUITE, derandomize=True, deadline=None)
settings.register_profile(RANDOM, derandomize=False, deadline=None, max_examples=1000, print_blob=True)


def examples(few: int, **more: Any) -> settings:
    """Return settings for ``few`` examples in the suite, and for the number of the active profile otherwise.

    ``more`` goes to :class:`hypothesis.settings`. The profile must already be loaded: conftest.py and
    ``--hypothesis-profile`` load it before any test is imported.
    """
    return settings(max_examples=few if settings.default.derandomize else settings.default.max_examples, **more)
