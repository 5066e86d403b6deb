"""The two modules of a compressed model: a low-rank linear and a low-rank SwiGLU MLP.

Both have ordinary ``nn.Linear`` children. Their parameters are therefore named ``<linear>.A.weight`` and
``<linear>.B.weight``, load from safetensors, move with ``device_map`` and take LoRA adapters like any linear. (8-bit
factors are :class:`Int8Linear` children, which take no adapter.) With ``impl`` None the modules call these children, so
that hooks and adapters work. With the name of an implementation they pass the weights to :mod:`neuronmm.kernels`.
``fuse`` sets ``impl``, for inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.kernels import Int8, LowRank, low_rank_linear, low_rank_swiglu
from neuronmm.models.int8_linear import Int8Linear

FACTORS = (".A.weight", ".B.weight")
"""The endings of the factors' tensor names; no other tensor has them."""


class LowRankLinear(nn.Module):
    """``y = B (A x) + bias``, the replacement of an ``nn.Linear``.

    Dimensions: x [..., in_features] -> [..., out_features]; A.weight [rank, in], B.weight [out, rank].

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
        kind: type[nn.Linear] | type[Int8Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self._leader = (leader,)  # in a tuple, so that it does not become a child
        if leader is None:
            self.A = kind(in_features, rank, bias=False, device=device, dtype=dtype)
        self.B = kind(rank, out_features, bias=bias, device=device, dtype=dtype)
        self.impl: str | None = None

    @property
    def factors(self) -> LowRank:
        """The weights in the form that the kernels take."""
        return LowRank(_matrix(self.A), _matrix(self.B), self.B.bias)

    def __getattr__(self, name: str) -> Any:
        """Return a child or parameter; ``A`` is the leader's if there is a leader."""
        leader = self.__dict__["_leader"][0] if name == "A" else None
        return super().__getattr__(name) if leader is None else leader.A

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is None:
            return self.B(self.A(x))
        return low_rank_linear(x, *self.factors, impl=self.impl)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def _matrix(factor: Any) -> Tensor | Int8:
    return factor.int8 if isinstance(factor, Int8Linear) else factor.weight


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
