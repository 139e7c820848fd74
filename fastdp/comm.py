"""The verbs, for anyone: `torch.nn.parallel.comm`'s functions for host and CUDA arrays alike.

Arrays may be torch tensors, NumPy arrays, or anything that exports DLPack. torch in, torch out;
NumPy in, NumPy out; others get `fastdp._C.Array` objects, which export DLPack themselves. One call
takes one kind; `out=` may be of any kind. All dtypes can be moved; summed can be fp64, fp32, fp16,
bf16, complex, the integers and bool.

Devices: an int is a CUDA index, -1 and "cpu" are the host. An entry may be repeated: each is a
replica with memory of its own. NumPy arrays lie on the host only.

Results are new memory and inputs are never changed. The exception is torch's own, on CUDA only: a
result that belongs where its input already is, is that input (`broadcast`, first such entry;
`broadcast_coalesced`, first entry; `reduce_add` of one tensor) or a view of it (`scatter`).
Strides are kept where they are dense; `gather` keeps the memory format that all inputs share.

Sums run in rank order: same inputs, same bits. fp16 and bf16 are added in fp32 and rounded once.

Autograd: `scatter`, `gather`, `broadcast` and `reduce_add` are differentiable, to any order and in
forward mode; the coalesced ones give detached results. `out=` takes no input that requires grad.

Where this differs from `torch.nn.parallel.comm`: complex tensors stay complex (torch returns real
views with a last dimension of 2) and may be lazily conjugated; `broadcast` keeps strides and is
differentiable with NCCL too, and so is `gather`; arrays of different dtypes are refused, not
converted; mistakes are ValueError, TypeError and IndexError instead of RuntimeError.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import accumulate, groupby
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import torch

from . import _C, comm_checks, comm_coalesced, comm_grad, moves
from .arrays import TORCH, family_of, family_of_all
from .peers import open_peers

__all__ = [
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]

_BUFFER_BYTES = 10 * 1024 * 1024


def scatter(
    tensor: Any,
    devices: Optional[Iterable[Any]] = None,
    chunk_sizes: Optional[Iterable[int]] = None,
    dim: int = 0,
    streams: Optional[Iterable[Optional[torch.cuda.Stream]]] = None,
    *,
    out: Optional[Sequence[Any]] = None,
) -> Tuple[Any, ...]:
    """Cuts an array along `dim` and places the pieces, in order, on devices.

    tensor: any shape but (), any dtype, host or CUDA.
    devices: where piece i goes. Exactly one of `devices` and `out` is given.
    chunk_sizes: length of each piece along `dim`, one for each device, adding up to the array's.
        None cuts as `torch.chunk`: equal pieces, the last one shorter, and fewer pieces than
        devices when there is not enough to cut.
    streams: CUDA streams to be current while piece i is copied; None entries are allowed.
    out: arrays to write instead, of the same dtype and of the shapes of the pieces.

    Returns the pieces, or the arrays of `out`, as a tuple.
    Raises ValueError, TypeError or IndexError for arguments that do not fit together.

    >>> scatter(torch.arange(5), ["cpu", "cpu"])
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    family = family_of(tensor, "tensor")
    shape = family.shape(tensor)
    dim = comm_checks.axis(dim, shape, "tensor")
    _exactly_one(devices, out)
    if out is not None:
        if chunk_sizes is not None:
            raise ValueError(
                f"chunk_sizes is {chunk_sizes}, but with out the sizes are those of out's arrays"
            )
        return _scatter_into(family, tensor, out, dim, streams)
    places = comm_checks.devices_for(family, devices)
    sizes = comm_checks.chunk_sizes_for(chunk_sizes, shape[dim], len(places), dim)
    lanes = comm_checks.streams_for(family, streams, places, "devices")
    return _scatter_new(family, tensor, places[: len(sizes)], sizes, dim, lanes)


