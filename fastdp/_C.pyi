"""The compiled core. Everything is positional; keywords and defaults live in the Python layer.

`_Producer` is anything that can be borrowed: a tensor whose type carries the DLPack exchange table,
an object with `__dlpack__`, or a NumPy array. Nothing is kept after a call returns unless it says
so. Refused, with an error that names the argument ("targets[1]: ..."): what is no tensor, and
tensors without strided memory of their own (sparse, nested, quantized, meta, MKLDNN, uninitialized,
subclasses with their own `__torch_dispatch__`) as TypeError; read-only ones where they would be
written, a set conjugate or negative bit, as ValueError. `requires_grad` is no hindrance.
"""

import builtins
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypedDict, final

from typing_extensions import Self

_Producer = Any

class Error(RuntimeError):
    """Base of the core's own errors. Caller mistakes are ValueError or TypeError instead, memory
    exhaustion is MemoryError, a missing capability NotImplementedError."""

class DeviceError(Error): ...
class TimeoutError(Error, builtins.TimeoutError): ...
class AbortedError(Error): ...
class FaultInjected(Error): ...

class _BuildInfo(TypedDict):
    version: str
    cuda: bool
    cuda_toolkit: str
    cuda_archs: str
    compiler: str
    commit: str
    dlpack: str

class _Counters(TypedDict):
    calls: int
    bytes: int
    chunks: int

def build_info() -> _BuildInfo: ...
def nothing() -> None:
    """The cost of a call: does nothing (benchmarks)."""

def env_table() -> Tuple[Tuple[str, str, str, str], ...]:
    """(name, type, default, sentence) of every environment variable fastdp reads."""

def counters() -> dict[str, _Counters]: ...
def reset_counters() -> None: ...
def dump() -> str:
    """The flight recorder (csrc/recorder.h): the last calls of verbs of this process, the newest
    last, one line each."""

def arm_fault(point: str, nth_call: int, /) -> None:
    """Tests: the n-th call from now of `point` fails with FaultInjected; 0 disarms."""

def set_deadline(timeout_ms: int, /) -> int:
    """How long this thread waits for devices in calls of the core from now on; 0: as long as
    FASTDP_TIMEOUT_MS says. Gives the former setting."""

def _use_exchange_table(use: bool, /) -> bool:
    """Tests: whether exchange tables are looked for on types. Gives the former setting."""

# Verbs on whole tensors. Targets are written; they are contiguous or strided, never overlapping.
# The first verb opens the core and connects its log to `logging` (logger "fastdp").
def scatter(
    source: _Producer,
    targets: Tuple[_Producer, ...],
    dim: int,
    source_stream: Optional[int] = None,
    /,
) -> None:
    """Slices of source into the targets. `source_stream`: the handle of the stream of the source's
    GPU that the source is ready on, and that waits for the reads of it, in place of the current
    one. It is not checked, and without a meaning where the source is the host's."""

def gather(sources: Tuple[_Producer, ...], target: _Producer, dim: int, /) -> None: ...
def broadcast(source: _Producer, targets: Tuple[_Producer, ...], /) -> None: ...
def reduce(sources: Tuple[_Producer, ...], target: _Producer, /) -> None: ...

def transport(
    devices: Tuple[Tuple[int, int], ...], wanted: Optional[str], /
) -> Tuple[str, str]:
    """(name, reason) of the transport that joins the first of `devices`, by DLPack's numbers, with
    the others. `wanted` as Bucket's `transport`; NotImplementedError, with what is missing, when
    that does not join them. The first time it opens the devices."""

def scratch(trim: bool, /) -> Tuple[Tuple[Tuple[int, int], int, int], ...]:
    """(device by DLPack's numbers, bytes of its memory, bytes of pinned memory) that the scratch
    pools of each opened device hold. With `trim` what is idle is given back first."""

def open_stream(device: Tuple[int, int], /) -> int:
    """The handle of a new stream of a GPU, by DLPack's numbers, that does not wait for the default
    stream. It is nobody else's, and stays open as long as the process."""

