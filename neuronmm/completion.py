"""Completion scripts for shells: the commands, their options and choices, and files where a file is expected."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh")
_FILES = {"MODEL", "OUT", "FILE", "FOLDER", "DIR", "YAML", "CHECKPOINT"}
"""The metavars of arguments that are files or folders; another metavar may offer one beside words: ``FILE|self``."""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of ``parser`` for one of :data:`SHELLS`."""
    import shtab

    _complete_files(parser)
    return str(shtab.complete(parser, shell))


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are files, for shtab, in ``parser`` and its commands."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif not _FILES.isdisjoint(str(action.metavar).split("|")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
