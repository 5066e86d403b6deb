"""The two modules a compressed model is made of.

Both keep ordinary ``nn.Linear`` children, so their parameters are named ``<linear>.A.weight`` and
``<linear>.B.weight``, load from safetensors, move with ``device_map`` and take LoRA adapters like any other linear.
(8-bit factors are :class:`Int8Linear` children, which take no adapter.)
With ``impl`` None they call those children (hooks and adapters see every product); with an implementation's name
they hand the weights to :mod:`neuronmm.kernels`. ``fuse`` sets it, for inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.kernels import Int8, LowRank, low_rank_linear, low_rank_swiglu
from neuronmm.models.int8_linear import Int8Linear

FACTORS = (".A.weight", ".B.weight")
"""How the names of the factors end, and no other tensor's."""


class LowRankLinear(nn.Module):
    """``y = B (A x) + bias`` in place of an ``nn.Linear``.

    Dimensions: x [..., in_features] -> [..., out_features]; A.weight [rank, in], B.weight [out, rank].

    ``kind`` is the class of the two factors. With a ``leader``, another low-rank linear of the same input, ``A`` is the
    leader's own module, whatever is put in its place later (an adapter, say). It is a child of the leader alone:
    parameters, ``state_dict`` and checkpoint hold it once.
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
        """The weights as the kernels take them."""
        return LowRank(_matrix(self.A), _matrix(self.B), self.B.bias)

    def __getattr__(self, name: str) -> Any:
        """Children and parameters, as in any module; a follower's ``A`` too."""
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
    """``down(silu(gate(x)) * up(x))`` over three low-rank linears, in place of a dense SwiGLU MLP.

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
