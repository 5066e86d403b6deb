"""A folder with the calibration of several runs on one text, which is computed once. One run at a time may use it.

It holds the tokens and, for each decoder layer, the moments of the dense model's linears and, if a run needs them,
those of their gradients. None of them depends on ratio or shared A. A run that reads them gets what it would compute
itself, to the last bit. A run that needs the moments twice, for the ranks and for the factors, keeps them in such a
folder of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.identity import of_model, of_texts
from neuronmm.compression.moments import Moments, leaders_of, moments_of, side
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
from neuronmm.compression.streaming import Rotary, advance
from neuronmm.compression.tensor_files import read_header, write_tensors
from neuronmm.kernels.durable import WRITING
from neuronmm.models import processes
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.output import stranger_in
from neuronmm.models.source import expanded
from neuronmm.version import VERSION

STORE = "run.json"
"""The file that says which calibration a store holds."""

_SIDES = ("outputs", "inputs")
_TOKENS, _SECONDS = "tokens", "seconds"
_TEXT = {"calibration", "calibration_rows", "calibration_length", "seed"}


def stored_bytes(linears: Sequence[Linear], *, gradients: bool) -> int:
    """Return the size of the stored moments of ``linears``, each with its own A; with those of their gradients."""
    layers: dict[str, dict[str, Linear]] = {}
    for linear in linears:
        index, _, inside = linear.name.removeprefix(f"{LAYERS}.").partition(".")
        layers.setdefault(index, {})[inside] = linear
    numbers = 0
    for layer in layers.values():
        for name in set(leaders_of(list(layer)).values()):
            size, _ = side(name, layer[name].out_features, layer[name].in_features)
            numbers += size * size + layer[name].in_features + 1  # the Gram matrix, its diagonal and the fraction
        for name, linear in layer.items() if gradients else ():
            numbers += side(name, linear.out_features, linear.in_features)[0] ** 2
    return torch.float64.itemsize * numbers


class CalibrationStore:
    """No store: the run computes its calibration whenever it needs it. :class:`SharedStore` keeps it in a folder."""

    seconds = 0.0
    """Time that other runs, or the interrupted one, spent on the contents that this run has read."""

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the calibration tokens [rows, length]; ``make`` is called if they are not stored."""
        return make()

    def complete(self, layers: int) -> bool:
        """Return whether the moments of all the model's layers are stored."""
        return all(self.has(index) for index in range(layers))

    def has(self, index: int) -> bool:
        """Return whether the moments of layer ``index`` are stored."""
        return False

    def keep(self, index: int, moments: dict[str, Moments], began: float) -> None:
        """Store the moments of layer ``index``, by linear; gathering them began at ``began``."""

    def moments(self, index: int, linears: list[str], damping: float, device: torch.device) -> dict[str, Moments]:
        """Return the stored moments of ``linears`` of layer ``index``."""
        raise LookupError(f"layer {index}: no moments are stored")

    def has_gradients(self, index: int) -> bool:
        """Return whether the second moments of the gradients of layer ``index`` are stored."""
        return False

    def keep_gradients(self, index: int, gradients: dict[str, Tensor], began: float) -> None:
        """Store the second moments of the gradients of layer ``index``, by linear; their pass began at ``began``."""

    def gradients(self, index: int, device: torch.device) -> dict[str, Tensor]:
        """Return the stored second moments of the gradients of layer ``index``, by linear."""
        raise LookupError(f"layer {index}: no gradients are stored")

    def gather(
        self, index: int, layer: nn.Module, linears: list[str], hidden: Tensor, rotary: Rotary, damping: float
    ) -> tuple[dict[str, Moments], Tensor]:
        """Return the moments of ``linears`` of ``layer`` and its outputs for ``hidden`` [rows, length, hidden].

        Stored moments are read, others are gathered and stored. Without rows the layer does not run: there are no
        outputs, and no moments unless they are stored.
        """
        if self.has(index):
            moments = self.moments(index, linears, damping, next(layer.parameters()).device)
            return moments, advance(layer, hidden, rotary) if len(hidden) else hidden
        if not len(hidden):
            return {}, hidden
        began = time.perf_counter()
        moments, outputs = moments_of(layer, hidden, rotary, linears, damping)
        self.keep(index, moments, began)
        return moments, outputs


