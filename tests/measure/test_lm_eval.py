"""lm-evaluation-harness on a compressed folder: the blocks of docs/evaluate.md run unchanged, without a connection."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from documents import blocks
from neuronmm.measure.evaluate import evaluate


def test_the_documents_blocks_give_the_accuracies_of_evaluate(
    checkpoint: Callable[..., Path],
    choice_task: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `datasets` reads these at its first import: no network access, and no files in the user's cache.
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install "neuronmm[eval]"')
    monkeypatch.chdir(tmp_path)
    folder, (file, _) = checkpoint(), choice_task
    folder.rename("OUT")
    shutil.copyfile(file, "my_choice.jsonl")
    Path("tasks").mkdir()
    (task,) = blocks("evaluate.md", "yaml")
    Path("tasks", "my_choice.yaml").write_text(task)
    (code,) = blocks("evaluate.md", "python")
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs/evaluate.md", "exec"), namespace)
    theirs = namespace["found"]["results"]["my_choice"]
    ours = {row["measure"]: row["models"]["model"] for row in evaluate("OUT", tasks=[file], dtype="fp32")["results"]}
    for metric in ("acc", "acc_norm"):
        assert theirs[f"{metric},none"] == pytest.approx(ours[f"task {metric}"]["value"])
