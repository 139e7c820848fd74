"""The compiled core. Everything is positional; keywords and defaults live in the Python layer.

`Producer` is anything that can be borrowed: a tensor whose type carries the DLPack exchange table, an
object with `__dlpack__`, or a NumPy array. Nothing is kept after a call returns unless it says so.
"""

import builtins
from typing import Any, Optional, Sequence, Tuple, TypedDict

Producer = Any

class Error(RuntimeError):
    """Base of the core's own errors. Caller mistakes are ValueError or TypeError instead, memory
    exhaustion is MemoryError, a missing capability NotImplementedError."""

class DeviceError(Error): ...
class TimeoutError(Error, builtins.TimeoutError): ...
class AbortedError(Error): ...
class FaultInjected(Error): ...

class BuildInfo(TypedDict):
    version: str
    cuda: bool
    cuda_toolkit: str
    cuda_archs: str
    compiler: str
    commit: str
    dlpack: str

class Counters(TypedDict):
    calls: int
    bytes: int
    chunks: int

def build_info() -> BuildInfo: ...
def nothing() -> None:
    """The cost of a call: does nothing (benchmarks)."""

def env_table() -> Tuple[Tuple[str, str, str, str], ...]:
    """(name, type, default, sentence) of every environment variable fastdp reads."""

def counters() -> dict[str, Counters]: ...
def reset_counters() -> None: ...
def arm_fault(point: str, nth_call: int) -> None:
    """Tests: the n-th call from now of `point` fails with FaultInjected; 0 disarms."""

def _use_exchange_table(use: bool, /) -> bool:
    """Tests: whether exchange tables are looked for on types. Gives the former setting."""

# Verbs on whole tensors. Targets are written; they are contiguous or strided, never overlapping.
def scatter(source: Producer, targets: Tuple[Producer, ...], dim: int) -> None: ...
def gather(sources: Tuple[Producer, ...], target: Producer, dim: int) -> None: ...
def broadcast(source: Producer, targets: Tuple[Producer, ...]) -> None: ...
def reduce(sources: Tuple[Producer, ...], target: Producer) -> None: ...

def borrow(tensors: Tuple[Producer, ...]) -> int:
    """Borrows each and gives the number of elements in all (benchmarks, tests)."""

def describe(tensors: Tuple[Producer, ...]) -> bytes:
    """Shape, strides, dtype, device and requires_grad of each tensor in one opaque string: equal
    strings, equal descriptions. Addresses are not in it. A tensor that cannot be borrowed raises."""

class Bucket:
    """The plan of a bucket (bucket.h). Immutable; any thread."""
    def __init__(self, prototypes: Tuple[Producer, ...], /) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def size_elems(self) -> int:
        """Length of a flat buffer in elements of the bucket's dtype."""
    @property
    def slots(self) -> Tuple[Tuple[int, Tuple[int, ...], Tuple[int, ...]], ...]:
        """(offset in elements, shape, strides in elements) of each slot."""
    def broadcast(self, sources: Tuple[Producer, ...], flats: Tuple[Producer, ...], /) -> None: ...
    def reduce(
        self, gradients: Tuple[Tuple[Optional[Producer], ...], ...], flat: Producer, /
    ) -> None:
        """gradients[rank][slot]; None counts as zero."""
    def views(self, flat: Producer, /) -> Optional[Tuple[Any, ...]]:
        """Every slot of `flat` as a tensor of flat's type, made by the exchange table: no autograd
        view relation, a version counter each, not resizable; they keep flat's memory alive. Host
        memory only. None when the type of `flat` carries no table that can make tensors."""

class Array:
    """Memory of the core's own, not initialised, as a DLPack producer: what fastdp.comm returns for producers that are
    neither torch nor NumPy."""
    def __init__(self, shape: Tuple[int, ...], dtype: Tuple[int, int, int], device: Tuple[int, int], /) -> None: ...
    @property
    def shape(self) -> Tuple[int, ...]: ...
    @property
    def dtype(self) -> Tuple[int, int, int]:
        """DLPack's (code, bits, lanes)."""
    def __dlpack__(self, *, stream: Any = ..., max_version: Any = ..., dl_device: Any = ..., copy: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> Tuple[int, int]: ...

def layout(tensor: Producer) -> Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, int, int], Tuple[int, int]]:
    """(shape, strides in elements, dtype, device) by DLPack's numbers."""

class Handoff:
    """A slot for one object between two threads (handoff.h). The GIL is released while waiting."""
    def __init__(self) -> None: ...
    def put(self, item: Any, /) -> None:
        """RuntimeError when an item is still in it, AbortedError when closed."""
    def take(self, timeout_s: float, /) -> Any:
        """Waits at most `timeout_s` seconds (negative: for ever); TimeoutError, AbortedError. On the
        main thread signals are looked at while waiting, so Ctrl-C raises KeyboardInterrupt."""
    def close(self) -> None: ...

class Tree:
    """The modules below one base module, flattened once, and what a refresh of a replica needs to
    know of them (py_tree.c). Not thread-safe: one call at a time per tree."""
    def __init__(self, modules: Sequence[Any], /) -> None: ...
    # The methods are described in py_tree.c.
