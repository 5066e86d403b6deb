"""The predicted time of a graph: streamed weights, repeated layers, kernels and collectives."""

from __future__ import annotations

from typing import Any

import pytest

from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.pyhlo import HloScribe, HloShape
from neuronmm.emulator.timing.graph import predict_graph
from neuronmm.emulator.timing.inference import ALL_REDUCE_NS
from neuronmm.kernels.hardware import TRN1, TRN2

with nki_modules():
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl


def layers(count: int, size: int, tokens: int = 1, dtype: str = "bf16", different: bool = False, ranks: int = 1) -> Any:
    """Return a graph of ``count`` layers y = silu(W x); with ``different`` no two layers have the same sizes."""

    def graph(scribe: Any) -> Any:
        kind = getattr(scribe, dtype)
        x = kind[size, tokens].Parameter(parameter_number=0)
        x = kind[x.sizes].Negate(x)
        for number in range(count):
            wide = size + 128 * number * different
            w = kind[x.sizes[0], wide].Parameter(parameter_number=1 + number)
            w = w.dtype[w.sizes].CustomCall(w, custom_call_target="AwsNeuronTransferWithStaticRing")
            dims = {"lhs_contracting_dimensions": [0], "rhs_contracting_dimensions": [0]}
            x = kind[wide, tokens].Dot(w, x, dot_dimension_numbers=dims)
            x = kind[x.sizes].Multiply(x, kind[x.sizes].Logistic(x))
            if ranks > 1:
                groups = [list(range(ranks))]
                x = kind[x.sizes].AllReduce(x, replica_groups=groups, to_apply=addition(kind))
        return x

    return HloScribe()(graph).module_proto


def addition(dtype: Any) -> Any:
    return lambda scribe: dtype.Add(dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1))


def test_decode_is_bound_by_the_weights() -> None:
    time = predict_graph(layers(8, 2048), TRN1)
    assert time.hbm_read == pytest.approx(8 * 2048 * 2048 * 2, rel=1e-3)
    limit = time.hbm_read / (TRN1.dma_rate * 1e9)
    assert limit < time.seconds < 1.35 * limit
    assert time.seconds == time.stream and time.kernels == time.collectives == 0


def test_float32_weights_take_twice_the_bytes() -> None:
    narrow, wide = (predict_graph(layers(4, 1024, dtype=d), TRN1) for d in ("bf16", "f32"))
    assert wide.hbm_read == pytest.approx(2 * narrow.hbm_read, rel=1e-3) and wide.seconds > 1.8 * narrow.seconds


def test_repeated_layers_cost_a_constant_time_per_layer() -> None:
    two, four, forty = (predict_graph(layers(n, 1024), TRN1).seconds for n in (2, 4, 40))
    assert forty == pytest.approx(four + 36 * (four - two) / 2, rel=0.05)
    assert predict_graph(layers(6, 512, different=True), TRN1).seconds > predict_graph(layers(6, 512), TRN1).seconds


def test_many_tokens_cost_tensor_time() -> None:
    one, many = predict_graph(layers(2, 1024), TRN1), predict_graph(layers(2, 1024, tokens=2048), TRN1)
    flops = 2 * 2 * 1024 * 1024 * 2048
    assert many.seconds > flops / TRN1.peak_flops("bfloat16") > one.seconds


def test_collectives_are_added() -> None:
    time = predict_graph(layers(5, 512, ranks=2), TRN1)
    assert time.collectives == pytest.approx(5 * ALL_REDUCE_NS / 1e9)
    assert time.stream == pytest.approx(predict_graph(layers(5, 512), TRN1).stream, rel=1e-6)


def time_of(graph: Any) -> Any:
    return predict_graph(HloScribe()(graph).module_proto, TRN1)


def attention(heads: int, length: int, dtype: str = "bf16") -> Any:
    """Return the time of the scores of one query over a cache, a parameter that an output is aliased to."""

    def graph(scribe: Any) -> Any:
        kind = getattr(scribe, dtype)
        query = kind[heads, 128, 1].Parameter(parameter_number=0)
        cache = kind[heads, 128, length].Parameter(parameter_number=1)
        dims = {
            "lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0],
            "lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [1],
        }  # fmt: skip
        kept = kind[cache.sizes].Reshape(cache)
        kept.set_alias_to(cache, must=True)
        scores = kind[heads, length, 1].Dot(cache, kind[query.sizes].Negate(query), dot_dimension_numbers=dims)
        return scribe.tuple(kind[cache.sizes], kind[scores.sizes]).Tuple(kept, scores)

    return time_of(graph)


@pytest.mark.parametrize("heads", [1, 8])
def test_attention_reads_its_cache_once(heads: int) -> None:
    short, long, wide = attention(heads, 1024), attention(heads, 4096), attention(heads, 1024, "f32")
    assert short.hbm_read == heads * 128 * 1024 * 2
    assert long.hbm_read == 4 * short.hbm_read and wide.hbm_read == 2 * short.hbm_read
    assert long.seconds > wide.seconds > short.seconds > short.hbm_read / (TRN1.dma_rate * 1e9)


