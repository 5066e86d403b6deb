"""Speed of vLLM on a dense and on a compressed checkpoint, in interleaved rounds of one process each.

A process loads one checkpoint, warms up, and times every number of streams. Decode tokens per second are those of all
streams together: the new tokens after the first, by the time that they add to a run that generates one token. Prompts
are random tokens, and no stream ends early. A ratio is the median of the rounds' ratios.

examples:
  OMP_NUM_THREADS=2 python scripts/bench_vllm.py DENSE COMPRESSED
  python scripts/bench_vllm.py DENSE COMPRESSED --streams 1 8 --rounds 5 --compile
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from bench_serving import VLLM

SETTINGS = {
    **VLLM,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the decode speed and the time of prompt and first token for every number of streams, of one process."""
    from vllm import LLM, SamplingParams

    draw = random.Random(0)
    llm = LLM(
        folder,
        enforce_eager=not options.compile,
        max_model_len=1024,
        max_num_seqs=max(options.streams),
        enable_prefix_caching=False,
    )

    def seconds(streams: int, new: int) -> float:
        prompts: Any = [
            {"prompt_token_ids": [draw.randrange(100, 40_000) for _ in range(options.prompt)]} for _ in range(streams)
        ]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    found: dict[str, Any] = {}
    for streams in options.streams:
        seconds(streams, 4)
        first, all_tokens = seconds(streams, 1), seconds(streams, 1 + options.new)
        found[str(streams)] = {"decode": streams * options.new / (all_tokens - first), "first": first}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("compressed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=48, help="new tokens of a stream after the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model")
    parser.add_argument("--only", choices=("dense", "compressed"), help="measure one of them once, in this process")
    options = parser.parse_args()
    if options.only:
        os.environ |= {**SETTINGS, **os.environ}
        print(json.dumps(measure(getattr(options, options.only), options)))
        return 0
    rounds: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        row = {}
        for variant in ("dense", "compressed")[:: -1 if turn % 2 else 1]:
            command = [sys.executable, *sys.argv, "--only", variant]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            row[variant] = json.loads(output.splitlines()[-1])
        rounds.append(row)
    print("streams  variant     decode tok/s             all prompts to the first token, s")
    for streams in map(str, options.streams):
        for variant in ("dense", "compressed"):
            cells = [
                f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
                for key in ("decode", "first")
                for values in [[row[variant][streams][key] for row in rounds]]
            ]
            print(f"{streams:>7}  {variant:<10}  {cells[0]:<23}  {cells[1]}")
        ratios = [row["compressed"][streams]["decode"] / row["dense"][streams]["decode"] for row in rounds]
        print(f"{'':>7}  ratio       {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(json.dumps({"options": vars(options), "rounds": rounds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
