"""Measure decode speed on the CPU, ours and other engines', in one interleaved run.

Each engine is a separate process that loads the model once. A round asks each of them in turn for the same work, with a
bandwidth probe before and after; the order rotates from round to round. A step is the mean over the new tokens. Each
measurement is appended to a file as one JSON line, and the same run, restarted, resumes from that file.
``cpu_report.py`` makes tables of it.

    python scripts/bench_cpu.py MODEL.gguf --install      first install each peer into its own environment
    python scripts/bench_cpu.py MODEL.gguf --batches 4 8 --engines dense all-0.4 llama.cpp-BF16 vllm
    python scripts/bench_cpu.py llama-1b --rounds 3 --engines dense mlp-0.4 all-0.4 llama.cpp-BF16

MODEL is a GGUF file, a folder (which leaves llama.cpp and OpenVINO out) or ``llama-1b``, a randomly initialised model
of Llama 3.2 1B's shape. Low-rank variants have random factors: only their speed means something.

Every process holds the model: 3 GB each for ``llama-1b``, 5 GB for OpenVINO and vLLM. If they do not all fit into
memory, run them in groups that write to the same file. Give each group ``dense`` and new round numbers, for example
``--first-round 3`` after three rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cpu_engines
import cpu_peers
import cpu_report
import torch

from neuronmm.kernels.cpu import arena
from neuronmm.measure.machine import describe_machine
from neuronmm.models.errors import UserError
from neuronmm.models.source import resolve

OURS = (
    "dense",
    "dense-int8",
    "dense-int4",
    "mlp-0.2",
    "mlp-0.4",
    "mlp-0.4-naive",
    "all-0.4",
    "all-0.4-int8",
    "all-0.4-int4",
)


class Worker:
    """An engine in its own process, which reads and writes JSON lines."""

    def __init__(self, name: str, model: str, python: str, threads: int) -> None:
        self.name = name
        script = Path(__file__).with_name("cpu_engines.py").absolute()
        command = [python, str(script), name, str(Path(model).absolute()), str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        # Run elsewhere: transformers would take this tree's folder `kernels` for the package of that name.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cpu_peers.ENVIRONMENTS,
        )
        self.facts: dict[str, Any] = self._answer()

    def __call__(self, **work: int) -> dict[str, Any]:
        """Run ``context``, ``new``, ``batch``; return ``ttft`` and ``tpot`` (one per step), in seconds."""
        assert self._process.stdin is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return self._answer()

    def takes(self, tokens: int, batch: int) -> bool:
        """Return whether the engine takes this many tokens and rows at once; say so if it does not."""
        most = self.facts.get("most", {"tokens": tokens, "batch": batch})
        if tokens <= most["tokens"] and batch <= most["batch"]:
            return True
        say(f"{self.name} is left out at {tokens} tokens, batch {batch}: it takes {most['tokens']} and {most['batch']}")
        return False

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the engine ended with status {self._process.wait()}")


def start(name: str, model: str, threads: int) -> Worker | str:
    """Return the engine's process, or the reason why there is none."""
    random = model == "llama-1b"
    folder = cpu_peers.write_random_1b() if random else resolve(model)
    if name not in cpu_peers.ENGINES:
        return Worker(name, str(folder), sys.executable, threads)
    python = cpu_peers.python_of(name)
    if not python.is_file():
        return "not installed; run with --install"
    try:
        if name == "vllm":
            worker = Worker(name, str(folder), str(python), threads)
            worker.facts["bytes"] = cpu_peers.folder_bytes_per_step(folder)
            return worker
        if name == "onnxruntime-int4":
            return Worker(name, str(cpu_peers.write_onnx(folder)), str(python), threads)
        if not random and not model.endswith(".gguf"):
            return "it takes a GGUF file"
        kind = name.rpartition("-")[2]
        file = cpu_peers.write_random_gguf(folder, kind) if random else cpu_peers.write_gguf(model, kind)
        worker = Worker(name, str(file), str(python), threads)
        worker.facts["bytes"] = cpu_peers.gguf_bytes_per_step(file)
        return worker
    except (RuntimeError, OSError) as error:
        return str(error)


