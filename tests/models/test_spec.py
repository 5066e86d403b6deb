"""The ``quantization_config`` block: what it accepts, and one-line errors for the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.models import CompressionSpec, UserError
from neuronmm.models.hf import NeuronMMConfig
from tiny_models import make_spec

GOOD = make_spec({"model.layers.0.mlp.up_proj": 8}, calibration={"source": "self", "tokens": 4096}).model_dump()
OPTIONAL = {"quant_method", "format", "calibration", "shared", "factors"}
RANKS = {
    "layers.0.self_attn.q_proj": 8,
    "layers.0.self_attn.k_proj": 8,
    "layers.0.self_attn.v_proj": 4,
    "layers.0.self_attn.o_proj": 8,
    "layers.0.mlp.gate_proj": 8,
    "layers.1.self_attn.k_proj": 8,
}


def test_a_block_survives_json_and_transformers() -> None:
    block = json.loads(json.dumps(GOOD))
    spec = CompressionSpec.parse(block, "config.json")
    assert spec.model_dump() == GOOD
    config = NeuronMMConfig.from_dict(block)
    assert config.spec == spec
    assert json.loads(config.to_json_string(use_diff=False)) == GOOD
    assert "up_proj" in repr(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 4}, r"format 4 is none of \(1, 2, 3\).*install the version that wrote it"),
        ({"format": "1"}, "format"),
        ({"quant_method": "gptq"}, "quantised by 'gptq'"),
        ({"ranks": {}}, r"quantization_config\.ranks"),
        ({"ranks": {"a.b": 0}}, r"quantization_config\.ranks\.a\.b: .*greater than 0"),
        ({"ranks": {"a.b": -4}}, r"ranks\.a\.b"),
        ({"ranks": {"a.b": 3.5}}, r"ranks\.a\.b"),
        ({"ranks": ["a.b"]}, "ranks"),
        ({"ranks": None}, "ranks"),
        ({"ranks": None, "shared": {"a.b": "a.c"}}, r"quantization_config\.ranks"),
        ({"shared": {"a.b": 3}}, r"shared\.a\.b"),
        ({"shared": ["a.b"]}, "shared"),
        ({"align": 0}, "align"),
        ({"factors": "int3"}, r"factors: Input should be 'model', 'int8', 'int4' or 'fp8'"),
        ({"asked_ratio": "many"}, "asked_ratio"),
        ({"colour": "red"}, "colour: Extra inputs"),
    ],
)
def test_a_bad_block_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        CompressionSpec.parse({**GOOD, **change}, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "leader", "message"),
    [
        ("0.self_attn.k_proj", "0.self_attn.q_proj", None),
        ("0.self_attn.q_proj", "0.self_attn.k_proj", None),
        ("0.self_attn.v_proj", "0.self_attn.q_proj", "rank 4, but its leader .*q_proj has rank 8"),
        ("0.self_attn.o_proj", "0.self_attn.q_proj", "does not read the input of"),
        ("0.mlp.gate_proj", "0.self_attn.q_proj", "does not read the input of"),
        ("1.self_attn.k_proj", "0.self_attn.q_proj", "does not read the input of"),
        ("0.mlp.up_proj", "0.mlp.gate_proj", "up_proj has no rank"),
        ("0.mlp.gate_proj", "0.mlp.up_proj", "up_proj has no rank"),
        ("0.mlp.gate_proj", "0.mlp.gate_proj", "has no A"),
    ],
)
def test_only_linears_of_one_input_and_rank_share(name: str, leader: str, message: str | None) -> None:
    shared = {f"layers.{name}": f"layers.{leader}"}
    if message is None:
        assert CompressionSpec.parse({**GOOD, "ranks": RANKS, "shared": shared}, "config.json").shared == shared
        return
    with pytest.raises(UserError, match=rf"quantization_config\.shared: .*{message}") as caught:
        CompressionSpec.parse({**GOOD, "ranks": RANKS, "shared": shared}, "config.json")
    assert "\n" not in str(caught.value)


def test_a_follower_does_not_lead() -> None:
    q, k, v = (f"layers.0.self_attn.{name}_proj" for name in "qkv")
    with pytest.raises(UserError, match=f"{v} uses the A of {k}, which has no A"):
        make_spec({q: 8, k: 8, v: 8}, shared={v: k, k: q})


GATE, UP, DOWN = (f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
PIVOTED = {
    **GOOD,
    "format": 2,
    "ranks": {GATE: 8, UP: 8, DOWN: 4},
    "shared": {UP: GATE},
    "forms": {GATE: {"form": "rows", "first": 16}, DOWN: {"form": "columns", "first": None}},
}


def test_pivoted_forms_survive_json_and_transformers() -> None:
    spec = CompressionSpec.parse(json.loads(json.dumps(PIVOTED)), "config.json")
    assert spec.model_dump() == PIVOTED
    assert not any(form.indexed for form in spec.forms.values())
    config = NeuronMMConfig.from_dict(json.loads(json.dumps(PIVOTED)))
    assert config.spec == spec
    assert json.loads(config.to_json_string(use_diff=False)) == PIVOTED
    assert CompressionSpec.parse({**PIVOTED, "forms": {GATE: {"form": "rows"}}}, "config.json").forms[GATE].indexed


def test_format_1_is_written_as_the_versions_without_forms_wrote_it() -> None:
    assert "forms" not in GOOD and GOOD["format"] == 1
    spec = CompressionSpec.parse({name: value for name, value in GOOD.items() if name != "format"}, "config.json")
    assert spec.model_dump() == GOOD and list(spec.model_dump()) == list(GOOD)
    assert "forms" not in json.loads(NeuronMMConfig.from_dict(GOOD).to_json_string(use_diff=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "pivoted forms need format 2"),
        ({"forms": {"layers.1.mlp.gate_proj": {"form": "rows", "first": 0}}}, "layers.1.mlp.gate_proj has no rank"),
        ({"forms": {UP: {"form": "rows", "first": 0}}}, "up_proj uses the A of layers.0.mlp.gate_proj"),
        ({"forms": {DOWN: {"form": "columns", "first": 0}}}, "has the form columns, which has no first pivot"),
        ({"forms": {GATE: {"form": "columns"}}}, "shares no A"),
        ({"forms": {GATE: {"form": "two"}}}, "Input should be 'rows' or 'columns'"),
        ({"forms": {GATE: {"form": ["rows"]}}}, "Input should be 'rows' or 'columns'"),
        ({"forms": {GATE: {"form": "rows", "first": -1}}}, "greater than or equal to 0"),
        ({"forms": {GATE: {"form": "rows", "first": "x"}}}, "valid integer"),
        ({"forms": {GATE: {"form": "rows", "pivots": [1, 2]}}}, "Extra inputs"),
        ({"forms": {GATE: {"first": 3}}}, "Field required"),
        ({"forms": {GATE: None}}, "forms"),
        ({"forms": [GATE]}, "forms"),
        ({"forms": None}, "forms"),
        ({"ranks": None}, r"quantization_config\.ranks"),
    ],
    ids=str,
)
def test_bad_forms_are_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        CompressionSpec.parse({**PIVOTED, **change}, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", sorted(GOOD.keys() - OPTIONAL))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(UserError, match=rf"quantization_config\.{field}: Field required"):
        CompressionSpec.parse({key: value for key, value in GOOD.items() if key != field}, "config.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_json_is_either_a_spec_or_a_user_error(block: Any) -> None:
    with pytest.raises(UserError):
        CompressionSpec.parse(block, "config.json")
