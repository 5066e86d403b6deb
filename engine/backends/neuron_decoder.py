"""Decoders on a Neuron host's model, whose graphs have a fixed batch: rows that start together, or slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from neuronmm.engine.backends.neuron import NeuronRunner


class _FixedBatch:
    """The state that both decoders share: the runner, its model and the size of the KV cache."""

    def __init__(self, runner: NeuronRunner, batch: int, max_len: int) -> None:
        self.batch, self.max_len = batch, max_len
        self._runner = runner  # must outlive the decoder
        self._model, self._rows = runner.model, runner.max_batch
        sizes, tp = runner.shards.checkpoint.architecture, runner.settings.tp_degree
        keys = runner.shards.heads.keys_per_core * tp * sizes.head
        positions = runner.settings.n_positions * self._rows
        self.state_bytes = 2 * sizes.layers * positions * keys * runner.dtype.itemsize

    def _check(self, end: int, rows: int) -> None:
        if end > self.max_len or rows != self.batch:
            raise ValueError(f"{rows} rows of {end} positions do not fit [{self.batch}, {self.max_len}]")


class NeuronDecoder(_FixedBatch):
    """The decoder of a static batch. Unused rows of the graph repeat the first row."""

    _start, _position = torch.zeros(0), 0

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.decoder.Decoder`."""
        self._start = self._fill(attention_mask.int().argmax(1).int())
        self._position = input_ids.shape[1]
        self._check(self._position, len(input_ids))
        return self._model(self._fill(input_ids), None, self._start)[: self.batch]

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.decoder.Decoder`."""
        self._check(self._position + 1, len(token_ids))
        at = torch.tensor([self._position], dtype=torch.int32)
        self._position += 1
        return self._model(self._fill(token_ids)[:, None], at, self._start)[: self.batch]

    def _fill(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[:1].expand(self._rows - len(rows), *rows.shape[1:])])


class NeuronSlots(_FixedBatch):
    """The decoder of a continuous batch, and its slots: each row holds an independent sequence without padding."""

    chunk = None

    def __init__(self, runner: NeuronRunner, batch: int, max_len: int) -> None:
        super().__init__(runner, batch, max_len)
        self._lengths = [0] * batch

    @torch.inference_mode()
    def join(self, slot: int, input_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`."""
        self._check(len(input_ids), self.batch)
        self._lengths[slot] = len(input_ids)
        at = torch.arange(len(input_ids))
        if len(input_ids) == 1:
            # The hosts treat a single token as a decode step of every slot. A second copy makes it a prompt. The
            # copy has the same position, since the hosts return the logits of the highest one, and the next step
            # overwrites it in the cache before anything reads it.
            input_ids, at = input_ids.repeat(2), at.repeat(2)
        return self._model(input_ids[None], at[None], torch.tensor([slot]))[0]

    def extend(self, slot: int, input_ids: Tensor) -> Tensor:
        """Refuse: the hosts read a prompt as a whole."""
        raise NotImplementedError

    @torch.inference_mode()
    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`."""
        at = [self._lengths[slot] for slot in slots]
        self._check(max(at) + 1, self.batch)
        for slot in slots:
            self._lengths[slot] += 1
        return self._model(token_ids[:, None], torch.tensor(at)[:, None], torch.tensor(slots))

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.decoder.Decoder`: every row joins its slot without its padding."""
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        return torch.stack([self.join(slot, row[mask]) for slot, (row, mask) in enumerate(rows)])

    def decode(self, token_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.decoder.Decoder`."""
        return self.step(list(range(self.batch)), token_ids)
