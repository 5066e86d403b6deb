"""Compare calibration texts at equal tokens: how far the compressed model is from the dense one on text of each kind.

Every calibration gets the same number of rows. The model samples free text, chat, code and answers to requests for
code itself; WikiText-2 is read from a file, Python from the modules of the standard library, of which one half is
calibrated on and the other half measured, and ``prose`` and ``package`` come with the package. The chat that is
measured is what the dense model answers to questions.

examples:
  python scripts/calibration_study.py MODEL -o study --wikitext wikitext2.train.txt \\
      --prose wikitext2.valid.txt c4.jsonl --questions arc_easy.jsonl
  python scripts/calibration_study.py MODEL -o study ... --calibrations free+chat free+chat+code
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuronmm.compression import calibration
from neuronmm.compression.calibration import from_model, from_text, mixed, prefixes, shares
from neuronmm.compression.config import CompressionConfig, Rows
from neuronmm.compression.continuation import Sampled, around_user, continue_rows
from neuronmm.compression.fidelity import divergences, final_states
from neuronmm.compression.pipeline import compress
from neuronmm.compression.streaming import StreamedModel
from neuronmm.compression.tensor_files import write_tensors
from neuronmm.models.documents import write_json
from neuronmm.models.load import load_tokenizer
from neuronmm.models.source import resolve
from neuronmm.progress import stage_progress

CALIBRATIONS = (
    "free",
    "chat",
    "code",
    "requests",
    "wikitext",
    "python",
    "free+chat",
    "free+chat+code",
    "free+chat+code+requests",
    "wikitext+python",
    "wikitext+python+free+chat+code",
    "prose+package+self",
)
MEASURED = Rows(8, 512, 1)
KINDS = ("free", "chat", "code")  # the order of calibration.prefixes; together they are "self"
SHIPPED = {"prose": "prose", "package": "code"}  # the package's texts, by their kind here
REQUESTS = ("Write a Python function", "Fix this code", "Write a program", "Explain this code", "How do I")
TASKS = (
    "returns the n-th Fibonacci number",
    "reverses the words of a sentence",
    "merges two sorted lists",
    "counts the vowels of a string",
    "checks whether a number is prime",
    "flattens a nested list",
    "finds the longest common prefix of a list of strings",
    "converts a Roman numeral to an integer",
)


class Study:
    """The texts of one model, sampled or read once, and the dense model's states on those that are measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.out
        self.model = resolve(args.model)
        self.tokenizer = load_tokenizer(self.model)
        self.dense = StreamedModel(self.model, torch.float32)
        self.folder.mkdir(parents=True, exist_ok=True)

    def check_settings(self) -> None:
        """Keep the settings in the folder; end if rows and results with other settings are there."""
        file = self.folder / "settings.json"
        others = {"out", "calibrations"}  # of the results, any may be asked for
        settings = {name: str(value) for name, value in vars(self.args).items() if name not in others}
        before = json.loads(file.read_text()) if file.exists() else {}
        if before != settings and (before or (self.folder / "study.json").exists()):
            raise SystemExit(f"{self.folder}: holds a study with other settings ({file}); give another -o")
        write_json(file, settings)

    @cache  # noqa: B019 - one study per process
    def rows(self, kind: str) -> Tensor:
        """Return the calibration rows [rows, length] of one kind, enough for a calibration of this kind alone."""
        rows = Rows(self.args.rows + -(-self.args.rows // 8), self.args.length, 0)
        if kind == "self":
            parts = shares(rows.count, len(KINDS))
            return mixed([self.rows(each)[:count] for each, count in zip(KINDS, parts, strict=True)])
        if kind in SHIPPED:
            return from_text(SHIPPED[kind], self.tokenizer, rows)
        if kind == "wikitext":
            return from_text(self.args.wikitext, self.tokenizer, rows)
        if kind == "python":
            return from_text(self._python(0), self.tokenizer, rows)
        openings = prefixes(self.tokenizer)[KINDS.index(kind) :: 3] if kind in KINDS else self._requests()
        model = StreamedModel(self.model, None)
        return self._kept(f"rows-{kind}", lambda: from_model(model, openings, rows, lambda _: None))

    @cache  # noqa: B019
    def measured(self, kind: str) -> Tensor:
        """Return the rows [rows, length] of one kind on which the compressed models are measured."""
        rows = MEASURED
        if kind == "python":
            return from_text(self._python(1), self.tokenizer, rows)
        prose = {file.stem: file for file in self.args.prose}
        if kind in prose:
            return from_text(prose[kind], self.tokenizer, rows)
        asked = self._questions() if kind == "chat" else [f"Write a Python function that {task}." for task in TASKS]
        before, after = around_user(self.tokenizer, answer=True)
        openings = [self._ids(before + question + after) for question in asked[: rows.count]]
        model = StreamedModel(self.model, None)
        name = f"measured-{kind.replace(' ', '-')}"
        return self._kept(name, lambda: continue_rows(model, openings, rows.length, Sampled(1), lambda: None))

    @property
    def kinds(self) -> list[str]:
        """The kinds of text that are measured."""
        return [*(file.stem for file in self.args.prose), "python", "chat", "answers with code"]

    @cache  # noqa: B019
    @torch.inference_mode()
    def expected(self, kind: str) -> Tensor:
        """Return the dense model's final states on the measured rows of one kind."""
        return final_states(self.dense, self.measured(kind), lambda: None)

    @torch.inference_mode()
    def distances(self, folder: Path) -> dict[str, Any]:
        """Return how far the checkpoint in ``folder`` is from the dense model, by kind of text."""
        low, result = StreamedModel(folder, torch.float32), dict[str, Any]()
        for kind in self.kinds:
            states = final_states(low, self.measured(kind), lambda: None)
            [result[kind]] = divergences(self.dense, self.expected(kind), [states])
        return result

    def calibrated_on(self, name: str) -> dict[str, Any]:
        """Compress with the rows of the kinds in ``name`` and return the distances."""
        kinds = name.split("+")
        counts = shares(len(self.rows(kinds[0])), len(kinds))
        rows = mixed([self.rows(kind)[:count] for kind, count in zip(kinds, counts, strict=True)])
        config = CompressionConfig.build(
            ratio=self.args.ratio,
            targets=self.args.targets,
            method="whitened",
            refine=self.args.refine,
            calibration_rows=self.args.rows,
            calibration_length=self.args.length,
        )
        out = self.folder / "checkpoint"
        with patch.object(calibration, "make_rows", lambda _: rows), stage_progress() as progress:
            report = compress(self.model, out, config, force=True, progress=progress)
        result = {"seconds": report["seconds"], "samples": report["fidelity"]["samples"]}
        result["warnings"] = report["fidelity"]["warnings"]
        return {**result, "distances": self.distances(out)}

    def _kept(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the rows that an earlier start sampled under this name, or sample them."""
        file = self.folder / f"{name}.safetensors"
        if not file.exists():
            write_tensors(file, {name: make()})
        return load_file(file)[name]

    def _ids(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    def _requests(self) -> list[list[int]]:
        before, _ = around_user(self.tokenizer, answer=False)
        return [self._ids(before + request) for request in REQUESTS]

    def _questions(self) -> list[str]:
        return [json.loads(line)["query"] for line in self.args.questions.read_text().splitlines()]

    def _python(self, half: int) -> Path:
        """Write every second module of the standard library into one file and return its path."""
        file = self.folder / f"python-{half}.txt"
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[half::2]
        file.write_text("\n\n".join(module.read_text(encoding="utf-8") for module in modules), encoding="utf-8")
        return file


def table(results: dict[str, Any]) -> list[str]:
    """Return a Markdown table of the divergences, in nats per token, one row per calibration."""
    kinds: Sequence[str] = list(next(iter(results.values()))["distances"])
    lines = [f"| calibrated on | {' | '.join(kinds)} | mean | largest |", f"|---|{'---:|' * (len(kinds) + 2)}"]
    for name, result in results.items():
        values = [result["distances"][kind]["kl"] for kind in kinds]
        cells = [*values, sum(values) / len(values), max(values)]
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--out", type=Path, required=True, help="work folder and study.json; resumes")
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--prose", type=Path, nargs="+", required=True, help="prose to measure on")
    parser.add_argument("--questions", type=Path, required=True, help="a .jsonl file with a question in each line")
    parser.add_argument("--calibrations", nargs="+", default=CALIBRATIONS)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--targets", default="all")
    parser.add_argument("--refine", default="off")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    study, file = Study(args), args.out / "study.json"
    study.check_settings()
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in args.calibrations:
        if name not in results:
            results[name] = study.calibrated_on(name)
            write_json(file, results)
            print("\n".join(table(results)), flush=True)


if __name__ == "__main__":
    main()
