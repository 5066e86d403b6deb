"""The one exception of the emulator: a rule of the hardware or of the language was broken."""

from __future__ import annotations


class NkiError(RuntimeError):
    """A kernel broke a rule: ``location`` (file:line), what happened, the limit and the actual value.

    Attributes: ``location`` "file:line" of the kernel source; ``rule`` a short stable name; ``limit`` and ``actual``
    as given (None where a rule has no figure).
    """

    def __init__(self, location: str, rule: str, message: str, limit: object = None, actual: object = None) -> None:
        figures = "" if limit is None and actual is None else f" (limit: {limit}; actual: {actual})"
        super().__init__(f"{location}: {message}{figures} [{rule}]")
        self.location, self.rule, self.limit, self.actual = location, rule, limit, actual
