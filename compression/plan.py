"""What a run will do to which linear: the targets, who shares an A with whom, and the rank of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuronmm.compression.allocation import allocate, energy, relative, sharing_pays
from neuronmm.compression.block import weight_of
from neuronmm.compression.calibration_store import CalibrationStore, stored_moments
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factorize import spectrum
from neuronmm.compression.ranks import Linear, auto_align, balance
from neuronmm.compression.reader import Reader
from neuronmm.compression.streaming import StreamedModel
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, SAME_INPUT, TARGETS
from neuronmm.models.progress import Progress

_JOINT = "together:"  # in front of a leader's name: what each rank of one A takes off its linears' relative losses
_SHARE = "share:"  # in front of a linear's name: its half's share of the residual stream


@dataclass(frozen=True)
class Plan:
    """``linears`` in the order of the layers, those that share an A as one; ``ranks`` by their names, None is dense."""

    linears: list[Linear]
    ranks: dict[str, int | None]
    align: int

    @cached_property
    def part_ranks(self) -> dict[str, int]:
        """The rank of every linear of the model that is factorised, by its own name."""
        ranks = ((part.name, self.ranks[linear.name]) for linear in self.linears for part in linear.parts)
        return {name: rank for name, rank in ranks if rank is not None}

    @cached_property
    def shared(self) -> dict[str, str]:
        """Linear -> the leader whose A it uses."""
        pairs = ((part.name, linear) for linear in self.linears for part in linear.members[1:])
        return {name: linear.name for name, linear in pairs if self.ranks[linear.name] is not None}

    @property
    def removed(self) -> int:
        """Parameters that the dense model has and the compressed one has not."""
        return sum(linear.dense - linear.kept(self.ranks[linear.name]) for linear in self.linears)

    def of_layer(self, index: int) -> list[Linear]:
        """The linears of one decoder layer."""
        return [linear for linear in self.linears if linear.name.startswith(f"{LAYERS}.{index}.")]


def targeted(reader: Reader, layers: int, targets: str) -> list[Linear]:
    """The linears that ``targets`` names, in the order of the layers."""
    return [
        Linear(name, out_features, in_features)
        for index in range(layers)
        for name in (f"{LAYERS}.{index}.{linear}" for linear in TARGETS[targets])
        for out_features, in_features in (reader.shape(f"{name}.weight"),)
    ]


def needs_spectra(config: CompressionConfig) -> bool:
    """Whether the plan depends on the calibration text."""
    return config.allocation == "global" or config.share == "auto"


def make_plan(linears: list[Linear], config: CompressionConfig, spectra: dict[str, Tensor] | None = None) -> Plan:
    """Decide. ``spectra``, from :func:`measure`, is needed where :func:`needs_spectra` says so.

    Linears of one input share an A where it loses less than what they lose at the ranks they have without it: beside
    values that the allocation leaves dense, at little cost, one A for queries, keys and values is a loss.

    Raises:
        UserError: the ratio is out of range, or the tile so wide that no matrix can be compressed.
    """
    align = auto_align(linears) if config.align == "auto" else config.align
    even = balance(linears, config.ratio, align)  # refuses what is impossible before anything long begins
    if not spectra:
        return Plan(linears, even, align)
    energies = {linear.name: energy(spectra[linear.name]) for linear in linears}
    losses = {name: relative(spectra[name], whole) for name, whole in energies.items()}
    ranks = _ranks(linears, losses, spectra, config, align)
    if config.share == "auto":
        for group in _groups(linears):
            joint = Linear.sharing(group, [energies[linear.name] for linear in group])
            together = spectra[_JOINT + joint.name]
            if sharing_pays(joint, ranks, losses, together):
                losses[joint.name] = together
                place = linears.index(group[0])
                linears = [*linears[:place], joint, *linears[place + len(group) :]]
        ranks = _ranks(linears, losses, spectra, config, align)
    return Plan(linears, ranks, align)


def _ranks(
    linears: list[Linear], losses: dict[str, Tensor], spectra: dict[str, Tensor], config: CompressionConfig, align: int
) -> dict[str, int | None]:
    if config.allocation == "uniform":
        return balance(linears, config.ratio, align)
    shares = {linear.name: float(spectra[_SHARE + linear.name]) for linear in linears}
    return allocate(linears, losses, shares, config.ratio, align)


def _groups(linears: Sequence[Linear]) -> list[list[Linear]]:
    """The linears of one input that could share an A."""
    found: dict[tuple[str, int], list[Linear]] = {}
    for linear in linears:
        layer, _, inside = linear.name.removeprefix(f"{LAYERS}.").partition(".")
        for number, group in enumerate(SAME_INPUT):
            if inside in group:
                found.setdefault((layer, number), []).append(linear)
    return [group for group in found.values() if len(group) > 1]


@torch.no_grad()
def measure(
    model: StreamedModel,
    linears: list[Linear],
    rows: Tensor,
    config: CompressionConfig,
    workspace: Workspace,
    store: CalibrationStore | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """What the plan depends on: of every linear the whitened spectrum and its half's share of the residual stream.

    Of linears of one input also what one A for all would lose. All over the dense model's own run.

    After every layer the work so far is kept in the workspace, for a resumed run. A store that has every layer's
    moments saves the run.

    Raises:
        UserError: weights or activations hold NaN or infinity.
    """
    runs = store is None or not store.complete(len(model))
    first, state = workspace.latest("spectra", ["hidden"] if runs else [])
    progress("measuring spectra", first / len(model))
    hidden, rotary = state.pop("hidden", None), None
    if runs:
        hidden = model.embed(rows) if hidden is None else hidden.to(model.device)
        rotary = model.rotary(hidden, torch.arange(hidden.shape[1])[None])
    for index in range(first, len(model)):
        inside = f"{LAYERS}.{index}."
        apart = [linear for linear in linears if linear.name.startswith(inside)]
        names = [linear.name.removeprefix(inside) for linear in apart]
        with model.layer(index) as layer:
            moments, hidden = stored_moments(layer, index, hidden, rotary, names, config.damping, store)
            try:
                for linear in apart:
                    known = moments[linear.name.removeprefix(inside)]
                    state[linear.name] = spectrum(weight_of(layer, linear, inside), known).cpu()
                    state[_SHARE + linear.name] = known.share.to("cpu", copy=True)
                for group in _groups(apart) if config.share == "auto" else []:
                    energies = [energy(state[linear.name]) for linear in group]
                    joint = Linear.sharing(group, energies)
                    known = moments[joint.name.removeprefix(inside)]
                    values = spectrum(weight_of(layer, joint, inside), known).cpu()
                    state[_JOINT + joint.name] = relative(values, max(energies))
            except ValueError as error:
                raise UserError(
                    f"{model.reader.folder}: {inside}*: {error}; the checkpoint is damaged or unstable in float32"
                ) from None
        workspace.save(f"spectra-{index + 1:05d}", {**state, **({} if hidden is None else {"hidden": hidden})})
        workspace.drop(f"spectra-{index:05d}")
        model.reader.close()  # pages of the mapped shard count as resident as long as it is mapped
        progress("measuring spectra", 1 / len(model))
    return state
