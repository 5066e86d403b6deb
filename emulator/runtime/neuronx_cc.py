"""The emulated compiler's command, ``neuronx-cc compile GRAPH --output=PROGRAM``. Its program holds the graph.

Hosts run this command where ``NEURONX_DUMP_TO`` asks them to keep a graph and its program in files. Python runs this
file by its path, so it imports nothing of the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAGIC = b"emulated NEFF of neuronmm\n"
"""How a program begins that the emulated compiler made; the serialised HloModuleProto follows."""


def main(arguments: list[str]) -> int:
    """Compile; other options than the graph and ``--output`` do not matter to a program that is the graph itself."""
    outputs = [a.removeprefix("--output=") for a in arguments if a.startswith("--output=")]
    if len(arguments) < 2 or arguments[0] != "compile" or len(outputs) != 1:
        print("emulated neuronx-cc: it knows only 'compile OPTIONS GRAPH --output=PROGRAM'", file=sys.stderr)
        return 2
    graphs = [a for a in arguments[1:] if not a.startswith("-") and a.endswith(".pb")]
    if len(graphs) != 1:
        print(f"emulated neuronx-cc: it compiles one graph, a .pb file, not {len(graphs)}", file=sys.stderr)
        return 2
    Path(outputs[0]).write_bytes(MAGIC + Path(graphs[0]).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
