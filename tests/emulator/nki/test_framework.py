"""``FrameworkKernel``: a host gets a config from shapes, and the kernel of that config runs on arrays."""

from __future__ import annotations

import importlib
import json
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from neuronmm.emulator.nki import NkiError, execute, nki_modules
from neuronmm.kernels.nki.layout import pack

with nki_modules():
    nki = importlib.import_module("neuronxcc.nki")
    nl = importlib.import_module("neuronxcc.nki.language")
    nisa = importlib.import_module("neuronxcc.nki.isa")
    attention = importlib.import_module("neuronxcc.nki.kernels.attention")
    entry = importlib.import_module("neuronmm.kernels.nki.entry_neuronxcc")


class HostTensor(NamedTuple):
    """A tensor of a graph builder: a shape, and a dtype in the host's spelling."""

    sizes: tuple[int, ...]
    element: str = "F32"


class HostKernel(nki.FrameworkKernel):  # type: ignore[name-defined, misc]
    def is_framework_tensor(self, value: Any) -> bool:
        return isinstance(value, HostTensor)

    def map_framework_tensor(self, value: HostTensor) -> tuple[tuple[int, ...], str]:
        return value.sizes, value.element

    def translate_to_neuron_dtype(self, dtype: str) -> Any:
        return {"F32": np.dtype(np.float32), "BF16": nl.bfloat16}[dtype]


def scaled_copy(factor: float) -> Any:
    def kernel(x: Any, y: Any) -> None:
        row = nl.program_id(0)
        nl.store(y[row * 4 : row * 4 + 4, 0:8], value=nl.multiply(nl.load(x[row * 4 : row * 4 + 4, 0:8]), factor))

    return kernel


def config(function: Any, *tensors: HostTensor, grid: tuple[int, ...] = ()) -> tuple[str, list[str], list[str]]:
    return HostKernel(func_name=function.__name__, func=function, grid=grid).dump_config(*tensors)


def test_a_kernel_runs_on_its_launch_grid_and_keeps_its_parameter_names() -> None:
    text, inputs, outputs = config(scaled_copy(3.0), HostTensor((12, 8)), HostTensor((12, 8)), grid=(3,))
    assert (inputs, outputs) == (["x"], ["y"]) and json.loads(text)["grid"] == [3]
    x = np.arange(96, dtype=np.float32).reshape(12, 8)
    (y,) = execute(text.encode(), [x])
    assert np.array_equal(y, 3 * x)


def test_configs_differ_if_and_only_if_the_kernels_differ() -> None:
    shapes = (HostTensor((4, 8)), HostTensor((4, 8)))
    texts = [config(scaled_copy(factor), *shapes)[0] for factor in (2.0, 2.0, 5.0)]
    assert texts[0] == texts[1] != texts[2]
    x = np.ones((4, 8), np.float32)
    assert [execute(text, [x])[0][0, 0] for text in texts] == [2, 2, 5]
    assert config(scaled_copy(2.0), *(HostTensor((4, 8), "BF16"),) * 2)[0] != texts[0]


def test_constants_that_only_look_alike_make_two_kernels() -> None:
    """Defaults of keywords count, and elements that the text of an array leaves out."""

    def named(number: float) -> Any:
        def kernel(x: Any, y: Any, *, factor: float = number) -> None:
            nl.store(y[0:4, 0:8], value=nl.multiply(nl.load(x[0:4, 0:8]), factor))

        return kernel

    def tabled(table: Any) -> Any:
        def kernel(x: Any, y: Any) -> None:
            nl.store(y[0:4, 0:8], value=nl.multiply(nl.load(x[0:4, 0:8]), float(table[64, 0])))

        return kernel

    shapes, x = (HostTensor((4, 8)), HostTensor((4, 8))), np.ones((4, 8), np.float32)
    tables = [np.zeros((128, 64), np.float32) for _ in range(3)]
    tables[1][64], tables[2][64] = 7, 7
    for kernels in (
        [named(2.0), named(7.0), named(7.0)],
        [tabled(table) for table in tables],
        [tabled(torch.tensor(table)) for table in tables],
    ):
        texts = [config(kernel, *shapes)[0] for kernel in kernels]
        assert texts[0] != texts[1] == texts[2]
        assert execute(texts[1], [x])[0][0, 0] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_host_runs_a_low_rank_kernel(dtype: torch.dtype) -> None:
    A, B, x = (torch.randn(s, dtype=dtype) for s in ((40, 200), (150, 40), (200, 7)))
    element, tensors = ("BF16" if dtype is torch.bfloat16 else "F32"), [x, pack(A), pack(B)]
    shapes = [HostTensor(tuple(t.shape), element) for t in tensors]
    text, inputs, outputs = config(entry.low_rank_matmul(40), *shapes, HostTensor((150, 7), element))
    assert (inputs, outputs) == (["x", "a", "b"], ["y"])
    array_dtype = ml_dtypes.bfloat16 if dtype is torch.bfloat16 else np.float32
    (y,) = execute(text, [t.float().numpy().astype(array_dtype) for t in tensors])
    expected = B.float() @ (A.float() @ x.float())
    assert np.allclose(y.astype(np.float32), expected, rtol=2e-2, atol=1e-2 * expected.abs().max())


def test_a_broken_rule_raises_while_the_graph_is_built() -> None:
    def kernel(x: Any, y: Any) -> None:
        nl.store(y, value=nl.load(x))

    with pytest.raises(NkiError, match="too many partitions"):
        config(kernel, HostTensor((129, 8)), HostTensor((129, 8)))


def test_wrong_tensors_and_unknown_configs_are_refused() -> None:
    def writes_its_first_argument(x: Any, y: Any) -> None:
        nl.store(x, value=nl.load(y))

    with pytest.raises(TypeError, match="writes_its_first_argument: the tensors it writes must be its last arguments"):
        config(writes_its_first_argument, HostTensor((4, 8)), HostTensor((4, 8)))
    with pytest.raises(TypeError, match="argument 1 is a float, not a tensor"):
        config(writes_its_first_argument, HostTensor((4, 8)), 2.0)  # type: ignore[arg-type]
    text = config(scaled_copy(2.0), HostTensor((4, 8)), HostTensor((4, 8)))[0]
    with pytest.raises(ValueError, match="it was built for"):
        execute(text, [np.ones((4, 9), np.float32)])
    with pytest.raises(KeyError, match="built in another process"):
        execute(text.replace(json.loads(text)["key"], "0" * 32), [np.ones((4, 8), np.float32)])


def test_aws_attention_kernels_import_and_refuse_to_run() -> None:
    with pytest.raises(NkiError, match="flash_fwd is not emulated"):
        config(attention.flash_fwd, HostTensor((4, 8)), HostTensor((4, 8)))