def gather(
    tensors: Iterable[Any], dim: int = 0, destination: Any = None, *, out: Any = None
) -> Any:
    """Joins arrays one after another along `dim`.

    tensors: arrays of one dtype and, but for `dim`, one shape (not ()), on any devices.
    destination: the device of the result; None is the host for host arrays, else the current CUDA
        device. -1 for the host works with a FutureWarning, as in torch.
    out: an array to write instead, of the result's shape and dtype; then no `destination`.

    Returns the result, new memory, or `out`.
    Raises ValueError, TypeError or IndexError for arguments that do not fit together.

    >>> gather([torch.tensor([1, 2]), torch.tensor([3])], destination="cpu")
    tensor([1, 2, 3])
    """
    family, tensors = family_of_all(tensors, "tensors")
    dim = comm_checks.axis(dim, family.shape(tensors[0]), "tensors[0]")
    comm_checks.alike(family, tensors, _names("tensors", tensors), dim)
    if out is not None:
        if destination is not None:
            raise ValueError(f"destination is {destination}, but out says where the result goes")
        return _gather_into(family, tensors, out, dim)
    if isinstance(destination, int) and destination == -1:
        warnings.warn(
            'destination=-1 for the host is deprecated: write destination="cpu"',
            FutureWarning,
            stacklevel=2,
        )
    device = comm_checks.destination_for(family, destination, tensors)
    if family is TORCH and comm_grad.is_recorded(tensors):
        return comm_grad.Gather.apply(dim, device, *tensors)
    return moves.gather(family, _sources(family, tensors, _names("tensors", tensors)), dim, device)


def broadcast(
    tensor: Any,
    devices: Optional[Iterable[Any]] = None,
    *,
    out: Optional[Sequence[Any]] = None,
) -> Tuple[Any, ...]:
    """Copies an array to each of several devices.

    tensor: any shape and dtype, host or CUDA.
    devices: where copy i goes. Exactly one of `devices` and `out` is given.
    out: arrays to write instead, of the same shape and dtype.

    Returns the copies, or the arrays of `out`, as a tuple.
    Raises ValueError or TypeError for arguments that do not fit together.

    >>> broadcast(torch.tensor([1, 2]), ["cpu"] * 2)
    (tensor([1, 2]), tensor([1, 2]))
    """
    family = family_of(tensor, "tensor")
    _exactly_one(devices, out)
    if out is not None:
        return _broadcast_into(family, tensor, out)
    places = comm_checks.devices_for(family, devices)
    home = _own_entry(family, tensor, places)
    others = [place for i, place in enumerate(places) if i != home]
    if family is TORCH and comm_grad.is_recorded([tensor]):
        copies = list(comm_grad.Broadcast.apply(others, tensor) if others else ())
    else:
        copies = list(moves.broadcast(family, family.source(tensor, "tensor"), others))
    if home is not None:
        copies.insert(home, tensor)
    return tuple(copies)


def broadcast_coalesced(
    tensors: Iterable[Any], devices: Iterable[Any], buffer_size: int = _BUFFER_BYTES
) -> Tuple[Tuple[Any, ...], ...]:
    """Copies many arrays to each of several devices, small ones together.

    tensors: any shapes, dtypes and strides, mixed; sparse COO tensors too. Each may lie on the host
        or on a CUDA device. An empty list is allowed.
    devices: where row i of the result goes.
    buffer_size: bytes moved together at most; a larger array goes alone.

    Returns one tuple for each device, of one array for each of `tensors`, without autograd.
    Raises ValueError or TypeError for arguments that do not fit together.

    >>> broadcast_coalesced([torch.tensor([1]), torch.tensor(True)], ["cpu", "cpu"])
    ((tensor([1]), tensor(True)), (tensor([1]), tensor(True)))
    """
    tensors = comm_checks.listed(tensors, "tensors", "arrays")
    family, tensors = family_of_all(tensors, "tensors") if tensors else (TORCH, tensors)
    places = comm_checks.devices_for(family, devices)
    limit_bytes = comm_checks.count(buffer_size, "buffer_size")
    as_they_are = bool(tensors) and all(
        _own_entry(family, tensor, places[:1]) == 0 for tensor in tensors
    )
    rest = places[1:] if as_they_are else places
    rows = comm_coalesced.broadcast(family, tensors, rest, limit_bytes)
    return (*([tensors] if as_they_are else []), *(tuple(row) for row in rows))


