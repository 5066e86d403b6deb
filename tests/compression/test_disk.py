"""What a run asks of the disk before it begins is what it comes to need."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config

from neuronmm.compression import pipeline, workspace
from neuronmm.compression.pipeline import compress
from neuronmm.compression.reader import Reader
from neuronmm.models import UserError

KINDS = [{}, {"factors": "int8"}, {"recover": "factors"}, {"recover": "factors", "factors": "int8"}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(kind.values()) or "plain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_never_holds_more_tensors_on_the_disk_than_it_asked_room_for(
    kind: dict[str, str],
    dtype: torch.dtype,
    dense: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, save, most = dense(dtype=dtype), workspace.save_file, [0]
    settings = config(method="whitened", calibration=str(text), **kind)

    def watched(tensors: Any, path: Path, **kwargs: Any) -> None:
        save(tensors, path, **kwargs)
        most.append(sum(map(_content, (tmp_path / "out.partial").rglob("*.*"))))

    monkeypatch.setattr(workspace, "save_file", watched)
    compress(source, tmp_path / "out", settings)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage._replace(free=max(most) - 1))
    with pytest.raises(UserError, match="GB free"):
        compress(source, tmp_path / "again", settings)
    assert max(most) > 1.5 * Reader(source).total_bytes(), "the largest moment was not seen"


def _content(file: Path) -> int:
    """The bytes of the tensors in a safetensors file, written or being written; nothing of another."""
    if file.suffix not in (".safetensors", ".writing"):
        return 0
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header
