"""NeuronCore figures that the kernels, the tiling solver, the emulator and the timing model share.

One frozen dataclass, three instances. Where the AWS documentation contradicts itself, the default is the figure that
published measurements support, and a comment names the other; ``dataclasses.replace`` selects it. Rates are in GB/s,
which is bytes per nanosecond; clocks are in GHz, cycles per nanosecond.

Sources: AWS Neuron documentation up to SDK 2.32, the NKI architecture guides for Trainium/Inferentia2, Trainium2 and
Trainium3, "Introduction to DMA with NKI", and the cost notes of the ``nki.isa`` pages.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element sizes of the dtypes the kernels compute in."""

_ROW_EFFICIENCY = ((0, 0.0), (512, 0.21), (1024, 0.42), (2048, 0.81), (4096, 0.97), (8192, 1.0))
"""(Bytes per partition row, fraction of a DMA engine's rate), from the DMA guide; the full rate of the last point is
assumed."""


@dataclass(frozen=True)
class NeuronCore:
    """One NeuronCore with its share of the chip's HBM.

    Sizes are in bytes, rates in bytes per nanosecond, clocks in GHz.
    """

    name: str
    device: str
    cores_per_chip: int
    hbm_chip_bytes: int
    hbm_chip_rate: float
    dma_engine_rate: float
    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    sbuf_partition_bytes: int
    dma_start_ns: float
    tensor_warm_up_ns: float
    """The tensor engine starts at half speed and reaches full speed after this much continuous work; 0: at once."""

    sbuf_reserved_bytes: int = 16 << 10
    """Bytes of every SBUF partition that the compiler keeps. The page of ``nki.compiler.sbuf.alloc`` documents them for
    v2; they are assumed to be the same on v3 and v4."""
    dma_engines: int = 16
    partitions: int = 128
    psum_banks: int = 8
    psum_bank_bytes: int = 2048
    stationary_columns: int = 128
    moving_columns: int = 512
    matmul_min_cycles: int = 64
    """Cost of a matmul of fewer columns; the stationary operand loads in 32 cycles, during the previous matmul."""
    matmul_overhead_cycles: float = 44.0
    """Cycles per matmul or transposition beyond its columns. Not documented: fitted to nine published latencies on trn1
    (docs/timing.md), and assumed to be the same on trn2 and trn3."""
    fp32_passes: int = 4
    vector_min_cycles: int = 64
    access_cycles: int = 60
    """Fixed cost of a Vector, Scalar or GpSimd instruction's SBUF or PSUM access."""
    exclusive: tuple[tuple[str, str, str], ...] = ()
    """(memory, engine, engine): the memory serves only one of the two engines at a time."""

    @property
    def sbuf_usable_bytes(self) -> int:
        """Bytes of an SBUF partition that a kernel's tiles may take."""
        return self.sbuf_partition_bytes - self.sbuf_reserved_bytes

    @property
    def psum_partition_bytes(self) -> int:
        return self.psum_banks * self.psum_bank_bytes

    @property
    def hbm_bytes(self) -> int:
        """This core's share of the chip's memory."""
        return self.hbm_chip_bytes // self.cores_per_chip

    @property
    def hbm_rate(self) -> float:
        """This core's share of the chip's HBM bandwidth."""
        return self.hbm_chip_rate / self.cores_per_chip

    @property
    def dma_rate(self) -> float:
        """Highest rate of all 16 engines together: their sum, or the HBM share if that is less."""
        return min(self.dma_engines * self.dma_engine_rate, self.hbm_rate)

    @property
    def clocks(self) -> dict[str, float]:
        """GHz by engine name, as instruction traces spell them."""
        return {
            "tensor": self.tensor_ghz,
            "vector": self.vector_ghz,
            "scalar": self.scalar_ghz,
            "gpsimd": self.gpsimd_ghz,
        }

    def peak_flops(self, dtype: str = "bfloat16") -> float:
        """Return the tensor engine's FLOP/s: 128 x 128 multiply-adds per cycle, a quarter of that in float32."""
        passes = self.fp32_passes if DTYPE_BYTES[dtype] == 4 else 1
        return 2.0 * self.partitions * self.stationary_columns * self.tensor_ghz * 1e9 / passes

    def row_efficiency(self, row_bytes: float) -> float:
        """Return the fraction of the DMA rate that transfers of ``row_bytes`` contiguous bytes reach, 0 to 1."""
        sizes = [size for size, _ in _ROW_EFFICIENCY]
        i = bisect_left(sizes, row_bytes)
        if i == 0:
            return 0.0
        if i == len(sizes):
            return 1.0
        (x0, y0), (x1, y1) = _ROW_EFFICIENCY[i - 1], _ROW_EFFICIENCY[i]
        return y0 + (y1 - y0) * (row_bytes - x0) / (x1 - x0)


TRN1 = NeuronCore(
    name="v2",
    device="trn1",
    cores_per_chip=2,
    hbm_chip_bytes=32 << 30,
    hbm_chip_rate=820.0,
    dma_engine_rate=17.0,  # the DMA overview says 27.2; dense decode at 237 GB/s is published and supports 16 x 17
    tensor_ghz=2.8,
    vector_ghz=1.12,
    scalar_ghz=1.4,
    gpsimd_ghz=1.4,
    sbuf_partition_bytes=192 << 10,
    dma_start_ns=1300.0,
    tensor_warm_up_ns=0.0,
    exclusive=(("psum", "vector", "scalar"), ("sbuf", "vector", "gpsimd")),  # the v3 guide lifts both
)

TRN2 = NeuronCore(
    name="v3",
    device="trn2",
    cores_per_chip=8,
    hbm_chip_bytes=96 << 30,
    hbm_chip_rate=2900.0,
    dma_engine_rate=23.0,  # the DMA overview says 27.2
    tensor_ghz=2.4,
    vector_ghz=0.96,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    sbuf_partition_bytes=224 << 10,
    dma_start_ns=1300.0,  # 600 with hardware descriptors
    tensor_warm_up_ns=3000.0,
)

TRN3 = NeuronCore(
    name="v4",
    device="trn3",
    cores_per_chip=8,
    hbm_chip_bytes=144 << 30,
    hbm_chip_rate=4700.0,
    dma_engine_rate=33.0,  # the DMA overview says 38.4
    tensor_ghz=2.4,
    vector_ghz=1.2,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    sbuf_partition_bytes=256 << 10,
    dma_start_ns=1300.0,
    tensor_warm_up_ns=3000.0,
)

CORES: dict[str, NeuronCore] = {core.device: core for core in (TRN1, TRN2, TRN3)}
"""Device name -> core; Inf2 has the same cores as Trn1."""

LOGICAL_CORE = "NEURON_LOGICAL_NC_CONFIG"
"""The SDK's environment variable for the number of physical cores of a logical core."""
