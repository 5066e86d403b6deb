"""The public kernels that ``nki_corpus.py`` runs: their file and name, arguments, and what NumPy gives for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Made = tuple[tuple[Any, ...], np.ndarray]


class Case(NamedTuple):
    """``kernel`` of any ``file`` of that name; ``make`` gives its arguments and the expected result in float64.

    ``tolerance`` is relative to the largest element; ``bare`` functions carry no ``nki.jit``.
    """

    file: str
    kernel: str
    make: Callable[[], Made]
    tolerance: float = 1e-4
    grid: tuple[int, ...] = ()
    bare: bool = False


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def product(k: int, m: int, n: int) -> Made:
    a, b = drawn(k, m), drawn(k, n)
    return (a, b), wide(a).T @ wide(b)


def addition() -> Made:
    a, b = drawn(256, 1024), drawn(256, 1024)[::-1].copy()
    return (a, b), wide(a) + wide(b)


def weights(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(tokens: int) -> Made:
    """q, k, v are [features, tokens]."""
    q, k, v = (drawn(128, tokens) / 8 + i / 8 for i in range(3))
    return (q, k, v), weights(wide(q).T @ wide(k)) @ wide(v).T


def scaled_attention() -> Made:
    """q, k, v are [tokens, features], and the kernel scales by 1/8."""
    q, k, v = (drawn(4096, 64) + i / 8 for i in range(3))
    return (q, k, v), weights(wide(q) @ wide(k).T / 8) @ wide(v)


def softmax() -> Made:
    x = drawn(200, 300)
    return (x,), weights(wide(x))


def rmsnorm() -> Made:
    x, g = drawn(250, 512), drawn(512)
    return (x, g), wide(x) / np.sqrt(np.square(wide(x)).mean(axis=1, keepdims=True) + 1e-5) * g


def layernorm() -> Made:
    x, gamma, beta = drawn(300, 1024), drawn(1024), drawn(1024)[::-1].copy()
    y = wide(x) - wide(x).mean(axis=1, keepdims=True)
    return (x, 1e-5, gamma, beta), y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + 1e-5) * gamma + beta


def rotary() -> Made:
    q, k, cos, sin = drawn(1, 2, 200, 64), drawn(1, 2, 200, 64) + 1, drawn(1, 200, 64), drawn(1, 200, 64) - 1

    def turned(x: np.ndarray) -> np.ndarray:
        half = np.concatenate([-x[..., 32:], x[..., :32]], axis=-1)
        return wide(x) * cos[:, None] + wide(half) * sin[:, None]

    return (q, k, cos, sin), np.stack([turned(q), turned(k)])


def pooled() -> Made:
    x = drawn(64, 8, 12)
    return (x, 2), wide(x).reshape(64, 4, 2, 6, 2).mean(axis=(2, 4))


def turned_rows() -> Made:
    x = drawn(2, 12)
    return (x, (3, 4)), wide(x).reshape(2, 3, 4).transpose(0, 2, 1).reshape(2, 12)


def mamba() -> Made:
    """A selective scan: 256 channels, 4 states, 1024 tokens."""
    delta, u, a = abs(drawn(1, 256, 1024)), drawn(1, 256, 1024), -abs(drawn(256, 4))
    b, c = drawn(1, 4, 1024), drawn(1, 4, 1024) + 1
    state, result = np.zeros((1, 256, 4)), np.zeros(u.shape)
    for t in range(u.shape[2]):
        state = state * np.exp(wide(delta[:, :, t, None]) * a) + wide(delta * u)[:, :, t, None] * b[:, None, :, t]
        result[:, :, t] = (state * c[:, None, :, t]).sum(axis=2)
    return (delta, u, a, b, c), result


def flash() -> Made:
    """Causal attention of one head: q, k [1, 1, features, tokens], v [1, 1, tokens, features], no dropout."""
    q, k, v = (drawn(2048, 128) / 2 + i / 8 for i in range(3))
    scores = wide(q) @ wide(k).T / np.sqrt(128)
    masked = np.where(np.tri(2048, dtype=bool), scores, -np.inf)
    return (q.T[None, None], k.T[None, None], v[None, None], None), (weights(masked) @ wide(v))[None, None]


def heads() -> Made:
    q, k, v = drawn(1, 128, 512), drawn(1, 128, 512), drawn(1, 512, 128)
    return (q, k, v), weights(wide(q[0]).T @ wide(k[0]) / 8)[None] @ wide(v)


def normed_product() -> Made:
    x, w = drawn(1, 128, 512), drawn(512, 512)
    return (x, w), wide(x) / np.sqrt(np.square(wide(x)).mean(axis=2, keepdims=True)) @ wide(w)


def nearest() -> Made:
    x = drawn(2, 30, 20, 64)
    rows, columns = np.arange(59) * 30 // 59, np.arange(38) * 20 // 38
    return (x, (2, 59, 38, 64)), wide(x)[:, rows][:, :, columns]


def largest() -> Made:
    x = drawn(150, 20)
    windows = np.lib.stride_tricks.sliding_window_view(wide(x), (3, 3))
    return (x, 3), windows.max(axis=(2, 3))


def enlarged(mode: str, *sizes: int) -> Made:
    x = drawn(2, 64, *sizes)
    y = torch.nn.functional.interpolate(torch.from_numpy(wide(x)), scale_factor=2, mode=mode).numpy()
    return (x,), y.reshape(128, *y.shape[2:])


MATMUL, ATTENTION = "matrix_multiplication_nki_kernels.py", "attention_kernels.py"
MAMBA, LAYERNORM = "mamba_nki_kernels.py", "layernorm_nki_kernel.py"
CASES = (
    Case(MATMUL, "nki_matmul_basic_", lambda: product(128, 64, 512)),
    Case(MATMUL, "nki_matmul_tiled_", lambda: product(256, 256, 1024)),
    Case(MATMUL, "nki_matmul_hoist_load_", lambda: product(256, 256, 1024)),
    Case(MATMUL, "nki_matmul_block_free_dimension_", lambda: product(256, 512, 1024)),
    Case(MATMUL, "nki_matmul_fully_optimized_", lambda: product(1024, 2048, 1024)),
    Case("tensor_addition_nki_kernels.py", "nki_tensor_add", addition),
    Case("spmd_tensor_addition_nki_kernels.py", "nki_tensor_add", addition),
    Case("spmd_multiple_nc_tensor_addition_nki_kernels.py", "nki_tensor_add_nc2", addition),
    Case("transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_", turned_rows),
    Case("average_pool2d_nki_kernels.py", "tensor_avgpool_kernel", pooled),
    Case("softmax_nki_kernels.py", "nki_softmax_kernel", softmax),
    Case("rmsnorm_nki_kernels.py", "nki_rmsnorm_kernel", rmsnorm),
    Case(LAYERNORM, "nki_layernorm_kernel_v1", layernorm),
    Case(LAYERNORM, "nki_layernorm_kernel_v2", layernorm),
    Case("rotary_nki_kernels.py", "nki_apply_rotary_embedding", rotary, grid=(1, 2)),
    *(Case(MAMBA, f"mamba_v{i}", mamba) for i in (1, 2, 3)),
    Case("sd_attention_nki_kernels.py", "fused_self_attn_for_SD_small_head_size", scaled_attention, 2e-2),
    *(Case(ATTENTION, f"attn_fwd_v{i}", lambda: attention(128)) for i in (1, 2)),
    *(Case(ATTENTION, f"attn_fwd_v{i}", lambda: attention(512), 2e-2) for i in (3, 4, 5, 6, 7, 8, "8a", 9, 10, 11)),
    Case("attention.py", "flash_fwd", flash, 2e-2, grid=(1, 1)),
    Case("vision.py", "resize_nearest_fixed_dma_kernel", nearest),
    Case("allocated_attention.py", "allocated_fused_self_attn_for_SD_small_head_size", heads),
    Case("allocated_fused_linear.py", "allocated_fused_rms_norm_qkv", normed_product),
    Case("matmul.py", "matmul", lambda: product(1024, 512, 2048), bare=True),
    Case("maxpooling.py", "max_pooling_2d_stride_1", largest),
    Case("interpolate_bilinear_fwd.py", "interpolate_bilinear_2x_fwd", lambda: enlarged("bilinear", 16, 12)),
    Case("interpolate_trilinear_fwd.py", "interpolate_trilinear_2x_fwd", lambda: enlarged("trilinear", 8, 6, 4)),
    Case("pipelined_attention.py", "flash_fwd", lambda: attention(512)),
    *(
        Case("mx_kernels.py", f"kernel_{name}", lambda count=count: ((drawn(128, 128),) * count, drawn(128, 128)))
        for name, count in (
            ("offline_quantized_mx_matmul", 5),
            ("on_device_quantize_matmul_mx", 5),
            ("copy_strided_quantize_matmul_mx", 3),
        )
    ),
    Case("nki_tensor_add_example.py", "nki_tensor_add", addition),
)
"""All of them; one that a checkout lacks is left out of its report."""
