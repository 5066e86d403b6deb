"""The plan of a run: the targeted linears, which of them share an A, and the rank of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factorize import spectrum
from neuronmm.compression.fisher import known_moments
from neuronmm.compression.layer_pair import weight_of
from neuronmm.compression.moments import Moments
from neuronmm.compression.ranks import Align, Linear, allocate, balance, energy, relative, sharing_pays
from neuronmm.compression.reader import Reader
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, SAME_INPUT, TARGETS

_JOINT = "together:"  # + a leader's name: the reduction of its linears' relative losses by each rank of a shared A
_FRACTION = "share:"  # + a linear's name: the fraction of the residual stream that its attention or MLP writes


@dataclass(frozen=True)
class Plan:
    """The targeted linears and their ranks.

    ``linears`` are in the order of the layers; those that share an A count as one. ``ranks`` are by name; a linear with
    rank None stays dense. ``tiles`` are what the ranks are multiples of.
    """

    linears: list[Linear]
    ranks: dict[str, int | None]
    tiles: Align

    @property
    def align(self) -> int:
        """What all ranks are multiples of."""
        return min(linear.tile(self.tiles) for linear in self.linears)

    @cached_property
    def part_ranks(self) -> dict[str, int]:
        """The rank of every factorised linear of the model, by its own name."""
        ranks = ((part.name, self.ranks[linear.name]) for linear in self.linears for part in linear.parts)
        return {name: rank for name, rank in ranks if rank is not None}

    @cached_property
    def shared(self) -> dict[str, str]:
        """Linear -> the leader whose A it uses."""
        pairs = ((part.name, linear) for linear in self.linears for part in linear.members[1:])
        return {name: linear.name for name, linear in pairs if self.ranks[linear.name] is not None}

    @property
    def parameters(self) -> int:
        """Number of parameters of the targeted linears in the compressed model."""
        return sum(linear.parameters(self.ranks[linear.name]) for linear in self.linears)

    @property
    def removed(self) -> int:
        """Number of parameters that compression removes."""
        return sum(linear.dense for linear in self.linears) - self.parameters

    def of_layer(self, index: int) -> list[Linear]:
        """Return the linears of one decoder layer."""
        return [linear for linear in self.linears if linear.name.startswith(f"{LAYERS}.{index}.")]

    def factorised(self, index: int) -> dict[Linear, int]:
        """Return the linears of one decoder layer that do not stay dense, and their ranks."""
        ranks = {linear: self.ranks[linear.name] for linear in self.of_layer(index)}
        return {linear: rank for linear, rank in ranks.items() if rank is not None}


def targeted(reader: Reader, layers: int, config: CompressionConfig) -> list[Linear]:
    """Return the linears that ``config.targets`` names, in the order of the layers."""
    return [
        Linear(name, out_features, in_features, pivoted=config.form == "pivoted")
        for index in range(layers)
        for name in (f"{LAYERS}.{index}.{linear}" for linear in TARGETS[config.targets])
        for out_features, in_features in (reader.shape(f"{name}.weight"),)
    ]


def make_plan(linears: list[Linear], config: CompressionConfig, spectra: dict[str, Tensor] | None = None) -> Plan:
    """Choose the ranks and the linears that share an A.

    Linears with one input share an A if they lose less with it than with an A each, at equal parameters. Queries, keys
    and values, for example, lose more with one A where the allocation leaves the small values dense at little cost.

    Args:
        linears: the targeted linears, each with its own A.
        config: the settings of the run.
        spectra: the result of :func:`measure_spectra`. Without it the ranks are uniform and no A is shared, which is
            final unless ``config.needs_spectra``.

    Raises:
        UserError: the ratio is out of range, or the tile is so wide that no matrix can be compressed.
    """
    if not config.factorises:
        return Plan(linears, {linear.name: None for linear in linears}, 1)
    uniform = balance(linears, config.ratio, config.align)  # also refuses what is impossible
    if not spectra:
        return Plan(linears, uniform, config.align)
    energies = {linear.name: _unit(spectra[linear.name], config) for linear in linears}
    losses = {name: relative(spectra[name], total) for name, total in energies.items()}
    ranks = _ranks(linears, losses, spectra, config)
    if config.share_a == "auto":
        for group in _groups(linears):
            joint = Linear.sharing(group, [energies[linear.name] for linear in group])
            together = spectra[_JOINT + joint.name]
            if sharing_pays(joint, ranks, losses, together):
                losses[joint.name] = together
                place = linears.index(group[0])
                linears = [*linears[:place], joint, *linears[place + len(group) :]]
        ranks = _ranks(linears, losses, spectra, config)
    return Plan(linears, ranks, config.align)


def _ranks(
    linears: list[Linear], losses: dict[str, Tensor], spectra: dict[str, Tensor], config: CompressionConfig
) -> dict[str, int | None]:
    if config.allocation == "uniform":
        return balance(linears, config.ratio, config.align)
    in_nats = config.method == "fisher"  # then no loss needs a weight
    fractions = {linear.name: 1.0 if in_nats else float(spectra[_FRACTION + linear.name]) for linear in linears}
    return allocate(linears, losses, fractions, config.ratio, config.align)


def _unit(spectrum: Tensor, config: CompressionConfig) -> float:
    """Return the unit of a linear's loss: the energy of its outputs, or 1 where the spectrum is in nats."""
    return 1.0 if config.method == "fisher" else energy(spectrum)


