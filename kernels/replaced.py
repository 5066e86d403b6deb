"""Replace a function of torch within a context, for modules of other libraries that call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class Replaced(TorchFunctionMode):
    """A context in which ``replacement`` is called instead of ``function``; it may call ``function`` itself."""

    def __init__(self, function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._replacement = function, replacement

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        called = self._replacement if function is self._function else function
        return called(*args, **(kwargs or {}))
