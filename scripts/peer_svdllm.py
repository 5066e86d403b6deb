"""Run SVD-LLM's own public code (AIoT-MLSys-Lab/SVD-LLM, arXiv 2403.07378) on one model and our calibration tokens.

It needs a checkout of that repository and the Python of an environment made as its README says (transformers 4.35.2).
The script calls its whitening (``profle_svdllm_low_resource``) and truncation (``whitening``) unchanged. It adapts only
what prevents a small grouped-query model on a CPU:

- The script passes the calibration tokens: the peer's loader uses sentencepiece and draws other rows than ours.
- It runs in fp32 on the CPU instead of fp16 on a GPU.
- The peer's attention modules lack grouped-query heads, so its code does not run the compressed model. The script
  multiplies the factors out into dense-shaped weights in the dtype of the source, and ``neuronmm evaluate`` reads the
  result like any checkpoint. With the targets ``mlp`` the attention factors are left out.

examples:
  python scripts/peer_svdllm.py MODEL --checkout SVD-LLM --python peer/bin/python --calibration wiki.txt -o peer-out
  python scripts/peer_svdllm.py MODEL --checkout SVD-LLM --python peer/bin/python --calibration wiki.txt -o peer-out \\
      --ratios 0.1,0.2,0.3,0.4 --targets mlp all --rows 64 --length 1024 --sweep sweep

Each result is a folder <targets>-<ratio> with a compression_report.json, which is also printed. --sweep also measures
each result as a point of that sweep; `neuronmm sweep ... --resume` then shows it in its table and picture, with the
bytes that its factors would take.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def main() -> None:
    """Run the peer's code in its environment, then write the dense-shaped checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the dense model: folder, GGUF file or hub id")
    parser.add_argument("--checkout", type=Path, required=True, help="the folder that holds SVDLLM.py")
    parser.add_argument("--python", required=True, help="the interpreter of the peer's environment")
    parser.add_argument("--calibration", type=Path, required=True, help="text or .jsonl file")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratios", default="0.2", help="fractions to remove, comma-separated; default 0.2")
    parser.add_argument("--targets", nargs="+", default=["mlp"], choices=["mlp", "all"])
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--sweep", type=Path, help="folder of a sweep of the same model, which receives the results")
    args = parser.parse_args()
    ratios = [float(ratio) for ratio in args.ratios.split(",")]
    for folder in (_folder(args.out, ratio, targets) for ratio in ratios for targets in args.targets):
        if folder.exists():
            parser.error(f"{folder}: exists already; give another -o")
    if args.sweep:
        run = args.sweep / "run.json"
        if not run.is_file():
            parser.error(f"{args.sweep}: is not the folder of a sweep; start one with neuronmm sweep")
        if json.loads(run.read_text(encoding="utf-8"))["speed"]:
            parser.error(f"{args.sweep}: measures speed, which dense-shaped checkpoints cannot show; give one without")

    from neuronmm.compression.calibration import from_text
    from neuronmm.compression.config import Rows
    from neuronmm.models.load import load_tokenizer
    from neuronmm.models.source import resolve

    folder = resolve(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = from_text(args.calibration, load_tokenizer(folder), Rows(args.rows, args.length, args.seed))
    save_file({"tokens": tokens}, args.out / "tokens.safetensors")
    job = {
        "model": str(folder.absolute()),
        "out": str(args.out.absolute()),
        "ratios": ratios,
        "checkout": str(args.checkout.absolute()),
    }
    command = [args.python, str(Path(__file__).absolute()), "--worker", json.dumps(job)]
    subprocess.run(command, check=True, cwd=args.out)  # the peer writes a cache folder into the working directory
    calibration = {"source": str(args.calibration), "rows": len(tokens), "length": args.length, "seed": args.seed}
    for ratio in ratios:
        for targets in args.targets:
            report = write(folder, args.out, ratio, targets)
            report["calibration"] = calibration
            result = _folder(args.out, ratio, targets) / "compression_report.json"
            result.write_text(json.dumps(report, indent=2) + "\n")
            print(json.dumps(report))
            if args.sweep:
                add_to_sweep(args.sweep, result.parent, report)


def _folder(out: Path, ratio: float, targets: str) -> Path:
    return out / f"{targets}-{ratio:g}"


def work(job: dict[str, Any]) -> None:
    """Whiten once, truncate at each ratio and save the factors; runs in the peer's environment."""
    sys.path.insert(0, job["checkout"])
    import SVDLLM
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(job["model"], torch_dtype=torch.float32).eval()

    out = Path(job["out"])
    tokens = load_file(out / "tokens.safetensors")["tokens"]
    loader = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens]
    began, model = time.perf_counter(), load()
    model.seqlen = tokens.shape[1]
    model.config.use_cache = False
    whitened = SVDLLM.profle_svdllm_low_resource("llama", model, loader, "cpu")
    calibrating = time.perf_counter() - began
    for ratio in job["ratios"]:
        began, model = time.perf_counter(), load()
        SVDLLM.whitening("llama", model, whitened, 1 - ratio, "cpu")  # the peer's ratio is the fraction that stays
        factors = {}
        for index, layer in enumerate(model.model.layers):
            for block, names in (("self_attn", ATTENTION), ("mlp", MLP)):
                for name in names:
                    full = f"model.layers.{index}.{block}.{name}_proj"
                    for side in "uv":
                        weight = getattr(getattr(layer, block), f"{name}_{side}_proj").weight
                        factors[f"{full}.{side}"] = weight.detach().contiguous()
        seconds = calibrating + time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        facts = {"seconds": str(seconds), "peak_rss_bytes": str(peak)}
        save_file(factors, out / f"factors-{ratio:g}.safetensors", metadata=facts)


