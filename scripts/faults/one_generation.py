"""Print, as JSON, a hash of the logits, greedy tokens and sampled tokens of a model in each dtype.

The study of determinism runs this file in processes of its own: one_generation.py MODEL ISA
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from neuronmm.engine.engine import load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.kernels.cpu.library import set_isa

DTYPES = (("fp32", None), ("bf16", None), ("bf16", "int8"), ("bf16", "int4"))


def outputs(model: str, dtype: str, weight_dtype: str | None) -> dict[str, Any]:
    """Return a hash of the logits of a prefill and of 40 decode steps, and the tokens of two generations."""
    engine = load(model, dtype=dtype, weight_dtype=weight_dtype)
    ids = torch.arange(3, 35)[None]
    decoder = engine.runner.decoder(1, 128)
    prefill = decoder.prefill(ids, torch.ones_like(ids)).float()
    steps = torch.cat([decoder.decode(torch.tensor([token])).float() for token in range(5, 45)])
    tokens = {}
    for name, temperature in (("greedy tokens", 0.0), ("sampled tokens", 1.0)):
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=7)
        tokens[name] = engine.generate(["w9 w10 w11"], params)[0].token_ids
    return {"logits of the prompt": digest(prefill), "logits of steps": digest(steps), **tokens}


def digest(logits: torch.Tensor) -> str:
    """Return a hash of float32 logits."""
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    path, isa = sys.argv[1:]
    if not set_isa(isa):
        sys.exit(f"this processor lacks {isa}")
    print(json.dumps({" ".join(filter(None, pair)): outputs(path, *pair) for pair in DTYPES}))
