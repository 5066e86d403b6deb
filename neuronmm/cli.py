"""The ``neuronmm`` command: a dispatcher over :mod:`neuronmm.commands`, and the one place errors become lines."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

COMMANDS = ("compress", "recover", "generate", "benchmark", "evaluate", "sweep", "predict", "tiling")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help shows all options)\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand module adds its own part."""
    root = Parser(
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for bad input, 1 for a failure, 128 + n where signal n would end it."""
    words = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed by the caller; what print sends to None goes to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        problem = _problem(words)
        if problem:
            print(f"neuronmm: error: {problem}", file=sys.stderr)
            return 2
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not UTF-8 shows escapes
            sys.stdout.reconfigure(errors="backslashreplace")
        root = parser()
        args = root.parse_args(words)
        if args.version:
            from neuronmm.version import VERSION

            print(VERSION)
            return 0
        if args.command is None:
            root.print_help()
            return 2
        return _run(args)
    except KeyboardInterrupt:
        print("neuronmm: interrupted", file=sys.stderr)
        return 130


def _problem(words: Sequence[str]) -> str | None:
    """What is wrong with the process itself: its output, or words that no command can take."""
    if sys.stdout is None:
        return "standard output is closed; send it to /dev/null if nobody reads it"
    for word in words:
        shown = word.encode(errors="backslashreplace").decode()
        if shown != word:
            return f"the argument {shown} is not UTF-8"
        if word.endswith("=--"):  # argparse of Python 3.11 drops that value
            return f"the argument {word} is ambiguous; leave a space before --"
    return None


def _run(args: argparse.Namespace) -> int:
    """The chosen command, its errors as one line each. What takes seconds to import is imported here."""
    from neuronmm.kernels import KernelError
    from neuronmm.models import UserError
    from neuronmm.models.hf import register

    register()
    try:
        with _interruptible():
            args.run(args)
        sys.stdout.flush()  # a reader that is gone is noticed here, not when the interpreter ends
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_output()
        return 141  # `| head` has what it wanted; rich makes a SystemExit of that
    except (UserError, KernelError, OSError, MemoryError, RuntimeError) as error:
        mended_by_user, memory = isinstance(error, (UserError, KernelError)), _lacks_memory(error)
        if args.debug or not (mended_by_user or memory or isinstance(error, OSError)):
            raise
        message = "not enough memory" if memory else str(error) or type(error).__name__
        print(f"neuronmm {args.command}: error: {message}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: not once more when the interpreter ends
            _drop_output()
        return 2 if mended_by_user else 1
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let an interruption of the block end it as one where C code turns it into another error, as torch does.

    A handler that the caller has set, or that ignores the signal, stays in force.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _lacks_memory(error: BaseException) -> bool:
    """Whether an allocation failed, Python's own or torch's, which has no type for it."""
    torchs = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in torchs)
    )


def _drop_output() -> None:
    """Let what is still in stdout's buffer go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