def reduce_add(inputs: Iterable[Any], destination: Any = None) -> Any:
    """Adds arrays up, in the order given.

    inputs: arrays of one shape and dtype; bool adds as "or", sparse COO tensors are added by torch.
    destination: the device of the sum, one that an input lies on; None is the host for host arrays,
        else the current CUDA device.

    Returns the sum, laid out like the first input on `destination`.
    Raises ValueError or TypeError for arguments that do not fit together.

    >>> reduce_add([torch.tensor([1, 2]), torch.tensor([10, 20])])
    tensor([11, 22])
    """
    family, inputs = family_of_all(inputs, "inputs")
    comm_checks.alike(family, inputs, _names("inputs", inputs))
    device = comm_checks.root_for(family, destination, inputs)
    if len(inputs) == 1 and family is TORCH and device.type == "cuda":
        return inputs[0]
    if family is TORCH and all(tensor.is_sparse for tensor in inputs):
        return comm_coalesced.add_sparse(inputs, device)
    if family is TORCH and comm_grad.is_recorded(inputs):
        return comm_grad.Reduce.apply(device, *inputs)
    return moves.reduce(family, _sources(family, inputs, _names("inputs", inputs)), device)


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Any]], destination: Any = None, buffer_size: int = _BUFFER_BYTES
) -> Tuple[Any, ...]:
    """Adds up many groups of arrays, small ones together, in rank order.

    inputs: inputs[r][k] is rank r's array of group k. The arrays of a group have one shape and
        dtype; groups may differ. Where all of a group are sparse COO tensors the sum is sparse;
        where some are, they are made dense first.
    destination: the device of the sums, as in `reduce_add`.
    buffer_size: bytes of one rank summed together at most; a larger array goes alone.

    Returns one sum for each group, new memory without autograd.
    Raises ValueError or TypeError for arguments that do not fit together.

    >>> ranks = [[torch.tensor([1]), torch.tensor(0.5)], [torch.tensor([2]), torch.tensor(1.0)]]
    >>> reduce_add_coalesced(ranks)
    (tensor([3]), tensor(1.5000))
    """
    ranks = tuple(
        comm_checks.listed(rank, f"inputs[{r}]", "arrays")
        for r, rank in enumerate(comm_checks.listed(inputs, "inputs", "lists of arrays"))
    )
    if not ranks:
        raise ValueError("inputs is empty: at least one rank is needed")
    for r, rank in enumerate(ranks):
        if len(rank) != len(ranks[0]):
            raise ValueError(
                f"inputs[{r}] has {len(rank)} arrays, but inputs[0] has {len(ranks[0])}"
            )
    limit_bytes = comm_checks.count(buffer_size, "buffer_size")
    if not ranks[0]:
        return ()
    family = comm_checks.one_family(ranks)
    device = comm_checks.root_for(family, destination, [rank[0] for rank in ranks])
    for k, column in enumerate(zip(*ranks)):
        comm_checks.alike(family, column, [f"inputs[{r}][{k}]" for r in range(len(ranks))])
        comm_checks.root_for(family, device, column)
    return tuple(comm_coalesced.reduce(family, ranks, device, limit_bytes))


def _exactly_one(devices: Any, out: Any) -> None:
    if (devices is None) == (out is None):
        given = "neither" if out is None else "both"
        raise ValueError(f"exactly one of devices and out must be given, not {given}")


def _names(name: str, arrays: Sequence[Any]) -> List[str]:
    return [f"{name}[{i}]" for i in range(len(arrays))]


def _sources(family: Any, arrays: Sequence[Any], names: Sequence[str]) -> List[Any]:
    return [family.source(array, name) for array, name in zip(arrays, names)]


def _own_entry(family: Any, tensor: Any, places: Sequence[torch.device]) -> Optional[int]:
    """The first CUDA entry where the tensor already is: torch gives back the tensor itself."""
    if family is not TORCH or tensor.device.type != "cuda" or tensor.device not in places:
        return None
    return places.index(tensor.device)


