"""Split the linears of a loaded model over the processes of a run, by transformers' tensor-parallel plan.

Source of the plan: ``base_model_tp_plan`` of a transformers config. Its style ``colwise`` gives each process some
outputs of a linear, ``rowwise`` some inputs, whose contributions are added up. A factorised linear keeps its form:

- some outputs: all of A, and the rows of B for these outputs. In the form ROWS the pivots among them stay implicit.
- some inputs: the columns of A for these inputs, and all of B. What is added up is the rank-r intermediate, so that a
  step exchanges r numbers per token instead of out. In the form COLUMNS the pivots among them stay implicit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as apply

from neuronmm.kernels import Form
from neuronmm.kernels.factors import place_pivots
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.low_bits import Int8Linear, LowBitsModule, frozen
from neuronmm.models.lowrank import LowRankLinear

Factor = nn.Linear | Int8Linear


class Summed(nn.Module):
    """A linear of which each process has some inputs; the results are added up in float32.

    Dimensions: x [..., inputs here] -> [..., out]. The last ``pivots`` inputs here are added to the results from
    ``first`` on without a weight, which is an identity block that is not stored.
    """

    def __init__(self, part: Factor, bias: Tensor | None = None, pivots: int = 0, first: int = 0) -> None:
        super().__init__()
        self.part, self.bias = part, None if bias is None else frozen(bias)
        self._pivots, self._first = pivots, first

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x[..., : self.part.in_features]).float()
        y[..., self._first : self._first + self._pivots] += x[..., self.part.in_features :]
        processes.add_up(y)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


class PivotedOutputs(nn.Module):
    """Some outputs of a linear in the form ROWS: pivots ``first`` to ``end`` of its rank are at ``places`` among them.

    Dimensions: x [..., in] -> [..., outputs here]; ``A`` [rank, in], ``B`` [outputs here without pivots, rank];
    ``places`` is the first of consecutive places or an index, as in :class:`~neuronmm.kernels.factors.LowRank`.
    """

    places: Any

    def __init__(self, A: Factor, B: Factor, bias: Tensor | None, span: tuple[int, int], places: int | Tensor) -> None:
        super().__init__()
        self.A, self.B, self.bias = A, B, None if bias is None else frozen(bias)
        self._span = slice(*span)
        if isinstance(places, Tensor):
            self.register_buffer("places", places)
        else:
            self.places = places

    def forward(self, x: Tensor) -> Tensor:
        h = self.A(x)
        y = place_pivots(self.places, h[..., self._span], self.B(h))
        return y if self.bias is None else y + self.bias


class GatheredHead(nn.Module):
    """The head; each process computes the logits of some tokens, and all get all of them, the same bits.

    Dimensions: x [..., hidden] -> [..., vocabulary], float32. A head that shares the embedding's weight stays in memory
    as a whole.
    """

    def __init__(self, head: nn.Linear, tied: bool) -> None:
        super().__init__()
        self._vocabulary, self._mine = head.out_features, mine(head.out_features)
        self._rows = self._mine if tied else slice(None)
        self.weight = head.weight if tied else frozen(head.weight.detach()[self._mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(*x.shape[:-1], self._vocabulary, device=x.device)
        logits[..., self._mine] = apply(x, self.weight[self._rows]).float()
        processes.add_up(logits)
        return logits


def split(model: Any, where: str) -> Any:
    """Leave each process its part of the layers of ``model``, in place, and return it.

    The attention heads in ``model.config`` become those of this process. Embedding and norms stay whole.

    Raises:
        UserError: the heads do not divide, the installed transformers has no plan for this model, or it has weights of
            few bits other than factors in int8.
    """
    config, count = model.config, processes.size()
    for module in model.modules():
        if isinstance(module, LowBitsModule) and type(module) is not Int8Linear:
            what = type(module).__name__.lower()
            raise UserError(f"{where}: its weights of few bits ({what}) cannot be split; start one process")
    heads = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    for what, number in heads.items():
        if number % count:
            counts = " or ".join(str(n) for n in range(1, number + 1) if all(h % n == 0 for h in heads.values()))
            raise UserError(f"{where}: its {number} {what} cannot be split over {count} processes; start {counts}")
    styles = {"colwise": some_outputs, "rowwise": some_inputs}
    plan = getattr(config, "base_model_tp_plan", None) or {}
    names = {name: styles[style] for name, style in plan.items() if style in styles}
    if not names:
        raise UserError(f"{where}: the installed transformers has no tensor-parallel plan for it; install a newer one")
    for index in range(len(model.model.layers)):
        for name, cut in names.items():
            full = name.replace("layers.*", f"{LAYERS}.{index}")
            model.set_submodule(full, cut(model.get_submodule(full)))
    model.set_submodule("lm_head", GatheredHead(model.lm_head, model.lm_head.weight is model.model.embed_tokens.weight))
    config.num_attention_heads //= count
    config.num_key_value_heads //= count
    return model


def mine(features: int) -> slice:
    """Return the part of ``features`` that this process has."""
    here, count = processes.rank(), processes.size()
    return slice(features * here // count, features * (here + 1) // count)


def some_outputs(module: Any) -> nn.Module:
    """Return the part of a linear, dense or factorised, with some outputs."""
    if not isinstance(module, LowRankLinear):
        return part_of(module, rows=mine(module.out_features))
    here = mine(module.out_features)
    if module.form is not Form.ROWS:
        module.B, module.out_features = part_of(cast(Factor, module.B), rows=here), here.stop - here.start
        return module
    A, B = cast(Factor, module.A), cast(Factor, module.B)
    first, rank = module.first_pivot, module.rank
    pivots = module.pivots if first is None else torch.arange(first, first + rank)
    span = tuple(int((pivots < edge).sum()) for edge in (here.start, here.stop))
    others = slice(here.start - span[0], here.stop - span[1])
    places = pivots[slice(*span)] - here.start
    bias = None if module.bias is None else module.bias.detach()[here]
    at = int(places[0]) if first is not None and len(places) else places.to(torch.int32)
    return PivotedOutputs(A, part_of(B, rows=others), bias, (span[0], span[1]), at)


def some_inputs(module: Any) -> nn.Module:
    """Return the part of a linear, dense or factorised, with some inputs."""
    here, low_rank = mine(module.in_features), isinstance(module, LowRankLinear)
    if not low_rank:
        return Summed(part_of(module, columns=here, bias=False), module.bias)
    if module.form is not Form.COLUMNS:
        module.A, module.in_features = Summed(part_of(module.A, columns=here)), here.stop - here.start
        return module
    stored = module.in_features - module.rank  # the pivots are the inputs after these
    columns = slice(min(here.start, stored), min(here.stop, stored))
    first, end = (max(edge, stored) - stored for edge in (here.start, here.stop))
    module.A = Summed(part_of(module.A, columns=columns), pivots=end - first, first=first)
    module.form, module.in_features = Form.TWO, here.stop - here.start
    return module


def part_of(
    linear: Factor, rows: slice = slice(None), columns: slice = slice(None), bias: bool = True
) -> nn.Linear | Int8Linear:
    """Return a linear with a copy of some rows and columns of the weight."""
    weight = linear.weight.detach()[rows, columns].clone(memory_format=torch.contiguous_format)
    kept: Tensor | None = linear.bias if bias else None
    part = type(linear)(weight.shape[1], weight.shape[0], bias=kept is not None, device=torch.device("meta"))
    part.weight = frozen(weight)
    if isinstance(linear, Int8Linear):
        part.weight_scale = frozen(linear.weight_scale.detach()[rows].clone())
    if kept is not None:
        part.bias = frozen(kept.detach()[rows].clone())
    return part
