"""The training of a checkpoint's factors: the loss, what it changes, interruption, rounding."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from draws import examples
from neuronmm.compression import distillation, factor_training
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.distillation import Lesson, dense_states, evaluate, loss_sum
from neuronmm.compression.factor_training import Recovery, round_stochastically, train_factors
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recovery_of
from neuronmm.models import UserError
from neuronmm.models.load import load_pretrained
from tiny_models import load_plain, make_tiny, make_tokens

ROWS = make_tokens(32, 20)
QUICK = {"learning_rate": 3e-3, "epochs": 2, "batch": 4}


def silent(stage: str, fraction: float) -> None:
    """Ignore progress."""


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def low(dense: Callable[..., Path], text: Path, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a dense and a compressed checkpoint: ``low({"share_a": "auto"}, dtype=torch.bfloat16)``."""

    def make(more: dict[str, Any] | None = None, **saving: Any) -> tuple[Path, Path]:
        source, out = dense("llama", **saving), tmp_path / "low"
        usual = {"ratio": 0.5, "align": 2, "calibration": str(text), "calibration_length": 16, "refine": "off"}
        usual |= {"form": "two", "method": "whitened"}
        compress(source, out, CompressionConfig.build(None, **{**usual, "share_a": "off", **(more or {})}))
        return source, out

    return make


@given(batch=st.integers(1, 3), length=st.integers(2, 9), chunk=st.integers(1, 12), seed=st.integers(0, 5))
@examples(10)
def test_the_chunked_loss_and_its_gradients_equal_those_of_all_logits_at_once(
    batch: int, length: int, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, tokens = make_tiny(), make_tokens(batch, length)
    states = 2 * torch.randn(batch, length, 32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distillation, "_CHUNK", chunk)
        chunked = loss_sum(model, Lesson(tokens, states), scale=0.5)
    gradients = {name: p.grad for name, p in model.named_parameters() if "layers" in name}
    model.zero_grad()
    logits = model(tokens).logits[:, :-1].log_softmax(-1)
    expected = model.lm_head(states[:, :-1]).log_softmax(-1).detach()
    loss = (expected.exp() * (expected - logits)).sum()
    (0.5 * loss).backward()
    assert chunked == pytest.approx(loss.item(), rel=1e-4)
    expected_gradients = {name: p.grad for name, p in model.named_parameters() if "layers" in name}
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-5 * largest)


def test_distilling_a_model_from_itself_costs_nothing(dense: Callable[..., Path]) -> None:
    folder = dense()
    lesson = Lesson(ROWS, dense_states(folder, ROWS, "cpu", silent))
    assert evaluate(load_pretrained(folder, torch.float32), lesson) == pytest.approx(0, abs=1e-5)
    assert lesson.predictions == len(ROWS) * 19


CASES = [{"rank": 4}, {"rank": 4, "two_stage": False}, {"rank": 0, "two_stage": False}, {"rank": 0, "autocast": True}]


