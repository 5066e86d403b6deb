"""The settings of a build for NeuronCores, and the configuration that a host reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from neuronmm.models.errors import UserError
from neuronmm.models.load import DTYPES
from neuronmm.models.neuronx.architecture import Architecture

AMPS = {dtype: name for name, dtype in DTYPES.items()}
LAYOUTS = ("HSB", "BSH")
SMALLEST_BUCKET = 128


@dataclass(frozen=True)
class Settings:
    """The sizes that a graph is compiled for.

    ``tp_degree``: NeuronCores that share the model. ``batch_size``: rows of every step. ``n_positions``: longest
    sequence, prompt and answer together. ``layout``: of the hidden state, HSB ([hidden, sequence, batch]) or BSH (the
    reverse). ``continuous``: rows start at any time, and prompts are processed one at a time.

    Raises:
        UserError: a value is out of range.
    """

    dtype: torch.dtype
    tp_degree: int = 1
    batch_size: int = 1
    n_positions: int = 512
    layout: str = "HSB"
    continuous: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.tp_degree >= 1, f"tp_degree {self.tp_degree}: must be 1 or more"),
            (self.batch_size >= 1, f"batch_size {self.batch_size}: must be 1 or more"),
            (self.n_positions >= 2, f"n_positions {self.n_positions}: must be 2 or more, for a prompt and an answer"),
            (self.layout in LAYOUTS, f"layout {self.layout!r}: must be one of {', '.join(LAYOUTS)}"),
        )
        for valid, message in checks:
            if not valid:
                raise UserError(message)

    def check(self, architecture: Architecture) -> None:
        """Raise if the sequence is longer than the model's context."""
        if self.n_positions > architecture.positions:
            raise UserError(
                f"n_positions {self.n_positions} exceeds the model's context of {architecture.positions} positions"
            )

    @property
    def amp(self) -> str:
        """The hosts' name of the dtype."""
        return AMPS[self.dtype]

    @property
    def buckets(self) -> list[int]:
        """Sequence lengths for a host that compiles several: powers of two from 128, and ``n_positions``."""
        sizes = []
        size = SMALLEST_BUCKET
        while size < self.n_positions:
            sizes.append(size)
            size *= 2
        return [*sizes, self.n_positions]


def host_config(architecture: Architecture) -> SimpleNamespace:
    """Return the model's configuration as a host's own code reads it.

    The hosts compute the head size as hidden size / heads, so this configuration has the number of heads that gives the
    right size. They also distribute heads over the cores, which :mod:`.heads` does before they see a weight.
    """
    return SimpleNamespace(
        hidden_size=architecture.hidden,
        intermediate_size=architecture.intermediate,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.host_heads,
        num_key_value_heads=architecture.host_heads,
        vocab_size=architecture.vocabulary,
        max_position_embeddings=architecture.positions,
        rms_norm_eps=architecture.epsilon,
        rope_theta=architecture.rope_theta,
        rope_scaling=architecture.rope_scaling,
        hidden_act="silu",
        bos_token_id=None,
        eos_token_id=list(architecture.ends),
    )
