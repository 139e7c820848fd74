"""Waiting for a bucket where it is first read.

On several GPUs a replica's forward starts while its parameters are still on their way. What makes
that safe is that nobody can read one without passing here: the dictionaries that hold a replica's
parameters and buffers make the reader's stream wait for the bucket first. (A hook at the module
that owns a parameter would not do: others read it too, as `nn.TransformerEncoderLayer` reads
`self_attn.out_proj.weight`.) A wait is enqueued on the stream, never on the host, and once per
bucket and stream.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Sequence

import torch

from . import _torch_compat


class Gate:
    """How far the buckets of one replica were waited for, by each stream that read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrived: Sequence[torch.cuda.Event] = ()
        self._passed: Dict[Any, int] = {}

    def close(self, arrived: Sequence[torch.cuda.Event]) -> None:
        """A new forward: arrived[k] is recorded behind the copies of bucket k, in their order."""
        self._arrived = arrived
        self._passed = {}

    def wait_for(self, bucket: int) -> None:
        stream = _torch_compat.raw_stream(self._device)
        if self._passed.get(stream, -1) < bucket < len(self._arrived):
            torch.cuda.current_stream(self._device).wait_event(self._arrived[bucket])
            self._passed[stream] = bucket


class AwaitedDict(dict):
    """A `_parameters` or `_buffers` whose values are waited for when they are read. `bucket` is the
    last bucket that holds one of them: what comes earlier has come, since copies run in order."""

    __slots__ = ("gate", "bucket")

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.bucket = -1

    def __getitem__(self, key: Any) -> Any:
        self.gate.wait_for(self.bucket)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.gate.wait_for(self.bucket)
        return super().get(key, default)

    def items(self) -> Any:
        self.gate.wait_for(self.bucket)
        return super().items()

    def values(self) -> Any:
        self.gate.wait_for(self.bucket)
        return super().values()

    def __iter__(self) -> Iterator[Any]:
        # Not for the names: dict(self) and self | other take the values past items() unless a
        # subclass has an __iter__ of its own.
        self.gate.wait_for(self.bucket)
        return super().__iter__()

    def __eq__(self, other: Any) -> Any:
        self.gate.wait_for(self.bucket)
        return super().__eq__(other)

    def __ne__(self, other: Any) -> Any:
        self.gate.wait_for(self.bucket)
        return super().__ne__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self.gate.wait_for(self.bucket)
        return super().__repr__()

    def copy(self) -> Dict[Any, Any]:
        return dict(self.items())

    def pop(self, *args: Any) -> Any:
        self.gate.wait_for(self.bucket)
        return super().pop(*args)

    def popitem(self) -> Any:
        self.gate.wait_for(self.bucket)
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.gate.wait_for(self.bucket)
        return super().setdefault(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is a plain dictionary: the events stay here."""
        return dict, (list(self.items()),)
