"""The ``neuronmm`` command: a dispatcher over :mod:`neuronmm.commands`, and the one place errors become lines."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

COMMANDS = ("compress", "recover", "generate", "benchmark", "evaluate", "sweep", "predict", "tiling")


def parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand module adds its own part."""
    root = argparse.ArgumentParser(
        prog="neuronmm",
        description="Compress a Llama or Qwen checkpoint by SVD, generate, and measure tokens per second.",
    )
    root.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"neuronmm.commands.{name}")
        text = (module.__doc__ or "").strip()
        summary, _, rest = text.partition("\n")
        command = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=rest.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--debug", action="store_true", help="show a traceback instead of one line when it fails")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for bad input, 1 for a failure, 128 + n where signal n would end it."""
    root = parser()
    args = root.parse_args(argv)
    if args.version:
        from neuronmm import __version__

        print(__version__)
        return 0
    if args.command is None:
        root.print_help()
        return 2
    from neuronmm.kernels import KernelError
    from neuronmm.models import UserError

    try:
        args.run(args)
        sys.stdout.flush()  # a reader that is gone is noticed here, not when the interpreter ends
    except KeyboardInterrupt:
        print("neuronmm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, KernelError, OSError, MemoryError) as error:
        if args.debug:
            raise
        print(f"neuronmm {args.command}: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2 if isinstance(error, (UserError, KernelError)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
