"""Collectives: instructions whose result on one rank depends on other ranks' operands."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import COLLECTIVES, Function, Node
from neuronmm.emulator.hlo.reducing import PAIRWISE

Ranks = list[Tensor]
"""One value per rank."""


def _collective(opcode: str) -> Callable[[Callable[[Node], Callable[[Ranks], Ranks]]], None]:
    """Register a factory of the function that one replica group runs, on its ranks' values in the group's order."""

    def register(factory: Callable[[Node], Callable[[Ranks], Ranks]]) -> None:
        def implementation(node: Node, ranks: int) -> Function:
            run_group, groups = factory(node), _groups(node, ranks)

            def run(values: Ranks) -> Ranks:
                results: list[Tensor | None] = [None] * ranks
                for group in groups:
                    for rank, value in zip(group, run_group([values[r] for r in group]), strict=True):
                        results[rank] = value
                return results  # type: ignore[return-value]

            return run

        COLLECTIVES[opcode] = implementation

    return register


def _groups(node: Node, ranks: int) -> list[list[int]]:
    """Return the replica groups; if the instruction has none, one group of all ranks.

    Raises:
        UnsupportedError: the groups are not a partition of the ranks.
    """
    groups = [list(g.replica_ids) for g in node.proto.replica_groups] or [list(range(ranks))]
    if sorted(r for g in groups for r in g) != list(range(ranks)):
        raise node.unsupported(f"replica groups {groups} on {ranks} ranks")
    return groups


def _reduction(node: Node) -> Callable[[Ranks], Tensor]:
    """Return the function that combines a group's values in the group's order, so every rank gets the same bits."""
    opcode = node.applied_opcode()
    if opcode not in PAIRWISE or len(node.operands) != 1:
        raise node.unsupported(f"it applies {opcode} to {len(node.operands)} operands")
    return functools.partial(functools.reduce, PAIRWISE[opcode])


@_collective("all-reduce")
def _all_reduce(node: Node) -> Callable[[Ranks], Ranks]:
    combine = _reduction(node)

    def all_reduce(values: Ranks) -> Ranks:
        result = combine(values)
        return [result if len(values) > 1 else result.clone()] * len(values)

    return all_reduce


@_collective("all-gather")
def _all_gather(node: Node) -> Callable[[Ranks], Ranks]:
    (dimension,) = node.proto.dimensions
    return lambda values: [torch.cat(values, dimension)] * len(values)


@_collective("reduce-scatter")
def _reduce_scatter(node: Node) -> Callable[[Ranks], Ranks]:
    combine, (dimension,) = _reduction(node), node.proto.dimensions
    return lambda values: [chunk.clone() for chunk in combine(values).chunk(len(values), dimension)]


@_collective("all-to-all")
def _all_to_all(node: Node) -> Callable[[Ranks], Ranks]:
    (dimension,) = node.proto.dimensions

    def all_to_all(values: Ranks) -> Ranks:
        chunks = [value.chunk(len(values), dimension) for value in values]
        return [torch.cat([sent[rank] for sent in chunks], dimension) for rank in range(len(values))]

    return all_to_all


def _replica_id(node: Node, ranks: int) -> Function:
    dtype = node.dtype
    return lambda: [torch.tensor(rank, dtype=dtype) for rank in range(ranks)]


COLLECTIVES["replica-id"] = _replica_id
