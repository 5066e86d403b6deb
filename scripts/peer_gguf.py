"""Add a GGUF model in types of llama.cpp to a sweep, each as a point without factors.

    python scripts/peer_gguf.py MODEL.gguf SWEEP --types Q8_0 Q4_1 Q4_0

The weights are rounded by the package ``gguf`` and measured here, after they are dequantised to bf16: llama.cpp's own
arithmetic, which also rounds activations, is not part of the figure. The size is that of the file's tensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import cpu_peers

from neuronmm.measure.sweep_folder import read_settings
from neuronmm.measure.sweep_points import add_point
from neuronmm.models.source import resolve


def tensor_bytes(file: Path) -> int:
    """Return the bytes of all tensors of a GGUF file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(str(file)).tensors)


def main() -> None:
    """Write the model in each type and measure it with the sweep's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="folder of a sweep of the same model")
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_1", "Q4_0"], help="default: Q8_0 Q4_1 Q4_0")
    args = parser.parse_args()
    if read_settings(args.sweep).speed:
        raise SystemExit(f"{args.sweep}: measures speed, which weights that were dequantised to bf16 cannot show")
    cpu_peers.ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    for kind in args.types:
        file = cpu_peers.write_gguf(args.model, kind)
        name, size = f"llama.cpp {kind}", tensor_bytes(file)
        bits = int("".join(filter(str.isdigit, kind.partition("_")[0])))  # of most weights: the folder has bf16
        facts: Any = {"name": name, "ratio": 0.0, "bytes": size, "bits": bits}
        add_point(args.sweep, name.replace(" ", "-"), resolve(file), facts)
        print(f"{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
