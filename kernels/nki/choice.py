"""What the entries of both dialects look up when a kernel is called: its block sizes, by the tiling solver."""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.hardware import NeuronCore
from neuronmm.kernels.nki.blocks import Blocks, Options
from neuronmm.kernels.nki.low_rank_mlp import Ranks
from neuronmm.kernels.ops import KernelError
from neuronmm.kernels.tiling import MlpProblem, Problem, solve


def tokens_first(layout: str) -> bool:
    """Whether activations of this layout are [tokens, features].

    Raises:
        KernelError: the layout is neither "HSB" nor "BSH".
    """
    if layout not in ("HSB", "BSH"):
        raise KernelError(f'layout {layout!r}: must be "HSB" ([features, tokens]) or "BSH" ([tokens, features])')
    return layout == "BSH"


def linear_blocks(x: Any, rank: int, y: Any, options: Options, core: NeuronCore) -> Blocks:
    """Block sizes for ``y = B (A x)`` on these tensors."""
    inputs, tokens = _sizes(x, options)
    flags = options.epsilon > 0, options.adds, options.tokens_first
    return solve(Problem(tokens, inputs, rank, _sizes(y, options)[0], _dtype(x), *flags), core).blocks


def mlp_blocks(x: Any, ranks: Ranks, shared: bool, options: Options, core: NeuronCore) -> Blocks:
    """Block sizes for the whole MLP on this input."""
    hidden, tokens = _sizes(x, options)
    sizes = tokens, hidden, ranks.intermediate, ranks.gate, ranks.up, ranks.down
    flags = options.epsilon > 0, options.adds, options.tokens_first
    return solve(MlpProblem(*sizes, _dtype(x), shared, *flags), core).blocks


def _sizes(x: Any, options: Options) -> tuple[int, int]:
    """Features and tokens of an activation."""
    tokens, features = (x.shape[0], x.shape[1]) if options.tokens_first else (x.shape[1], x.shape[0])
    return features, tokens


def _dtype(x: Any) -> str:
    return "float32" if "32" in str(x.dtype) else "bfloat16"
