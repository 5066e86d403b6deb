"""The emulated compiler's command, ``neuronx-cc compile GRAPH --output=PROGRAM``. The program contains the graph.

Hosts run this command if ``NEURONX_DUMP_TO`` is set, to write graph and program to files. Python runs this file by its
path, outside the package, so it imports nothing from it.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAGIC = b"emulated NEFF of neuronmm\n"
"""The first bytes of an emulated program; the serialised HloModuleProto follows."""


def main(arguments: list[str]) -> int:
    """Write the program of one graph and return the exit status; options other than ``--output`` are ignored."""
    outputs = [a.removeprefix("--output=") for a in arguments if a.startswith("--output=")]
    if len(arguments) < 2 or arguments[0] != "compile" or len(outputs) != 1:
        print("emulated neuronx-cc: the only command is 'compile OPTIONS GRAPH --output=PROGRAM'", file=sys.stderr)
        return 2
    graphs = [a for a in arguments[1:] if not a.startswith("-") and a.endswith(".pb")]
    if len(graphs) != 1:
        print(f"emulated neuronx-cc: expected one graph, a .pb file, not {len(graphs)}", file=sys.stderr)
        return 2
    Path(outputs[0]).write_bytes(MAGIC + Path(graphs[0]).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
