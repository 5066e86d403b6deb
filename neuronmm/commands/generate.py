"""generate text from a model, compressed or dense, and stream it to the terminal

examples:
  neuronmm generate OUT --prompt "The capital of France is"
  neuronmm generate OUT --chat --prompt "Name three rivers." --temperature 0.7 --top-p 0.9 --seed 1
  neuronmm generate OUT --prompt "1, 2, 3," --max-new-tokens 40 --stop "10" --json
  neuronmm generate OUT --batch-file prompts.txt > answers.jsonl
  neuronmm generate OUT --chat --prompt "Fix the bug in ..." --draft ngram       (the same text, often faster)
  neuronmm generate MODEL --prompt "The sky is" --weight-dtype int4             (a third of the bytes, on the CPU)
  neuronmm generate BIG --prompt "The sky is" --draft SMALL --json              (SMALL has the same tokenizer)
  neuronmm generate OUT --prompt "The sky is" --backend neuron --tp 2            (on Trainium)
  neuronmm generate OUT --prompt "The sky is" --backend neuron --tp 2 --emulate  (the same on this CPU, slowly)

The text goes to stdout. The backend, the kernels, TTFT (time to the first token) and decode tokens/s (without prompt
tokens and the first token) go to stderr. A batch file has one prompt per line or, if its name ends in .jsonl, one
object with a "prompt" per line; the results are JSON lines in the same order. Decoding is greedy unless --temperature
is above 0. --draft guesses the next tokens, from repetitions in the text, with the model itself in fewer bits
or with a smaller model, and the model verifies several in one step: the text stays the same. Drafts turn themselves
off where they do not pay.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", metavar="OUT", help="a model folder (compressed or dense), a GGUF file or a hub id")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--batch-file", type=Path, metavar="FILE", help="file of prompts; results are JSON lines")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 (default) keeps all"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; 1 (default) is off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 (default) is off")
    parser.add_argument("--seed", type=int, help="make sampling reproducible")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--backend", default="auto", help="auto (default), cpu, cuda or neuron")
    add_dtype(parser)
    add_weight_dtype(parser)
    parser.add_argument("--impl", default="auto", help="low-rank kernel: auto (default), naive, torch, reference, ...")
    add_draft(parser, "for one prompt")
    add_neuron_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print results as JSON lines instead of streaming text")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option of the dtype to compute in."""
    what = "auto (default: as config.json says, fp16 as bf16), bf16, fp16 or fp32"
    parser.add_argument("--dtype", default="auto", help=what)


def add_weight_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option of the CPU backend."""
    parser.add_argument(
        "--weight-dtype",
        choices=("int8", "int4"),
        help="round the dense weights when they are loaded, on the CPU; int4 keeps embedding and head in int8",
    )


def add_draft(parser: argparse.ArgumentParser, when: str) -> None:
    """Add the option that names a draft; ``when`` says when it is used."""
    parser.add_argument(
        "--draft",
        metavar="ngram|int4|int8|CHECKPOINT",
        help=f"guess tokens, on the CPU and {when}; int4 is the model itself, rounded",
    )


def add_neuron_arguments(parser: argparse.ArgumentParser, continuous: bool = True) -> None:
    """Add the options of ``--backend neuron``; ``continuous``: let the user choose a continuous batch (no server)."""
    group = parser.add_argument_group("with --backend neuron")
    group.add_argument("--tp", type=int, metavar="N", help="NeuronCores that share the model; default 1")
    group.add_argument("--positions", type=int, metavar="N", help="longest prompt and answer together; default 512")
    if continuous:
        group.add_argument("--continuous", action="store_true", help="start a prompt when another one ends")
    names = ("--host", "--neuron-host") if continuous else ("--neuron-host",)  # a server's --host is an address
    group.add_argument(
        *names, dest="neuron_host", metavar="NAME", help="default: the first Neuron host that is present"
    )
    group.add_argument(
        "--emulate", action="store_true", help="run the Neuron host on this CPU with an emulated runtime"
    )


def backend_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the backend options given on the command line, as ``load`` takes them."""
    options = {
        "weight_dtype": args.weight_dtype,
        "tp_degree": args.tp,
        "n_positions": args.positions,
        "continuous": getattr(args, "continuous", None) or None,
        "emulate": args.emulate or None,
        "host": args.neuron_host,
    }
    return {name: value for name, value in options.items() if value is not None}


def imports_before_load(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Return the context for the slow imports of a command that will load the model."""
    from neuronmm.engine.early import imports_before

    backend = "cpu" if args.draft and args.backend == "auto" else args.backend
    return imports_before(args.model, backend, args.dtype, args.weight_dtype)


def run(args: argparse.Namespace) -> None:
    """Load the model, generate, and report the speed."""
    from neuronmm.models import UserError

    prompts = read_prompts(args.batch_file) if args.batch_file else [args.prompt]
    if args.draft and len(prompts) > 1:
        raise UserError(f"--draft serves one prompt at a time, not {len(prompts)}; leave it out")
    with imports_before_load(args):
        from neuronmm.engine.backends.torch_runner import MAX_BATCH
        from neuronmm.engine.engine import load
        from neuronmm.engine.sampling import SamplingParams
        from neuronmm.progress import stage_progress

    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    options = backend_options(args)
    if args.backend == "neuron":
        options["batch_size"] = min(len(prompts), MAX_BATCH)
    with stage_progress() as progress:
        engine = load(
            args.model,
            backend=args.backend,
            dtype=args.dtype,
            impl=args.impl,
            draft=args.draft,
            progress=progress,
            **options,
        )
    for prompt in prompts:
        engine.encode(prompt, args.chat)  # refuses a prompt that does not fit before anything is compiled
    dtype = str(engine.runner.dtype).removeprefix("torch.")
    print(f"backend {engine.runner.backend}, {dtype}, kernels: {engine.runner.path}", file=sys.stderr)
    if args.batch_file or args.json:
        with stage_progress(live=False) as progress:
            for result in engine.each(prompts, params, chat=args.chat):
                print(json.dumps(result.to_dict(), ensure_ascii=False), flush=True)
                if args.batch_file:
                    progress("generating", 1 / len(prompts))
        return
    stream = engine.stream(prompts[0], params, chat=args.chat)
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    result = stream.result
    speed = f"{result.tokens_per_second:.1f} tokens/s" if result.tokens_per_second else "a single token"
    print(
        f"measured: {result.prompt_tokens} prompt tokens, TTFT {result.ttft * 1e3:.0f} ms; "
        f"{len(result.token_ids)} new tokens ({result.finish_reason}), decode {speed}",
        file=sys.stderr,
    )
    if result.draft:
        accepted, drafted = result.draft.accepted, result.draft.drafted
        print(f"{accepted} of {drafted} drafted tokens accepted, {result.draft.steps} steps", file=sys.stderr)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a batch file without blank lines.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or a line of a .jsonl file is not an object with a "prompt".
    """
    from pydantic import BaseModel

    from neuronmm.models import UserError
    from neuronmm.models.documents import lines, read_rows, read_text

    class Row(BaseModel):
        prompt: str

    if path.suffix == ".jsonl":
        prompts = [row.prompt for _, row in read_rows(path, Row, '{"prompt": "..."}')]
    else:
        prompts = [line for _, line in lines(read_text(path))]
    if not prompts:
        raise UserError(f"{path}: holds no prompts; give one per line")
    return prompts
