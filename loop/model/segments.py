"""Segments of a model: the parts whose results are computed again in the backward pass, each as a whole.

Between two segments, the results of all earlier calls that are still needed must be kept. Within a segment, all results
are needed at once while it is computed again. The cuts are chosen so that the sum of both is least.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from loop.model.layer_graph import LayerCall, LayerGraph, inner_layers, layer_graph
from loop.model.variables import Layer
from loop.task import Model

_LIMITS = 16
"""The number of limits on the size of a part that are compared."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Calls of layers, one after the other in a graph."""

    calls: list[LayerCall]  # the calls
    inputs: list[int]  # the ids of the tensors that it takes from the parts before it
    outputs: list[int]  # the ids of its tensors that are used after it
    remembered: bool  # whether its results are kept for the backward pass, as without recomputing


@dataclasses.dataclass(frozen=True)
class CutGraph:
    """The graph of a functional or sequential model, cut into parts."""

    graph: LayerGraph
    parts: list[Part]


def segments(model: Model, remembered: set[int]) -> Iterator[CutGraph | Layer]:
    """The segments of a Keras model: graphs that are cut, and layers that are one segment each.

    A layer that holds more than a quarter of all layers, such as an encoder with all its blocks, is opened, and the
    layers within it become segments. As one segment it would need all of its memory at once.

    Args:
        model: the model, which isn't a segment itself.
        remembered: the ids of layers whose results are to be kept for the backward pass.
    """
    yield from _within(model, len(inner_layers(model)) / 4, remembered)


def _within(layer: Layer, most: float, remembered: set[int]) -> Iterator[CutGraph | Layer]:
    """The segments within a layer.

    Args:
        layer: the layer, or the model.
        most: the greatest number of inner layers of a layer that is one segment.
        remembered: the ids of layers whose results are to be kept.
    """
    # Without a graph nothing tells which tensors flow where: each layer within it is recomputed by itself.
    graph = layer_graph(layer)
    if graph is None:
        for child in layer._flatten_layers(include_self=False, recursive=False):
            if _is_opened(child, most):
                yield from _within(child, most, remembered)
            elif not _is_remembered(child, remembered):
                yield child
        return

    # By identity, and once each: a shared layer is called several times.
    opened: dict[int, Layer] = {}
    kept: set[int] = set()
    for call in graph.calls:
        if _is_opened(call.layer, most):
            opened[id(call.layer)] = call.layer
        if _is_remembered(call.layer, remembered):
            kept.add(id(call.layer))
    yield CutGraph(graph, cut(graph, opened.keys() | kept))
    for inner in opened.values():
        yield from _within(inner, most, remembered)


def _is_opened(layer: Layer, most: float) -> bool:
    """Whether the layers within a layer become segments, instead of the layer."""
    inner = len(inner_layers(layer))
    return inner > 0 and (layer_graph(layer) is not None or inner > most)


def _is_remembered(layer: Layer, remembered: set[int]) -> bool:
    """Whether the results of a layer are kept for the backward pass."""
    if id(layer) in remembered:
        return True
    # An embedding holds little memory, and its gradient must keep its rows: see `loop.step.lookups`.
    return any(type(inner).__name__ == "Embedding" for inner in [layer, *inner_layers(layer)])


def cut(graph: LayerGraph, remembered: set[int]) -> list[Part]:
    """Cuts a graph where it needs the least memory: for what is kept between the parts, and for the largest part.

    Args:
        graph: the graph.
        remembered: the ids of layers whose calls are parts of their own, and remembered.
    """
    count = len(graph.calls)
    live = _live_sizes(graph)
    sizes: list[int] = []
    alone: list[bool] = []
    largest = 0
    for call in graph.calls:
        size = call.computed_size
        is_alone = id(call.layer) in remembered
        sizes.append(size)
        alone.append(is_alone)
        if not is_alone:
            largest = max(largest, size)

    # From the limit that is just large enough for each single call to the one that lets all calls be one part. The
    # square puts most of them at the small end.
    total = sum(sizes)
    best: tuple[float, list[int]] = (float("inf"), [0, count])
    for number in range(_LIMITS):
        limit = largest + (total - largest) * (number / (_LIMITS - 1)) ** 2
        between, starts = _cheapest_cuts(sizes, live, alone, limit)
        best = min(best, (between + limit, starts))

    parts = []
    for start, end in itertools.pairwise(best[1]):
        # The last part is remembered: its backward pass begins as soon as it is computed.
        parts.append(_part(graph, start, end, alone[start] or end == count))
    return parts


def _cheapest_cuts(
    sizes: Sequence[int], live: Sequence[int], alone: Sequence[bool], limit: float
) -> tuple[float, list[int]]:
    """The cuts between which the least must be kept, if no part is larger than a limit.

    For each call it finds the best start of a part that ends there, from the best cuts before that start.

    Args:
        sizes: the size of what each call computes.
        live: the size of what must be kept after each call.
        alone: whether a call is a part of its own.
        limit: the greatest size of a part of several calls.

    Returns:
        The size of what is kept between the parts; and the index of the first call of each part, with the number of
        calls at the end.
    """
    # At index n of both: the least cost of the first n calls, and the start of the last part among them.
    costs = [0.0]
    best_starts = [0]
    for end in range(1, len(sizes) + 1):
        best = (float("inf"), end - 1)
        size = 0
        for start in range(end - 1, -1, -1):
            size += sizes[start]
            # A single call is a part whatever its size. Longer parts are larger still, so that the search ends here.
            has_several = end - start > 1
            if has_several and (size > limit or alone[start] or alone[end - 1]):
                break
            kept_before = live[start - 1] if start else 0
            best = min(best, (costs[start] + kept_before, start))
        costs.append(best[0])
        best_starts.append(best[1])

    # Back from the end, part by part.
    starts = [len(sizes)]
    while starts[0] > 0:
        starts.insert(0, best_starts[starts[0]])
    return costs[-1], starts


def _live_sizes(graph: LayerGraph) -> list[int]:
    """The size of the results that later calls need, after each call; without the model's inputs, which stay anyway."""
    last_use = _last_uses(graph)
    live: dict[int, int] = {}
    sizes = []
    for index, call in enumerate(graph.calls):
        live |= zip(call.outputs, call.sizes, strict=True)
        live = {tensor: size for tensor, size in live.items() if last_use.get(tensor, -1) > index}
        sizes.append(sum(live.values()))
    return sizes


def _last_uses(graph: LayerGraph) -> dict[int, int]:
    """The index of the last call that takes each tensor; the model's outputs are used after all calls."""
    last: dict[int, int] = {}
    for index, call in enumerate(graph.calls):
        last |= dict.fromkeys(call.inputs, index)
    return last | dict.fromkeys(graph.outputs, len(graph.calls))


def _part(graph: LayerGraph, start: int, end: int, remembered: bool) -> Part:
    """The part of the calls from `start` up to `end`."""
    calls = graph.calls[start:end]
    # Dicts in place of sets: they keep the order of the calls.
    made: dict[int, None] = {}
    taken: dict[int, None] = {}
    for call in calls:
        made |= dict.fromkeys(call.outputs)
    for call in calls:
        for tensor in call.inputs:
            if tensor not in made:
                taken[tensor] = None
    last = _last_uses(graph)
    outputs = [tensor for tensor in made if last.get(tensor, -1) >= end]
    return Part(calls, list(taken), outputs, remembered)
