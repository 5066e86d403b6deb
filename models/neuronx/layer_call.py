"""Identifies the arguments that a host's decoder passes to a layer, by the signature of the host's own layer.

The hosts pass positional arguments only: the step's values, the caches, the host's own weights (None if the model has
no such weight), then the extra weights. Their number and order differ between hosts and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from neuronmm.models.errors import UserError
from neuronmm.models.neuronx.graph import Step

_NAMES = ("hidden", "cache_ids", "start_ids", "pos_embed", "mask", "active_mask", "attn_k_cache", "attn_v_cache")


class LayerArguments(NamedTuple):
    """A layer's arguments: the hidden state, the step, both caches, and the extra weights."""

    hidden: Any
    step: Step
    keys: Any
    values: Any
    weights: list[Any]


class LayerCall:
    """Names the positional arguments of a call by the signature of ``layer``, the host's own layer.

    The host always passes the parameters without a default; extra weights follow them. ``host``: name and version, for
    errors.

    Raises:
        UserError: the host's layer lacks a parameter that is needed.
    """

    def __init__(self, layer: Callable[..., Any], host: str) -> None:
        parameters = [p for p in signature(layer).parameters.values() if p.name != "self"]
        self.names, self.host = [p.name for p in parameters if p.default is Parameter.empty], host
        missing = [name for name in _NAMES if name not in self.names]
        if missing:
            raise UserError(
                f"{host} is not a supported version: its layer has no {', '.join(missing)}; docs/trainium.md lists the "
                f"supported ones"
            )

    def __call__(self, arguments: Sequence[Any], weights: int) -> LayerArguments:
        """Name the arguments of a call that ends with ``weights`` extra weights.

        Raises:
            UserError: the host passes another number of arguments than its own layer takes.
        """
        if len(arguments) != len(self.names) + weights:
            raise UserError(
                f"{self.host} is not a supported version: it passes {len(arguments)} arguments to a layer, not the "
                f"{len(self.names)} of its own layer and {weights} weights; docs/trainium.md lists the supported ones"
            )
        named = dict(zip(self.names, arguments, strict=False))
        step = Step(*(named[name] for name in ("cache_ids", "start_ids", "pos_embed", "mask", "active_mask")))
        keys, values = named["attn_k_cache"], named["attn_v_cache"]
        return LayerArguments(named["hidden"], step, keys, values, list(arguments[len(self.names) :]))