def borrow(tensors: Tuple[_Producer, ...], /) -> int:
    """Borrows each and gives the number of elements in all (benchmarks, tests). Like the methods of
    Bucket and describe(), it asks only complex tensors for the conjugate and the negative bit."""

def describe(tensors: Tuple[_Producer, ...], /) -> bytes:
    """Shape, strides, dtype, device and requires_grad of each tensor in one opaque string: equal
    strings, equal descriptions. Addresses are not in it. What cannot be borrowed raises."""

def layout(
    tensor: _Producer, /
) -> Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, int, int], Tuple[int, int]]:
    """(shape, strides in elements, dtype, device) by DLPack's numbers."""

def are_plain(tensors: Tuple[Any, ...], strided: Any, is_complex: bool, /) -> bool:
    """Whether all torch tensors of the tuple, None aside, are of that layout with neither the
    negative bit nor, of complex ones, the conjugate bit set."""

def become(tensors: Tuple[Any, ...], kinds: Tuple[Optional[type], ...], /) -> None:
    """Gives each tensor, which nobody else holds yet, its class; None lets it be."""

def aliases(
    tensors: Tuple[Any, ...], kind: type, otherwise: Callable[[Any], Any], /
) -> Tuple[Any, ...]:
    """`detach()` of each tensor whose class is `kind`, of that class too; otherwise(tensor) for any
    other."""

@final
class Bucket:
    """The plan of a bucket (bucket.h). Immutable; any thread."""
    def __new__(
        cls,
        prototypes: Tuple[_Producer, ...],
        offsets: Optional[Tuple[int, ...]] = None,
        transport: Optional[str] = None,
        /,
    ) -> Self:
        """`offsets`: where each slot begins, in elements, ascending; None: at aligned places.
        `transport`: what must carry it, or "auto"; None: what FASTDP_TRANSPORT says."""
    @property
    def number(self) -> int:
        """By which records (dump) name it, counted from 1 in this process."""
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
    def broadcast(
        self, sources: Tuple[_Producer, ...], flats: Tuple[_Producer, ...], /
    ) -> None: ...
    def reduce(
        self, gradients: Tuple[Tuple[Optional[_Producer], ...], ...], flat: _Producer, /
    ) -> None:
        """gradients[rank][slot]; None counts as zero."""
    def views(self, flat: _Producer, /) -> Optional[Tuple[Any, ...]]:
        """Every slot of `flat` as a tensor of flat's type, made by the exchange table: no autograd
        view relation, a version counter each, not resizable; they keep flat's memory alive. Host
        memory only. None when the type of `flat` carries no table that can make tensors of it."""
    def split(self, flat: Any, /) -> Tuple[Any, ...]:
        """The same of a torch tensor on any device, as tensors of flat's own storage."""

@final
class Array:
    """Memory of the core's own, not initialised, as a DLPack producer: what fastdp.comm returns for
    producers that are neither torch nor NumPy."""
    def __new__(
        cls, shape: Tuple[int, ...], dtype: Tuple[int, int, int], device: Tuple[int, int], /
    ) -> Self: ...
    @property
    def shape(self) -> Tuple[int, ...]: ...
    @property
    def dtype(self) -> Tuple[int, int, int]:
        """DLPack's (code, bits, lanes)."""
    def __dlpack__(
        self,
        *,
        stream: Optional[int] = ...,
        max_version: Optional[Tuple[int, int]] = ...,
        dl_device: Optional[Tuple[int, int]] = ...,
        copy: Optional[bool] = ...,
    ) -> Any: ...
    def __dlpack_device__(self) -> Tuple[int, int]: ...

