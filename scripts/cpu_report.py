"""Write the measurements of ``bench_cpu.py`` as Markdown after the marker in a document, or print them without one.

python scripts/cpu_report.py out/bench_cpu.jsonl docs/results/cpu.md
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from neuronmm.measure.statistics import summarise, with_range

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Read the file's lines; skip a line that a stopped run left incomplete."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def tables(lines: list[Line]) -> str:
    """Return one table per model, context and batch, and one that describes the engines."""
    facts: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = line["model"], line["engine"]
        if "round" not in line and ("absent" not in line or key not in facts):  # it may have been there before
            facts[key] = line
    points: dict[tuple[str, int, int], list[Line]] = defaultdict(list)
    for line in lines:
        if "round" in line:
            points[line["model"], line["context"], line["batch"]].append(line)
    text = [_point(*point, measured, facts) for point, measured in sorted(points.items())]
    return "\n\n".join([*text, _engines(facts)])


def _spread(values: list[float], form: str) -> str:
    return with_range(summarise(values), form)


def _point(model: str, context: int, batch: int, lines: list[Line], facts: dict[tuple[str, str], Line]) -> str:
    engines: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        engines[line["engine"]].append(line)
    nbytes = {name: facts[model, name]["bytes"] for name in engines}
    by_round = {line["round"]: line["step"] for line in engines.get("dense", [])}
    probes = [line[which] / 1e9 for line in lines for which in ("before", "after")]
    counts = sorted({len(measured) for measured in engines.values()})
    rows = [
        f"### {model}, {context} tokens of context, batch {batch}",
        "",
        f"{' or '.join(map(str, counts))} rounds; read bandwidth {_spread(probes, '.1f')} GB/s. "
        "Median (range) over the rounds.",
        "",
        "| engine | decode tokens/s | of the limit | over dense, same round | ideal by bytes | TTFT ms | MB per step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]

    for name, measured in engines.items():
        limits = [(line["before"] + line["after"]) / 2 / nbytes[name] for line in measured]
        shares = [1 / line["step"] / limit for line, limit in zip(measured, limits, strict=True)]
        paired = [by_round[line["round"]] / line["step"] for line in measured if line["round"] in by_round]
        cells = [
            _spread([batch / line["step"] for line in measured], ".1f"),
            _spread(shares, ".2f"),
            _spread(paired, ".2f") if paired else "",
            f"{nbytes['dense'] / nbytes[name]:.2f}" if by_round else "",
            _spread([1e3 * line["ttft"] for line in measured], ".0f"),
            f"{nbytes[name] / 1e6:.0f}",
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _engines(facts: dict[tuple[str, str], Line]) -> str:
    rows = ["### Engines", "", "| model | engine | what it is | ready after, s |", "|---|---|---|---:|"]
    for (model, name), line in sorted(facts.items()):
        path = f"absent: {line['absent']}" if "absent" in line else line["path"]
        ready = f"{line['load_seconds']:.1f}" if "load_seconds" in line else ""
        rows.append(f"| {model} | {name} | {path} | {ready} |")
    machine = next(iter(facts.values()))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rows += [
        "",
        f"Machine: {machine['device']}, {machine['cores']} cores, {machine['threads']} threads used; {versions}.",
    ]
    return "\n".join(rows)


MARKER = "<!-- What follows is written by scripts/cpu_report.py -->"

if __name__ == "__main__":
    result = tables(read(Path(sys.argv[1])))
    if len(sys.argv) > 2:
        document = Path(sys.argv[2])
        before = document.read_text(encoding="utf-8").partition(MARKER)[0]
        document.write_text(f"{before}{MARKER}\n\n{result}\n", encoding="utf-8")
    else:
        print(result)