def write(source: Path, out: Path, ratio: float, targets: str) -> dict[str, Any]:
    """Write the dense-shaped checkpoint of one ratio; return its report, with the sizes that factors would have."""
    from safetensors import safe_open

    from neuronmm.compression.reader import Reader
    from neuronmm.compression.tensor_files import replace_tensors

    file = out / f"factors-{ratio:g}.safetensors"
    factors, reader, weights, dense, remaining = load_file(file), Reader(source), {}, 0, 0
    with safe_open(file, framework="pt") as opened:
        facts = {key: float(value) for key, value in opened.metadata().items() if key != "format"}
    ranks = {}
    for name in sorted({key.rpartition(".")[0] for key in factors}):
        if targets == "mlp" and ".mlp." not in name:
            continue
        u, v = factors[f"{name}.u"].double(), factors[f"{name}.v"].double()
        weight = reader[f"{name}.weight"]
        assert weight.shape == (u.shape[0], v.shape[1]), f"{name}: {tuple(weight.shape)}, u {u.shape}, v {v.shape}"
        weights[f"{name}.weight"] = (u @ v).to(weight.dtype)
        dense, remaining, ranks[name] = dense + weight.numel(), remaining + u.numel() + v.numel(), u.shape[1]
    folder = _folder(out, ratio, targets)
    shutil.copytree(source, folder)
    replace_tensors(folder, weights)
    total = sum(torch.Size(reader.shape(name)).numel() for name in reader.names)
    return {
        "kind": "measured",
        "method": "SVD-LLM (W), its own code",
        "model": str(source),
        "targets": targets,
        "asked_ratio": ratio,
        "realised_ratio": 1 - remaining / dense,
        "model_ratio": (dense - remaining) / total,
        "parameters": {"dense": total, "compressed": total - dense + remaining},
        **facts,
        "ranks": ranks,
    }


def add_to_sweep(sweep: Path, folder: Path, report: dict[str, Any]) -> None:
    """Add the checkpoint in ``folder`` to the sweep as a point."""
    from neuronmm.compression.reader import Reader
    from neuronmm.measure.sweep_points import add_point

    reader = Reader(folder)
    shares = ("targets", "realised_ratio", "model_ratio", "seconds", "peak_rss_bytes")
    facts = {key: report[key] for key in shares}
    facts |= {"name": "SVD-LLM", "ratio": report["asked_ratio"]}
    facts["bytes"] = round(sum(map(reader.nbytes, reader.names)) * (1 - report["model_ratio"]))
    add_point(sweep, f"SVD-LLM-{folder.name}", folder, facts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
