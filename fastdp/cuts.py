"""How arguments become one tree per replica: tensors are cut along a dimension or copied whole,
containers are made anew around the pieces, all else is handed on as it is.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.parallel import scatter_gather
from torch.nn.utils.rnn import PackedSequence

from .containers import is_namedtuple, place, rebuild_dict
from .copies import copies_of
from .functions import scatter_tensor
from .marks import Replicated
from .moves import chunk_lengths, is_acted_out
from .options import sizes_for
from .placement import public_device
from .scattered import Scattered
from .surprises import Surprises


class Rules(NamedTuple):
    """What a wrapper's options say about cutting; the defaults are nn.DataParallel's."""

    chunk_sizes: Any = None
    split_lists: bool = False
    replicate_scalars: bool = False
    sized: bool = False  # whether the result is to tell the sizes of the pieces


PLAIN = Rules()


class Rows(tuple):
    """Positional arguments, one tuple for each replica, that know how many samples each has."""

    sizes: Tuple[int, ...] = ()


def find_tensors(tree: Any, kinds: Any = torch.Tensor) -> List[Any]:
    """Every tensor that a plain scatter would cut, in order."""
    if isinstance(tree, kinds):
        return [tree]
    if isinstance(tree, dict):
        tree = [item for pair in tree.items() for item in pair]
    if isinstance(tree, (tuple, list)):
        return [tensor for item in tree for tensor in find_tensors(item, kinds)]
    return []


_CUT = (torch.Tensor, Scattered)  # the latter is cut already, and counts all the same


def walk(tree: Any, path: Any, stop_at_lists: bool) -> Iterator[Tuple[Any, Any]]:
    """(path, tensor) of each tensor; lists that are not empty count as leaves where they are cut
    themselves."""
    if isinstance(tree, _CUT) or (stop_at_lists and isinstance(tree, list) and tree):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(key, (path, key), stop_at_lists)
            yield from walk(value, (path, key), stop_at_lists)
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from walk(item, (path, i), stop_at_lists)


class _Deal:
    """Makes a tree for each device out of one."""

    def __init__(self, devices: Tuple[torch.device, ...]) -> None:
        self.devices = devices

    def tensor(self, tensor: torch.Tensor, path: Any) -> Sequence[Any]:
        raise NotImplementedError

    def packed(self, packed: PackedSequence, path: Any) -> Sequence[Any]:
        raise NotImplementedError

    def placed(self, scattered: Scattered, path: Any) -> Sequence[Any]:
        raise NotImplementedError

    def sequence(self, items: List[Any], path: Any) -> Sequence[Any]:
        return [list(row) for row in self.columns(items, path)]

    def columns(self, items: Sequence[Any], path: Any) -> Iterator[Tuple[Any, ...]]:
        """Zipped: where tensors give unequal numbers of pieces, the smallest decides."""
        return zip(*[self.trees(item, (path, i)) for i, item in enumerate(items)])

    def trees(self, tree: Any, path: Any) -> Sequence[Any]:
        if isinstance(tree, torch.Tensor):
            return self.tensor(tree, path)
        if not isinstance(tree, (tuple, list, dict)) or len(tree) == 0:
            if isinstance(tree, Replicated):
                return Whole(self.devices).trees(tree.value, path)
            if isinstance(tree, Scattered):
                return self.placed(tree, path)
            return [tree for _ in self.devices]
        if isinstance(tree, dict):
            columns = [
                list(zip(self.trees(key, (path, key)), self.trees(value, (path, key))))
                for key, value in tree.items()
            ]
            return [rebuild_dict(type(tree), pairs, path) for pairs in zip(*columns)]
        if isinstance(tree, list):
            return self.sequence(tree, path)
        if isinstance(tree, PackedSequence):
            return self.packed(tree, path)
        rows = self.columns(tree, path)
        return [type(tree)(*row) for row in rows] if is_namedtuple(tree) else list(rows)


class Whole(_Deal):
    """Every device gets all of it."""

    def tensor(self, tensor: torch.Tensor, path: Any) -> Sequence[torch.Tensor]:
        if tensor.layout == torch.strided:
            return copies_of(tensor, self.devices)
        if is_acted_out(self.devices):
            return [tensor] * len(self.devices)
        return [tensor.to(device, copy=True) for device in self.devices]

    def placed(self, scattered: Scattered, path: Any) -> Sequence[torch.Tensor]:
        return copies_of(scattered.gathered(), self.devices)

    def packed(self, packed: PackedSequence, path: Any) -> Sequence[PackedSequence]:
        """Its sizes stay on the host, where torch wants them."""
        data, order, back = (
            self.trees(part, path)
            for part in (packed.data, packed.sorted_indices, packed.unsorted_indices)
        )
        return [PackedSequence(d, packed.batch_sizes, o, b) for d, o, b in zip(data, order, back)]


class Cut(_Deal):
    """Each device gets its piece of every tensor.

    Args:
        devices: of the replicas that can be used; surplus ones get nothing.
        dim: dimension that is cut.
        rules: the wrapper's options.
        batch: samples in the batch; None where there is nothing to cut.
        sizes: of the pieces, where they are not `torch.chunk`'s.
        surprises: where to warn, if at all.
        cut_by: what gave the sizes.
    """

    def __init__(
        self,
        devices: Tuple[torch.device, ...],
        dim: int,
        rules: Rules = PLAIN,
        batch: Optional[int] = None,
        sizes: Optional[List[int]] = None,
        surprises: Optional[Surprises] = None,
        cut_by: str = "chunk_sizes",
    ) -> None:
        super().__init__(devices)
        self._dim = dim
        self._rules = rules
        self._batch = batch
        self._sizes = sizes
        self._surprises = surprises
        self._cut_by = cut_by

    def tensor(self, tensor: torch.Tensor, path: Any) -> Sequence[torch.Tensor]:
        if tensor.dim() == 0:
            if self._rules.replicate_scalars:
                return copies_of(tensor, self.devices)
            raise RuntimeError(
                f"chunk expects at least a 1-dimensional tensor, but {place(path)} is 0-dim: pass "
                "a number, fastdp.Replicated(...), or replicate_scalars=True to the wrapper"
            )
        if self._sizes is not None and tensor.size(self._dim) != self._batch:
            raise ValueError(
                f"{place(path)} has size {tensor.size(self._dim)} along dimension {self._dim}, but "
                f"{self._cut_by} cut a batch of {self._batch}: pass fastdp.Replicated(...) for "
                "what every replica is to get whole"
            )
        return scatter_tensor(tensor, self.devices, self._dim, self._sizes)

    def placed(self, scattered: Scattered, path: Any) -> Sequence[torch.Tensor]:
        scattered.check(self.devices, self._dim, path)
        if scattered.size(self._dim) == self._batch and list(scattered.sizes) != self._sizes:
            raise ValueError(
                f"{place(path)} is a fastdp.Scattered in pieces of {list(scattered.sizes)}, but "
                f"another one beside it is in pieces of {self._sizes}: prefetch both for the "
                "wrapper that is to take them"
            )
        return scattered.slices

    def packed(self, packed: PackedSequence, path: Any) -> Sequence[Any]:
        raise TypeError(
            f"{place(path)} is a PackedSequence: its data and batch_sizes cannot be cut "
            "independently. Pass the padded batch and its lengths, and pack inside forward"
        )

    def sequence(self, items: List[Any], path: Any) -> Sequence[Any]:
        if self._rules.split_lists:
            return self._split(items, path)
        if self._surprises is not None and len(items) == self._batch:
            if not find_tensors(items, _CUT):
                self._surprises.uncut_list(path, len(items))
        return super().sequence(items, path)

    def _split(self, items: List[Any], path: Any) -> Sequence[List[Any]]:
        if len(items) != self._batch:
            raise ValueError(
                f"{place(path)} is a list of {len(items)}, but split_lists=True takes lists for "
                f"samples, and the batch has {self._batch}: pass a tuple, or "
                "fastdp.Replicated(...), for what is no list of samples"
            )
        sizes = self._sizes or chunk_lengths(len(items), len(self.devices))
        pieces, start = [], 0
        for device, size in zip(self.devices, sizes):
            deal = Whole((device,))
            piece = enumerate(items[start : start + size], start)
            pieces.append([deal.trees(item, (path, i))[0] for i, item in piece])
            start += size
        return pieces


def replaced_scatter() -> Optional[Callable[..., Any]]:
    """What somebody put in the place of torch's own scatter, which torch's wrapper then calls."""
    found = scatter_gather.scatter
    return None if getattr(found, "__globals__", None) is vars(scatter_gather) else found


def scatter_call(
    inputs: Tuple[Any, ...],
    kwargs: Optional[Dict[str, Any]],
    devices: Tuple[torch.device, ...],
    dim: int,
    rules: Rules = PLAIN,
    surprises: Optional[Surprises] = None,
) -> Tuple[Tuple[Tuple[Any, ...], ...], Tuple[Dict[str, Any], ...]]:
    """`scatter_kwargs` under a wrapper's options, with a word about what may be a mistake; by what
    was put in the place of torch's scatter where there is no option to heed."""
    replaced = replaced_scatter()
    if replaced is None or rules is not PLAIN:
        return _scatter_arguments(inputs, kwargs, devices, dim, rules, surprises)
    ids = list(map(public_device, devices))
    rows = list(replaced(inputs, ids, dim)) if inputs else []
    named = list(replaced(kwargs, ids, dim)) if kwargs else []
    _even_out(rows, named)
    return tuple(rows), tuple(named)


