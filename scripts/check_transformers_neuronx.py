"""Compare greedy tokens of transformers-neuronx's own Python, on an emulated runtime, with those of HF.

    git clone https://github.com/aws-neuron/transformers-neuronx CHECKOUT && git -C CHECKOUT checkout v0.13.0
    python scripts/check_transformers_neuronx.py CHECKOUT DENSE LOW [--tp 1,3,4] [--new-tokens N] [--impl reference]

DENSE is a Llama as a folder, GGUF file or hub id; LOW is the same model compressed. Every weight and sum is float32.
Each model generates by transformers-neuronx's ``sample`` from a prompt of 6 tokens, from one of 130, and from both as
one padded batch. HF's ``generate`` gives the expected tokens, one prompt at a time. The script prints one line per run
and one JSON line, and exits with status 1 if a token differs. It needs a host's packages (.venv-neuron), but no device.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import neuronmm
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_tokenizer
from neuronmm.models.source import resolve

VERSION = "0.13."
NAME = "transformers-neuronx"
LENGTHS = (6, 130)
POSITIONS = 256
"""The larger of the two buckets of transformers-neuronx; the shorter prompt uses the bucket of 128 positions."""
TEXT = (
    "The history of the canal begins long before the first boat was built. Farmers along the river had always needed "
    "water in the dry months, and every village kept a small ditch of its own, which somebody had to clear in spring. "
    "When the town grew, its council asked an engineer to join the ditches to one waterway. He walked the valley for "
    "two summers, measured the height of every field, and drew a map that is still kept in the library. The work took "
    "eleven years and more money than anybody had expected. On the day of the opening it rained, the mayor lost his "
    "hat, and a choir of school children sang three songs under umbrellas. After that the price of grain fell, and"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("dense")
    parser.add_argument("low")
    parser.add_argument("--tp", default="1,3,4", help="numbers of NeuronCores, one run each (default 1,3,4)")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument(
        "--impl",
        choices=("nki", "reference"),
        default="nki",
        help="interpret the kernels, or run their torch reference",
    )
    args = parser.parse_args()
    source = args.checkout / "src"
    if not (source / "transformers_neuronx" / "version.py").is_file():
        parser.error(f"{args.checkout} is not a checkout of transformers-neuronx: it has no src/transformers_neuronx")
    if not 1 <= args.new_tokens <= POSITIONS - max(LENGTHS):
        parser.error(f"--new-tokens {args.new_tokens}: must be between 1 and {POSITIONS - max(LENGTHS)}")
    sys.path.insert(0, str(source))
    failed = []
    for kind, model in (("dense", args.dense), ("compressed", args.low)):
        prompts = prompts_of(model)
        expected = [of_hf(model, prompt, args.new_tokens) for prompt in prompts]
        for tp in map(int, args.tp.split(",")):
            for name, rows, got, took in of_host(model, prompts, args.new_tokens, tp, args.impl):
                good = got == [expected[row] for row in rows]
                failed += [] if good else [f"{kind}, tp {tp}, {name}"]
                print(f"{'ok  ' if good else 'FAIL'} {kind}, tp {tp}, {name}: {took}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"check": NAME, "new_tokens": args.new_tokens, "failed": failed, "peak_gib": round(peak, 2)}))
    return 1 if failed else 0


def prompts_of(model: str) -> list[Tensor]:
    """Return the first 6 tokens of the text, and the first 130."""
    ids = load_tokenizer(resolve(model))(TEXT).input_ids
    if len(ids) < max(LENGTHS):
        raise UserError(f"the tokenizer of {model} makes only {len(ids)} tokens of the text")
    return [torch.tensor(ids[:length]) for length in LENGTHS]


def of_hf(model: str, prompt: Tensor, new: int) -> list[int]:
    """Return the greedy tokens of transformers' ``generate``; a low-rank linear is two matmuls in torch."""
    hf = neuronmm.load(model, backend="cpu", dtype="fp32", impl="naive").runner.model
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = hf.generate(prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **options)
    return list(ids[0, len(prompt) :].tolist())


def of_host(
    model: str, prompts: list[Tensor], new: int, tp: int, impl: str
) -> Iterator[tuple[str, list[int], list[list[int]], str]]:
    """Yield the runs on ``tp`` cores: name, the prompts' indices, the tokens per prompt, and the time in words."""
    for rows in ([0], [1], [0, 1]):
        sizes = {"tp_degree": tp, "batch_size": len(rows), "n_positions": POSITIONS, "amp": "fp32"}
        engine = neuronmm.load(model, backend="neuron", emulate=True, impl=impl, **sizes)
        runner: Any = engine.runner
        if runner.adapter.NAME != NAME or not runner.adapter.VERSION.startswith(VERSION):
            raise UserError(f"the host is {runner.adapter.NAME} {runner.adapter.VERSION}, not {NAME} {VERSION}x")
        longest = max(len(prompts[row]) for row in rows)
        padding = torch.tensor([longest - len(prompts[row]) for row in rows], dtype=torch.int32)
        ids = torch.stack([torch.nn.functional.pad(prompts[row], (longest - len(prompts[row]), 0)) for row in rows])
        neuron = runner.model
        runner.session.calls.clear()
        start = time.perf_counter()
        # No token ends a sequence: HF's generate has none either.
        sampled = neuron.sample(ids, longest + new, start_ids=padding, top_k=1, eos_token_override=-1)
        kernels = runner.session.calls["nki"] + runner.session.calls["reference"]
        took = f"{new} tokens in {time.perf_counter() - start:.1f} s, {kernels} kernels run"
        runner.close()
        lengths = " and ".join(str(len(prompts[row])) for row in rows)
        yield f"batch {len(rows)}, prompt of {lengths}", rows, sampled[:, longest:].tolist(), took


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
