"""What is ordered before what, on pretended GPUs (pretended_gpus.py): an oracle for the waits that
fastdp makes in Python. Every move, every layer and every gradient of a step declares the tensors that
it reads and writes, and on which stream; two accesses of one byte, one of them writing, that no
stream, event or edge of autograd puts in order are reported, whatever really ran first. Memory that
was freed may be anybody's on the stream that it was taken on: the next to write new memory there has
to come after all who used it.

The autograd engine does here what it does on GPUs: a node runs with the stream current that was so
in its forward, that stream waits for whoever made the gradients, and on other devices the default
stream is current."""

import functools
import itertools

import torch
from pretended_gpus import GPUS, Stream
from torch.multiprocessing.reductions import StorageWeakRef

from fastdp import functions, moves
from fastdp.buckets import Bucket

NODES = ("Scatter", "Gather", "Broadcast", "Land", "Reduce")


class Access:
    def __init__(self, stream, tensor, writes, what):
        self.name, self.step = stream.name, stream.clock[stream.name]
        self.begin = tensor.data_ptr()
        self.end = self.begin + tensor.numel() * tensor.element_size()
        self.writes, self.what = writes, what

    def meets(self, other):
        return self.begin < other.end and other.begin < self.end and (self.writes or other.writes)

    def is_before(self, stream):
        return stream.clock.get(self.name, 0) >= self.step

    def __str__(self):
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.name}"


class Block:
    """One storage, and who touched it."""

    def __init__(self, storage, pool):
        self.weak = StorageWeakRef(storage)
        self.pool = pool  # the stream whose memory it is; None: it was there before
        self.accesses = []
        self.ready = {}  # what a reader in backward comes after
        self.rank = 0


