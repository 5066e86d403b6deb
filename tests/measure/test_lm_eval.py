"""lm-evaluation-harness runs on a compressed folder through its own ``hf`` model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import neuronmm  # noqa: F401 (registers the checkpoint format)
from neuronmm.measure.evaluate import evaluate

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_same_accuracy_as_evaluate(
    checkpoint: Callable[..., Path],
    choice_task: tuple[Path, list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `datasets` reads these at its first import: no network access, and no files in the user's cache.
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, (file, _) = checkpoint(), choice_task
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK.format(file=file))
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), tokenizer=tokenizer, dtype="float32", device="cpu", batch_size=4),
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )["results"]["tiny_choice"]
    ours = {row["measure"]: row["models"]["model"] for row in evaluate(folder, tasks=[file], dtype="fp32")["results"]}
    for metric in ("acc", "acc_norm"):
        assert theirs[f"{metric},none"] == pytest.approx(ours[f"task {metric}"]["value"])
