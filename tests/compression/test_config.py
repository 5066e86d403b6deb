"""Recipes and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuronmm.compression.config import CompressionConfig
from neuronmm.models import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid(recipe: Path) -> None:
    CompressionConfig.build(recipe)


def test_arguments_win_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("ratio: 0.3\ntargets: all\n")
    built = CompressionConfig.build(recipe, ratio=0.4, method=None)
    assert (built.ratio, built.targets, built.method) == (0.4, "all", "fisher")
    assert CompressionConfig.build() == CompressionConfig()


def test_a_baseline_is_not_refined_unless_that_is_asked_for() -> None:
    assert CompressionConfig(method="svd").refine == CompressionConfig(method="asvd").share_a == "off"
    assert CompressionConfig(method="asvd").allocation == "uniform" != CompressionConfig().allocation
    assert CompressionConfig().refine == CompressionConfig(method="svd", refine="fast").refine == "fast"
    assert CompressionConfig().form == "pivoted" and CompressionConfig(method="svd").form == "two"
    assert not CompressionConfig(method="svd").needs_text and CompressionConfig(method="svd", refine="fast").needs_text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ratio: 0.9", "ratio = 0.9"),
        ("ratios: 0.2", "ratios = 0.2"),
        ("method: magic", "method = 'magic'"),
        ("form: rows", "form = 'rows'"),
        ("damping: 0", "damping = 0"),
        ("damping: 1.0e-11", "damping = 1e-11"),
        ("damping: much", "damping = 'much'"),
        ("budget: true", "budget: is the boolean True; give a number"),
        ("calibration_rows: yes", "calibration_rows: is the boolean True"),
        ("refine: off", "refine: is the boolean False; .*'off' in quotes"),
        ("calibration: ''", "calibration: a name is empty"),
        ("calibration: [self, '']", "calibration: a name is empty"),
        ("- ratio", "a recipe is a YAML mapping"),
        ("ratio: [", "not a readable recipe"),
        ('calibration: "\\ud800"', "not a readable recipe"),
    ],
)
def test_a_bad_recipe_is_named_with_its_field(tmp_path: Path, content: str, message: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        CompressionConfig.build(recipe)
    assert str(recipe) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="not a readable recipe"):
        CompressionConfig.build(tmp_path / "absent.yaml")
