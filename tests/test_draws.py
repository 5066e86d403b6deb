"""The examples of a property: the same in every run of the suite, different in every long run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draws

ROOT = Path(__file__).parent.parent


def drawn(profile: settings) -> list[int]:
    seen: list[int] = []

    @profile
    @given(st.integers())
    def collect(number: int) -> None:
        seen.append(number)

    collect()
    return seen


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--hypothesis-profile") or draws.SUITE


def test_the_suites_profile_is_the_default(profile: str) -> None:
    assert settings.default == settings.get_profile(profile)


def test_the_suite_draws_the_same_every_time() -> None:
    assert drawn(settings.get_profile(draws.SUITE)) == drawn(settings.get_profile(draws.SUITE))


def test_the_long_run_draws_a_thousand_others() -> None:
    first, second = (drawn(settings.get_profile(draws.RANDOM)) for _ in range(2))
    assert len(first) == len(second) == 1000 and first != second


@pytest.mark.parametrize(("name", "count"), [(draws.SUITE, 7), (draws.RANDOM, 1000)])
def test_a_profile_sets_the_number_of_examples(name: str, count: int, profile: str) -> None:
    settings.load_profile(name)
    try:
        assert draws.examples(7).max_examples == count
    finally:
        settings.load_profile(profile)


def test_ci_runs_what_a_user_runs() -> None:
    """CI sets no variables and runs ``make test``, as the README tells a user to."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script and "export" not in script
