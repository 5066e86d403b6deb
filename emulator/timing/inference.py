"""Time to first token and time per output token of a whole model, from its dimensions alone.

Decode, and prefill of up to 128 tokens, is the simulated stream of :mod:`.decode`. Longer prefill is a closed form.
Each linear takes the longer of its tensor and its DMA time, with strips of 1024 tokens; attention takes the longest of
its matmuls, its exponentials and its vector passes. Tensor parallelism shards as transformers-neuronx does: q, k, v,
gate and up by output, o and down by input. Factors without a sharded dimension are replicated; each layer has two
all-reduces.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from neuronmm.emulator.timing.decode import Layer, Weight, decoder_step, widening_engines
from neuronmm.emulator.timing.report import report
from neuronmm.emulator.timing.simulate import simulate
from neuronmm.kernels.hardware import NeuronCore

STRIP = 1024
"""Tokens that pass the weights together in a long prefill."""
STREAM_TOKENS = 128
"""Up to this many tokens a prefill is a simulated stream."""
ALL_REDUCE_NS = 10_000.0
"""Latency of one all-reduce between cores: an assumption, because no measurement is published."""
ELEMENT = 2
"""Bytes per element: dense weights, activations and cache are bfloat16."""


@dataclass(frozen=True)
class Decoder:
    """Dimensions of a Llama-style decoder.

    Attributes:
        head: size of one attention head.
        ranks: for each layer, (linear, rank) of q, k, v, o, gate, up and down; a linear without a rank is dense.
        followers: for each layer, the linears that use another linear's A and have none of their own.
        pivots: for each layer, (linear, number of pivots on each core). Pivots are outputs of q, k, v, gate and up and
            inputs of o and down; a core neither stores nor multiplies the rank x pivots weights that belong to them.
        factors: dtype of the factors: bfloat16, float8_e4m3, or int8, which is widened on chip.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    ranks: tuple[tuple[tuple[str, int], ...], ...] = ()
    followers: tuple[tuple[str, ...], ...] = ()
    pivots: tuple[tuple[tuple[str, int], ...], ...] = ()
    factors: str = "bfloat16"

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) of a layer's linears by name."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return {
            "q": (self.hidden, queries),
            "k": (self.hidden, keys),
            "v": (self.hidden, keys),
            "o": (queries, self.hidden),
            "gate": (self.hidden, self.intermediate),
            "up": (self.hidden, self.intermediate),
            "down": (self.intermediate, self.hidden),
        }


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a batch in seconds; ``weight_bytes`` and ``cache_bytes`` are per core."""

    ttft: float
    tpot: float
    tokens_per_second: float
    weight_bytes: int
    cache_bytes: int

    def fits(self, core: NeuronCore) -> bool:
        """Return whether weights and cache fit the core's share of the HBM."""
        return self.weight_bytes + self.cache_bytes <= core.hbm_bytes