def _groups(linears: Sequence[Linear]) -> list[list[Linear]]:
    """Return the groups of linears with one input, which could share an A."""
    groups: dict[tuple[str, int], list[Linear]] = {}
    for linear in linears:
        layer, _, inside = linear.name.removeprefix(f"{LAYERS}.").partition(".")
        for number, names in enumerate(SAME_INPUT):
            if inside in names:
                groups.setdefault((layer, number), []).append(linear)
    return [group for group in groups.values() if len(group) > 1]


def has_spectra(run: Run, linears: list[Linear], layers: int) -> bool:
    """Return whether an interrupted run has measured the spectra of all ``layers``, in all processes."""
    return all(processes.of_all(_measured(run, linears, layers)[0] == layers))


def _measured(run: Run, linears: list[Linear], layers: int) -> tuple[int, dict[str, Tensor]]:
    """Return how many of the ``layers`` an interrupted run has measured, and what it measured."""
    first, state = run.workspace.latest("spectra", [])
    whole = all(linear.name in state for linear in linears[: first * len(linears) // layers])
    return (first, state) if whole else (0, {})


def _spectrum(layer: nn.Module, prefix: str, known: Callable[[Linear], Moments], linear: Linear) -> Tensor:
    return spectrum(weight_of(layer, linear, prefix), known(linear)).cpu()


@torch.no_grad()
def measure_spectra(run: Run, model: StreamedModel, linears: list[Linear], rows: Tensor) -> dict[str, Tensor]:
    """Run the dense model over ``rows`` and measure what the plan depends on.

    For every linear this is the whitened spectrum and the fraction of the residual stream that its attention or MLP
    writes; for linears with one input also the loss with a shared A. After every layer the workspace saves the result
    so far, for a resumed run. If the store has the moments of every layer, the model does not run.

    Raises:
        UserError: weights or activations hold NaN or infinity.
    """
    streamed, config = () if run.store.complete(len(model)) else ("dense",), run.config
    first, state = _measured(run, linears, len(model))
    usable = not streamed or first == len(model) or "hidden" in state
    if len(set(processes.of_all((first, usable)))) > 1 or not usable:
        first, state = 0, {}
    run.progress("measuring spectra", first / len(model))
    hidden = state.pop("hidden", None)
    streams = model.streams(processes.part(rows), streamed, None if hidden is None else {"dense": hidden})
    for index in range(first, len(model)):
        prefix = f"{LAYERS}.{index}."
        targets = [linear for linear in linears if linear.name.startswith(prefix)]
        names = [linear.name.removeprefix(prefix) for linear in targets]
        with model.layer(index) as layer:
            moments, streams.dense = run.store.gather(
                index, layer, names, streams.dense, streams.rotary, config.damping
            )
            try:
                known = known_moments(run, index, layer, moments)
                measure = partial(_spectrum, layer, prefix, known)
                alone = processes.shared_out(targets, measure)
                for linear, name in zip(targets, names, strict=True):
                    state[linear.name] = alone[linear]
                    state[_FRACTION + linear.name] = moments[name].fraction.to("cpu", copy=True)
                groups = _groups(targets) if config.share_a == "auto" else []
                units = [[_unit(alone[linear], config) for linear in group] for group in groups]
                joints = [Linear.sharing(group, energies) for group, energies in zip(groups, units, strict=True)]
                together = processes.shared_out(joints, measure)
                for joint, energies in zip(joints, units, strict=True):
                    state[_JOINT + joint.name] = relative(together[joint], max(energies))
            except ValueError as error:
                raise UserError(
                    f"{model.reader.folder}: {prefix}*: {error}; the checkpoint is damaged or unstable in float32"
                ) from None
        run.workspace.save(f"spectra-{index + 1:05d}", {**state, **({"hidden": streams.dense} if streamed else {})})
        processes.meet()
        run.workspace.drop(f"spectra-{index:05d}")
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress("measuring spectra", 1 / len(model))
    return state