def test_a_gather_loads_its_result_and_an_update_stores_its_own_bytes() -> None:
    def lookup(scribe: Any, count: int) -> Any:
        table, rows = (
            scribe.bf16[4096, 2048].Parameter(parameter_number=0),
            scribe.s32[count].Parameter(parameter_number=1),
        )
        numbers = {"offset_dims": [1], "collapsed_slice_dims": [0], "start_index_map": [0], "index_vector_dim": 1}
        options = {"gather_dimension_numbers": numbers, "gather_slice_sizes": [1, 2048]}
        return scribe.bf16[count, 2048].Gather(table, rows, **options)

    def update(scribe: Any, count: int) -> Any:
        cache = scribe.bf16[4096, 2048].Parameter(parameter_number=0)
        new = scribe.bf16[count, 2048].Parameter(parameter_number=1)
        starts = [scribe.s32.Parameter(parameter_number=n) for n in (2, 3)]
        return scribe.bf16[4096, 2048].DynamicUpdateSlice(cache, new, *starts)

    few, many = (time_of(lambda s, n=n: lookup(s, n)) for n in (16, 1024))
    assert (few.hbm_read, many.hbm_read) == (16 * 2048 * 2, 1024 * 2048 * 2) and many.seconds > few.seconds
    few, many = (time_of(lambda s, n=n: update(s, n)) for n in (16, 1024))
    assert few.hbm_read == many.hbm_read == 0
    assert many.seconds > 1024 * 2048 * 2 / (TRN1.dma_rate * 1e9) > few.seconds > 0


def test_a_softmax_and_a_norm_take_four_passes() -> None:
    def call(scribe: Any, target: str) -> Any:
        x = scribe.f32[4096, 4096].Parameter(parameter_number=0)
        weight, epsilon = scribe.f32[4096].Parameter(parameter_number=1), scribe.f32.Parameter(parameter_number=2)
        operands = (x, weight, epsilon) if target == "AwsNeuronRmsNorm" else (x,)
        config = {"custom_call_target": target, "backend_config": b"1"}
        return scribe.f32[4096, 4096].CustomCall(*operands, **config)

    names = ("AwsNeuronGeluApprxTanh", "AwsNeuronSoftmax", "AwsNeuronRmsNorm")
    one, softmax, norm = (time_of(lambda s, n=n: call(s, n)).seconds for n in names)
    assert softmax == norm == pytest.approx(4 * one, rel=0.01)


def test_a_cores_number_costs_nothing() -> None:
    def graph(scribe: Any, numbered: bool) -> Any:
        x = scribe.f32[128, 128].Parameter(parameter_number=0)
        y = scribe.f32[128, 128].Multiply(x, x)
        if not numbered:
            return y
        number = scribe.f32.Convert(scribe.u32.ReplicaId())
        return scribe.f32[128, 128].Multiply(y, scribe.f32[128, 128].Broadcast(number, dimensions=[]))

    plain, numbered = (predict_graph(HloScribe()(lambda s, n=n: graph(s, n)).module_proto, TRN1) for n in (False, True))
    assert numbered.collectives == plain.collectives == 0 and numbered.seconds > plain.seconds


def test_a_faster_core_is_faster() -> None:
    assert predict_graph(layers(4, 2048), TRN2).seconds < predict_graph(layers(4, 2048), TRN1).seconds


class HostKernel(nki.FrameworkKernel):  # type: ignore[name-defined, misc]
    def is_framework_tensor(self, value: Any) -> bool:
        return isinstance(value, HloShape)

    def map_framework_tensor(self, value: Any) -> tuple[tuple[int, ...], str]:
        return value.sizes, "float32"

    def translate_to_neuron_dtype(self, dtype: str) -> str:
        return dtype


def triple(x: Any, y: Any) -> None:
    nl.store(y, value=nl.multiply(nl.load(x), 3.0))


def test_kernels_are_simulated_and_added() -> None:
    def graph(scribe: Any, count: int) -> Any:
        x = scribe.f32[128, 64].Parameter(parameter_number=0)
        for _ in range(count):
            config, _, _ = HostKernel(func_name="triple", func=triple).dump_config(x, x.dtype[x.sizes])
            target = {"custom_call_target": "AwsNeuronCustomNativeKernel", "backend_config": config.encode()}
            x = scribe.f32[128, 64].CustomCall(x, **target)
        return x

    one, three = (predict_graph(HloScribe()(lambda s, n=n: graph(s, n)).module_proto, TRN1) for n in (1, 3))
    assert one.kernels > 0 and one.stream == 0
    assert three.seconds == pytest.approx(3 * one.seconds) and three.hbm_read == 3 * one.hbm_read