class Probe:
    """Measures the read bandwidth, bytes per second: the best of three passes over 512 MiB on huge pages."""

    def __init__(self) -> None:
        self._memory = arena.gather([torch.ones(128 << 20)])[0]

    def __call__(self) -> float:
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self._memory.sum()
            seconds.append(time.perf_counter() - begin)
        return self._memory.nbytes / min(seconds)


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all measurements of one round must share."""
    return {
        "source": str(Path(args.model).absolute()),
        "new": args.new,
        "threads": args.threads,
        "engines": args.engines,
    }


def check_same(lines: list[dict[str, Any]], args: argparse.Namespace) -> str | None:
    """Return why the measurements of this run cannot be added to the ``lines`` of the file; None if they can."""
    new = asked(args)
    for line in lines:
        if line["model"] != args.name or "round" not in line:
            continue
        old = line.get("asked", {})
        other = [name for name in ("source", "new", "threads") if old.get(name) != new[name]]
        if other:
            return f"has measurements of {args.name} with another {', '.join(other)}; give another --output"
        point = line["context"] in args.contexts and line["batch"] in args.batches
        if point and args.first_round <= line["round"] < args.first_round + args.rounds and old != new:
            return f"has round {line['round']} with other engines; give --first-round, or another --output"
    return None


def say(text: str) -> None:
    """Print progress to stderr; stdout is for the tables."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(workers: list[Worker], args: argparse.Namespace, done: set[tuple[Any, ...]], file: Any) -> None:
    """Measure every round that is not in the file yet, with one warm-up per process and point."""
    probe, warmed = Probe(), set()
    points = [(context, batch) for context in args.contexts for batch in args.batches]
    able = {
        point: [worker for worker in workers if worker.takes(point[0] + args.new + 1, point[1])] for point in points
    }
    for turn in range(args.first_round, args.first_round + args.rounds):
        for context, batch in points:
            engines = able[context, batch]
            for i in range(len(engines)):
                worker = engines[(turn + i) % len(engines)]
                if (worker.name, context, batch, turn) in done:
                    continue
                if (worker.name, context, batch) not in warmed:
                    worker(context=context, new=2, batch=batch)
                    warmed.add((worker.name, context, batch))
                before = probe()
                result = worker(context=context, new=args.new, batch=batch)
                point = {"engine": worker.name, "context": context, "batch": batch, "round": turn}
                step = statistics.fmean(result["tpot"])  # as for engines that give one time for all steps
                figures = {"ttft": result["ttft"], "step": step, "before": before, "after": probe()}
                line = {"model": args.name, "asked": asked(args), **point, **figures}
                print(json.dumps(line), file=file, flush=True)
                where = f"round {turn - args.first_round + 1} of {args.rounds}, context {context}, batch {batch}"
                say(f"{where}, {worker.name}: {batch / step:.1f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a checkpoint, or llama-1b")
    engines = [*OURS, "transformers", *cpu_peers.ENGINES]
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=engines, metavar="NAME", help="engines, in this order"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[32, 512], help="prompt tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=0, help="number of the first round")
    parser.add_argument("--new", type=int, default=32, help=f"tokens after the first, at most {cpu_engines.MOST_NEW}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument("--output", type=Path, default=Path("out/bench_cpu.jsonl"), help="where measurements are added")
    args = parser.parse_args()
    args.name = Path(args.model).name
    if not 1 <= args.new <= cpu_engines.MOST_NEW:
        parser.error(f"--new {args.new}: must be 1 to {cpu_engines.MOST_NEW}")
    torch.set_num_threads(args.threads)
    if args.model != "llama-1b":
        try:
            resolve(args.model)
        except UserError as error:
            parser.error(str(error))
    if args.install:
        cpu_peers.install()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    cpu_peers.ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    lines = cpu_report.read(args.output) if args.output.is_file() else []
    done = {
        (line["engine"], line["context"], line["batch"], line["round"])
        for line in lines
        if line["model"] == args.name and "round" in line
    }
    problem = check_same(lines, args)
    if problem:
        parser.error(f"{args.output}: {problem}")
    workers = []
    with args.output.open("a", encoding="utf-8") as file:
        machine = {**asdict(describe_machine(torch.device("cpu"))), "threads": args.threads}
        for i, name in enumerate(args.engines):
            say(f"engine {i + 1} of {len(args.engines)}, {name}: starting")
            worker = start(name, args.model, args.threads)
            if isinstance(worker, Worker):
                workers.append(worker)
                facts = worker.facts
            else:
                facts = {"absent": worker}
                say(f"{name} is left out: {worker}")
            print(json.dumps({"model": args.name, "engine": name, "machine": machine, **facts}), file=file, flush=True)
        try:
            measure(workers, args, done, file)
        finally:
            for worker in workers:
                worker.close()
    print(cpu_report.tables(cpu_report.read(args.output)))


if __name__ == "__main__":
    main()
