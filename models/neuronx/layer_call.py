"""What a host's decoder hands to a layer, found by the names that the host's own layer gives it.

The hosts call a layer with positions only: the step's values, the caches, their own weights (None where a model has
none of that name), then the extra ones. How many there are, and in which order, differs from host to host and from
version to version; the signature of the host's own layer says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from neuronmm.models.errors import UserError
from neuronmm.models.neuronx.graph import Step

_NAMES = ("hidden", "cache_ids", "start_ids", "pos_embed", "mask", "active_mask", "attn_k_cache", "attn_v_cache")


class Handed(NamedTuple):
    """A layer's arguments: the hidden state, the step, both caches, and our weights."""

    hidden: Any
    step: Step
    keys: Any
    values: Any
    weights: list[Any]


class LayerCall:
    """Reads the positions of a call by the signature of ``own``, the host's layer.

    Its parameters without a default are what the host always hands over; extra weights come after them.

    Raises:
        UserError: the host's layer lacks one of the names that are needed.
    """

    def __init__(self, own: Callable[..., Any], host: str) -> None:
        parameters = [p for p in signature(own).parameters.values() if p.name != "self"]
        self.names, self.host = [p.name for p in parameters if p.default is Parameter.empty], host
        missing = [name for name in _NAMES if name not in self.names]
        if missing:
            raise UserError(
                f"{host} is not a version that neuronmm knows: its layer has no {', '.join(missing)}; docs/trainium.md "
                f"names the versions that are served"
            )

    def __call__(self, given: Sequence[Any], weights: int) -> Handed:
        """The arguments of a call that ends with ``weights`` extra weights.

        Raises:
            UserError: the host hands over another number of values than its own layer takes.
        """
        if len(given) != len(self.names) + weights:
            raise UserError(
                f"{self.host} is not a version that neuronmm knows: it hands {len(given)} values to a layer, not the "
                f"{len(self.names)} of its own and {weights} weights; docs/trainium.md names the versions that are "
                f"served"
            )
        named = dict(zip(self.names, given, strict=False))
        step = Step(*(named[name] for name in ("cache_ids", "start_ids", "pos_embed", "mask", "active_mask")))
        keys, values = named["attn_k_cache"], named["attn_v_cache"]
        return Handed(named["hidden"], step, keys, values, list(given[len(self.names) :]))
