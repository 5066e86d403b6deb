"""Run llama.cpp's own server from the package ``xllamacpp``, in its environment, until a signal.

    python scripts/llama_server.py MODEL.gguf PORT ROWS CONTEXT THREADS

ROWS sequences run at once, each with a context of CONTEXT tokens. Prompts are not cached between requests.
"""

import signal
import sys
from typing import Any

import xllamacpp


def settings(model: str, rows: int, context: int, threads: int) -> Any:
    """Return the settings with which every benchmark here runs llama.cpp's server."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx, params.kv_unified = rows, rows * context, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_prompt, params.cache_ram_mib = False, 0
    return params


def main() -> None:
    """Start the server in this process."""
    model, port, rows, context, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = settings(model, rows, context, threads)
    params.port = port
    server = xllamacpp.Server(params)
    print(server.listening_address, xllamacpp.get_system_info(), flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
