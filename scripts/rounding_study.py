"""What rounding the factors of a compressed checkpoint costs: perplexity, and the distance from the unrounded model.

Each checkpoint is rounded to int8 and fp8 as ``compress --factor-dtype`` does, in a temporary folder, and computed in
float32. The distance is the KL divergence of the next-token distributions in nats per token, on the windows of the
perplexity; standard errors are over the windows.

examples:
  python scripts/rounding_study.py LOW --text wikitext2.valid.txt c4.dev.jsonl --limit 8
  neuronmm convert LOW -o LOW-TWO --form two; python scripts/rounding_study.py LOW LOW-TWO --text wikitext2.valid.txt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from neuronmm.compression.checkpoint import copy_checkpoint, round_factors
from neuronmm.compression.rounding import ROUND
from neuronmm.measure.config import by_name
from neuronmm.measure.perplexity import Windows, cut, read_text
from neuronmm.measure.scoring import hidden_states, negative_log_likelihood
from neuronmm.measure.statistics import estimate
from neuronmm.models.documents import write_json
from neuronmm.models.load import load_pretrained, load_tokenizer
from neuronmm.progress import stage_progress

CHUNK = 256
"""Positions per call of the head."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="LOW", help="compressed, in the model's dtype")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="as evaluate --text takes them")
    parser.add_argument("--limit", type=int, default=8, help="windows of each text (default 8)")
    parser.add_argument("--context", type=int, help="tokens per window (default as evaluate chooses)")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write the figures to")
    args = parser.parse_args()
    if len({folder.name for folder in args.checkpoints}) < len(args.checkpoints):
        parser.error("two checkpoints have one name, under which results name them; rename one")
    results: dict[str, dict[str, Any]] = {}
    with stage_progress() as progress:
        for folder in args.checkpoints:
            texts = windows_of(folder, args.text, args.context, args.limit)
            advance = lambda part, name=folder.name: progress(name, part)  # noqa: E731
            results[folder.name] = measure(folder, texts, advance)
            if args.output is not None:
                write_json(args.output, results)
    print("\n".join(table(results)))


def windows_of(folder: Path, texts: list[Path], context: int | None, limit: int) -> dict[str, Windows]:
    """Return the windows of each text by the text's name."""
    tokenizer = load_tokenizer(folder)
    maximum = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return {
        name: cut(tokenizer, read_text(text), maximum, context=context, limit=limit)
        for name, text in by_name(texts).items()
    }


def measure(folder: Path, texts: dict[str, Windows], advance: Callable[[float], None]) -> dict[str, Any]:
    """Return the figures of the checkpoint as it is ("model") and with rounded factors, by dtype and text."""
    figures: dict[str, Any] = {}
    exact: list[Tensor] = []
    for dtype in ("model", *ROUND):
        with TemporaryDirectory() as work:
            path = folder if dtype == "model" else Path(work)
            if dtype != "model":
                copy_checkpoint(folder, path)
                round_factors(path, dtype)  # type: ignore[arg-type]
            model = load_pretrained(path, torch.float32)
            stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        states, figures[dtype] = [], {"bytes": stored}
        for name, windows in texts.items():
            rows = [windows.ids[start : start + windows.context] for start in windows.starts]
            here = [hidden_states(model, ids[None])[0] for ids in rows]
            nll = [negative_log_likelihood(model, h[:-1], ids[1:]).mean() for h, ids in zip(here, rows, strict=True)]
            before = exact[len(states) : len(states) + len(here)] if exact else here
            kl = [divergence(model.lm_head, a, b) for a, b in zip(before, here, strict=True)]
            states += here
            distance = estimate(kl)
            figures[dtype][name] = {
                "perplexity": float(torch.stack(nll).mean().exp()),
                "kl": distance.value,
                "kl_standard_error": distance.standard_error,
            }
            advance(1 / (3 * len(texts)))
        exact = exact or states
    return figures


@torch.inference_mode()
def divergence(head: Any, exact: Tensor, rounded: Tensor) -> float:
    """Return the mean KL divergence over the positions of a window, but the last; states [positions, hidden]."""
    total = 0.0
    for a, b in zip(exact[:-1].split(CHUNK), rounded[:-1].split(CHUNK), strict=True):
        p, q = head(a).float().log_softmax(-1), head(b).float().log_softmax(-1)
        total += float(kl_div(q, p, reduction="sum", log_target=True))
    return total / (len(exact) - 1)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the figures as a Markdown table."""
    texts = [name for name in next(iter(next(iter(results.values())).values())) if name != "bytes"]
    lines = [f"| checkpoint | factors | MB | {' | '.join(f'{t}: perplexity | nats from unrounded' for t in texts)} |"]
    lines.append("|---|---|---:|" + "---:|---:|" * len(texts))
    for name, figures in results.items():
        for dtype, one in figures.items():
            cells = [
                f"{one[t]['perplexity']:.3f} | {one[t]['kl']:.5f}"
                + ("" if one[t]["kl_standard_error"] is None else f" ± {one[t]['kl_standard_error']:.5f}")
                for t in texts
            ]
            lines.append(f"| {name} | {dtype} | {one['bytes'] / 1e6:.1f} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
