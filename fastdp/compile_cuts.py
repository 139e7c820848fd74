"""Where one graph of a compiled forward is cut, so that parameters and gradients travel beside it.

Each edge costs fusion, and a compilation of its own. So a piece takes in all buckets that will have
come by the time at which it begins: of a convolutional net, whose first layers compute long for few
parameters, two pieces hide everything; of a transformer pieces grow as there is more compute before
them. Compute is estimated, as if the GPU were fast: then no piece waits for long.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

MAX_PIECES = 8

# What a large GPU reaches (H200, bf16), and how long a bucket's copy takes to begin.
_FLOPS_PER_S = 4e14
_BYTES_PER_S = 2.5e12
_START_S = 15e-6


def inputs_of(graph: Any) -> List[Any]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def cut(
    graph: Any,
    inputs: Sequence[Any],
    buckets: Sequence[Optional[int]],
    limit: int,
    bytes_per_s: float,
) -> Optional[Any]:
    """The graph as a module of at most `limit` parts, each of which begins where a bucket is first
    read; None where that would be one. `buckets` has for each input the bucket that it is in, or
    None; `bytes_per_s` is how fast these come. A graph that reads its parameters in another order
    than that of the buckets has fewer parts: what is read first decides."""
    from torch.fx.passes.split_module import split_module

    bucket_of = {node: bucket for node, bucket in zip(inputs_of(graph), buckets)}
    tensor_of = dict(zip(inputs_of(graph), inputs))
    sizes: Dict[int, int] = {}
    for bucket, tensor in zip(buckets, inputs):
        if bucket is not None and tensor.requires_grad:
            sizes[bucket] = sizes.get(bucket, 0) + tensor.numel() * tensor.element_size()
    part_of = parts(sizes, _compute_s(graph, bucket_of, tensor_of), bytes_per_s, limit)
    parts_read = {node: part_of.get(bucket, 0) for node, bucket in bucket_of.items()}
    reached = dict(_reached(graph, parts_read, 0))
    numbers = {part: number for number, part in enumerate(sorted(set(reached.values())))}
    if len(numbers) < 2:
        return None
    return split_module(graph, None, lambda node: numbers[reached[node]], keep_original_order=True)


def parts(
    sizes: Dict[int, int], compute_s: Dict[int, float], bytes_per_s: float, limit: int
) -> Dict[int, int]:
    """For each bucket, of so many bytes, the part that it belongs to. `compute_s`: how long what
    reads it, and what follows up to the next one's first read, takes."""
    result: Dict[int, int] = {}
    part = -1
    comes_s = begins_s = ends_s = 0.0  # the bucket; the part; what is planned so far
    for bucket in sorted(sizes):
        comes_s += _START_S + sizes[bucket] / bytes_per_s
        if part < 0 or (comes_s > begins_s and part + 1 < limit):
            part += 1
            begins_s = ends_s = max(ends_s, comes_s)
        result[bucket] = part
        ends_s += compute_s.get(bucket, 0.0)
    return result


def _reached(
    graph: Any, number_of: Dict[Any, Optional[int]], least: int
) -> Iterator[Tuple[Any, int]]:
    """Each operation, with the largest number among what it and those before it read."""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        read = [number_of.get(source) for source in node.all_input_nodes]
        least = max([least, *(number for number in read if number is not None)])
        yield node, least


def _compute_s(
    graph: Any, bucket_of: Dict[Any, Optional[int]], tensor_of: Dict[Any, Any]
) -> Dict[int, float]:
    """For each bucket, how long the operations take from its first read on."""
    result: Dict[int, float] = {}
    for node, bucket in _reached(graph, bucket_of, -1):
        weights = [
            tensor_of[source]
            for source in node.all_input_nodes
            if bucket_of.get(source) is not None and tensor_of[source].dim() > 1
        ]
        result[bucket] = result.get(bucket, 0.0) + _operation_s(node, weights)
    return result


def _operation_s(node: Any, weights: Sequence[torch.Tensor]) -> float:
    """Its output is written once, and each of its rows or pixels multiplied with all weights."""
    output = node.meta.get("example_value")
    if not isinstance(output, torch.Tensor):
        return 0.0
    seconds = output.numel() * output.element_size() / _BYTES_PER_S
    if "embedding" in str(node.target):
        return seconds  # it looks its weights up
    for weight in weights:
        channels = weight.shape[0] if weight.dim() > 2 else output.shape[-1] if output.dim() else 1
        seconds += 2 * weight.numel() * output.numel() / max(channels, 1) / _FLOPS_PER_S
    return seconds
