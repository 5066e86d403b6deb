"""Check kernel numerics and generation, on a device or emulated, for scripts/verify_on_trainium.sh.

    python scripts/verify_neuron.py tiny FOLDER                  a tiny random Llama, for a dry run
    python scripts/verify_neuron.py kernels [--emulate] [--host NAME]      each NKI kernel against float64
    python scripts/verify_neuron.py generate DENSE LOW [--emulate] [--host NAME] [--tp N] [--new-tokens N]
    python scripts/verify_neuron.py serve MODEL [--tp N] [--new-tokens N]            vllm-neuron, on a device only

NxD Inference (--host nxd-inference) and vllm-neuron (--host vllm-neuron, on Trainium 2) take the kernels of ``nki``,
the other hosts those of ``neuronxcc.nki``.

Each prints its figures and one JSON line, and exits with status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

import neuronmm
from neuronmm.engine.sampling import SamplingParams
from neuronmm.kernels.hardware import TRN1, TRN2, NeuronCore
from neuronmm.kernels.nki.layout import pack
from neuronmm.models.source import resolve

SHAPES = {
    "Llama-3.2-1B MLP, decode": (1, 2048, 8192, 1280),
    "Llama-3.2-1B MLP, prefill": (256, 2048, 8192, 1280),
    "odd sizes, decode": (3, 576, 1536, 100),
    "odd sizes, prefill": (300, 576, 1536, 100),
}
"""Name -> tokens, hidden, intermediate, rank."""
NKI_HOSTS = {"nxd-inference": TRN1, "vllm-neuron": TRN2}
"""The hosts that take the kernels of ``nki``, and the core that these are for."""
POSITIONS = 128
SAME = 8
"""Greedy tokens that must be equal where the host computes in bfloat16 and the CPU in float32."""
PROMPTS = ("The capital of France is", "Once upon a time there was a small robot who")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny")
    tiny.add_argument("folder", type=Path)
    kernels = commands.add_parser("kernels")
    generate, serve = commands.add_parser("generate"), commands.add_parser("serve")
    serve.add_argument("model")
    generate.add_argument("dense")
    generate.add_argument("low")
    for command in (generate, serve):
        command.add_argument("--tp", type=int, default=1)
        command.add_argument("--new-tokens", type=int, default=64)
    for command in (kernels, generate):
        command.add_argument("--emulate", action="store_true")
        command.add_argument("--host", default="transformers-neuronx")
    args = parser.parse_args()
    if args.command == "tiny":
        return write_tiny(args.folder)
    if args.command == "kernels":
        core = NKI_HOSTS.get(args.host)
        return check_kernels(args.emulate, partial(run_nki, core) if core else run_neuronxcc)
    if args.command == "serve":
        return check_serving(str(resolve(args.model)), args.tp, args.new_tokens)
    return check_generation(args.dense, args.low, args.emulate, args.host, args.tp, args.new_tokens)


def write_tiny(folder: Path) -> int:
    """Write a two-layer Llama with random weights and a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({"</s>": 0, **{letter: i + 1 for i, letter in enumerate(alphabet)}}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(vocab_size=257, num_key_value_heads=2, max_position_embeddings=512, **sizes, **ends)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return 0


def check_kernels(emulate: bool, run_kernel: Callable[..., Tensor]) -> int:
    """Check every kernel in bfloat16: its error against float64 is at most twice that of torch in bfloat16."""
    if emulate:
        from neuronmm.emulator.nki import nki_modules

    failures = []
    for name, (tokens, hidden, wide, rank) in SHAPES.items():
        torch.manual_seed(0)
        x, *weights = [
            torch.randn(shape).to(torch.bfloat16) / shape[-1] ** 0.5
            for shape in ((tokens, hidden), *[(rank, hidden), (wide, rank)] * 2, (rank, wide), (hidden, rank))
        ]
        x = x * hidden**0.5
        with nki_modules() if emulate else nullcontext():
            linear = run_kernel("low_rank_matmul", rank, x, weights[:2], wide)
            mlp = run_kernel("low_rank_swiglu_mlp", (rank, rank, rank, wide), x, weights, hidden)
        cases = (("low_rank_matmul", linear, weights[:2]), ("low_rank_swiglu_mlp", mlp, weights))
        for kernel, output, factors in cases:
            plain, exact = formula(x, factors), formula(x.double(), [w.double() for w in factors])
            ratio = ((output.double() - exact).norm() / (plain.double() - exact).norm()).item()
            good = ratio <= 2 and bool(torch.isfinite(output).all())
            print(f"{'ok  ' if good else 'FAIL'} {kernel}, {name}: error {ratio:.2f} times that of torch in bfloat16")
            failures += [] if good else [f"{kernel}, {name}"]
    print(json.dumps({"check": "kernels", "emulated": emulate, "failed": failures}))
    return 1 if failures else 0


def formula(x: Tensor, w: list[Tensor]) -> Tensor:
    """Compute the linear or the MLP of these factors in their precision."""
    if len(w) == 2:
        return x @ w[0].T @ w[1].T
    return (silu(x @ w[0].T @ w[1].T) * (x @ w[2].T @ w[3].T)) @ w[4].T @ w[5].T


def run_nki(core: NeuronCore, name: str, static: Any, x: Tensor, weights: list[Tensor], outputs: int) -> Tensor:
    """Run a kernel of ``nki`` on a core or emulated, in the layout of its hosts. x [tokens, in] -> [tokens, out]."""
    from neuronmm.kernels.nki import entry_nki as entry
    from neuronmm.kernels.nki.problem import Ranks

    ranks, first = static if name == "low_rank_matmul" else Ranks(*static), core is not TRN1
    kernel = getattr(entry, name)(ranks, layout="BSH" if first else "HSB", core=core)
    y = to_tensor(kernel(*arrays_of(x if first else x.T, weights)))
    return y if first else y.T


def arrays_of(x: Tensor, weights: list[Tensor]) -> list[np.ndarray]:
    """Return the arguments of a kernel: ``x`` in its layout, and the packed weights."""
    return [t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for t in (x, *map(pack, weights))]


def to_tensor(y: Any) -> Tensor:
    """Return a kernel's result as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(y).view(np.int16)).view(torch.bfloat16)


def run_neuronxcc(name: str, static: Any, x: Tensor, weights: list[Tensor], outputs: int) -> Tensor:
    """Run a kernel of ``neuronxcc.nki`` on a core or emulated. Dimensions: x [tokens, in] -> [tokens, out]."""
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl

    from neuronmm.kernels.nki import entry_neuronxcc as entry
    from neuronmm.kernels.nki.problem import Ranks

    if name == "low_rank_matmul":
        kernel = entry.low_rank_matmul(static)

        def call(x: Any, a: Any, b: Any) -> Any:
            y = nl.ndarray((outputs, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
            kernel(x, a, b, y)
            return y
    else:
        kernel = entry.low_rank_swiglu_mlp(Ranks(*static))

        def call(x: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:  # type: ignore[misc]
            y = nl.ndarray((outputs, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
            kernel(x, a, b, c, d, e, f, y)
            return y

    return to_tensor(nki.jit(call, mode="baremetal")(*arrays_of(x.T, weights))).T


def equal_tokens(tokens: list[int], expected: list[int]) -> int:
    """Return how many tokens are equal before the first that differs."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((i for i, (token, other) in pairs if token != other), len(expected))


def check_room(engine: Any, new: int) -> None:
    """End if the prompts and ``new`` tokens do not fit the positions of the graphs, before one is compiled."""
    most = POSITIONS - max(len(engine.encode(prompt)) for prompt in PROMPTS)
    if new > most:
        raise SystemExit(f"--new-tokens {new}: at most {most} fit behind the prompts in {POSITIONS} positions")


def check_generation(dense: str, low: str, emulate: bool, host: str, tp: int, new: int) -> int:
    """Check that greedy tokens in float32 equal those of the CPU backend, with one prompt padded."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    failures = []
    for name, model in (("dense", dense), ("compressed", low)):
        cpu = neuronmm.load(model, backend="cpu", dtype="fp32")
        check_room(cpu, new)
        expected = cpu.generate(PROMPTS, params)
        sizes = {"tp_degree": tp, "batch_size": 2, "n_positions": POSITIONS, "amp": "fp32"}
        engine: Any = neuronmm.load(model, backend="neuron", emulate=emulate, host=host, **sizes)
        print(f"{name}: {engine.runner.path}")
        results = engine.generate(PROMPTS, params)
        for prompt, a, b in zip(PROMPTS, results, expected, strict=True):
            same = equal_tokens(a.token_ids, b.token_ids)
            print(f"{'ok  ' if same == new else 'FAIL'} {name}, {prompt!r}: first {same} of {new} tokens equal")
            print(f"     {a.text!r}")
            failures += [] if same == new else [f"{name}: {prompt}"]
        engine.runner.close()
    print(json.dumps({"check": "generation", "emulated": emulate, "tp": tp, "failed": failures}))
    return 1 if failures else 0


def check_serving(model: str, tp: int, new: int) -> int:
    """Check that vllm-neuron's first greedy tokens equal those of the CPU backend."""
    from vllm import LLM  # type: ignore[import-not-found]
    from vllm import SamplingParams as Sampling

    if os.environ.get("VLLM_NEURON_DISABLE_NKI_KERNELS"):
        raise SystemExit("VLLM_NEURON_DISABLE_NKI_KERNELS is set: torch would compute what this checks; unset it")
    cpu = neuronmm.load(model, backend="cpu", dtype="fp32")
    check_room(cpu, new)
    expected = cpu.generate(PROMPTS, SamplingParams(max_new_tokens=new, ignore_eos=True))
    host = LLM(model, tensor_parallel_size=tp, max_model_len=POSITIONS, max_num_seqs=2)
    results = host.generate(list(PROMPTS), Sampling(temperature=0, max_tokens=new, ignore_eos=True))
    failures = []
    for prompt, a, b in zip(PROMPTS, results, expected, strict=True):
        same = equal_tokens(list(a.outputs[0].token_ids), b.token_ids)
        good = same >= min(SAME, new)
        print(f"{'ok  ' if good else 'FAIL'} {prompt!r}: first {same} of {new} tokens equal")
        print(f"     {a.outputs[0].text!r}")
        failures += [] if good else [prompt]
    print(json.dumps({"check": "serving", "model": model, "tp": tp, "failed": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
