"""The scribe writes modules that XLA can read and run and in which hosts find what they look up."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_oracle as xla
from draws import examples
from neuronmm.emulator.pyhlo import HloScribe
from neuronmm.emulator.pyhlo.literal import DTYPES, serialize_torch, tensor_of
from neuronmm.emulator.pyhlo.messages import METANEFF, Kind, PrimitiveType


def addition(dtype: Any) -> Any:
    return lambda scribe: dtype.Add(dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1))


def tiny(scribe: Any) -> Any:
    """A dot, a sum, a mask, and an output that is aliased to a cache parameter."""
    f32, pred = scribe.f32, scribe.pred
    x, w = f32[2, 3].Parameter(parameter_number=0), f32[3, 4].Parameter(parameter_number=1)
    cache = f32[2, 4].Parameter(parameter_number=2)
    dims = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    y = f32[2, 4].Dot(x, w, dot_dimension_numbers=dims)
    total = f32[2].Reduce(y, f32.Constant(constant_value=0), dimensions=[1], to_apply=addition(f32))
    wide = f32[2, 4].Broadcast(total, dimensions=[0])
    mask = pred[2, 4].Compare(y, wide, comparison_direction="GT")
    new_cache = f32[2, 4].Select(mask, y, cache)
    new_cache.set_alias_to(cache, must=True)
    return scribe.tuple(f32[2, 4], f32[2]).Tuple(new_cache, total)


def test_a_module_has_the_fields_that_hosts_read() -> None:
    module = HloScribe(serialize_torch)(tiny).module_proto
    shape = module.host_program_shape
    assert [list(p.dimensions) for p in shape.parameters] == [[2, 3], [3, 4], [2, 4]]
    assert shape.result.element_type == PrimitiveType.TUPLE
    assert [list(t.dimensions) for t in shape.result.tuple_shapes] == [[2, 4], [2]]
    (entry,) = module.input_output_alias.entries
    assert (list(entry.output_shape_index), entry.parameter_number, entry.kind) == ([0], 2, Kind.MUST_ALIAS)
    assert module.name == "tiny" and str(module) == str(HloScribe()(tiny).module_proto)
    assert pickle.loads(pickle.dumps(module)) == module


def test_dtypes_compare_and_hash_by_identity() -> None:
    def graph(scribe: Any) -> Any:
        x = scribe.bf16[4].Parameter(parameter_number=0)
        assert x.dtype == scribe.bf16 != scribe.f32 and {scribe.bf16: 1}[x.dtype] == 1
        assert x.dtype[2].sizes == (2,) and x.dtype[()].sizes == () and scribe.u32.dtype[[1, 2]].sizes == (1, 2)
        assert x.scribe is scribe and scribe.get_dtype("s32") is scribe.s32
        assert DTYPES[x.shape_proto.element_type] is torch.bfloat16
        with pytest.raises(AttributeError):
            scribe.f31  # noqa: B018
        with pytest.raises(AttributeError):
            x.lowercase  # noqa: B018
        with pytest.raises(TypeError, match="operand 1 is bf16"):
            x.dtype[4].Add(x, x.dtype[4])
        with pytest.raises(TypeError, match="only a parameter"):
            x.set_alias_to(x.dtype[4].Negate(x))
        return x

    HloScribe()(graph)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="parameter 0 is missing"):
        HloScribe()(lambda scribe: scribe.f32[2].Parameter(parameter_number=1))


@examples(50)
@given(st.sampled_from([d for d in DTYPES.values() if d is not torch.uint64]), st.lists(st.integers(0, 3), max_size=3))
def test_literals_keep_their_values(dtype: torch.dtype, sizes: list[int]) -> None:
    values = torch.randn(sizes) * 3 if dtype.is_floating_point else torch.randint(0, 2, sizes)
    literal = serialize_torch(values.to(dtype))
    assert torch.equal(tensor_of(type(literal).FromString(literal.SerializeToString())), values.to(dtype))


def test_plain_python_values_become_fields() -> None:
    """The forms in which hosts write attributes: arrays, iterators, nested dictionaries."""

    def graph(scribe: Any) -> Any:
        shape = {"dimensions": [3], "element_type": PrimitiveType.F32, "layout": {"minor_to_major": reversed(range(1))}}
        literal = {"f32s": np.float32([1, 2, 3]), "shape": shape}
        x = scribe.f32[3].Constant(literal=literal)
        config = {"dimensions": [{"edge_padding_low": 1, "edge_padding_high": 0, "interior_padding": 2}]}
        return scribe.f32[8].Pad(x, scribe.f32.Constant(constant_value=0.5), padding_config=config)

    module = HloScribe()(graph).module_proto
    constant, _, pad = module.computations[0].instructions
    assert tensor_of(constant.literal).tolist() == [1, 2, 3]
    assert pad.padding_config.dimensions[0].interior_padding == 2


def test_metaneff() -> None:
    neff = METANEFF["MetaNeff"]()
    neff.output_aliases_to[0] = 2
    neff.input_tensors.add(name=b"input0", shape=[2], data_type=METANEFF["MetaTensor"].DataType.FLOAT)
    assert METANEFF["MetaNeff"].FromString(neff.SerializeToString()) == neff


def test_xla_reads_and_runs_the_module() -> None:
    module = HloScribe()(tiny).module_proto
    text = xla.print_module(module.SerializeToString())
    assert "must-alias" in text and "dot(" in text and "direction=GT" in text
    x, w, cache = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4)
    new_cache, total = xla.run(module, [x, w, cache])
    y = x @ w
    assert torch.allclose(total, y.sum(1), atol=1e-5)
    assert torch.allclose(new_cache, torch.where(y > y.sum(1, keepdim=True), y, cache), atol=1e-5)