def _scatter_arguments(
    inputs: Tuple[Any, ...],
    kwargs: Optional[Dict[str, Any]],
    devices: Tuple[torch.device, ...],
    dim: int,
    rules: Rules,
    surprises: Optional[Surprises],
) -> Tuple[Tuple[Tuple[Any, ...], ...], Tuple[Dict[str, Any], ...]]:
    replicas = len(devices)
    found = _cuttable(inputs, rules), _cuttable(kwargs, rules)
    sizes = _sizes(found, dim)
    batch = sizes[0] if sizes else None
    pieces: Optional[List[int]] = None
    placed = [leaf for leaf in chain(*found) if isinstance(leaf, Scattered)]
    if placed:
        # What lies there already decides; tensors beside it are cut as it was.
        batch, pieces = placed[0].size(dim), list(placed[0].sizes)
        devices = devices[: max(len(leaf.sizes) for leaf in placed)]
    elif batch is not None:
        if rules.chunk_sizes is not None:
            pieces = sizes_for(rules.chunk_sizes, batch, replicas) if batch else [0]
            devices = devices[: len(pieces)]
        else:
            devices = devices[: max(map(_piece_count, set(sizes), repeat(replicas)))]
            if not any(sizes):
                devices = devices[:1]
    cut_by = "a fastdp.Scattered beside it" if placed else "chunk_sizes"
    cut = Cut(devices, dim, rules, batch, pieces, surprises, cut_by)
    rows = list(cut.trees(tuple(inputs), "inputs")) if inputs else []
    named = list(cut.trees(kwargs, "kwargs")) if kwargs else []
    if found[0] and not found[1]:
        named = named[: len(rows)]
    elif found[1] and not found[0]:
        rows = rows[: len(named)]
    used = _even_out(rows, named)
    if surprises is not None and sizes:
        if sizes.count(sizes[0]) < len(sizes):
            surprises.unequal(_tensor_places(inputs, kwargs, rules), dim, replicas)
        if 0 < used < replicas and batch and not callable(rules.chunk_sizes):
            surprises.idle(used, replicas, batch)
    if not rules.sized:
        return tuple(rows), tuple(named)
    result = Rows(rows)
    if batch is not None:
        result.sizes = tuple(pieces or chunk_lengths(batch, replicas))[:used]
    return result, tuple(named)


