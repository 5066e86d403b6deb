"""``compress`` end to end on tiny checkpoints: results, interruption, refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from compression_runs import EVERYTHING, config, edit_tensors, tensors
from neuronmm.compression import checkpoint, memory, pipeline, tensor_files
from neuronmm.compression.distillation import working_memory
from neuronmm.compression.factorize import factorize
from neuronmm.compression.pipeline import compress
from neuronmm.compression.reader import Reader
from neuronmm.models import FAMILIES, LowRankLinear, UserError
from neuronmm.models.contents import inspect
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.load import load_pretrained, load_tokenizer


@pytest.mark.parametrize("form", ["two", "pivoted"])
@pytest.mark.parametrize("targets", ["mlp", "attention", "all"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_result_is_a_loadable_checkpoint_of_the_promised_size(
    model_type: str, targets: str, form: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense(model_type, tied=model_type == "qwen2", dtype=torch.bfloat16, max_shard_size="20KB")
    out = tmp_path / "out"
    report = compress(source, out, config(targets=targets, ratio=0.3, form=form))
    assert not (tmp_path / "out.partial").exists()
    model = load_pretrained(out, torch.float32)
    assert load_tokenizer(out)("w5 w6")["input_ids"] == load_tokenizer(source)("w5 w6")["input_ids"]
    assert torch.isfinite(model(torch.randint(3, 64, (2, 9))).logits).all()
    ranks = {name: m.rank for name, m in model.named_modules() if isinstance(m, LowRankLinear)}
    assert ranks == json.loads((out / "config.json").read_text())["quantization_config"]["ranks"]
    assert ranks == {m["name"]: m["rank"] for m in report["matrices"] if m["rank"] is not None}
    assert len(report["matrices"]) == 2 * len(TARGETS[targets])

    before, after = tensors(source), tensors(out)
    pivots = {name: after.pop(name) for name in list(after) if name.endswith(".pivots")}
    indexed = {name for name in ranks if "self_attn" in name} if form == "pivoted" else set()
    assert {name.removesuffix(".pivots") for name in pivots} == indexed
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert sum(t.numel() for t in before.values()) == report["parameters"]["dense"]
    assert sum(t.numel() for t in after.values()) == report["parameters"]["compressed"]
    for name in before.keys() & after.keys():
        assert torch.equal(before[name], after[name])
    gone = before.keys() - after.keys()
    assert {name.rpartition(".")[0] for name in gone} == set(ranks)
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert ("forms" in block, block["format"]) == ((True, 2) if form == "pivoted" else (False, 1))
    kept = sum(m["kept_parameters"] for m in report["matrices"]) / sum(
        m["dense_parameters"] for m in report["matrices"]
    )
    assert report["realised_ratio"] == pytest.approx(1 - kept) and report["asked_ratio"] == 0.3
    assert abs(report["realised_ratio"] - 0.3) < 0.05
    assert json.loads((out / "compression_report.json").read_text()) == report
    assert f"| {LAYERS}.1." in (out / "compression_report.md").read_text()
    assert (out / "model.safetensors").stat().st_mode & 0o044 == (out / "config.json").stat().st_mode & 0o044


def test_plain_svd_writes_the_truncated_svd(dense: Callable[..., Path], tmp_path: Path) -> None:
    report = compress(dense(), tmp_path / "out", config(method="svd"))
    before, after = tensors(tmp_path / "dense-llama"), tensors(tmp_path / "out")
    for matrix in report["matrices"]:
        name, rank = matrix["name"], matrix["rank"]
        factors = factorize(before[f"{name}.weight"], rank)
        product = after[f"{name}.B.weight"] @ after[f"{name}.A.weight"]
        torch.testing.assert_close(product, (factors.B @ factors.A).float(), rtol=1e-4, atol=1e-5)
        assert matrix["relative_error"] == pytest.approx(factors.relative_error)
    assert report["calibration"] is None


def test_whitened_reports_the_error_on_its_calibration_text(
    dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """Inputs gathered with hooks on the dense model reproduce the reported errors; plain SVD is worse."""
    source = dense()
    settings = config(calibration=str(text), calibration_rows=40, damping=1e-9)
    report = compress(source, tmp_path / "white", settings)
    compress(source, tmp_path / "plain", config(method="svd"))
    model = load_pretrained(source, torch.float32)
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name in {m["name"] for m in report["matrices"]}:
            module.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0]))
    from neuronmm.compression.calibration import Rows, from_text

    with torch.no_grad():
        model(from_text(text, load_tokenizer(source), Rows(40, 12, 0)))
    before, white, plain = tensors(source), tensors(tmp_path / "white"), tensors(tmp_path / "plain")
    for matrix in report["matrices"]:
        name = matrix["name"]
        x = torch.cat(inputs[name]).flatten(0, -2).double().T
        y = before[f"{name}.weight"].double() @ x
        errors = {}
        for kind, after in (("white", white), ("plain", plain)):
            approximation = after[f"{name}.B.weight"].double() @ (after[f"{name}.A.weight"].double() @ x)
            errors[kind] = float((y - approximation).norm() / y.norm())
        assert errors["white"] == pytest.approx(matrix["relative_error"], rel=1e-3)
        assert errors["white"] < errors["plain"]


class Interrupted(BaseException):
    """An interruption, such as Ctrl-C, that no code catches."""


def _after(count: int) -> Callable[[str, float], None]:
    left = [count]

    def progress(stage: str, fraction: float) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted

    return progress


@pytest.mark.parametrize(
    "changes",
    [{"method": "svd"}, {"method": "whitened"}, EVERYTHING, {**EVERYTHING, "form": "pivoted"}],
    ids=["svd", "plain", "all", "pivoted"],
)
def test_an_interrupted_run_resumes_to_identical_bytes(
    changes: dict[str, str], dense: Callable[..., Path], tmp_path: Path
) -> None:
    source, uninterrupted, out = dense(), tmp_path / "whole", tmp_path / "out"
    settings = config(targets="all", **changes)
    compress(source, uninterrupted, settings)
    stops = 0
    for count in range(80):
        try:
            compress(source, out, settings, progress=_after(count), resume=count > 0)
            break
        except Interrupted:
            stops += 1
            assert not out.exists()
    assert stops >= 2 and not (tmp_path / "out.partial").exists()
    report = json.loads((out / "compression_report.json").read_text())
    assert report["seconds"] > 0 and report["peak_rss_bytes"] > 2**26
    for file in uninterrupted.iterdir():
        if not file.name.startswith("compression_report"):
            assert file.read_bytes() == (out / file.name).read_bytes(), file.name


def test_a_crash_before_any_rename_resumes_to_identical_bytes(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, uninterrupted, out = dense(), tmp_path / "whole", tmp_path / "out"
    compress(source, uninterrupted, config())
    replace, crashes = os.replace, 0
    for call in range(99):
        calls = [0]

        def crash(*paths: Path, calls: list[int] = calls, last: int = call) -> None:
            if calls[0] == last:
                raise Interrupted
            calls[0] += 1
            replace(*paths)

        with monkeypatch.context() as patched, suppress(Interrupted):
            patched.setattr(os, "replace", crash)
            compress(source, out, config())
            break
        assert not out.exists()
        compress(source, out, config(), resume=True)
        assert (out / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
        shutil.rmtree(out)
        crashes += 1
    assert crashes > 6, "run.json, calibration, hidden states, two layers, the reports and the move to OUT"


def test_the_reported_time_and_memory_include_the_interrupted_part(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = dense(), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "peak_rss", lambda: 1 << 60)
        ticks = iter(range(0, 10**9, 1000))
        patched.setattr(pipeline.time, "perf_counter", lambda: next(ticks))
        with pytest.raises(Interrupted):
            compress(source, out, config(), progress=_after(14))
    report = compress(source, out, config(), resume=True)
    assert report["peak_rss_bytes"] == 1 << 60 and 1000 <= report["seconds"] < 3000


def test_an_interrupted_run_is_neither_lost_nor_resumed_with_other_settings(
    dense: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = dense(), tmp_path / "out"
    with pytest.raises(Interrupted):
        compress(source, out, config(), progress=_after(14))
    with pytest.raises(UserError, match="--resume continues it, --force starts over"):
        compress(source, out, config())
    with pytest.raises(UserError, match=r"another ratio \(0\.2, now 0\.3\)"):
        compress(source, out, config(ratio=0.3), resume=True)
    compress(source, out, config(ratio=0.3), force=True)
    assert not (tmp_path / "out.partial").exists()


def test_an_existing_out_stays_until_its_replacement_is_complete(dense: Callable[..., Path], tmp_path: Path) -> None:
    source, out = dense(), tmp_path / "out"
    compress(source, out, config(method="svd"))
    before = (out / "config.json").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        compress(source, out, config())
    with pytest.raises(Interrupted):
        compress(source, out, config(), force=True, progress=_after(14))
    assert (out / "config.json").read_bytes() == before
    compress(source, out, config(), force=True)
    assert (out / "config.json").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense-llama", "out"]


def test_large_results_are_sharded(dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dense()
    compress(source, tmp_path / "one", config(method="svd"))
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 9000)
    compress(source, tmp_path / "many", config(method="svd"))
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    load_pretrained(tmp_path / "many", torch.float32)


def test_what_cannot_be_compressed_is_refused(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = dense(), tmp_path / "out"
    compress(source, tmp_path / "done", config(method="svd"))
    with pytest.raises(UserError, match="already compressed or quantised"):
        compress(tmp_path / "done", out, config())
    with pytest.raises(UserError, match="no such"):
        compress(tmp_path / "absent", out, config())
    with pytest.raises(UserError, match="no such calibration file"):
        compress(source, out, config(calibration=str(tmp_path / "absent.txt")))
    with monkeypatch.context() as patched:
        usage = shutil.disk_usage(tmp_path)
        patched.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(UserError, match="of disk free"):
            compress(source, out, config())
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_recovery_that_would_not_fit_in_memory_or_on_the_disk_is_refused_at_once(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, usage = dense(), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(UserError, match="of memory free"):
        compress(source, tmp_path / "out", config(recover="factors"))
    weights = SimpleNamespace(available=4 * Reader(source).total_parameters())  # and nothing for the activations
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: weights)
    with pytest.raises(UserError, match="of memory free"):
        compress(source, tmp_path / "out", config(recover="lora"))
    free = 3 * Reader(source).total_bytes()  # enough for LoRA: the state of the factors' training comes on top
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(UserError, match="of disk free"):
        compress(source, tmp_path / "out", config(recover="factors"))
    assert not (tmp_path / "out.partial").exists()
    weights.available += sum(working_memory(inspect(source).config, config()))
    assert compress(source, tmp_path / "out", config(recover="lora"))["recovery"]


def test_a_full_disk_is_named_and_the_run_can_be_resumed(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = dense(), tmp_path / "out"
    save, left = tensor_files.save_file, [2]

    def full(tensors: Any, path: Path, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise SafetensorError("No space left on device (os error 28)")
        save(tensors, path, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "save_file", full)
        with pytest.raises(UserError, match=r"No space left.*--resume"):
            compress(source, out, config())
    assert not out.exists()

    def refused(tensors: Any, path: Path, **kwargs: Any) -> None:
        raise SafetensorError("Permission denied (os error 13)")

    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "save_file", refused)
        with pytest.raises(UserError, match=r"Permission denied.*make .*out\.partial.* writable and --resume"):
            compress(source, out, config(), resume=True)
    compress(source, out, config(), resume=True)
    load_pretrained(out, torch.float32)


@pytest.mark.parametrize("method", ["svd", "whitened"])
def test_damaged_checkpoints_are_named(method: str, dense: Callable[..., Path], tmp_path: Path) -> None:
    out, name = tmp_path / "out", f"{LAYERS}.1.mlp.up_proj.weight"
    source = dense()
    edit_tensors(source, lambda t: t[name].fill_(float("nan")))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        compress(source, out, config(method=method), force=True)
    source = dense()
    edit_tensors(source, lambda t: t.pop(name))
    with pytest.raises(UserError, match="up_proj"):
        compress(source, out, config(method=method), force=True)
    source = dense()
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="corrupt"):
        compress(source, out, config(method=method), force=True)
    assert not out.exists()


def test_one_row_of_calibration_text_is_enough_for_a_finite_result(dense: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "tiny.txt"
    text.write_text(" ".join(f"w{i}" for i in range(3, 15)))
    compress(dense(), tmp_path / "out", config(calibration=str(text)))
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path / "out").values())


def test_a_dead_layer_is_compressed(dense: Callable[..., Path], tmp_path: Path) -> None:
    """A layer whose MLP gets all-zero inputs, and one whose weights are zero."""
    source = dense()

    def kill(content: dict[str, torch.Tensor]) -> None:
        content[f"{LAYERS}.0.post_attention_layernorm.weight"].zero_()
        content[f"{LAYERS}.1.mlp.down_proj.weight"].zero_()

    edit_tensors(source, kill)
    report = compress(source, tmp_path / "out", config())
    model = load_pretrained(tmp_path / "out", torch.float32)
    assert torch.isfinite(model(torch.randint(3, 64, (1, 5))).logits).all()
    assert report["matrices"][-1]["relative_error"] == 0


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda", 0, "no CUDA GPU"),
        ("cuda:2", 2, "torch sees 2 CUDA GPUs"),
        ("gpu", 2, "must be cpu or cuda"),
        ("mps", 2, "must be cpu or cuda"),
    ],
)
def test_a_missing_device_is_refused(
    device: str,
    gpus: int,
    message: str,
    dense: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=f"device {device}: .*{message}"):
        compress(dense(), tmp_path / "out", config(), device=device)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("method", "form"), [("whitened", "two"), ("anchored", "pivoted"), ("fisher", "two"), ("fisher", "pivoted")]
)
def test_a_gpu_compresses_as_the_cpu_does(
    method: str, form: str, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """Every step runs on the GPU. Numbers may differ, because eigenvectors and training amplify rounding.

    The text is given, because rounding changes which tokens are sampled.
    """
    source, changes = dense(), {"method": method, "form": form, "targets": "all", "calibration": str(text)}
    errors = [
        compress(source, tmp_path / device, config(**{**EVERYTHING, **changes}), device=device)["mean_relative_error"]
        for device in ("cpu", "cuda")
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    load_pretrained(tmp_path / "cuda", torch.float32)
