"""Cases that the tests of fastdp.comm share: dtypes, layouts, lengths, and equality by bits."""

import itertools

import torch
from torch_features import FLOAT8

COUNTS = [1, 2, 3, 4, 7, 8]

SUMMED = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
MOVED = [*SUMMED, *FLOAT8]


def lengths(count, chunk=5):
    """0, 1, a prime, and what lies around a multiple of the number of devices."""
    return sorted({0, 1, 13, count * chunk - 1, count * chunk, count * chunk + 1})


def values(shape, dtype, rank=0, device="cpu"):
    """Different for each index (as far as the dtype can tell) and for each rank; small whole
    numbers, so that sums of a few are exact in every dtype."""
    count = torch.Size(shape).numel()
    number = torch.arange(count, dtype=torch.int64) * 7 + rank * 3
    if dtype == torch.bool:
        return (number % 3 == 0).view(shape).to(device)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (number % 5).to(torch.float32).to(dtype).view(shape).to(device)
    if dtype.is_complex:
        parts = torch.stack([number % 15, number % 11 - 4], dim=-1).to(dtype.to_real())
        return torch.view_as_complex(parts).view(shape).to(device)
    return (number % 15).to(dtype).view(shape).to(device)


def bits(tensor):
    """The bytes of a tensor's elements in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    # Not contiguous(): that keeps odd strides of dimensions of size 1.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(actual, expected):
    """Equality to the last bit, of shape and dtype too."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return torch.equal(bits(actual), bits(expected))


def _offset(tensor):
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape)


def _stepped(tensor):
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)[..., ::2]


def _transposed(tensor):
    shape = tuple(reversed(tensor.shape))
    buffer = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return buffer.permute(tuple(reversed(range(tensor.dim()))))


def _padded(tensor):
    shape = [size + 2 for size in tensor.shape]
    buffer = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return buffer[tuple(slice(1, 1 + size) for size in tensor.shape)]


LAYOUTS = {
    "contiguous": torch.empty_like,
    "offset": _offset,  # aligned to its element only
    "stepped": _stepped,
    "transposed": _transposed,
    "padded": _padded,
}


def laid_out(tensor, layout):
    """The same values in another layout."""
    return LAYOUTS[layout](tensor).copy_(tensor)


def extent(tensor):
    """First byte and one past the last byte of what is touched; None without elements."""
    if tensor.numel() == 0:
        return None
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def disjoint(*tensors):
    """No two share a byte."""
    spans = [extent(tensor) for tensor in tensors if tensor.numel() > 0]
    return all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(spans, 2))


class Producer:
    """What any other library's array is to us: DLPack and nothing else."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **arguments):
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


class LegacyProducer(Producer):
    """One from before DLPack 1.0: takes a stream and gives an unversioned capsule."""

    def __dlpack__(self, stream=None):
        return self._tensor.__dlpack__(stream=stream)