class SharedStore(CalibrationStore):
    """The folder of calibration, as one run uses it. The first run creates and fills the folder, the others read it.

    The folder in a work folder serves one run, which reads it twice. Of several processes the first one writes, and all
    read.

    Args:
        folder: the store.
        dense: the dense checkpoint.
        device: where the model runs.
        config: the settings of the run. Those of the calibration must be the same for all runs. Runs with other targets
            share the tokens only.

    Raises:
        UserError: the folder belongs to another model, text or device, is not a store, or cannot be created.
    """

    def __init__(self, folder: str | Path, dense: Reader, device: str, config: CompressionConfig) -> None:
        self._folder, self._targets, self._known = expanded(folder), config.targets, set[str]()
        run = {**of_model(dense), "version": VERSION, "device": device}
        run |= of_texts(config) | config.model_dump(include=_TEXT)
        processes.in_turn(lambda: self._open(run))

    def _open(self, run: dict[str, Any]) -> None:
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be created ({error.strerror}); give another folder") from None
        before = read_own(folder / STORE)
        if before is None:
            if stranger_in(folder, [f"*{WRITING}"]) is not None:
                raise UserError(f"{folder}: its {STORE} does not say what it holds; remove it or give another folder")
            write_json(folder / STORE, run)
        elif before != run:
            raise UserError(f"{folder}: holds the calibration of another model, text or device; give another folder")

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        if read_header(self._path(_TOKENS), [_TOKENS]) is None:
            began = time.perf_counter()
            self._write(_TOKENS, {_TOKENS: make()}, began)
        return self._read(_TOKENS, torch.device("cpu"))[_TOKENS]

    def has(self, index: int) -> bool:
        return _SECONDS in (read_header(self._path(self._layer(index))) or {})

    def keep(self, index: int, moments: dict[str, Moments], began: float) -> None:
        by_leader = {leader: moments[leader] for leader in leaders_of(list(moments)).values()}
        tensors = {f"{name}.{_SIDES[sums.of_inputs]}": sums.gram for name, sums in by_leader.items()}
        for name, sums in by_leader.items():
            tensors |= {f"{name}.squares": sums.squares, f"{name}.share": sums.fraction.clone()}
        self._write(self._layer(index), tensors, began)
        processes.meet()

    def moments(self, index: int, linears: list[str], damping: float, device: torch.device) -> dict[str, Moments]:
        tensors = self._read(self._layer(index), device)
        leaders, by_leader = leaders_of(linears), dict[str, Moments]()
        for name in set(leaders.values()):
            of_inputs = f"{name}.{_SIDES[True]}" in tensors
            sums = by_leader[name] = Moments(0, of_inputs, damping, device)
            sums.gram = tensors[f"{name}.{_SIDES[of_inputs]}"]
            sums.squares, sums.fraction = tensors[f"{name}.squares"], tensors[f"{name}.share"]
        return {name: by_leader[leader] for name, leader in leaders.items()}

    def has_gradients(self, index: int) -> bool:
        return _SECONDS in (read_header(self._path(self._gradients(index))) or {})

    def keep_gradients(self, index: int, gradients: dict[str, Tensor], began: float) -> None:
        self._write(self._gradients(index), gradients, began)
        processes.meet()

    def gradients(self, index: int, device: torch.device) -> dict[str, Tensor]:
        return self._read(self._gradients(index), device)

    def _layer(self, index: int) -> str:
        return f"{self._targets}-{index:05d}"

    def _gradients(self, index: int) -> str:
        return f"{self._targets}-gradients-{index:05d}"

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _write(self, name: str, tensors: dict[str, Tensor], began: float) -> None:
        if processes.rank() == 0:
            write_tensors(self._path(name), tensors, {_SECONDS: str(time.perf_counter() - began)})
        self._known.add(name)

    def _read(self, name: str, device: torch.device) -> dict[str, Tensor]:
        with safe_open(self._path(name), framework="pt", device=str(device)) as file:
            if name not in self._known:
                self.seconds += float(file.metadata()[_SECONDS])
                self._known.add(name)
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
