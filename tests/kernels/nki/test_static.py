"""Static checks: a kernel uses NKI only through a dialect layer, and a layer uses only what its dialect has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from neuronmm.emulator.nki.modules import surface
from neuronmm.kernels import nki as kernels

FOLDER = Path(kernels.__file__).parent
BODIES = ("moves", "scaling", "matmuls", "stages", "low_rank_matmul", "low_rank_mlp", "baselines")
REMOVED = {
    "neuronxcc": {"tensor_copy_dynamic_src", "tensor_copy_dynamic_dst", "loop_reduce", "dma_transpose", "nc_matmul_mx"},
    "nki": {"arange", "mgrid", "par_dim", "load", "store", "affine_range", "loop_reduce", "dma_transpose"},
}
"""Functions that the SDK removed or deprecated, or that these kernels must not use, by dialect."""

ISA = {
    "neuronxcc": {
        "nc_matmul": "stationary moving is_stationary_onezero is_moving_onezero is_transpose tile_position tile_size "
        "mask",
        "nc_transpose": "data mask dtype engine",
        "get_nc_version": "",
        "activation": "op data bias scale reduce_op reduce_res reduce_cmd mask dtype",
        "activation_reduce": "op data reduce_op reduce_res bias scale mask dtype",
        "tensor_reduce": "op data axis mask dtype negate keepdims",
        "tensor_tensor": "data1 data2 op dtype mask engine",
        "tensor_tensor_scan": "data0 data1 initial op0 op1 reverse0 reverse1 dtype mask",
        "tensor_scalar": "data op0 operand0 reverse0 op1 operand1 reverse1 dtype mask engine",
        "tensor_copy": "src mask dtype engine",
        "reciprocal": "data dtype mask",
        "memset": "shape value dtype mask engine",
        "dma_copy": "dst src mask dst_rmw_op oob_mode dge_mode",
        "affine_select": "pred on_true_tile on_false_value mask dtype",
        "bn_aggr": "data mask dtype",
        "bn_stats": "data mask dtype",
        "dma_transpose": "src axes mask dtype dge_mode",
        "iota": "expr dtype mask",
        "max8": "src mask dtype",
        "nc_find_index8": "data vals mask dtype",
        "nc_match_replace8": "data vals imm dst_idx mask dtype",
        "nc_stream_shuffle": "src dst shuffle_mask dtype mask",
        "range_select": "on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd reduce_res reduce_op range_start "
        "on_false_value mask dtype",
        "scalar_tensor_tensor": "data op0 operand0 op1 operand1 reverse0 reverse1 dtype mask",
        "select_reduce": "dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred mask dtype",
        "tensor_copy_predicated": "src dst predicate reverse_pred mask dtype",
        "tensor_partition_reduce": "op data mask dtype",
        "tensor_scalar_reduce": "data op0 operand0 reduce_op reduce_res reverse0 dtype mask",
    },
    "nki": {
        "nc_matmul": "dst stationary moving is_stationary_onezero is_moving_onezero is_transpose accumulate "
        "tile_position tile_size perf_mode name",
        "nc_transpose": "dst data engine name",
        "activation": "dst op data bias scale reduce_op reduce_res reduce_cmd name",
        "activation_reduce": "dst op data reduce_op reduce_res bias scale name",
        "tensor_reduce": "dst op data axis negate keepdims name",
        "tensor_tensor": "dst data1 data2 op engine name",
        "tensor_tensor_scan": "dst data0 data1 initial op0 op1 reverse0 reverse1 name",
        "tensor_scalar": "dst data op0 operand0 reverse0 op1 operand1 reverse1 engine name",
        "tensor_copy": "dst src engine name",
        "reciprocal": "dst data name",
        "memset": "dst value engine name",
        "dma_copy": "dst src priority oob_mode dge_mode engine name",
        "affine_select": "dst pattern channel_multiplier on_true_tile on_false_value cmp_op offset name",
        "bn_aggr": "dst data name",
        "bn_stats": "dst data name",
        "dma_transpose": "dst src axes priority dge_mode oob_mode name",
        "iota": "dst pattern offset channel_multiplier name",
        "max8": "dst src name",
        "nc_find_index8": "dst data vals name",
        "nc_match_replace8": "dst data vals imm dst_idx name",
        "nc_stream_shuffle": "dst src shuffle_mask name",
        "scalar_tensor_tensor": "dst data op0 operand0 op1 operand1 reverse0 reverse1 name",
        "select_reduce": "dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred name",
        "tensor_copy_predicated": "dst src predicate reverse_pred name",
    },
}
"""Parameters in order, from the SDK's documentation: 2.26 for ``neuronxcc.nki.isa``, 2.32 for ``nki.isa``.

