"""Segments of a model: the parts whose results are computed again on the way back, each as a whole."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from loop.model.layer_graph import LayerCall, LayerGraph, inner_layers, layer_graph

_LIMITS = 16
"""How many sizes of the largest segment are compared."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Calls of layers, one after the other in a graph.

    Attributes:
        calls: the calls.
        inputs: the ids of the tensors that it takes from before it.
        outputs: the ids of its tensors that are used after it.
        remembered: whether its results are remembered, as without recomputing.
    """

    calls: list[LayerCall]
    inputs: list[int]
    outputs: list[int]
    remembered: bool


@dataclasses.dataclass(frozen=True)
class CutGraph:
    """The graph of a functional or sequential model, cut into parts."""

    graph: LayerGraph
    parts: list[Part]


def segments(model: Any, remembered: set[int]) -> Iterator[CutGraph | Any]:
    """The segments of a Keras model: graphs that are cut, and layers that are one segment each.

    A layer that holds more than a quarter of all layers, such as an encoder with all its blocks, is looked into: as one
    segment it would need its memory at once.

    Args:
        model: the model, which isn't a segment itself.
        remembered: the ids of layers whose results are to be remembered.
    """
    yield from _within(model, len(inner_layers(model)) / 4, remembered)


def _within(layer: Any, most: float, remembered: set[int]) -> Iterator[CutGraph | Any]:
    graph = layer_graph(layer)
    if graph is None:
        for child in layer._flatten_layers(include_self=False, recursive=False):
            if _is_looked_into(child, most):
                yield from _within(child, most, remembered)
            elif not _is_remembered(child, remembered):
                yield child
        return

    looked_into = {id(call.layer): call.layer for call in graph.calls if _is_looked_into(call.layer, most)}
    kept = looked_into.keys() | {id(call.layer) for call in graph.calls if _is_remembered(call.layer, remembered)}
    yield CutGraph(graph, cut(graph, kept))
    for inner in looked_into.values():
        yield from _within(inner, most, remembered)


def _is_looked_into(layer: Any, most: float) -> bool:
    inner = len(inner_layers(layer))
    return inner > 0 and (layer_graph(layer) is not None or inner > most)


def _is_remembered(layer: Any, remembered: set[int]) -> bool:
    """Whether a layer isn't computed again: one that it must not be, or an embedding, whose gradient has only rows."""
    if id(layer) in remembered:
        return True
    return any(type(inner).__name__ == "Embedding" for inner in [layer, *inner_layers(layer)])


def cut(graph: LayerGraph, remembered: set[int]) -> list[Part]:
    """Cuts a graph where it needs the least memory: what goes between the parts, and the largest part.

    The last part is remembered: its way back begins as soon as it is computed.

    Args:
        graph: the graph.
        remembered: the ids of layers whose calls are parts of their own, and remembered.
    """
    count = len(graph.calls)
    live = _live_sizes(graph)
    sizes = [call.computes for call in graph.calls]
    alone = [id(call.layer) in remembered for call in graph.calls]
    total = sum(sizes)
    largest = max((size for size, is_alone in zip(sizes, alone, strict=True) if not is_alone), default=0)
    best: tuple[float, list[int]] = (float("inf"), [0, count])
    for number in range(_LIMITS):
        limit = largest + (total - largest) * (number / (_LIMITS - 1)) ** 2
        between, starts = _cheapest_cuts(sizes, live, alone, limit)
        best = min(best, (between + limit, starts))
    starts = best[1]
    return [_part(graph, start, end, alone[start] or end == count) for start, end in itertools.pairwise(starts)]


def _cheapest_cuts(
    sizes: Sequence[int], live: Sequence[int], alone: Sequence[bool], limit: float
) -> tuple[float, list[int]]:
    """The cuts with the least between the parts, if no part is larger than a limit.

    Args:
        sizes: of the calls.
        live: the size of what goes on after each call.
        alone: whether a call is a part of its own.
        limit: of a part.

    Returns:
        The size of what goes between the parts; and the index of each part's first call, and the number of calls.
    """
    costs = [0.0]
    first_calls = [0]
    for end in range(1, len(sizes) + 1):
        best = (float("inf"), end - 1)
        size = 0
        for start in range(end - 1, -1, -1):
            size += sizes[start]
            several = end - start > 1
            if several and (size > limit or alone[start] or alone[end - 1]):
                break
            best = min(best, (costs[start] + (live[start - 1] if start else 0), start))
        costs.append(best[0])
        first_calls.append(best[1])
    starts = [len(sizes)]
    while starts[0] > 0:
        starts.insert(0, first_calls[starts[0]])
    return costs[-1], starts


def _live_sizes(graph: LayerGraph) -> list[int]:
    """The size of what goes on after each call, without the inputs of the model, which are held anyway."""
    last_use = _last_uses(graph)
    live: dict[int, int] = {}
    sizes = []
    for place, call in enumerate(graph.calls):
        live |= zip(call.outputs, call.sizes, strict=True)
        live = {tensor: size for tensor, size in live.items() if last_use.get(tensor, -1) > place}
        sizes.append(sum(live.values()))
    return sizes


def _last_uses(graph: LayerGraph) -> dict[int, int]:
    """The index of the last call that takes each tensor; those that the model returns are used after all calls."""
    last = {tensor: place for place, call in enumerate(graph.calls) for tensor in call.inputs}
    return last | dict.fromkeys(graph.outputs, len(graph.calls))


def _part(graph: LayerGraph, start: int, end: int, remembered: bool) -> Part:
    calls = graph.calls[start:end]
    own = {tensor: None for call in calls for tensor in call.outputs}
    taken = {tensor: None for call in calls for tensor in call.inputs if tensor not in own}
    last = _last_uses(graph)
    return Part(calls, list(taken), [tensor for tensor in own if last.get(tensor, -1) >= end], remembered)
