"""A layer's arguments are found by the names of the host's own layer, and a host that differs is named."""

from __future__ import annotations

import pytest

from neuronmm.models.errors import UserError
from neuronmm.models.neuronx.layer_call import LayerCall


class Host:
    """Layers as hosts declare them: a step, caches, own weights, and optional extra ones."""

    def one(self, hidden, cache_ids, start_ids, pos_embed, mask, active_mask, attn_k_cache, attn_v_cache, norm, q, k,
            in0_weight=None, is_first=False): ...  # type: ignore[no-untyped-def]  # fmt: skip

    def other(self, hidden, last_token_id, pos_embed, cache_ids, start_ids, core_id, mask, active_mask, attn_k_cache,
              attn_v_cache, norm, q, q_scales, k, k_scales, in0_weight=None, in0_scales=None): ...  # type: ignore[no-untyped-def]  # fmt: skip

    def older(self, hidden, cache_ids, start_ids, pos_embed, mask, attn_k_cache, attn_v_cache, norm, q, k): ...  # type: ignore[no-untyped-def]  # fmt: skip


ONE = ["hidden", "cache", "start", "rotations", "mask", "active", "keys", "values", *[None] * 3]
OTHER = ["hidden", "last", "rotations", "cache", "start", "core", "mask", "active", "keys", "values", *[None] * 5]


@pytest.mark.parametrize(("layer", "own"), [(Host.one, ONE), (Host.other, OTHER)])
def test_arguments_are_found_wherever_they_stand(layer: object, own: list[str | None]) -> None:
    handed = LayerCall(layer, "host 1")([*own, "first", "second"], 2)  # type: ignore[arg-type]
    assert (handed.hidden, handed.keys, handed.values) == ("hidden", "keys", "values")
    step = handed.step
    assert (step.cache_ids, step.start_ids, step.positions) == ("cache", "start", "rotations")
    assert (step.mask, step.active_mask) == ("mask", "active")
    assert handed.weights == ["first", "second"]


def test_a_host_that_differs_is_named() -> None:
    with pytest.raises(
        UserError, match=r"host 0\.9 is not a supported version: its layer has no active_mask; docs/trainium\.md"
    ):
        LayerCall(Host.older, "host 0.9")
    with pytest.raises(
        UserError, match=r"host 2 .* it passes 13 arguments to a layer, not the 11 of its own layer and 3 weights"
    ):
        LayerCall(Host.one, "host 2")([*ONE, "first", "second"], 3)
