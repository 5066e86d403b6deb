"""What several runs on one calibration text have in common, in a folder, so that it is made once.

The tokens, and of each decoder layer the moments of the dense model's linears: neither depends on method, ratio or
sharing. What is read back is what a run alone would gather, to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from neuronmm.compression.block import Rotary, advance, moments_of
from neuronmm.compression.calibration import make_rows
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.moments import Moments, leaders_of
from neuronmm.compression.parts import place_tensors, read_header
from neuronmm.compression.workspace import Workspace
from neuronmm.kernels.durable import WRITING
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import stranger_in
from neuronmm.models.progress import Progress
from neuronmm.version import VERSION

_SIDES = ("outputs", "inputs")
_RUN, _TOKENS = "run.json", "tokens"
_TEXT = {"calibration", "calibration_rows", "calibration_length", "seed"}


class CalibrationStore:
    """One run's view of the folder, which is made if it is missing: the first run fills it, the others read it.

    Args:
        folder: where it lies.
        dense: the dense model's folder, which tokens and moments are of.
        size: its tensors' bytes.
        device: where the model runs.
        config: the run's settings, of which the calibration's have to be the same for all runs. Those of other targets
            share the tokens alone.

    Raises:
        UserError: the folder was filled for something else, or by somebody else.
    """

    def __init__(self, folder: Path, dense: Path, size: int, device: str, config: CompressionConfig) -> None:
        self.seconds = 0.0  # what making the contents took that this run has read and not made
        self._folder, self._targets, self._known = folder, config.targets, set[str]()
        run = {"model": str(dense), "bytes": size, "version": VERSION, "device": device}
        run |= config.model_dump(include=_TEXT)
        folder.mkdir(parents=True, exist_ok=True)
        before = read_own(folder / _RUN)
        if before is None:
            if stranger_in(folder, [f"*{WRITING}"]) is not None:
                raise UserError(f"{folder}: its {_RUN} does not say what it holds; remove it or give another folder")
            write_json(folder / _RUN, run)
        elif before != run:
            raise UserError(f"{folder}: holds the calibration of another model or text; give another folder")

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """The calibration tokens [rows, length], made where they are not there yet."""
        if read_header(self._path(_TOKENS), [_TOKENS]) is None:
            began = time.perf_counter()
            self._write(_TOKENS, {_TOKENS: make()}, began)
        return self._read(_TOKENS, torch.device("cpu"))[_TOKENS]

    def complete(self, layers: int) -> bool:
        """Whether the moments of all of the model's layers are there."""
        return all(self.has(index) for index in range(layers))

    def has(self, index: int) -> bool:
        """Whether those of layer ``index`` are there and whole."""
        return read_header(self._path(self._layer(index))) is not None

    def keep(self, index: int, moments: dict[str, Moments], began: float) -> None:
        """Keep what layer ``index`` was found to have, by its linears' names; gathering it began at ``began``."""
        own = {leader: moments[leader] for leader in leaders_of(list(moments)).values()}
        tensors = {f"{name}.{_SIDES[one.of_inputs]}": one.gram for name, one in own.items()}
        for name, one in own.items():
            tensors |= {f"{name}.squares": one.squares, f"{name}.share": one.share.clone()}
        self._write(self._layer(index), tensors, began)

    def moments(self, index: int, linears: list[str], damping: float, device: torch.device) -> dict[str, Moments]:
        """The moments that :meth:`keep` was given for layer ``index``, of its ``linears``."""
        held = self._read(self._layer(index), device)
        leaders, own = leaders_of(linears), dict[str, Moments]()
        for name in set(leaders.values()):
            of_inputs = f"{name}.{_SIDES[True]}" in held
            own[name] = Moments(0, of_inputs, damping, device)
            own[name].gram = held[f"{name}.{_SIDES[of_inputs]}"]
            own[name].squares, own[name].share = held[f"{name}.squares"], held[f"{name}.share"]
        return {name: own[leader] for name, leader in leaders.items()}

    def _layer(self, index: int) -> str:
        return f"{self._targets}-{index:05d}"

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _write(self, name: str, tensors: dict[str, Tensor], began: float) -> None:
        place_tensors(self._path(name), tensors, {"seconds": str(time.perf_counter() - began)})
        self._known.add(name)

    def _read(self, name: str, device: torch.device) -> dict[str, Tensor]:
        with safe_open(self._path(name), framework="pt", device=str(device)) as file:
            if name not in self._known:
                self.seconds += float(file.metadata()["seconds"])
                self._known.add(name)
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def tokens_of(
    workspace: Workspace,
    dense: Path,
    config: CompressionConfig,
    device: str,
    store: CalibrationStore | None,
    progress: Progress,
) -> Tensor:
    """The tokens [rows, length] of a run: an interrupted one's, or the store's, or made of ``dense`` or a text."""
    make = partial(make_rows, dense, config.calibration, config.rows, device, progress)
    return workspace.tokens(make if store is None else partial(store.tokens, make))


def stored_moments(
    layer: nn.Module,
    index: int,
    hidden: Tensor | None,
    rotary: Rotary | None,
    names: list[str],
    damping: float,
    store: CalibrationStore | None,
) -> tuple[dict[str, Moments], Tensor | None]:
    """As :func:`neuronmm.compression.block.moments_of`, but read from the store where they are there.

    Without ``hidden`` the layer is not run: there are no outputs, and no moments that are not in the store.
    """
    if store is not None and store.has(index):
        known = store.moments(index, names, damping, next(layer.parameters()).device)
        if hidden is None:
            return known, None
        assert rotary is not None
        return known, advance(layer, hidden, rotary)
    if hidden is None:
        return {}, None
    assert rotary is not None
    began = time.perf_counter() if store is not None else 0.0
    moments, outputs = moments_of(layer, hidden, rotary, names, damping)
    if store is not None:
        store.keep(index, moments, began)
    return moments, outputs