def predict(model: Decoder, core: NeuronCore, batch: int = 1, prompt: int = 128, parallel: int = 1) -> Prediction:
    """Predict generation with ``batch`` sequences (at most 128) of ``prompt`` tokens on ``parallel`` cores."""
    dense: tuple[tuple[Any, ...], ...] = ((),) * model.layers
    each = zip(model.ranks or dense, model.followers or dense, model.pivots or dense, strict=True)
    kinds = Counter(_layer(model, dict(ranks), names, dict(pivots), parallel) for ranks, names, pivots in each)
    layers = [([list(group) for group in layer], times) for layer, times in kinds.items()]
    head = Weight(model.hidden, -(-model.vocabulary // parallel))
    cache = 2 * ELEMENT * max(1, model.kv_heads // parallel) * model.head * prompt
    reduce = 2 * model.layers * ALL_REDUCE_NS * (parallel > 1)

    def stream(tokens: int, cache_bytes: int) -> float:
        return report(simulate(decoder_step(layers, head, cache_bytes, tokens, core=core), core)).latency * 1e9

    tpot = stream(batch, cache * batch) + reduce
    if batch * prompt <= STREAM_TOKENS:
        ttft = stream(batch * prompt, cache * batch) + reduce
    else:
        ttft = _prefill(model, layers, head, core, batch, prompt, parallel) + reduce
    weights = sum(times * weight.bytes for layer, times in layers for group in layer for weight in group)
    return Prediction(
        ttft=ttft / 1e9,
        tpot=tpot / 1e9,
        tokens_per_second=batch / tpot * 1e9,
        weight_bytes=weights + head.bytes,
        cache_bytes=cache * batch * model.layers,
    )


def _layer(
    model: Decoder, ranks: dict[str, int], followers: tuple[str, ...], pivots: dict[str, int], parallel: int
) -> tuple[tuple[Weight, ...], ...]:
    """Return the linears of one layer on one core, grouped as in :data:`Layer`, hashable."""
    sizes = model.linears()

    def factor(rows: int, columns: int) -> Weight:
        return Weight(rows, columns, model.factors)

    def shard(name: str) -> tuple[int, int]:
        rows, columns = sizes[name]
        stored = pivots.get(name, 0)
        by_input = name in ("o", "down")
        return (-(-rows // parallel) - stored, columns) if by_input else (rows, -(-columns // parallel) - stored)

    groups: list[tuple[Weight, ...]] = []
    for names in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        firsts = tuple(factor(shard(n)[0], ranks[n]) for n in names if n in ranks and n not in followers)
        seconds = tuple(factor(ranks[n], shard(n)[1]) if n in ranks else Weight(*shard(n)) for n in names)
        groups += [firsts] if firsts else []
        groups.append(seconds)
    if any(n in ranks for n in ("q", "k", "v")):  # attention follows the first group, so q, k, v must be one group
        groups[:2] = [groups[0] + groups[1]]
    return tuple(groups)


def _prefill(
    model: Decoder, layers: list[tuple[Layer, int]], head: Weight, core: NeuronCore, batch: int, prompt: int,
    parallel: int,
) -> float:  # fmt: skip
    """Return the nanoseconds of batch x prompt tokens; only the last token of each sequence reaches the head."""
    linears = sum(
        times * _linear(weight, batch * prompt, core) for layer, times in layers for group in layer for weight in group
    )
    heads = -(-model.heads // parallel)
    attention = model.layers * batch * _attention(heads, model.head, prompt, core)
    return linears + attention + head.bytes / core.dma_rate


def _linear(weight: Weight, tokens: int, core: NeuronCore) -> float:
    """Return the longest of tensor, DMA and widening time in ns.

    Each strip reads the weights again, and widens them if they are int8; activations move once.
    """
    rows, columns = weight.rows, weight.columns
    blocks, tail = divmod(tokens, core.moving_columns)
    cycles = blocks * (core.moving_columns + core.matmul_overhead_cycles)
    cycles += (max(tail, core.matmul_min_cycles) + core.matmul_overhead_cycles) * (tail > 0)
    tensor = -(-rows // 128) * -(-columns // 128) * cycles / core.tensor_ghz
    strips = -(-tokens // STRIP)
    traffic = strips * weight.bytes + ELEMENT * tokens * (rows + columns)
    widening = 0.0
    if weight.dtype == "int8":
        speed = sum(core.clocks[engine.value] for engine in widening_engines(core))
        widening = strips * rows * columns / 128 / speed
    return max(tensor, widening, traffic / (core.dma_rate * core.row_efficiency(4096)))


def _attention(heads: int, head: int, length: int, core: NeuronCore) -> float:
    """Return the ns of causal attention of one sequence in one layer.

    Per score: two matmuls, one exponential, two vector passes; the slowest of the three engines counts.
    """
    scores = heads * length * (length + 1) / 2
    tiles = scores / (128 * core.moving_columns)
    matmuls = 2 * tiles * -(-head // 128) * (core.moving_columns + core.matmul_overhead_cycles) / core.tensor_ghz
    return max(matmuls, scores / 128 / core.scalar_ghz, 2 * scores / 128 / core.vector_ghz)
