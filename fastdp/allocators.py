"""What torch's allocator does with memory that was freed while another stream still reads it.

As it is by default, a freed block is kept for the stream that it was taken on, and the system gets
it back only when the whole GPU is idle. Whoever takes it next on that stream waits for its readers
(streams.py), and the allocator need not know them. But expandable segments are unmapped as soon as
their own stream is idle; and with cudaMallocAsync, or an allocator of the user's, freed memory may
go to any stream. Those have to be told of each reader, at a price: a block is free again only once
a host that runs ahead sees that its readers are through.
"""

from __future__ import annotations

from typing import Sequence

import torch


def has_to_be_told(devices: Sequence[torch.device]) -> bool:
    """Whether it is such a one. Takes a little memory on each GPU's current stream, which should be
    one that has none yet: how that was taken tells how the next will be."""
    if not devices or not torch.backends.cuda.is_built():
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return True
    probes = [torch.empty(1, dtype=torch.uint8, device=device) for device in devices]
    addresses = [probe.data_ptr() for probe in probes]
    return any(
        segment.get("is_expandable", False)
        and any(0 <= at - segment["address"] < segment["total_size"] for at in addresses)
        for segment in torch.cuda.memory_snapshot()
    )
