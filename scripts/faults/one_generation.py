"""Print a hash of the logits of a prefill and of decode steps, greedy tokens and sampled tokens, one a line.

The study of determinism runs this file in processes of its own: one_generation.py MODEL ISA DTYPE WEIGHT_DTYPE
"""

from __future__ import annotations

import hashlib
import sys

import torch

from neuronmm.engine.engine import load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.kernels.cpu.library import set_isa

if __name__ == "__main__":
    model, isa, dtype, weights = sys.argv[1:]
    if not set_isa(isa):
        sys.exit(f"this processor lacks {isa}")
    engine = load(model, dtype=dtype, weight_dtype=weights or None)
    ids = torch.arange(3, 35)[None]
    decoder = engine.runner.decoder(1, 128)
    rows = [decoder.prefill(ids, torch.ones_like(ids))]
    rows += [decoder.decode(torch.tensor([token])) for token in range(5, 45)]
    logits = torch.cat([row.float() for row in rows])
    print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=7)
        print(engine.generate(["w9 w10 w11"], params)[0].token_ids)
