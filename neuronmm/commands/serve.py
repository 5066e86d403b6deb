"""serve a model, compressed or dense, to clients of OpenAI's API

examples:
  neuronmm serve OUT                                     (then: http://127.0.0.1:8000/v1)
  neuronmm serve OUT --port 0 --json                     (a free port; one JSON line says which, when it is ready)
  neuronmm serve OUT --max-batch 16 --context 4096 --max-tokens 1024
  neuronmm serve MODEL --draft int4                      (the same answers, faster for a single client)
  neuronmm serve OUT --host 0.0.0.0 --api-key-file key.txt
  NEURONMM_API_KEY=secret neuronmm serve OUT --host 0.0.0.0
  neuronmm serve OUT --backend neuron --tp 2 --positions 512     (on Trainium)

Endpoints: /v1/models, /v1/completions, /v1/chat/completions, /health, and /metrics for Prometheus. Requests join and
leave a running batch; each gets the text that it would get alone. More than --max-batch rows wait in a queue, and a
request that does not fit the queue gets status 429. SIGTERM and SIGINT end the server after the running requests, at
the latest after --grace seconds. The server needs: pip install "neuronmm[serve]"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from neuronmm.commands.generate import (
    add_draft,
    add_dtype,
    add_neuron_arguments,
    add_weight_dtype,
    backend_options,
    imports_before_load,
)

CONTEXT = 2048
"""Default context, unless the model's is shorter: the cache of all slots is allocated at the start."""

KEY_VARIABLE = "NEURONMM_API_KEY"
_MANY = 10**6
_RANGES = {
    "port": (0, 65535),
    "max_batch": (1, 1024),
    "max_queue": (0, _MANY),
    "max_tokens": (1, _MANY),
    "context": (2, _MANY),
    "grace": (0, _MANY),
}
_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", metavar="OUT", help="a model folder (compressed or dense), a GGUF file or a hub id")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only"
    )
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one and prints it")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="rows that run at once; default 8")
    parser.add_argument("--max-queue", type=int, default=64, metavar="N", help="rows that may wait; default 64")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer that a request may ask for; default the context"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help=f"prompt and answer together; default {CONTEXT}, or the model's"
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="seconds for the last requests; default 30"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"require the key in FILE (or in ${KEY_VARIABLE}) from clients",
    )
    parser.add_argument("--backend", default="auto", help="auto (default), cpu, cuda or neuron")
    add_dtype(parser)
    add_weight_dtype(parser)
    add_draft(parser, "while one row runs alone")
    add_neuron_arguments(parser, continuous=False)
    parser.add_argument("--json", action="store_true", help="print one JSON line with the address when it is ready")


def run(args: argparse.Namespace) -> None:
    """Load the model and serve it until a signal."""
    from neuronmm.models import UserError
    from neuronmm.models.source import short_name
    from neuronmm.serving.address import bind, is_local, url

    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f'the server needs {", ".join(missing)}: pip install "neuronmm[serve]"')
    for name, (least, most) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it has to be {least} to {most}")
    key = read_key(args.api_key_file)
    with bind(args.host, args.port) as reserved:
        if key is None and not is_local(reserved):
            print(
                f"warning: {args.host} is open to other machines and there is no API key; give --api-key-file or "
                f"set {KEY_VARIABLE}",
                file=sys.stderr,
            )
        with imports_before_load(args):
            from neuronmm.engine.engine import load
            from neuronmm.progress import stage_progress
            from neuronmm.serving.server import serve
            from neuronmm.serving.service import Limits

        options = backend_options(args)
        if args.backend == "neuron":
            options.update(continuous=True, batch_size=args.max_batch)
        with stage_progress() as progress:
            engine = load(
                args.model, backend=args.backend, dtype=args.dtype, draft=args.draft, progress=progress, **options
            )
        if args.context is not None and args.context > engine.context:
            raise UserError(f"--context is {args.context}, but the model has {engine.context} positions")
        engine.context = args.context or min(engine.context, CONTEXT)
        limits = Limits(args.max_batch, args.max_queue, args.max_tokens or engine.context, engine.context)
        name, address = short_name(args.model), url(reserved)
        runner = engine.runner
        print(
            f"backend {runner.backend}, {runner.dtype}, kernels: {runner.path}".replace("torch.", ""), file=sys.stderr
        )

        def ready() -> None:
            line = {"url": address, "model": name, "max_batch": limits.max_batch, "context": limits.context}
            print(json.dumps(line) if args.json else f"{name}: ready at {address}/v1", flush=True)

        serve(engine, name, reserved, limits, key, args.grace, ready)


def read_key(path: Path | None) -> str | None:
    """Return the API key in a file or in the environment, or None.

    Raises:
        UserError: it is empty or holds a character that no HTTP header may have.
    """
    from neuronmm.models import UserError
    from neuronmm.models.documents import read_text

    if path is None and KEY_VARIABLE not in os.environ:
        return None
    key = (os.environ[KEY_VARIABLE] if path is None else read_text(path)).strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{path or KEY_VARIABLE}: an API key has to be one word of printable ASCII characters")
    return key
