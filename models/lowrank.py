"""The two modules of a compressed model: a low-rank linear and a low-rank SwiGLU MLP.

Both have ordinary ``nn.Linear`` children. Their parameters are therefore named ``<linear>.A.weight`` and
``<linear>.B.weight``, load from safetensors, move with ``device_map`` and take LoRA adapters like any linear. (Factors
of few bits are :class:`Int8Linear`, :class:`Int4Linear` or :class:`Fp8Linear` children, which take no adapter.) With
``impl`` None the modules call these children, so that hooks and adapters work. With the name of an implementation they
pass the weights to :mod:`neuronmm.kernels`. ``fuse`` sets ``impl``, for inference.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from neuronmm.kernels import Form, LowRank, low_rank_linear, low_rank_swiglu
from neuronmm.kernels.factors import place_pivots
from neuronmm.models.fp8 import Fp8Linear
from neuronmm.models.low_bits import Int4Linear, Int8Linear, frozen, matrix_of

FACTORS = (".A.weight", ".B.weight")
"""The endings of the factors' tensor names; no other tensor has them."""


FactorKind: TypeAlias = type[nn.Linear] | type[Int8Linear] | type[Int4Linear] | type[Fp8Linear]
"""The class of a factor."""


class LowRankLinear(nn.Module):
    """A linear of rank r in a form of :class:`neuronmm.kernels.LowRank`, the replacement of an ``nn.Linear``.

    Dimensions: x [..., in_features] -> [..., out_features]; A.weight [rank, in], B.weight [out, rank]. In the form
    ROWS, B.weight is C [out - rank, rank], and the bias [out] is this module's own, because B has no rows for the
    pivots. In the form COLUMNS, A.weight is D [rank, in - rank].

    ``first_pivot`` is the first pivot in the form ROWS; if it is None there, the buffer ``pivots`` [rank], int32,
    holds the pivots.
    ``kind`` is the class of the two factors. A ``leader`` is another low-rank linear with the same input, whose ``A``
    this linear uses, including whatever replaces it later (an adapter, for example). ``A`` is a child of the leader
    only: parameters, ``state_dict`` and checkpoint hold it once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        leader: LowRankLinear | None = None,
        kind: FactorKind = nn.Linear,
        form: Form = Form.TWO,
        first_pivot: int | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.form, self.first_pivot = form, first_pivot
        self._leader = (leader,)  # in a tuple, so that it does not become a child
        in_rows = form is Form.ROWS
        if leader is None:
            stored_inputs = in_features - (rank if form is Form.COLUMNS else 0)
            self.A = kind(stored_inputs, rank, bias=False, device=device, dtype=dtype)
        stored_outputs = out_features - (rank if in_rows else 0)
        self.B = kind(rank, stored_outputs, bias=bias and not in_rows, device=device, dtype=dtype)
        if in_rows:
            empty = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
            self.bias = None if empty is None else nn.Parameter(empty)
            if first_pivot is None:
                self.register_buffer("pivots", torch.arange(rank, dtype=torch.int32, device=device))
        self.impl: str | None = None

    @classmethod
    def of(cls, factors: LowRank, leader: LowRankLinear | None = None) -> LowRankLinear:
        """Return a module with the parameters of ``factors``, whose A is that of ``leader`` if there is one."""
        pivots = factors.pivots
        module = cls(
            factors.in_features,
            factors.out_features,
            factors.rank,
            factors.bias is not None,
            device=torch.device("meta"),
            leader=leader,
            form=factors.form,
            first_pivot=pivots if isinstance(pivots, int) else None,
        )
        if leader is None:
            module.A.weight = frozen(factors.A)
        module.B.weight = frozen(factors.B)
        if factors.bias is not None:
            (module if factors.form is Form.ROWS else module.B).bias = frozen(factors.bias)
        if isinstance(pivots, Tensor):
            module.pivots = pivots
        return module

    @property
    def factors(self) -> LowRank:
        """The weights in the form that the kernels take."""
        if self.form is not Form.ROWS:
            return LowRank(matrix_of(self.A), matrix_of(self.B), self.B.bias, self.form)
        return LowRank(matrix_of(self.A), matrix_of(self.B), self.bias, self.form, self.places)

    @property
    def places(self) -> int | Tensor:
        """The pivots in the form ROWS: the first of a range, or an index."""
        return self.pivots if self.first_pivot is None else self.first_pivot

    def __getattr__(self, name: str) -> Any:
        """Return a child or parameter; ``A`` is the leader's if there is a leader."""
        leader = self.__dict__["_leader"][0] if name == "A" else None
        return super().__getattr__(name) if leader is None else leader.A

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is not None:
            return low_rank_linear(x, *self.factors, impl=self.impl)
        if self.form is Form.TWO:
            return self.B(self.A(x))
        if self.form is Form.COLUMNS:
            others, pivots = x.split([self.in_features - self.rank, self.rank], dim=-1)
            return self.B(pivots + self.A(others))
        h = self.A(x)
        y = place_pivots(self.places, h, self.B(h))
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}, form={self.form.value}"


class LowRankSwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with three low-rank linears, the replacement of a dense SwiGLU MLP.

    Dimensions: x [..., hidden] -> [..., hidden].
    """

    def __init__(self, gate_proj: LowRankLinear, up_proj: LowRankLinear, down_proj: LowRankLinear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.act_fn = nn.SiLU()
        self.impl: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is None:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return low_rank_swiglu(x, self.gate_proj.factors, self.up_proj.factors, self.down_proj.factors, impl=self.impl)
