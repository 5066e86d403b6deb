"""The public kernels that ``nki_corpus.py`` runs: file, name, arguments, and NumPy's result for these arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Example = tuple[tuple[Any, ...], np.ndarray]
"""Arguments of a kernel and the expected result in float64."""


class Case(NamedTuple):
    """The function ``kernel`` of every file named ``file``; ``make`` returns its arguments and the expected result.

    ``tolerance`` is relative to the largest element. ``grid`` is the launch grid. A ``bare`` function has no
    ``nki.jit``.
    """

    file: str
    kernel: str
    make: Callable[[], Example]
    tolerance: float = 1e-4
    grid: tuple[int, ...] = ()
    bare: bool = False


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def as_float64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def matmul(k: int, m: int, n: int) -> Example:
    a, b = normal(k, m), normal(k, n)
    return (a, b), as_float64(a).T @ as_float64(b)


def addition() -> Example:
    a, b = normal(256, 1024), normal(256, 1024)[::-1].copy()
    return (a, b), as_float64(a) + as_float64(b)


def softmax_of(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(tokens: int) -> Example:
    """q, k, v are [features, tokens]."""
    q, k, v = (normal(128, tokens) / 8 + i / 8 for i in range(3))
    return (q, k, v), softmax_of(as_float64(q).T @ as_float64(k)) @ as_float64(v).T


def scaled_attention() -> Example:
    """q, k, v are [tokens, features], and the kernel scales by 1/8."""
    q, k, v = (normal(4096, 64) + i / 8 for i in range(3))
    return (q, k, v), softmax_of(as_float64(q) @ as_float64(k).T / 8) @ as_float64(v)


def softmax() -> Example:
    x = normal(200, 300)
    return (x,), softmax_of(as_float64(x))


def rmsnorm() -> Example:
    x, g = normal(250, 512), normal(512)
    return (x, g), as_float64(x) / np.sqrt(np.square(as_float64(x)).mean(axis=1, keepdims=True) + 1e-5) * g


def layernorm() -> Example:
    x, gamma, beta = normal(300, 1024), normal(1024), normal(1024)[::-1].copy()
    y = as_float64(x) - as_float64(x).mean(axis=1, keepdims=True)
    return (x, 1e-5, gamma, beta), y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + 1e-5) * gamma + beta


def rotary() -> Example:
    q, k, cos, sin = normal(1, 2, 200, 64), normal(1, 2, 200, 64) + 1, normal(1, 200, 64), normal(1, 200, 64) - 1

    def rotate(x: np.ndarray) -> np.ndarray:
        half = np.concatenate([-x[..., 32:], x[..., :32]], axis=-1)
        return as_float64(x) * cos[:, None] + as_float64(half) * sin[:, None]

    return (q, k, cos, sin), np.stack([rotate(q), rotate(k)])


def average_pool() -> Example:
    x = normal(64, 8, 12)
    return (x, 2), as_float64(x).reshape(64, 4, 2, 6, 2).mean(axis=(2, 4))


def transposed_rows() -> Example:
    x = normal(2, 12)
    return (x, (3, 4)), as_float64(x).reshape(2, 3, 4).transpose(0, 2, 1).reshape(2, 12)


def selective_scan() -> Example:
    """A selective scan: 256 channels, 4 states, 1024 tokens."""
    delta, u, a = abs(normal(1, 256, 1024)), normal(1, 256, 1024), -abs(normal(256, 4))
    b, c = normal(1, 4, 1024), normal(1, 4, 1024) + 1
    state, result = np.zeros((1, 256, 4)), np.zeros(u.shape)
    for t in range(u.shape[2]):
        decay = np.exp(as_float64(delta[:, :, t, None]) * a)
        state = state * decay + as_float64(delta * u)[:, :, t, None] * b[:, None, :, t]
        result[:, :, t] = (state * c[:, None, :, t]).sum(axis=2)
    return (delta, u, a, b, c), result


def causal_attention() -> Example:
    """Causal attention of one head: q, k [1, 1, features, tokens], v [1, 1, tokens, features], no dropout."""
    q, k, v = (normal(2048, 128) / 2 + i / 8 for i in range(3))
    scores = as_float64(q) @ as_float64(k).T / np.sqrt(128)
    masked = np.where(np.tri(2048, dtype=bool), scores, -np.inf)
    return (q.T[None, None], k.T[None, None], v[None, None], None), (softmax_of(masked) @ as_float64(v))[None, None]


def batched_attention() -> Example:
    q, k, v = normal(1, 128, 512), normal(1, 128, 512), normal(1, 512, 128)
    return (q, k, v), softmax_of(as_float64(q[0]).T @ as_float64(k[0]) / 8)[None] @ as_float64(v)


def rmsnorm_matmul() -> Example:
    x, w = normal(1, 128, 512), normal(512, 512)
    return (x, w), as_float64(x) / np.sqrt(np.square(as_float64(x)).mean(axis=2, keepdims=True)) @ as_float64(w)


def nearest_resize() -> Example:
    x = normal(2, 30, 20, 64)
    rows, columns = np.arange(59) * 30 // 59, np.arange(38) * 20 // 38
    return (x, (2, 59, 38, 64)), as_float64(x)[:, rows][:, :, columns]


def max_pool() -> Example:
    x = normal(150, 20)
    windows = np.lib.stride_tricks.sliding_window_view(as_float64(x), (3, 3))
    return (x, 3), windows.max(axis=(2, 3))


def interpolation(mode: str, *sizes: int) -> Example:
    x = normal(2, 64, *sizes)
    y = torch.nn.functional.interpolate(torch.from_numpy(as_float64(x)), scale_factor=2, mode=mode).numpy()
    return (x,), y.reshape(128, *y.shape[2:])


MATMUL, ATTENTION = "matrix_multiplication_nki_kernels.py", "attention_kernels.py"
MAMBA, LAYERNORM = "mamba_nki_kernels.py", "layernorm_nki_kernel.py"
CASES = (
    Case(MATMUL, "nki_matmul_basic_", lambda: matmul(128, 64, 512)),
    Case(MATMUL, "nki_matmul_tiled_", lambda: matmul(256, 256, 1024)),
    Case(MATMUL, "nki_matmul_hoist_load_", lambda: matmul(256, 256, 1024)),
    Case(MATMUL, "nki_matmul_block_free_dimension_", lambda: matmul(256, 512, 1024)),
    Case(MATMUL, "nki_matmul_fully_optimized_", lambda: matmul(1024, 2048, 1024)),
    Case("tensor_addition_nki_kernels.py", "nki_tensor_add", addition),
    Case("spmd_tensor_addition_nki_kernels.py", "nki_tensor_add", addition),
    Case("spmd_multiple_nc_tensor_addition_nki_kernels.py", "nki_tensor_add_nc2", addition),
    Case("transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_", transposed_rows),
    Case("average_pool2d_nki_kernels.py", "tensor_avgpool_kernel", average_pool),
    Case("softmax_nki_kernels.py", "nki_softmax_kernel", softmax),
    Case("rmsnorm_nki_kernels.py", "nki_rmsnorm_kernel", rmsnorm),
    Case(LAYERNORM, "nki_layernorm_kernel_v1", layernorm),
    Case(LAYERNORM, "nki_layernorm_kernel_v2", layernorm),
    Case("rotary_nki_kernels.py", "nki_apply_rotary_embedding", rotary, grid=(1, 2)),
    *(Case(MAMBA, f"mamba_v{i}", selective_scan) for i in (1, 2, 3)),
    Case("sd_attention_nki_kernels.py", "fused_self_attn_for_SD_small_head_size", scaled_attention, 2e-2),
    *(Case(ATTENTION, f"attn_fwd_v{i}", lambda: attention(128)) for i in (1, 2)),
    *(Case(ATTENTION, f"attn_fwd_v{i}", lambda: attention(512), 2e-2) for i in (3, 4, 5, 6, 7, 8, "8a", 9, 10, 11)),
    Case("attention.py", "flash_fwd", causal_attention, 2e-2, grid=(1, 1)),
    Case("vision.py", "resize_nearest_fixed_dma_kernel", nearest_resize),
    Case("allocated_attention.py", "allocated_fused_self_attn_for_SD_small_head_size", batched_attention),
    Case("allocated_fused_linear.py", "allocated_fused_rms_norm_qkv", rmsnorm_matmul),
    Case("matmul.py", "matmul", lambda: matmul(1024, 512, 2048), bare=True),
    Case("maxpooling.py", "max_pooling_2d_stride_1", max_pool),
    Case("interpolate_bilinear_fwd.py", "interpolate_bilinear_2x_fwd", lambda: interpolation("bilinear", 16, 12)),
    Case("interpolate_trilinear_fwd.py", "interpolate_trilinear_2x_fwd", lambda: interpolation("trilinear", 8, 6, 4)),
    Case("pipelined_attention.py", "flash_fwd", lambda: attention(512)),
    *(
        Case("mx_kernels.py", f"kernel_{name}", lambda count=count: ((normal(128, 128),) * count, normal(128, 128)))
        for name, count in (
            ("offline_quantized_mx_matmul", 5),
            ("on_device_quantize_matmul_mx", 5),
            ("copy_strided_quantize_matmul_mx", 3),
        )
    ),
    Case("nki_tensor_add_example.py", "nki_tensor_add", addition),
)
"""All cases; the report on a checkout leaves out the cases that it lacks."""