def _even_out(rows: List[Any], named: List[Any]) -> int:
    """Empty ones for what either lacks of the other; returns how many there are then."""
    used = max(len(rows), len(named))
    rows.extend(() for _ in range(used - len(rows)))
    named.extend({} for _ in range(used - len(named)))
    return used


def _cuttable(tree: Any, rules: Rules) -> List[Any]:
    """The tensors of a tree that are cut, and lists where they are."""
    if rules.split_lists:
        return [leaf for _, leaf in walk(tree, "", True) if not _is_given_whole(leaf, rules)]
    found = find_tensors(tree, _CUT)
    if rules.replicate_scalars:
        return [tensor for tensor in found if tensor.dim() > 0]
    return found


def _is_given_whole(leaf: Any, rules: Rules) -> bool:
    return rules.replicate_scalars and isinstance(leaf, torch.Tensor) and leaf.dim() == 0


def _sizes(found: Tuple[List[Any], List[Any]], dim: int) -> List[int]:
    """How many samples each has; the first says how many the batch has."""
    lists = []
    sizes = []
    for leaf in chain(*found):
        if isinstance(leaf, list):
            lists.append(len(leaf))
        elif leaf.dim() > 0:
            sizes.append(leaf.size(dim))
    return sizes + lists


def _piece_count(size: int, count: int) -> int:
    """How many pieces `torch.chunk` makes: nothing is cut into as many as one asks for."""
    return -(-size // -(-size // count)) if size else count


def _tensor_places(inputs: Any, kwargs: Any, rules: Rules) -> Iterator[Tuple[Any, Any]]:
    for name, tree in (("inputs", inputs), ("kwargs", kwargs)):
        for path, leaf in walk(tree, name, rules.split_lists):
            if isinstance(leaf, _CUT):
                yield path, leaf
