"""Decode speed on the CPU, ours and other engines', in one interleaved run.

Every engine is a process of its own, loaded once. A round asks each of them in turn for the same work, with a bandwidth
probe before and after; the order of the engines turns from round to round. Medians and ranges over the rounds are
printed as a table, then everything as one JSON line. Figures are measured, on this machine, while it ran.

    python scripts/bench_cpu.py MODEL.gguf --install      also install the peers, each into an environment of its own
    python scripts/bench_cpu.py llama-1b --engines dense mlp-0.4 all-0.4

MODEL is a checkpoint (folder or GGUF file; llama.cpp and OpenVINO need the GGUF file) or ``llama-1b``, a randomly
initialised model of Llama 3.2 1B's shape. Low-rank variants have random factors: only their speed means something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from neuronmm.engine.machine import describe_machine
from neuronmm.kernels.cpu import arena

OURS = ("dense", "dense-int8", "mlp-0.2", "mlp-0.4", "mlp-0.4-naive", "all-0.4", "all-0.4-int8")
PEERS = {
    "llama.cpp-BF16": ("llama.cpp", "llama-cpp-python"),
    "llama.cpp-Q8_0": ("llama.cpp", "llama-cpp-python"),
    "openvino-F16": ("openvino", "openvino-genai"),
}
"""Engine -> its environment, and the package that makes the environment."""
ENVIRONMENTS = Path(__file__).parent.parent / "out" / "peers"


class Worker:
    """An engine in its own process: JSON lines in, JSON lines out."""

    def __init__(self, name: str, model: str, python: str, threads: int) -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name("cpu_engines.py")), name, model, str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts: dict[str, Any] = self._answer()

    def __call__(self, **work: int) -> dict[str, Any]:
        """``context``, ``new``, ``batch`` -> ``ttft`` and ``tpot`` (one a step), in seconds."""
        assert self._process.stdin is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; its messages are above")


def write_gguf(model: str, kind: str) -> Path:
    """The GGUF file ``model`` in another type (BF16, F16, Q8_0); norms stay in fp32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    path = ENVIRONMENTS / f"{Path(model).stem}.{kind}.gguf"
    if path.is_file():
        return path
    reader, target = GGUFReader(model), GGMLQuantizationType[kind]
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type)
        if data.ndim == 2:
            writer.add_tensor(tensor.name, quantize(data, target), raw_dtype=target)
        else:
            writer.add_tensor(tensor.name, data.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bandwidth() -> float:
    """Bytes a second that reading 512 MiB on huge pages reaches, best of three."""
    if not _probe:
        _probe.append(arena.gather([torch.ones(128 << 20)])[0])
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        _probe[0].sum()
        seconds.append(time.perf_counter() - start)
    return _probe[0].nbytes / min(seconds)


_probe: list[Any] = []


def start(name: str, model: str, threads: int) -> Worker | str:
    """The engine's process, or why there is none."""
    if name not in PEERS:
        return Worker(name, model, sys.executable, threads)
    python = ENVIRONMENTS / PEERS[name][0] / "bin" / "python"
    if not python.is_file():
        return "not installed; --install does it"
    if not model.endswith(".gguf"):
        return "it takes a GGUF file"
    try:
        return Worker(name, str(write_gguf(model, name.rpartition("-")[2])), str(python), threads)
    except (RuntimeError, OSError) as error:
        return str(error)


def install() -> None:
    """Make an environment for every peer; one that fails is reported and left out."""
    for environment, package in sorted(set(PEERS.values())):
        where = ENVIRONMENTS / environment
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
        command = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", package]
        # llama-cpp-python compiles llama.cpp; its image and audio models would be a third of that work.
        done = subprocess.run(command, env={**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}, check=False)
        print(f"{package}: {'installed' if done.returncode == 0 else 'not installed, see above'}", flush=True)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(workers: list[Worker], context: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """``rounds`` interleaved rounds at one context length.

    A round's decode speed is ``batch`` by the median step; its share of the limit is taken against the mean of the two
    probes around it.
    """
    rows: dict[str, dict[str, list[float]]] = {w.name: {"speed": [], "ttft": [], "share": []} for w in workers}
    probes = [bandwidth()]
    for turn in range(args.rounds):
        for i in range(len(workers)):
            worker = workers[(turn + i) % len(workers)]
            result = worker(context=context, new=args.new, batch=args.batch)
            probes.append(bandwidth())
            step = statistics.median(result["tpot"])
            row = rows[worker.name]
            row["speed"].append(args.batch / step)
            row["ttft"].append(result["ttft"])
            row["share"].append(worker.facts["bytes"] / step / statistics.mean(probes[-2:]))
    return [
        {
            "engine": worker.name,
            "context": context,
            "batch": args.batch,
            **{key: spread(values) for key, values in rows[worker.name].items()},
            "probe": spread(probes),
        }
        for worker in workers
    ]


def table(points: list[dict[str, Any]], workers: list[Worker]) -> None:
    """Print the figures; speed-ups are over the first engine."""
    nbytes = {worker.name: worker.facts["bytes"] for worker in workers}
    print(
        f"{'engine':<16}{'context':>8}{'decode tok/s (range)':>26}{'x first':>9}{'of limit':>10}{'TTFT ms':>9}{'MB':>7}"
    )
    for point in points:
        first = next(p for p in points if p["context"] == point["context"])
        speed, ttft, share = point["speed"], point["ttft"]["median"], point["share"]["median"]
        decode = f"{speed['median']:.1f} ({speed['low']:.1f}-{speed['high']:.1f})"
        ratio = speed["median"] / first["speed"]["median"]
        size = nbytes[point["engine"]] / 1e6
        left, right = f"{point['engine']:<16}{point['context']:>8}{decode:>26}", f"{1e3 * ttft:>9.0f}{size:>7.0f}"
        print(f"{left}{ratio:>9.2f}{share:>10.2f}{right}")
    for context in sorted({p["context"] for p in points}):
        probe = next(p["probe"] for p in points if p["context"] == context)
        low, middle, high = (probe[key] / 1e9 for key in ("low", "median", "high"))
        print(f"read bandwidth around context {context}: {middle:.1f} GB/s ({low:.1f}-{high:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a checkpoint, or llama-1b")
    parser.add_argument("--engines", nargs="+", default=[*OURS, "transformers", *PEERS], help="which, in order")
    parser.add_argument("--contexts", nargs="+", type=int, default=[32, 512], help="prompt tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="tokens after the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--install", action="store_true", help="install the peers first")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.install:
        install()
    started = {name: start(name, args.model, args.threads) for name in args.engines}
    workers = [worker for worker in started.values() if isinstance(worker, Worker)]
    absent = {name: reason for name, reason in started.items() if isinstance(reason, str)}
    try:
        points = [point for context in args.contexts for point in measure(workers, context, args)]
    finally:
        for worker in workers:
            worker.close()
    table(points, workers)
    for worker in workers:
        print(f"{worker.name}: {worker.facts['path']}, loaded in {worker.facts['load_seconds']:.1f} s")
    for name, reason in absent.items():
        print(f"{name}: absent ({reason})")
    facts = {worker.name: worker.facts for worker in workers}
    machine = describe_machine(torch.device("cpu"))
    print(
        json.dumps({"machine": machine, "arguments": vars(args), "engines": facts, "absent": absent, "points": points})
    )


if __name__ == "__main__":
    main()
