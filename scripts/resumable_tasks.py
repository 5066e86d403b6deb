"""Named tasks in several processes; an interrupted run resumes as long as the sources of its figures are unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neuronmm.models.documents import read_own, write_json

ROOT = Path(__file__).parent.parent


def compute(
    names: Iterable[str], one: Callable[[str], Any], *, sources: Iterable[str], state: Path, jobs: int
) -> dict[str, Any]:
    """Return ``one(name)``, which JSON must hold, for each of ``names``.

    ``sources`` are patterns of files in the repository. Each result is written to ``state`` as soon as it is ready;
    results there that were made from the same files are taken over.
    """
    files = (file for pattern in sources for file in sorted(ROOT.glob(pattern)))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    previous = read_own(state) or {}
    results: dict[str, Any] = previous["results"] if previous.get("sources") == digest else {}
    state.parent.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if name not in results]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(jobs) as pool:
        bar = progress.add_task("", total=len(todo) + len(results), completed=len(results))
        running = {pool.submit(one, name): name for name in todo}
        for future in as_completed(running):
            results[running[future]] = future.result()
            write_json(state, {"sources": digest, "results": results})
            progress.update(bar, advance=1, description=running[future])
    return results
