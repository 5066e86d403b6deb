"""The search of the ratio that keeps a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from compression_runs import config, tensors
from neuronmm import cli
from neuronmm.compression import budget as search_module
from neuronmm.compression.config import BUDGETS, CompressionConfig
from neuronmm.compression.factorize import factorize
from neuronmm.compression.pipeline import compress
from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO
from neuronmm.compression.report import read
from neuronmm.models import FAMILIES
from neuronmm.models.errors import UserError

LARGE, SMALL = 1e9, 1e-9


UNREFINED = {"allocation": "global", "share_a": "auto", "refine": "off", "form": "two"}


def settings_within(budget: float, **changes: Any) -> CompressionConfig:
    made = config(**{**UNREFINED, **changes})
    return CompressionConfig(**made.model_dump(exclude={"ratio", "budget", "targets"}), budget=budget)


def within(source: Path, out: Path, budget: float, **changes: Any) -> dict[str, Any]:
    return compress(source, out, settings_within(budget, **changes))


@pytest.mark.parametrize("form", ["two", "pivoted"])
@pytest.mark.parametrize("method", ["svd", "asvd", "whitened", "fisher"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_trial_measures_the_checkpoint_of_its_ratio(
    model_type: str, method: str, form: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense(model_type)
    everything = within(source, tmp_path / "all", LARGE, method=method, form=form)
    assert everything["asked_ratio"] == MAX_RATIO
    trials = everything["search"]["trials"]
    budget = sorted(trial["kl"] for trial in trials)[len(trials) // 2]
    report = within(source, tmp_path / "some", budget, method=method, form=form)
    trials, rounding = report["search"]["trials"], report["search"]["rounding"]
    found = next(trial for trial in trials if trial["ratio"] == report["asked_ratio"])
    assert all(trial["kl"] + rounding > budget for trial in trials if trial["ratio"] > found["ratio"])
    assert found["kl"] + rounding <= budget
    distance = report["fidelity"]["distance"]
    if form == "two":
        assert rounding == 0 and found["kl"] == pytest.approx(distance["kl"], rel=1e-3)
        assert found["agreement"] == distance["agreement"] and found["rows"] == distance["rows"]
    else:
        assert found["kl"] + rounding == pytest.approx(distance["kl"], rel=0.02)


def test_the_rounding_of_pivoted_factors_counts(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kls, measured = {0.05: 0.1, 0.1: 0.2, 0.2: 0.4, 0.4: 0.8}, list[float]()

    def trials(*arguments: Any, pivot: bool = False) -> dict[float, dict[str, float]]:
        ratios = arguments[-1]
        if pivot:
            measured.extend(ratios)
        added = 0.15 if pivot else 0.0
        return {ratio: {"ratio": ratio, "kl": kls.get(ratio, 2 * ratio) + added} for ratio in ratios}

    monkeypatch.setattr(search_module, "_measured", trials)
    report = within(dense(), tmp_path / "out", 0.4, form="pivoted")
    assert measured == [0.2]  # the largest within the budget before rounding
    assert report["search"]["rounding"] == pytest.approx(0.15) and report["asked_ratio"] == 0.1


@pytest.mark.parametrize(("broken", "found"), [(0.4, 0.2), ("pivoted", MIN_RATIO)])
def test_divergences_that_are_not_finite_exceed_every_budget(
    broken: float | str, found: float, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trials(*arguments: Any, pivot: bool = False) -> dict[float, dict[str, float]]:
        def kl(ratio: float) -> float:
            return math.nan if ratio == broken or (pivot and broken == "pivoted") else ratio

        return {ratio: {"ratio": ratio, "kl": kl(ratio)} for ratio in arguments[-1] if ratio in (0.05, 0.1, 0.2, 0.4)}

    monkeypatch.setattr(search_module, "_measured", trials)
    within(dense(), tmp_path / "out", 0.5, form="pivoted")
    report = read(tmp_path / "out")  # JSON has no such number
    assert report["asked_ratio"] == found
    assert [trial["ratio"] for trial in report["search"]["trials"]][-1] == (0.2 if broken == 0.4 else 0.4)


@pytest.mark.parametrize("form", ["two", "pivoted"])
def test_the_fractions_of_the_search_add_up_to_one_and_the_dense_model_runs_once(
    form: str, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions, runs = list[float](), Mock(wraps=search_module.final_states)
    monkeypatch.setattr(search_module, "final_states", runs)

    def progress(stage: str, fraction: float) -> None:
        fractions.extend([fraction] if stage == "searching the ratio" else [])

    compress(dense(), tmp_path / "out", settings_within(LARGE, form=form), progress=progress)
    assert sum(fractions) == pytest.approx(1) and runs.call_count == 1


def test_the_found_ratio_gives_the_checkpoint_of_that_ratio(dense: Callable[..., Path], tmp_path: Path) -> None:
    source = dense()
    found = within(source, tmp_path / "found", LARGE)
    asked = compress(source, tmp_path / "asked", config(**UNREFINED, targets="all", ratio=found["asked_ratio"]))
    assert asked["search"] is None and asked["budget"] is None
    one, other = tensors(tmp_path / "found"), tensors(tmp_path / "asked")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_impossible_budget_is_refused_with_what_was_measured(dense: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--budget 1e-09: removing 5% of the targeted weights already costs \d\S+ nats"
    ):
        within(dense(), tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


def test_a_larger_budget_goes_on_with_the_gradients_of_a_refused_one(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense()
    straight = within(source, tmp_path / "straight", LARGE, method="fisher")
    with pytest.raises(UserError, match="larger budget with --resume"):
        within(source, tmp_path / "out", SMALL, method="fisher")

    def again(*_: Any) -> None:
        raise AssertionError("the gradients were kept")

    monkeypatch.setattr("neuronmm.compression.fisher._run_backwards", again)
    settings = settings_within(LARGE, method="fisher")
    resumed = compress(source, tmp_path / "out", settings, resume=True)
    assert resumed["search"] == straight["search"] and resumed["budget"] == LARGE
    one, other = tensors(tmp_path / "straight"), tensors(tmp_path / "out")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_planned_run_is_not_resumed_with_another_budget(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense()
    with monkeypatch.context() as patch:
        patch.setattr("neuronmm.compression.pipeline.compress_layer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            within(source, tmp_path / "out", LARGE)
    with pytest.raises(UserError, match="was started with another budget"):
        compress(source, tmp_path / "out", settings_within(2 * LARGE), resume=True)


def test_a_resumed_run_does_not_search_again(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, stop = dense(), KeyboardInterrupt()

    def interrupt(*_: Any) -> None:
        raise stop

    settings = settings_within(LARGE)
    straight = compress(source, tmp_path / "straight", settings)
    with monkeypatch.context() as patch:
        patch.setattr("neuronmm.compression.pipeline.compress_layer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "out", settings)
    monkeypatch.setattr(search_module, "_measured", interrupt)
    resumed = compress(source, tmp_path / "out", settings, resume=True)
    assert resumed["search"] == straight["search"] and resumed["asked_ratio"] == straight["asked_ratio"]
    one, other = tensors(tmp_path / "straight"), tensors(tmp_path / "out")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("of_inputs", [False, True])
def test_the_factors_of_a_lower_rank_are_part_of_those_of_a_higher_one(of_inputs: bool) -> None:
    from neuronmm.compression.moments import Moments

    out, size = (12, 9)[:: 1 if of_inputs else -1]
    weight, inputs = torch.randn(out, size), torch.randn(40, size)
    seen = inputs if of_inputs else inputs @ weight.T
    known = Moments(seen.shape[1], of_inputs, 1e-4, torch.device("cpu"))
    known.gram, known.squares = (seen.T @ seen).double(), inputs.double().square().sum(0)
    for moments in (None, known):
        low, high = factorize(weight, 3, moments), factorize(weight, 7, moments)
        torch.testing.assert_close(low.B @ low.A, high.B[:, :3] @ high.A[:3])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"budget": 0.1, "ratio": 0.2}, "budget and ratio exclude each other"),
        ({"budget": 0.1, "method": "anchored"}, "anchored is not; use fisher"),
        ({"budget": "small"}, "budget 'small': must be nats per token or one of faithful, balanced"),
        ({"budget": 0.0}, "budget = 0.0"),
        ({"budget": "nan"}, "budget = nan"),
    ],
)
def test_wrong_budgets_are_refused_in_one_line(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        CompressionConfig.build(**settings)
    assert "\n" not in str(caught.value)


def test_an_option_replaces_the_ratio_or_the_budget_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("ratio: 0.3\n")
    made = CompressionConfig.build(recipe, budget="faithful")
    assert made.budget == BUDGETS["faithful"] and made.ratio == MIN_RATIO
    recipe.write_text("budget: balanced\n")
    assert CompressionConfig.build(recipe).budget == BUDGETS["balanced"]
    made = CompressionConfig.build(recipe, ratio=0.3)
    assert made.budget is None and made.ratio == 0.3


def test_the_verb_reports_what_it_found(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("refine: 'off'\ncalibration_rows: 4\ncalibration_length: 8\nalign: 2\n")
    source, out = dense(), tmp_path / "out"
    assert cli.main(["compress", str(source), "-o", str(out), "--recipe", str(recipe), "--budget", "1000"]) == 0
    assert "ratio found" in capsys.readouterr().out
    assert "the budget is 1000" in (out / "compression_report.md").read_text()