@final
class Handoff:
    """A slot for one object between two threads (handoff.h). The GIL is released while waiting."""
    def __new__(cls) -> Self: ...
    def put(self, item: Any, /) -> None:
        """RuntimeError when an item is still in it, AbortedError when closed."""
    def take(self, timeout_s: float, /) -> Any:
        """Waits at most `timeout_s` seconds (negative: for ever); TimeoutError, AbortedError. On
        the main thread signals are looked at while waiting, so Ctrl-C raises KeyboardInterrupt."""
    def close(self) -> None:
        """Wakes whoever waits with AbortedError; an item that is in it can still be taken."""

@final
class Tree:
    """The modules below one base module, flattened once (py_tree.c). Not thread-safe."""
    def __new__(cls, modules: Tuple[Any, ...], /) -> Self:
        """All modules, the root first, each once."""
    def collect(self) -> Tuple[Tuple[Any, ...], Tuple[Any, ...], bytes]:
        """(parameters, buffers, pattern): the distinct tensors of a held tree as they are now, in
        order of first appearance, and bytes that are equal where the same entries are tied."""
    def entries(self) -> List[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
        """[(parameters, buffers), ...]: for each module, which of the collected tensors its
        dictionaries hold, as indices; -1 for None."""
    def hold(self, root: Any, /) -> bool:
        """Owns all modules until release(), if the tree below root is the one that this was made
        of."""
    def release(self) -> None:
        """The end of hold()."""

@final
class Replica:
    """One replica of a Tree, refreshed for every forward (py_replica.c). Not thread-safe."""
    def __new__(cls, tree: Tree, modules: Tuple[Any, ...], /) -> Self: ...
    @property
    def modules(self) -> Tuple[Any, ...]: ...
    def refresh(self, parameters: Tuple[Any, ...], buffers: Tuple[Any, ...], /) -> None:
        """Makes every module as a new replica's, with these copies of what Tree.collect() found."""
    def empty(self) -> None:
        """Drops the copies and whatever the forward left in the modules."""
    def settle(self) -> None:
        """Whoever holds a module of this replica now is no user of it."""
    def idle(self) -> bool:
        """Nobody holds a module of this replica who did not at settle()."""

@final
class Gate:
    """What the streams of one GPU have waited for (py_gate.h)."""
    def __new__(
        cls, ordinal: int, wait: Callable[[Any], Any], raw_stream: Callable[[int], int], /
    ) -> Self:
        """wait(event): the GPU's current stream waits for it; raw_stream(ordinal): that stream's
        handle, asked for where no exchange table tells."""
    def close(self, arrived: Iterable[Any], /) -> None:
        """A new forward: arrived[k] is recorded behind the copies of bucket k, in their order."""
    def wait_for(self, bucket: int, /) -> None:
        """The current stream waits for the bucket, unless it has."""

@final
class AwaitedDict(Dict[Any, Any]):
    """A `_parameters` or `_buffers` whose values are waited for when they are read."""
    bucket: int
    """The last bucket that holds one of the values: what comes earlier has come, since copies run
    in order. -1: none does."""
    def __init__(self, gate: Gate, /) -> None: ...
    @property
    def gate(self) -> Gate: ...

@final
class Snapshot:
    """What the attributes of some modules held when it was made (py_snapshot.c). Holds the values,
    not the modules. One call at a time.

    Seen: every entry of each `__dict__`; a change of class; the content of lists, tuples and
    dictionaries (subclasses too), sets and deques, four levels down, 8192 entries in all, beyond
    which a container is known by its identity and length; the attributes of dataclass objects and
    of objects of the classes `records`; the address of tensors that are attributes, and on the host
    whether they were written. Numbers, strings and tuples of them count by value, all else by
    identity. Of `_parameters` and `_buffers` only the names, and which are None.

    Not seen: the content of any other object (arrays, generators, modules that are not in
    `modules`), class attributes, closures, globals, the elements of a tensor on a device."""
    def __new__(cls, modules: Tuple[Any, ...], records: Tuple[type, ...] = (), /) -> Self: ...
    def differs(self) -> Optional[str]:
        """None if nothing that is seen has changed, else what has: the class of the module, the
        entry, and where the module stands in `modules`."""
