"""The console for tables on stdout."""

from rich.console import Console

_WIDTH = 175


def wide_console() -> Console:
    """Return a console for stdout that is wide enough for the tables if stdout is not a terminal."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH)
