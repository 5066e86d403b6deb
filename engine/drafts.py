"""What a ``draft`` names, loaded: it gives each sequence a drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch
from transformers import PreTrainedTokenizerBase

from neuronmm.engine.backends import cpu
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.engine.drafters import Drafter, FewerBitsDrafter, ModelDrafter, NgramDrafter
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_tokenizer
from neuronmm.models.low_bits import WeightDtype, weight_dtype_of
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import resolve

NGRAM = "ngram"
"""The name of the drafter that needs no model."""

FEWER_BITS: tuple[WeightDtype, ...] = get_args(WeightDtype)
"""The names of the drafts of the model itself, with its dense weights rounded."""


class Drafts:
    """What ``draft`` names: n-grams, the model itself in fewer bits, or a checkpoint that is loaded beside the model.

    Raises:
        UserError: the model does not decode in the C++ core, or the checkpoint has another tokenizer or does not
            decode there either.
    """

    def __init__(
        self,
        draft: str | Path,
        folder: Path,
        runner: object,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        progress: Progress = no_progress,
    ) -> None:
        self.name, self._vocabulary = str(draft), vocabulary
        self._runner: TorchRunner | None = None
        rounded: WeightDtype | None = next((dtype for dtype in FEWER_BITS if dtype == draft), None)
        self._shares_cache = rounded is not None
        if not isinstance(runner, cpu.CpuRunner) or not _in_core(runner):
            raise UserError("drafts need a model that decodes in the C++ core: bf16 or fp32, and --impl auto")
        if draft == NGRAM:
            return
        if rounded is not None and weight_dtype_of(runner.model) is None:
            self._runner = runner.rounded(rounded)
        elif rounded is not None:  # from the weights in the files, which were rounded when the model was loaded
            self._runner = cpu.load(folder, runner.dtype, "auto", rounded)
        else:
            self._runner = cpu.load(_same_tokenizer(draft, tokenizer, progress), runner.dtype, "auto")
        if not _in_core(self._runner):
            raise UserError(f"{draft}: does not decode in the C++ core; use another draft, or --draft {NGRAM}")
        self._step_seconds = _step_seconds(_decoder(self._runner, 4))

    def drafters(self, rows: Sequence[CpuDecoder]) -> Callable[[int], Drafter]:
        """Return what creates the drafter of a new sequence in a row, which forgets the one before.

        ``rows`` are decoders of the model, of one length. One row drafts at a time: another checkpoint has one decoder
        for all of them.
        """
        if self._runner is None:
            return lambda _: NgramDrafter()
        model, max_len = self._runner.model, rows[0].max_len
        if not self._shares_cache:
            own = _decoder(self._runner, max_len)
            # Models of one family pad their embeddings to different sizes; no text has the tokens of the padding.
            common = min(self._vocabulary, model.config.vocab_size)
            return lambda _: ModelDrafter(own, self._step_seconds, common)
        weights = describe(model, max_len)
        twins = [CpuDecoder(model, 1, max_len, weights, row.cache) for row in rows]
        return lambda row: FewerBitsDrafter(twins[row], self._step_seconds, self._vocabulary)


def _same_tokenizer(draft: str | Path, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> Path:
    folder = resolve(draft, progress)
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{draft}: has another vocabulary than the model; a draft has to have the same tokenizer")
    return folder


def _in_core(runner: TorchRunner) -> bool:
    return isinstance(runner.decoder(1, 1), CpuDecoder)


def _decoder(runner: TorchRunner, max_len: int) -> CpuDecoder:
    decoder = runner.decoder(1, max_len)
    assert isinstance(decoder, CpuDecoder)
    return decoder


def _step_seconds(decoder: CpuDecoder) -> float:
    """Return the shortest of three steps after one token."""
    token = torch.zeros(1, 1, dtype=torch.long)
    decoder.prefill(token, torch.ones_like(token))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        decoder.decode(token[0])
        times.append(time.perf_counter() - start)
    return min(times)
