"""How far a compressed model is from the dense one: measured on held-out text, and shown by what both models write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedTokenizerBase

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.continuation import around_user, continue_rows, first_token, greedy
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, advance
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.load import end_tokens, load_config, load_tokenizer, positions_of

LARGEST_KL = 0.25
"""Nats per token on held-out text above which a checkpoint gets a warning.

Measured on SmolLM2-135M (docs/results/quality.md): 0.12 and less wrote sane text, 0.35 and more went in circles.
"""

_PROMPTS = ("Why is the sky blue?", "Write a Python function that checks whether a string is a palindrome.")
_BEGINNINGS = ("The capital of France is", "def is_palindrome(text):")  # for models without a chat template
_NEW_TOKENS = 96
_CHUNK = 128  # positions per call of the head, whose logits would otherwise take more memory than a layer
_REPEATS, _LOOP_TOKENS = 3, 16


def compare(run: Run, folder: Path, rows: Tensor, fitted: Tensor) -> dict[str, Any]:
    """Compare the checkpoint in ``folder`` with the dense model of ``run``; one layer is in memory at a time.

    All processes of the run measure; only the first one writes samples.

    Args:
        run: the run that wrote the checkpoint.
        folder: the checkpoint.
        rows: held-out token ids [rows, length]; without rows nothing is measured, and the models only write samples.
        fitted: the rows that the factors were fitted to, which are the same if the text has only one.

    Returns:
        Plain values for the report. ``text`` names the calibration text, of which the rows are. ``kl`` is the KL
        divergence of the next-token distributions from the dense ones in nats per token, None if it is not finite;
        ``agreement`` the fraction of positions at which both models' most probable token is the same; ``held_out``
        whether the factors were fitted to other rows.
    """
    measured = None
    if rows.numel():
        measured = {**_distance(run, folder, rows), "held_out": not torch.equal(rows, fitted)}
    samples = _samples(run, folder) if processes.rank() == 0 else []
    warnings = _warnings(run.config, measured, samples)
    if measured is not None and not math.isfinite(measured["kl"]):
        measured |= {"kl": None, "kl_standard_error": None}  # JSON has no such number
    return {
        "kind": "measured",
        "text": run.config.calibration,
        "distance": measured,
        "samples": samples,
        "warnings": warnings,
    }


def divergences(
    dense: StreamedModel, expected: Tensor, candidates: Sequence[Tensor], low: StreamedModel | None = None
) -> list[dict[str, Any]]:
    """Return how far the next-token distributions of each compressed model are from the dense ones.

    Args:
        dense: the dense model.
        expected: the outputs [rows, length, hidden] of its last layer, for the rows of this process.
        candidates: those of each compressed model.
        low: the compressed model; None if all have the last norm and the head of the dense one, which only rounding
            changes.

    Returns:
        Plain values by candidate: ``rows``, ``length``, ``kl``, ``agreement``, ``kl_standard_error`` over the rows
        (None for one).
    """
    kls, same = [list[float]() for _ in candidates], [0] * len(candidates)
    with dense.head() as logits, nullcontext(logits) if low is None else low.head() as low_logits:
        for want, *got in zip(expected, *candidates, strict=True):
            totals = [0.0] * len(got)
            for chunk, *chunks in zip(*(states[:-1].split(_CHUNK) for states in (want, *got)), strict=True):
                target = logits(chunk).log_softmax(-1)
                most = target.argmax(-1)
                for number, states in enumerate(chunks):
                    result = low_logits(states).log_softmax(-1)
                    totals[number] += float(kl_div(result, target, reduction="sum", log_target=True))
                    same[number] += int((most == result.argmax(-1)).sum())
            for of_rows, total in zip(kls, totals, strict=True):
                of_rows.append(total / max(len(want) - 1, 1))
    return [_summary(of_rows, equal, expected) for of_rows, equal in zip(kls, same, strict=True)]


def _summary(kls: list[float], same: int, expected: Tensor) -> dict[str, Any]:
    """Return the values of :func:`divergences` for one candidate, over the rows of all processes.

    ``kls`` are the divergences of the rows of this process, ``same`` is the number of positions with the same token.
    """
    values = torch.tensor([kl for part in processes.of_all(kls) for kl in part], dtype=torch.float64)
    same, positions = int(processes.total(same)), int(processes.total(expected[:, 1:, 0].numel()))
    return {
        "rows": len(values),
        "length": expected.shape[1],
        "kl": float(values.mean()),
        "kl_standard_error": float(values.std() / len(values) ** 0.5) if len(values) > 1 else None,
        "agreement": same / positions,
    }


def loops(tokens: Sequence[int]) -> bool:
    """Return whether ``tokens`` end in a loop: one passage three times or more, in 16 tokens or more."""
    for period in range(1, len(tokens) // _REPEATS + 1):
        tail = tokens[-max(_REPEATS * period, _LOOP_TOKENS) :]
        if len(tail) >= _LOOP_TOKENS and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


@torch.inference_mode()
def _distance(run: Run, folder: Path, rows: Tensor) -> dict[str, Any]:
    """Return the :func:`divergences` of the checkpoint in ``folder`` over ``rows``."""
    dense = StreamedModel(run.dense.folder, torch.float32, run.device)
    low = StreamedModel(folder, torch.float32, run.device)
    step = partial(run.progress, "comparing", 0.5 / (len(dense) + len(low)))
    rounded = None if run.config.weight_dtype == "model" else low
    [distance] = divergences(dense, final_states(dense, rows, step), [final_states(low, rows, step)], rounded)
    return distance


def final_states(model: StreamedModel, rows: Tensor, step: Callable[[], None]) -> Tensor:
    """Return the outputs [rows, length, hidden] of the last decoder layer for the rows of this process."""
    streams = model.streams(processes.part(rows), ("dense",))
    for index in range(len(model)):
        with model.layer(index) as layer:
            streams.dense = advance(layer, streams.dense, streams.rotary)
        model.reader.close()  # pages of a mapped shard count as resident
        step()
    return streams.dense


def _samples(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Return what both models write greedily after the same prompts; nothing if a prompt does not fit the model."""
    config = load_config(run.dense.folder)
    try:
        tokenizer = load_tokenizer(run.dense.folder)
        prompts = list(_openings(tokenizer))
    except UserError:  # the weights alone are a complete input
        return []
    longest = min(max(len(ids) for _, ids in prompts) + _NEW_TOKENS, positions_of(config))
    if any(len(ids) >= longest or max(ids) >= config.vocab_size for _, ids in prompts):
        return []
    ends = end_tokens(run.dense.folder, config, tokenizer)
    texts: list[list[tuple[str, bool]]] = []
    for source in (run.dense.folder, folder):
        model = StreamedModel(source, None, run.device)
        step = partial(run.progress, "comparing", 0.25 / longest)
        tokens = continue_rows(model, [ids for _, ids in prompts], longest, greedy, step).tolist()
        written = [row[len(ids) :][:_NEW_TOKENS] for row, (_, ids) in zip(tokens, prompts, strict=True)]
        texts.append([_text(tokenizer, row, ends) for row in written])
    return [
        {
            "prompt": prompt,
            "dense": {"text": dense[0], "loops": dense[1]},
            "compressed": {"text": low[0], "loops": low[1]},
        }
        for (prompt, _), dense, low in zip(prompts, *texts, strict=True)
    ]