class Orders:
    def __init__(self, gpus, monkeypatch):
        self.gpus = gpus
        self.reports = []
        self.blocks = {}
        self.freed = {}  # of each pool, the accesses to what was freed
        self._defaults = {device: Stream(f"n{device.index}", device) for device in GPUS}
        for name in NODES:
            node = getattr(functions, name)
            for side in ("forward", "backward"):
                wrapped = getattr(self, f"_{side}")(getattr(node, side))
                monkeypatch.setattr(node, side, staticmethod(wrapped))
        monkeypatch.setattr(Bucket, "_move", self._bucket_move(Bucket._move))
        monkeypatch.setattr(moves, "scatter", self._scatter(moves.scatter))
        monkeypatch.setattr(moves, "gather", self._gather(moves.gather))

    def current(self, rank=0):
        return self.gpus.current[GPUS[rank]]

    def rank_of(self, tensor):
        return self._block(tensor, None).rank

    def read(self, stream, tensor, what):
        self._access(stream, tensor, False, what)

    def write(self, stream, tensor, what):
        self._access(stream, tensor, True, what)

    def join(self, stream, tensors):
        """The end of a backward: the caller's stream waits for those of the gradients."""
        for tensor in tensors:
            stream.merge(self._block(tensor, None).ready)

    def _sweep(self):
        for pointer, block in list(self.blocks.items()):
            if block.weak.expired():
                del self.blocks[pointer]
                if block.pool is not None:
                    self.freed.setdefault(block.pool, []).extend(block.accesses)

    def _block(self, tensor, writer):
        self._sweep()
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        block = self.blocks.get(pointer)
        if block is None:
            block = Block(storage, None if writer is None else writer.name)
            if pointer != 0:
                self.blocks[pointer] = block
        return block

    def _access(self, stream, tensor, writes, what):
        if tensor.numel() == 0:
            return
        block = self._block(tensor, stream if writes else None)
        stream.step()
        access = Access(stream, tensor, writes, what)
        if not block.accesses and block.pool is not None:
            for former in self.freed.pop(block.pool, []):
                self._check(former, access, stream, "memory that was freed: ")
        for former in block.accesses:
            if former.meets(access):
                self._check(former, access, stream, "")
        block.accesses.append(access)

    def _check(self, former, access, stream, where):
        if not former.is_before(stream):
            self.reports.append(f"{where}no order between: {former}, and {access}")

    # --- moves: home's stream and the others', as the core orders them ---

    def _spread(self, source, parts, what):
        home = self.current()
        for rank, part in parts:
            stream = self.current(rank)
            stream.merge(home.clock)
            for tensor in source:
                self.read(stream, tensor, what)
            self.write(stream, part, what)
            self._block(part, None).rank = rank
            home.merge(stream.clock)

    def _collect(self, parts, target, what):
        home = self.current()
        streams = {rank: self.current(rank) for rank, _ in parts}
        for stream in streams.values():
            home.merge(stream.clock)
        for _, part in parts:
            self.read(home, part, what)
        self.write(home, target, what)
        for stream in streams.values():
            stream.merge(home.clock)

    def _bucket_move(self, plain):
        @functools.wraps(plain)
        def move(bucket, verb, sources, targets):
            plain(bucket, verb, sources, targets)
            if isinstance(targets, tuple):
                first = len(bucket.devices) - len(targets)
                self._spread(sources, list(enumerate(targets, first)), "a bucket's broadcast")
            else:
                parts = [(rank, g) for rank, row in enumerate(sources) for g in row]
                self._collect(
                    [part for part in parts if part[1] is not None], targets, "a bucket's sum"
                )

        return move

    def _scatter(self, plain):
        def scatter(family, source, devices, *rest):
            pieces = plain(family, source, devices, *rest)
            self._spread([source], list(enumerate(pieces)), "scatter")
            return pieces

        return scatter

    def _gather(self, plain):
        def gather(family, sources, dim, device):
            result = plain(family, sources, dim, device)
            self._collect(list(enumerate(sources)), result, "gather")
            return result

        return gather

    # --- nodes of autograd ---

    def _forward(self, plain):
        @functools.wraps(plain)
        def forward(ctx, *arguments):
            outputs = plain(ctx, *arguments)
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            ctx.orders_stream = self.current(self.rank_of(first))
            return outputs

        return forward

    def _backward(self, plain):
        @functools.wraps(plain)
        def backward(ctx, *gradients):
            stream = ctx.orders_stream
            for gradient in gradients:
                if gradient is not None:
                    stream.merge(getattr(gradient, "orders_ready", None) or
                                 self._block(gradient, None).ready)
            outer = dict(self.gpus.current)
            self.gpus.current.update({**self._defaults, stream.device: stream})
            try:
                outputs = plain(ctx, *gradients)
            finally:
                self.gpus.current.update(outer)
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, torch.Tensor):
                    if output.numel() == 0:  # a parcel: no memory that it could be known by
                        output.orders_ready = dict(stream.clock)
                    self._block(output, None).ready = dict(stream.clock)
            return outputs

        return backward

    def layer(self):
        """A node of user code: layer(x, weight) = x * weight, on the stream of x's replica."""
        orders = self

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                ctx.rank = orders.rank_of(x)
                stream = orders.current(ctx.rank)
                orders.read(stream, x, "a forward")
                orders.read(stream, weight, "a forward")
                y = x * weight
                orders.write(stream, y, "a forward")
                orders._block(y, None).rank = ctx.rank
                return y

            @staticmethod
            def backward(ctx, gradient):
                x, weight = ctx.saved_tensors
                stream = ctx.orders_stream
                for tensor in (x, weight, gradient):
                    orders.read(stream, tensor, "a backward")
                found = gradient * weight, (gradient * x).sum(0)
                for tensor in found:
                    orders.write(stream, tensor, "a backward")
                return found

        Layer.forward = staticmethod(self._forward(Layer.forward))
        Layer.backward = staticmethod(self._backward(Layer.backward))
        return Layer.apply

    def other_streams(self, count=itertools.count()):
        """Makes other streams current, as a user may; what they do on home comes after what was
        done there before."""
        number = next(count)
        for device in GPUS:
            stream = Stream(f"d{number}.{device.index}", device)
            if device == GPUS[0]:
                stream.merge(self.gpus.current[device].clock)
            self.gpus.streams.append(stream)
            self.gpus.current[device] = stream