The signature of ``dma_transpose`` in 2.26 ends in ``**kwargs``; the text describes ``dge_mode`` as a parameter.
"""


def tree(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))


def calls(name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]


def primitives(name: str) -> dict[str, list[str]]:
    """Return the public methods of a dialect's class with their parameters."""
    (dialect,) = [node for node in tree(name).body if isinstance(node, ast.ClassDef)]
    methods = [node for node in dialect.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return {f.name: [a.arg for a in f.args.args[1:]] for f in methods}


@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
def test_the_layer_uses_only_what_its_dialect_has(dialect: str) -> None:
    prefix = "neuronxcc.nki" if dialect == "neuronxcc" else "nki"
    table = {"nisa": surface(dialect)[f"{prefix}.isa"], "nl": surface(dialect)[f"{prefix}.language"]}
    used = [
        node
        for node in ast.walk(tree(f"dialect_{dialect}"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in table
    ]
    assert len(used) > 15
    for node in used:
        assert node.attr in table[node.value.id], f"line {node.lineno}: {ast.unparse(node)} is not in {prefix}"  # type: ignore[attr-defined]
        assert node.attr not in REMOVED[dialect]
    for call in calls(f"dialect_{dialect}"):
        target = ast.unparse(call.func).split(".")
        function = table[target[0]][target[1]] if target[0] in table else None
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters
            assert len(call.args) <= len(parameters)
            assert {k.arg for k in call.keywords} <= set(parameters), f"line {call.lineno}: {ast.unparse(call)}"


@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
def test_the_emulated_instructions_are_the_documented_ones(dialect: str) -> None:
    module = surface(dialect)["neuronxcc.nki.isa" if dialect == "neuronxcc" else "nki.isa"]
    functions = {name: f for name, f in module.items() if inspect.isfunction(f)}
    assert set(functions) == set(ISA[dialect])
    for name, function in functions.items():
        documented, emulated = ISA[dialect][name].split(), list(inspect.signature(function).parameters)
        assert emulated == [p for p in documented if p in emulated], name


def test_both_layers_have_the_same_functions() -> None:
    first, second = primitives("dialect_neuronxcc"), primitives("dialect_nki")
    assert second.pop("output") == ["shape", "dtype"]  # only this dialect returns its outputs
    assert first == second


@pytest.mark.parametrize("name", BODIES)
def test_bodies_depend_on_no_dialect(name: str) -> None:
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text = ast.unparse(node)
            assert "nki.language" not in text and "nki.isa" not in text and "neuronxcc" not in text
    layer = primitives("dialect_nki")
    primitive_calls = [c for c in calls(name) if isinstance(c.func, ast.Attribute) and ast.unparse(c.func.value) == "d"]
    assert primitive_calls
    for call in primitive_calls:
        parameters = layer[call.func.attr]  # type: ignore[attr-defined]
        assert len(call.args) == len(parameters), ast.unparse(call)
        assert not call.keywords


@pytest.mark.parametrize("name", [*BODIES, "dialect_neuronxcc", "dialect_nki"])
def test_tiles_put_partitions_first(name: str) -> None:
    """No block dimension before the partitions: ``par_dim`` only ever marks the first axis."""
    for call in calls(name):
        if ast.unparse(call.func).endswith(("ndarray", "zeros")):
            shape = ast.unparse(call.args[0])
            assert "par_dim" not in shape or shape.startswith("(nl.par_dim(shape[0])")