def _openings(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts and their tokens, in the chat template if the tokenizer has one."""
    before, after = around_user(tokenizer, answer=True) if tokenizer.chat_template else ("", "")
    for prompt in _PROMPTS if tokenizer.chat_template else _BEGINNINGS:
        ids: Any = tokenizer(before + prompt + after, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        yield prompt, ids or [first_token(tokenizer)]


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: frozenset[int]) -> tuple[str, bool]:
    """Return the text of ``ids`` up to its end, and whether it ends in a loop."""
    stop = next((number for number, token in enumerate(ids) if token in ends), len(ids))
    return str(tokenizer.decode(ids[:stop], skip_special_tokens=True)), loops(ids[:stop])


def _warnings(config: CompressionConfig, distance: dict[str, Any] | None, samples: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each sign that the compressed model is no substitute for the dense one."""
    warnings, budget = list[str](), config.budget
    lower = "compress with a lower --ratio or a --budget" if budget is None else "compress with a lower --budget"
    if not config.factorises:
        lower = "keep more bits"
    if budget is not None and distance is not None and not distance["kl"] <= budget:
        warnings.append(
            f"the finished model is {distance['kl']:.3f} nats per token from the dense one, more than the budget of "
            f"{budget:g}; {lower}"
        )
    if distance is not None and not distance["kl"] <= LARGEST_KL:
        text = "held-out" if distance["held_out"] else "its calibration"
        warnings.append(
            f"the compressed model is far from the dense one ({distance['kl']:.2f} nats per token on {text} text, "
            f"more than {LARGEST_KL}); {lower}, or calibrate on more text like yours"
        )
    looping = [s["prompt"] for s in samples if s["compressed"]["loops"] and not s["dense"]["loops"]]
    if looping:
        warnings.append(
            f"the compressed model repeats itself where the dense one does not (after {looping[0]!r}); {lower}, "
            "or calibrate on more text like yours"
        )
    return warnings