RATIOS = {"two": 0.5, "pivoted": 0.6}
"""At these ratios both forms begin at the same loss. At equal ratios pivoted factors begin at a smaller one, and the 28
random rows hold too little to lower that."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["two", "pivoted"])
def test_training_lowers_the_held_out_loss_and_changes_the_factors_alone(
    low: Callable[..., tuple[Path, Path]], form: str, case: dict[str, Any]
) -> None:
    source, folder = low({"form": form, "ratio": RATIOS[form]}, dtype=torch.bfloat16, max_shard_size="20KB")
    before, config = tensors(folder), (folder / "config.json").read_text()
    fractions: dict[str, float] = {}

    def progress(stage: str, fraction: float) -> None:
        fractions[stage] = fractions.get(stage, 0) + fraction

    done = train_factors(folder, ROWS, Recovery(**QUICK, **case), progress, dense=source)
    assert done["kept"] and done["loss_after"] < 0.98 * done["loss_before"]
    assert fractions == pytest.approx({"recovering": 1, "dense model": 1})
    assert json.loads(json.dumps(done)) == done
    assert [stage["factors"] for stage in done["stages"]] == (["B", "A"] if Recovery(**case).two_stage else ["AB"])
    assert done["rows"] == {"trained": 28, "held_out": 4, "length": 20}

    after = tensors(folder)
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    # The second stage of LoRA, on what the first has left to learn in random rows, may end where it began.
    gained = {
        factor for stage in done["stages"] if min(stage["losses"]) < stage["losses"][0] for factor in stage["factors"]
    }
    assert gained >= set(done["stages"][0]["factors"])
    assert changed == {name for name in after if name.endswith(tuple(f".{factor}.weight" for factor in gained))}
    assert all((after[name].dtype, after[name].shape) == (before[name].dtype, before[name].shape) for name in after)
    assert (folder / "config.json").read_text() == config
    states = dense_states(source, ROWS, "cpu", silent)
    again = evaluate(load_plain(folder), Lesson(ROWS, states).pick(torch.arange(28, 32)))
    assert again == pytest.approx(done["loss_after"], rel=1e-6)


def test_no_layer_keeps_its_activations(low: Callable[..., tuple[Path, Path]]) -> None:
    source, folder = low()
    lesson = Lesson(ROWS, dense_states(source, ROWS, "cpu", silent))
    kept, gradients = [], []
    for block in (nullcontext, factor_training.recomputed_layers):
        model, sizes = load_pretrained(folder, torch.float32), list[int]()

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with block(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_sum(model, lesson, 1.0)
        kept.append(sum(sizes))
        gradients.append({name: p.grad for name, p in model.named_parameters() if name.endswith("weight")})
    assert kept[1] < 0.5 * kept[0]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("rank", [0, 4])
def test_training_recomputes_the_layers(
    low: Callable[..., tuple[Path, Path]], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = low()
    again = Mock(wraps=factor_training.checkpoint)
    monkeypatch.setattr(factor_training, "checkpoint", again)
    train_factors(folder, ROWS, Recovery(**QUICK, rank=rank), silent, dense=source)
    assert again.call_count > 0


def test_the_same_run_gives_the_same_bytes(low: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    source, folder = low()
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(torch.seed())  # what ran before must not matter
        copy = tmp_path / f"copy-{len(results)}"
        copy.mkdir()
        for name, data in contents(folder).items():
            (copy / name).write_bytes(data)
        train_factors(copy, ROWS, Recovery(**QUICK, rank=2, seed=seed), silent, dense=source)
        results.append(contents(copy))
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize("form", ["two", "pivoted"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_shared_a_is_trained_once_and_stays_shared(
    low: Callable[..., tuple[Path, Path]], rank: int, form: str
) -> None:
    source, folder = low({"share_a": "auto", "targets": "all", "form": form})
    shared = json.loads((folder / "config.json").read_text())["quantization_config"]["shared"]
    assert shared, "nothing is shared, so nothing is tested"
    before = tensors(folder)
    done = train_factors(folder, ROWS, Recovery(**QUICK, rank=rank), silent, dense=source)
    after = tensors(folder)
    assert done["kept"] and after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if name.endswith((".A.weight", ".B.weight"))}
    if rank == 0:
        sizes = {f: sum(t.numel() for n, t in after.items() if n.endswith(f".{f}.weight")) for f in "BA"}
        assert {stage["factors"]: stage["trained_parameters"] for stage in done["stages"]} == sizes


@pytest.mark.parametrize("where", ["dense model", "recovering", "replacing"])
def test_an_interruption_leaves_the_checkpoint_unchanged(
    low: Callable[..., tuple[Path, Path]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = low(max_shard_size="20KB")
    before = contents(folder)

    def stop(stage: str, fraction: float) -> None:
        if stage == where:
            raise KeyboardInterrupt

    def refuse(*arguments: object) -> None:
        raise KeyboardInterrupt

    if where == "replacing":
        monkeypatch.setattr("neuronmm.compression.tensor_files.shutil.copymode", refuse)
    with pytest.raises(KeyboardInterrupt):
        train_factors(folder, ROWS, Recovery(**QUICK), stop, dense=source)
    assert contents(folder) == before


def passes_of(case: dict[str, Any]) -> int:
    """Return the number of epochs of all stages."""
    return QUICK["epochs"] * (2 if Recovery(**case).two_stage else 1)


@pytest.mark.parametrize(("case", "passes"), [(c, n + 1) for c in CASES for n in range(passes_of(c))], ids=str)
def test_an_interrupted_training_resumes_after_its_last_epoch_to_the_same_bytes(
    low: Callable[..., tuple[Path, Path]], case: dict[str, Any], passes: int, tmp_path: Path
) -> None:
    source, folder = low()
    uninterrupted, work, settings = tmp_path / "whole", tmp_path / "work", Recovery(**QUICK, **case)
    shutil.copytree(folder, uninterrupted)
    work.mkdir()
    expected = train_factors(uninterrupted, ROWS, settings, silent, dense=source)
    step, steps = Mock(wraps=loss_sum), math.ceil(28 / QUICK["batch"])

    def interrupted(*arguments: Any) -> float:
        if step.call_count == passes * steps:
            raise KeyboardInterrupt
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(factor_training, "loss_sum", interrupted)
        patched.setattr(
            factor_training, "replace_tensors", Mock(side_effect=KeyboardInterrupt)
        )  # after the very last pass
        train_factors(folder, ROWS, settings, silent, dense=source, work=work)
    step.reset_mock()
    fractions: list[float] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(factor_training, "loss_sum", step)
        done = train_factors(
            folder, ROWS, settings, lambda stage, fraction: fractions.append(fraction), dense=source, work=work
        )
    assert step.call_count == (passes_of(case) - passes) * steps
    assert sum(fractions) == pytest.approx(2), "the dense model's and the recovery's"
    assert contents(folder) == contents(uninterrupted)
    assert [stage["losses"] for stage in done["stages"]] == [stage["losses"] for stage in expected["stages"]]
    assert 0 < done["resumed_seconds"] < done["seconds"]


def test_an_interrupted_training_of_pivoted_factors_resumes_to_the_same_bytes(
    low: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    def make(more: dict[str, Any] | None = None, **saving: Any) -> tuple[Path, Path]:
        return low({"form": "pivoted", "targets": "all", "share_a": "auto", **(more or {})}, **saving)

    test_an_interrupted_training_resumes_after_its_last_epoch_to_the_same_bytes(make, CASES[3], 1, tmp_path)


def test_training_that_does_not_help_changes_nothing(low: Callable[..., tuple[Path, Path]]) -> None:
    source, folder = low()
    before = contents(folder)
    done = train_factors(folder, ROWS, Recovery(rank=0, learning_rate=100.0, epochs=9), silent, dense=source)
    assert contents(folder) == before
    assert not done["kept"] and done["loss_after"] == done["loss_before"]
    assert [len(stage["losses"]) for stage in done["stages"]] == [3, 3], "stops after two epochs without gain"


def test_small_steps_keep_their_gain_in_bf16(low: Callable[..., tuple[Path, Path]]) -> None:
    source, folder = low(dtype=torch.bfloat16)
    done = train_factors(folder, ROWS, Recovery(rank=4, learning_rate=3e-5, epochs=2, batch=8), silent, dense=source)
    trained = done["loss_before"] - min(done["stages"][-1]["losses"])
    stored = done["loss_before"] - done["loss_after"]
    assert stored > 0.6 * trained > 0, "to the nearest it would be a quarter"


def test_factors_that_are_worse_once_rounded_are_not_stored(
    low: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = low()
    before = contents(folder)
    monkeypatch.setattr(
        factor_training, "round_stochastically", lambda values, dtype, generator: -10 * values.to(dtype)
    )
    done = train_factors(folder, ROWS, Recovery(**QUICK, rank=2, two_stage=False), silent, dense=source)
    assert min(done["stages"][0]["losses"]) < done["loss_before"], "nothing was trained, so nothing is tested"
    assert not done["kept"] and done["loss_after"] == done["loss_before"]
    assert contents(folder) == before


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[:, :1], ROWS[:0]], ids=["one row", "one token", "none"])
def test_too_little_text_is_refused(low: Callable[..., tuple[Path, Path]], rows: Tensor) -> None:
    with pytest.raises(UserError, match="two or more rows of two or more tokens"):
        source, folder = low()
        train_factors(folder, rows, Recovery(), silent, dense=source)


def test_a_damaged_checkpoint_is_refused(low: Callable[..., tuple[Path, Path]]) -> None:
    source, folder = low()
    damaged = tensors(folder)
    damaged["model.layers.0.mlp.up_proj.A.weight"][0, 0] = torch.nan
    factor_training.replace_tensors(folder, damaged)
    with pytest.raises(UserError, match="damaged"):
        train_factors(folder, ROWS, Recovery(), silent, dense=source)


@pytest.mark.parametrize(("recover", "length", "rows"), [("factors", 256, 4), ("factors", 1500, 1), ("lora", 1024, 8)])
def test_a_step_of_the_factors_is_one_forward_pass_and_a_step_of_lora_has_the_published_rows(
    recover: str, length: int, rows: int
) -> None:
    settings_of_run = recovery_of(CompressionConfig.build(None, recover=recover, calibration_length=length), "cpu")
    assert settings_of_run.batch == rows
    if recover == "factors":
        assert len(Lesson(make_tokens(rows, length), torch.zeros(rows, length, 1)).passes()) == 1


TIMES = 4000
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@given(value=st.floats(-100, 100, width=32), seed=st.integers(0, 3))
def test_rounding_chooses_between_two_neighbours_and_preserves_the_mean(
    dtype: torch.dtype, value: float, seed: int
) -> None:
    values = torch.full((TIMES,), value)
    rounded = round_stochastically(values, dtype, torch.Generator().manual_seed(seed))
    assert rounded.dtype == dtype
    nearest = values[0].to(dtype)
    if float(nearest) == value:
        assert (rounded == nearest).all()
        return
    other = torch.nextafter(nearest, torch.tensor(torch.inf if value > float(nearest) else -torch.inf, dtype=dtype))
    low, high = sorted((float(nearest), float(other)))
    assert low < value < high and set(rounded.float().unique().tolist()) <= {low, high}
    fraction = (value - low) / (high - low)
    # Five standard errors, and some counts more where one of the two is so rare that they are not normal.
    spread = 5 * (fraction * (1 - fraction) / TIMES) ** 0.5 + 10 / TIMES
    assert float((rounded == high).float().mean()) == pytest.approx(fraction, abs=spread)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_rounding_changes_neither_exact_values_nor_its_argument(dtype: torch.dtype) -> None:
    values = torch.cat([torch.zeros(64), torch.randn(64, generator=torch.Generator().manual_seed(0))]).to(dtype).float()
    before = values.clone()
    rounded = round_stochastically(values, dtype, torch.Generator())
    assert torch.equal(rounded.float(), before)
    rounded.zero_()
    assert torch.equal(values, before)
