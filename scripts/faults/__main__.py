"""Feed neuronmm what strangers and bad days feed it, and count how each run ends.

A study writes its counts into the JSON document; ``--plant`` first plants a fault that the study has to find, and
writes what it found under "planted". The full studies take about three quarters of an hour of one core.

examples:
  python scripts/faults config 'config, all run' headers index values gguf templates
  python scripts/faults kills places            (places needs root, for disks of a limited size)
  python scripts/faults soak determinism -o docs/results/reliability.json
  python scripts/faults --plant config headers index values gguf templates kills places soak
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import determinism
import fuzz_config
import fuzz_templates
import fuzz_weights
import kills
import places
import plants
import soak
import tally
import torch
import transformers

from neuronmm.compression.memory import peak_rss

Run = Callable[[Path], dict[str, Any]]

STUDIES: dict[str, Run] = {
    "config": lambda work: fuzz_config.study(20_000, work),
    "config, all run": lambda work: fuzz_config.study(3000, work, every=3, first=20_000),
    "headers": lambda work: fuzz_weights.headers(1000, work),
    "index": lambda work: fuzz_weights.index(500, work),
    "values": lambda work: fuzz_weights.values(500, work),
    "gguf": lambda work: fuzz_weights.gguf(1000, work),
    "templates": lambda work: fuzz_templates.study(work),
    "kills": lambda work: kills.study(100, work / "kills"),
    "places": lambda work: places.study(work / "places"),
    "soak": lambda work: soak.study(80_000, 100, work),
    "determinism": lambda work: determinism.study(work / "determinism"),
}


def _planted(plant: Callable[[], AbstractContextManager[None]], run: Run) -> Run:
    def planted(work: Path) -> dict[str, Any]:
        with plant():
            return run(work)

    return planted


PLANTED: dict[str, tuple[str | None, Run]] = {
    "config": (plants.unchecked_config.__doc__, _planted(plants.unchecked_config, lambda w: fuzz_config.study(60, w))),
    "config, wrong result": (
        plants.wrong_epsilon.__doc__,
        _planted(plants.wrong_epsilon, lambda work: fuzz_config.study(60, work)),
    ),
    "headers": (
        plants.uncaught_shard.__doc__,
        _planted(plants.uncaught_shard, lambda work: fuzz_weights.headers(60, work)),
    ),
    "index": (plants.any_index.__doc__, _planted(plants.any_index, lambda work: fuzz_weights.index(60, work))),
    "values": (
        plants.unchecked_tensors.__doc__,
        _planted(plants.unchecked_tensors, lambda work: fuzz_weights.values(60, work)),
    ),
    "gguf": (plants.uncaught_gguf.__doc__, _planted(plants.uncaught_gguf, lambda work: fuzz_weights.gguf(60, work))),
    "templates": (
        plants.unbounded_templates.__doc__,
        _planted(plants.unbounded_templates, lambda work: fuzz_templates.study(work, 1)),
    ),
    "kills": (plants.write_in_place.__doc__, lambda w: kills.study(20, w / "kills", plant=plants.write_in_place)),
    "places": (
        plants.full_disk_is_success.__doc__,
        lambda work: places.full_disks(work / "places", plants.full_disk_is_success),
    ),
    "soak": (plants.leak.__doc__, lambda work: soak.study(10_000, 20, work, plants.leak)),
}
"""Study -> the fault that is planted, and the study on it. The study of determinism has its own planted difference."""


def findings(result: Any) -> list[str]:
    """Return the findings anywhere in a result."""
    if not isinstance(result, dict):
        return []
    inside = [finding for value in result.values() for finding in findings(value)]
    return [*result.get("findings", []), *inside]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--plant", action="store_true", help="plant a fault, and fail unless the study finds it")
    parser.add_argument("-o", "--out", type=Path, help="a JSON document to write the counts into")
    args = parser.parse_args()
    known = PLANTED if args.plant else STUDIES
    for name in args.studies:
        if name not in known:
            parser.error(f"{name}: is none of {', '.join(known)}")
    torch.set_num_threads(1)
    status = 0
    for name in args.studies:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NEURONMM_CACHE"] = f"{folder}/cache"
            began, cpu = time.monotonic(), time.process_time()
            if args.plant:
                what, run = PLANTED[name]
                tally.SECONDS = 3
                found = findings(run(Path(folder)))
                result: dict[str, Any] = {"planted": what, "found": len(found), "first": found[:1]}
                status |= not found
            else:
                result = STUDIES[name](Path(folder))
                status |= bool(findings(result))
            result |= {
                "seconds": round(time.monotonic() - began, 1),
                "cpu_seconds": round(time.process_time() - cpu, 1),
            }
            result |= {"peak_rss_bytes": peak_rss()}
        print(json.dumps({name: result}, indent=1))
        if args.out:
            _save(args.out, "planted" if args.plant else "studies", name, result)
    return status


def _save(out: Path, kind: str, name: str, result: dict[str, Any]) -> None:
    """Put the result of a study into the document, beside those of others."""
    document: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"kind": "measured"}
    document |= {"python": platform.python_version(), "torch": torch.__version__}
    document |= {"transformers": transformers.__version__, "machine": platform.platform()}
    document.setdefault(kind, {})[name] = result
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