def _scatter_new(
    family: Any,
    tensor: Any,
    places: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    lanes: Sequence[Optional[torch.cuda.Stream]],
) -> Tuple[Any, ...]:
    """Pieces that stay on their CUDA device are views, as in torch. The others travel in as few
    calls of the core as there are runs of neighbours with one stream."""
    home = tensor.device if family is TORCH and tensor.device.type == "cuda" else None
    recorded = family is TORCH and comm_grad.is_recorded([tensor])
    starts = list(accumulate(sizes, initial=0))
    pieces: List[Any] = []
    for (stays, lane), run in groupby(
        range(len(sizes)), lambda i: (places[i] == home, None if places[i] == home else lanes[i])
    ):
        run = list(run)
        first, last = run[0], run[-1] + 1
        length = starts[last] - starts[first]
        part = tensor
        if length != starts[-1]:
            part = tensor.narrow(dim, starts[first], length)
        if stays:
            pieces.extend(part.split(list(sizes[first:last]), dim))
        elif recorded:
            pieces.extend(
                comm_grad.Scatter.apply(places[first:last], sizes[first:last], dim, lane, part)
            )
        else:
            source = family.source(part, "tensor")
            pieces.extend(
                moves.scatter(family, source, places[first:last], sizes[first:last], dim, lane)
            )
    return tuple(pieces)


def _scatter_into(family: Any, tensor: Any, out: Any, dim: int, streams: Any) -> Tuple[Any, ...]:
    source = _unrecorded(family, [tensor], ["tensor"])[0]
    outputs = comm_checks.Outputs(out, family.dtype(tensor))
    shape = family.shape(tensor)
    lengths = []
    for i, piece in enumerate(outputs.shapes):
        if len(piece) != len(shape) or piece != shape[:dim] + (piece[dim],) + shape[dim + 1 :]:
            raise ValueError(
                f"out[{i}] has shape {piece}, but must agree with tensor, {shape} "
                f"in all but dimension {dim}"
            )
        lengths.append(piece[dim])
    if sum(lengths) != shape[dim]:
        raise ValueError(
            f"the arrays of out add up to {sum(lengths)} along dimension {dim}, "
            f"but tensor's size there is {shape[dim]}"
        )
    lanes = comm_checks.streams_for(family, streams, outputs.places, "out")
    starts = list(accumulate(lengths, initial=0))
    open_peers((family.device(source), *outputs.places))
    for lane, run in groupby(range(len(lengths)), lanes.__getitem__):
        run = list(run)
        first, last = run[0], run[-1] + 1
        part = source
        if lane is not None or len(run) != len(lengths):
            part = source.narrow(dim, starts[first], starts[last] - starts[first])
        with nullcontext() if lane is None else torch.cuda.stream(lane):
            _C.scatter(part, outputs.targets[first:last], dim)
            moves.hold_sources((part,), outputs.places[first:last])
    return outputs.written()


def _gather_into(family: Any, tensors: Sequence[Any], out: Any, dim: int) -> Any:
    sources = _unrecorded(family, tensors, _names("tensors", tensors))
    outputs = comm_checks.Output(out, family.dtype(tensors[0]))
    shapes = [family.shape(tensor) for tensor in tensors]
    length = sum(shape[dim] for shape in shapes)
    expected = shapes[0][:dim] + (length,) + shapes[0][dim + 1 :]
    if outputs.shapes[0] != expected:
        raise ValueError(f"out has shape {outputs.shapes[0]}, but the result has {expected}")
    open_peers((*outputs.places, *map(family.device, sources)))
    _C.gather(tuple(sources), outputs.targets[0], dim)
    moves.hold_sources(sources, outputs.places)
    return outputs.written()[0]


def _broadcast_into(family: Any, tensor: Any, out: Any) -> Tuple[Any, ...]:
    source = _unrecorded(family, [tensor], ["tensor"])[0]
    outputs = comm_checks.Outputs(out, family.dtype(tensor))
    for i, shape in enumerate(outputs.shapes):
        if shape != family.shape(tensor):
            raise ValueError(f"out[{i}] has shape {shape}, but tensor has {family.shape(tensor)}")
    open_peers((family.device(source), *outputs.places))
    _C.broadcast(source, outputs.targets)
    moves.hold_sources((source,), outputs.places)
    return outputs.written()


def _unrecorded(family: Any, arrays: Sequence[Any], names: Sequence[str]) -> List[Any]:
    """Sources for writing into arrays of the caller's, which autograd could not follow."""
    if family is TORCH:
        for array, name in zip(arrays, names):
            if comm_grad.is_recorded([array]):
                raise ValueError(
                    f"{name} requires grad, but out= records no gradient: detach it, "
                    "use torch.no_grad(), or leave out= away"
                )
    return _sources(family, arrays, names)
