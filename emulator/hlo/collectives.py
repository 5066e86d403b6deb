"""Collectives: instructions whose result on a rank depends on other ranks' operands."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import ACROSS, Function, Node
from neuronmm.emulator.hlo.reducing import PAIRWISE

Ranks = list[Tensor]


def _collective(opcode: str) -> Callable[[Callable[[Node], Callable[[Ranks], Ranks]]], None]:
    """Register what a collective does within one group, ranks in the group's order."""

    def register(make: Callable[[Node], Callable[[Ranks], Ranks]]) -> None:
        def across(node: Node, ranks: int) -> Function:
            within, groups = make(node), _groups(node, ranks)

            def run(values: Ranks) -> Ranks:
                results: list[Tensor | None] = [None] * ranks
                for group in groups:
                    for rank, value in zip(group, within([values[r] for r in group]), strict=True):
                        results[rank] = value
                return results  # type: ignore[return-value]

            return run

        ACROSS[opcode] = across

    return register


def _groups(node: Node, ranks: int) -> list[list[int]]:
    """The replica groups; none given: one of all ranks.

    Raises:
        UnsupportedError: the groups are not a partition of the ranks.
    """
    groups = [list(g.replica_ids) for g in node.proto.replica_groups] or [list(range(ranks))]
    if sorted(r for g in groups for r in g) != list(range(ranks)):
        raise node.unsupported(f"replica groups {groups} on {ranks} ranks")
    return groups


def _sum(node: Node) -> Callable[[Ranks], Tensor]:
    """The combination of a group's values, in rank order: every rank gets the same bits."""
    how = node.applied()
    if how not in PAIRWISE or len(node.operands) != 1:
        raise node.unsupported(f"to apply {how}")
    return functools.partial(functools.reduce, PAIRWISE[how])


@_collective("all-reduce")
def _all_reduce(node: Node) -> Callable[[Ranks], Ranks]:
    combine = _sum(node)

    def all_reduce(values: Ranks) -> Ranks:
        total = combine(values)
        return [total if len(values) > 1 else total.clone()] * len(values)

    return all_reduce


@_collective("all-gather")
def _all_gather(node: Node) -> Callable[[Ranks], Ranks]:
    (dimension,) = node.proto.dimensions
    return lambda values: [torch.cat(values, dimension)] * len(values)


@_collective("reduce-scatter")
def _reduce_scatter(node: Node) -> Callable[[Ranks], Ranks]:
    combine, (dimension,) = _sum(node), node.proto.dimensions
    return lambda values: [part.clone() for part in combine(values).chunk(len(values), dimension)]


@_collective("all-to-all")
def _all_to_all(node: Node) -> Callable[[Ranks], Ranks]:
    (dimension,) = node.proto.dimensions

    def all_to_all(values: Ranks) -> Ranks:
        pieces = [value.chunk(len(values), dimension) for value in values]
        return [torch.cat([piece[rank] for piece in pieces], dimension) for rank in range(len(values))]

    return all_to_all


def _replica_id(node: Node, ranks: int) -> Function:
    dtype = node.dtype
    return lambda: [torch.tensor(rank, dtype=dtype) for rank in range(ranks)]


ACROSS["replica-id"] = _replica_id
