"""Segments of a training step on GPUs, one after another or as late as chance wants them.

`ordered` patches every piece of communication, and hooks every layer, so that a step can be run in
two ways. Synchronised: all GPUs are waited for around each segment, so nothing can be too early.
Delayed: before each segment the stream that it runs on is held up, or not, by a kernel that waits
(seeded), every flat buffer is filled with NaN before it is written, and what is free in the
compute streams' pools is filled with NaN over and over. A wait that is missing then shows as a NaN
or as other bits than those of the synchronised run.
"""

import contextlib
import random
import threading

import torch

from fastdp import moves
from fastdp.buckets import Bucket
from fastdp.streams import Communication

# Cycles of a delay: 0, 0.05, 0.2 and 1 ms at 2 GHz. Python enqueues a layer in some 0.05 ms.
DELAYS = (0, 0, 0, 100_000, 400_000, 2_000_000)


class Synchronised:
    """All GPUs are idle whenever a segment starts or ends."""

    def __init__(self, devices):
        self._devices = devices

    def segment(self, device=None):
        for each in self._devices:
            torch.cuda.synchronize(each)

    def poison(self, tensor):
        pass

    def spoil_free(self, device, sizes):
        pass


class Delayed:
    """Holds up the current stream of a device, or of all; fills free memory with NaN."""

    def __init__(self, devices, seed=0, delays=DELAYS):
        self._devices = devices
        self._delays = delays
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # replicas and engine threads draw from one sequence

    def segment(self, device=None):
        for each in self._devices if device is None else [device]:
            with self._lock:
                cycles = self._random.choice(self._delays)
            if cycles:
                with torch.cuda.device(each):
                    torch.cuda._sleep(cycles)

    def poison(self, tensor):
        """On the current stream of the tensor's device."""
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    def spoil_free(self, device, sizes):
        """Takes memory from the current stream's pool as any program may, and fills it."""
        taken = [torch.full((size,), float("nan"), device=device) for size in sizes]
        del taken


@contextlib.contextmanager
def ordered(monkeypatch, way):
    """Inside, communication goes through `way`."""
    with monkeypatch.context() as patch:
        _patch_buckets(patch, way)
        _patch_communication(patch, way)
        for name in ("scatter", "gather"):
            _patch_move(patch, name, way)
        yield


def _patch_buckets(patch, way):
    copies, sums = Bucket.copies, Bucket.sums

    def late_copies(self, tensors, home, flats):
        way.segment()
        # Not where they are taken: the streams wait for former readers only after that.
        for flat in flats:
            way.poison(flat)
        way.segment()
        result = copies(self, tensors, home, flats)
        way.segment()
        return result

    def late_sums(self, gradients, flat):
        way.poison(flat)
        way.segment()
        result = sums(self, gradients, flat)
        way.segment()
        return result

    patch.setattr(Bucket, "copies", late_copies)
    patch.setattr(Bucket, "sums", late_sums)


def _patch_communication(patch, way):
    current, mark, in_backward = (
        Communication.current,
        Communication.mark,
        Communication.in_backward,
    )

    @contextlib.contextmanager
    def late_current(self):
        with current(self):
            way.segment()
            yield

    def late_mark(self, bucket):
        with current(self):
            way.segment()
        mark(self, bucket)

    @contextlib.contextmanager
    def late_in_backward(self, *rest, **options):
        way.segment()
        with in_backward(self, *rest, **options):
            way.segment()
            yield
            way.segment()

    patch.setattr(Communication, "current", late_current)
    patch.setattr(Communication, "mark", late_mark)
    patch.setattr(Communication, "in_backward", late_in_backward)


def _patch_move(patch, name, way):
    move = getattr(moves, name)

    def late_move(*args):
        way.segment()
        result = move(*args)
        way.segment()
        return result

    patch.setattr(moves, name, late_move)


def hook_layers(module, way):
    """Before each layer's forward and backward, on its own device and stream."""
    sizes = sorted({parameter.numel() for parameter in module.parameters()})

    def before(device):
        way.spoil_free(device, sizes)
        way.segment(device)

    def on_backward(gradient):
        before(gradient.device)

    def on_forward(layer, inputs):
        before(inputs[0].device)

    def on_output(layer, inputs, output):
        if output.requires_grad:
            output.register_hook(on_backward)

    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_pre_hook(on_forward)
            layer.register_forward_hook(on_output)
