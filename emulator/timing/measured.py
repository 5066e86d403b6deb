"""Published measurements on one NeuronCore of a trn1.2xlarge, which the timing model is compared with.

Source: arXiv 2510.25977 and its authors' public repository (dinghongsong/NeuronMM). The kernel sweep is read off a
figure, to about 1 ms and 0.1 GiB. The latencies per token are from the repository's benchmark reports.
"""

from __future__ import annotations

from typing import NamedTuple

SWEEP = (8192, 4096, 16384)
"""K, r and N of the kernel sweep, in bf16; the dense matmul is [M, K] [K, N]."""


class Sweep(NamedTuple):
    """One kernel of the sweep: latency in ms and HBM traffic in GiB, both by M."""

    name: str
    latency: dict[int, float]
    traffic: dict[int, float]


NEURONMM = Sweep("NeuronMM", {8192: 21.2, 16384: 42.0, 32768: 84.2}, {8192: 1.90, 16384: 3.78, 32768: 7.46})
NKI_XUV = Sweep("NKI XUV", {8192: 26.9, 16384: 56.5, 32768: 116.9}, {8192: 3.41, 16384: 9.48, 32768: 22.37})
NKI_XW = Sweep("NKI XW", {8192: 44.0, 16384: 88.9, 32768: 186.3}, {8192: 4.38, 16384: 15.53, 32768: 35.56})
COMPILER_XUV = Sweep("compiler XUV", {8192: 23.7, 16384: 49.4, 32768: 98.9}, {8192: 4.3, 16384: 8.4, 32768: 16.8})
COMPILER_XW = Sweep("compiler XW", {8192: 33.0, 16384: 65.4, 32768: 130.3}, {8192: 5.43, 16384: 10.45, 32768: 20.96})

DENSE_DECODE_MS = 10.42
"""Llama-3.2-1B, bf16, batch 1, context 32: ms per token in the report without a label. Only a dense path, which
streams 2.47 GB of weights at 237 GB/s, explains the figure."""

DENSE_CONTEXT_MS = 50.07
"""Context encoding in ms in the same report. Its throughput, 639 tokens/s, implies 32 tokens."""

CONTEXT_REPORTS = {
    "no label": (DENSE_CONTEXT_MS, DENSE_DECODE_MS),
    "dense, tutorial kernel": (70.28, 39.08),
    "NeuronMM, ratio 0.2": (66.63, 26.09),
}
"""Each published report of Llama-3.2-1B -> (context encoding of 32 tokens, time per token), both in ms."""

VALIDATION: dict[str, float | str] = {
    "published_kernel_latencies_mean_absolute_error": 0.058,
    "published_dense_decode_error": -0.099,
    "published_dense_context_encoding_error": -0.813,
    "ttft": "not validated",
    "measured_on": "trn1, one core",
}
"""The timing model's relative errors on these measurements, attached to every prediction: the mean absolute error of
the sweep's nine latencies, the signed errors of the others."""

CAVEAT = (
    f"Timing model against published measurements ({VALIDATION['measured_on']}): kernel latencies "
    f"{VALIDATION['published_kernel_latencies_mean_absolute_error']:.1%} mean absolute error, dense decode "
    f"{VALIDATION['published_dense_decode_error']:+.1%}. TTFT is not validated: the one published context encoding, "
    f"of 32 tokens, took {DENSE_CONTEXT_MS} ms and is predicted "
    f"{VALIDATION['published_dense_context_encoding_error']:+.1%}."
)
"""The errors as a sentence, printed with every prediction."""
