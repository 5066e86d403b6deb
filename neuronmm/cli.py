"""The ``neuronmm`` command: dispatches to :mod:`neuronmm.commands` and turns errors into one line each."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from neuronmm.completion import SHELLS, script

COMMANDS = (
    "compress",
    "recover",
    "convert",
    "generate",
    "serve",
    "benchmark",
    "evaluate",
    "sweep",
    "predict",
    "tiling",
    "inspect",
    "doctor",
    "report",
)


SEVERAL = ("compress", "recover", "generate")
"""The commands that several processes run together."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, and completes an abbreviation to the options that the help shows."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the matches of an abbreviation. An old name of an option has to be given in full."""
        matches = super()._get_option_tuples(option_string)
        return [match for match in matches if match[0] is None or match[0].help != argparse.SUPPRESS]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help shows all options)\n")


def parser() -> argparse.ArgumentParser:
    """Build the parser; each command module adds its arguments."""
    root = Parser(
        prog="neuronmm",
        description="Compress a Llama or Qwen checkpoint by SVD, generate, and measure tokens per second.",
    )
    root.add_argument("--version", action="store_true", help="print the version and exit")
    shells = ", ".join(SHELLS)
    root.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help=f"print a completion script: {shells}"
    )
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"neuronmm.commands.{name}")
        text = (module.__doc__ or "").strip()
        summary, _, details = text.partition("\n")
        command = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=details.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--debug", action="store_true", help="show a traceback instead of one line when it fails")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 for bad input, 1 for a failure, 128 + n for signal n."""
    words = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed by the caller; print(file=None) would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        problem = _process_problem(words)
        if problem:
            print(f"neuronmm: error: {problem}", file=sys.stderr)
            return 2
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows escapes
            sys.stdout.reconfigure(errors="backslashreplace")
        root = parser()
        args = root.parse_args(words)
        if args.version:
            from neuronmm.version import VERSION

            print(VERSION)
            return 0
        if args.print_completion:
            print(script(root, args.print_completion))
            return 0
        if args.command is None:
            root.print_help()
            return 2
        return _run(args)
    except KeyboardInterrupt:
        print("neuronmm: interrupted", file=sys.stderr)
        return 130


def _process_problem(words: Sequence[str]) -> str | None:
    """Return what is wrong with stdout or the encoding of the arguments, or None."""
    if sys.stdout is None:
        return "standard output is closed; send it to /dev/null if nobody reads it"
    for word in words:
        escaped = word.encode(errors="backslashreplace").decode()
        if escaped != word:
            return f"the argument {escaped} is not UTF-8"
        if word.endswith("=--"):  # argparse of Python 3.11 drops that value
            return f"the argument {word} is ambiguous; leave a space before --"
    return None


def _run(args: argparse.Namespace) -> int:
    """Run the chosen command and turn its errors into one line. Slow imports happen in the commands."""
    from neuronmm.kernels import KernelError
    from neuronmm.models import UserError
    from neuronmm.models.errors import lacks_memory, without_panics

    try:
        with _interruptible(), _joined(args.command), without_panics():
            args.run(args)
        sys.stdout.flush()  # detects a closed pipe here instead of at interpreter exit
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_output()
        return 141  # a closed pipe (`| head`), which rich turns into a SystemExit
    except (UserError, KernelError, OSError, MemoryError, RuntimeError) as error:
        user_error, memory = isinstance(error, (UserError, KernelError)), lacks_memory(error)
        if args.debug or not (user_error or memory or isinstance(error, OSError)):
            raise
        message = "not enough memory" if memory else str(error) or type(error).__name__
        print(f"neuronmm {args.command}: error: {message}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk, which would fail again at interpreter exit
            _drop_output()
        return 2 if user_error else 1
    return 0


def of_several() -> bool:
    """Return whether torchrun started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _joined(command: str) -> AbstractContextManager[None]:
    """Return a context in which the processes that torchrun started know each other.

    Raises:
        UserError: the command runs in one process.
    """
    if not of_several():
        return nullcontext()
    from neuronmm.models import UserError
    from neuronmm.models.processes import joined, started

    rank, size = started()
    if size > 1 and command not in SEVERAL:
        if rank > 0:
            raise SystemExit(2)
        raise UserError(f"runs in one process, not {size}; torchrun starts only {', '.join(SEVERAL)}")
    return joined()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt if the block is interrupted, even if C code such as torch's raises another error instead.

    A handler that the caller has set remains active.
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


def _drop_output() -> None:
    """Discard the content of stdout's buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
