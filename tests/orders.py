"""What is ordered before what, on pretended GPUs (pretended_gpus.py): an oracle for the waits that
fastdp makes in Python. Every move, every layer and every gradient of a step declares the tensors
that it reads and writes, and on which stream; two accesses of one byte, one of them writing, that
no stream, event or edge of autograd puts in order are reported, whatever really ran first. Memory
that was freed may be anybody's on the stream that it was taken on: the next to write new memory
there has to come after all who used it.

The autograd engine does here what torch's does on GPUs and no more: a node runs with the stream
current that was so in its forward, and on other devices the default stream is. A gradient on the
device of both its producer and its consumer is waited for by the consumer's stream. One that only
shares the producer's device is waited for by the default stream there; of one that only shares the
consumer's, the consumer's stream waits for the default stream there. What the engine adds up by
itself it adds up on those; and memory that a gradient gave back is nobody's before they are done.
So engine "device" has it. With "direct" a consumer's stream waits for the one that the gradient was
made on, wherever they are, and sums are made on streams of the engine's own; with "node" it waits
for the stream of the producer's node instead; with "blind" the engine orders nothing between
devices. Moves are ordered as the verbs promise (csrc/transport.h), and no more."""

import functools
import itertools

import torch
from pretended_gpus import Stream
from torch.multiprocessing.reductions import StorageWeakRef

from fastdp import copies, functions, moves
from fastdp.buckets import Bucket

NODES = [getattr(functions, name) for name in "Scatter Gather Broadcast Land Reduce".split()]
NODES += [copies.Copies, copies.Sum]


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

    def __init__(self, storage, pool, place):
        self.weak = StorageWeakRef(storage)
        self.pool = pool  # the stream whose memory it is; None: it was there before
        self.accesses = []
        self.recorded = []  # streams that the engine told the allocator of
        self.ready = None  # of a gradient: (place of its producer, the clock of that one's stream)
        self.place = place  # the number of the GPU that it lies on


class Orders:
    def __init__(self, gpus, monkeypatch, engine="device"):
        self.engine = engine
        self.gpus, self.devices, self.places = gpus, gpus.devices, gpus.places
        self.home = self.output = gpus.places[0]  # where outputs are joined may be another
        self.target = None  # where what a node's backward joins goes
        self.reports = []
        self.blocks = {}
        self.freed = {}  # of each pool, the accesses to what was freed
        self._defaults = {device: Stream(f"n{device.index}", device) for device in self.devices}
        for node in NODES:
            self.wrap(node, monkeypatch)
        monkeypatch.setattr(Bucket, "_move", self._bucket_move(Bucket._move))
        monkeypatch.setattr(moves, "scatter", self._scatter(moves.scatter))
        monkeypatch.setattr(moves, "gather", self._gather(moves.gather))
        monkeypatch.setattr(moves, "broadcast", self._broadcast(moves.broadcast))
        monkeypatch.setattr(moves, "reduce", self._reduce(moves.reduce))

    def current(self, place=None):
        return self.gpus.current[self.devices[self.home if place is None else place]]

    def place_of(self, tensor):
        return self._block(tensor, None).place

    def put(self, tensor, place):
        """Says that a tensor of the user's is not at home."""
        self._block(tensor, None).place = place

    def read(self, stream, tensor, what):
        self._access(stream, tensor, False, what)

    def write(self, stream, tensor, what):
        self._access(stream, tensor, True, what)

    def join(self, stream, tensors):
        """The end of a backward: the caller's stream waits for those of the gradients."""
        for tensor in tensors:
            stream.merge(self._block(tensor, None).ready[1])

    def is_made(self, gradient):
        """A gradient that user code made, on the current stream of the output's device."""
        self.is_ready(gradient, self.output)

    def is_ready(self, gradient, place):
        """A gradient, for a backward, on the stream that is current there now."""
        block = self._block(gradient, None)
        block.place = place
        block.ready = place, dict(self.current(place).clock)

    def synchronize(self):
        """The host waits for all that was enqueued."""
        for stream in self.gpus.streams:
            stream.step()
        for stream in self.gpus.streams:
            for other in self.gpus.streams:
                stream.merge(other.clock)

    def _sweep(self):
        for pointer, block in list(self.blocks.items()):
            if block.weak.expired():
                del self.blocks[pointer]
                if block.pool is not None:
                    late = [a for a in block.accesses if not any(map(a.is_before, block.recorded))]
                    self.freed.setdefault(block.pool, []).extend(late)

    def _block(self, tensor, writer):
        self._sweep()
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        block = self.blocks.get(pointer)
        if block is None:
            block = Block(storage, None if writer is None else writer.name, self.home)
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

    def _mover(self, place, what):
        stream = self.current(place)
        if stream in self._defaults.values():
            self.reports.append(f"{what} on {stream.name}, which is no stream of the forward's")
        return stream

    def _spread(self, source, parts, what, ready=None):
        """`ready`: the stream that the source is ready on, if it is not the current one."""
        home = ready or self._mover(self.place_of(source[0]), what)
        streams = [self._mover(self.places[rank], what) for rank, _ in parts]
        for stream in streams:  # all before any work: none waits for another
            stream.merge(home.clock)
        for stream in streams:
            for tensor in source:
                self.read(stream, tensor, what)
        read = [dict(stream.clock) for stream in streams]
        for stream, (rank, part) in zip(streams, parts):
            self.write(stream, part, what)
            self.put(part, self.places[rank])
        for clock in read:
            home.merge(clock)

    def _collect(self, parts, target, what, place=None):
        place = self.home if place is None else place
        home = self._mover(place, what)
        streams = {rank: self._mover(self.places[rank], what) for rank, _ in parts}
        for rank, part in parts:
            self.read(streams[rank], part, what)
        for stream in streams.values():
            home.merge(stream.clock)
        for _, part in parts:
            self.read(home, part, what)
        read = dict(home.clock)
        self.write(home, target, what)
        self.put(target, place)
        for stream in streams.values():
            stream.merge(read)

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
            place = self.output if self.target is None else self.target
            self._collect(list(enumerate(sources)), result, "gather", place)
            return result

        return gather

    def _broadcast(self, plain):
        def broadcast(family, source, devices):
            results = plain(family, source, devices)
            self._spread([source], list(enumerate(results)), "broadcast")
            return results

        return broadcast

    def _reduce(self, plain):
        def reduce(family, sources, device):
            result = plain(family, sources, device)
            self._collect(list(enumerate(sources)), result, "reduce")
            return result

        return reduce

    # --- nodes of autograd ---

    def wrap(self, node, monkeypatch):
        monkeypatch.setattr(node, "forward", staticmethod(self.in_forward(node.forward)))
        monkeypatch.setattr(node, "backward", staticmethod(self.in_backward(node.backward)))

    def in_forward(self, plain):
        @functools.wraps(plain)
        def forward(ctx, *arguments):
            outputs = plain(ctx, *arguments)
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            ctx.orders_stream = self.current(self.place_of(first))
            inputs = [each for each in arguments if isinstance(each, torch.Tensor)]
            ctx.orders_input = self.place_of(inputs[0]) if inputs else self.home
            return outputs

        return forward

    def _receive(self, stream, gradient, place):
        """The engine hands a gradient to a node that runs on the stream. `place`: where it lies if
        the engine added it up itself."""
        block = self._block(gradient, None)
        own = self.devices.index(stream.device)
        # A parcel has no memory that it could be known by.
        ready = getattr(gradient, "orders_ready", None) or block.ready
        if ready is None:
            block.place = place
            adds = stream if place == own else self._defaults[self.devices[place]]
            if self.engine == "direct":
                adds = Stream(f"e{len(self.gpus.streams)}", self.devices[place])
            for each in (*self.gpus.streams, self._defaults[self.devices[place]]):
                is_there = each.device == self.devices[place]
                if is_there and each.name[0] != "s":  # none of user code's
                    adds.merge(each.clock)
            self.write(adds, gradient, "a sum of the engine's")
            block.recorded.append(adds)
            if self.engine == "direct":
                stream.merge(adds.clock)
            return
        place = getattr(gradient, "orders_place", block.place)
        default = self._defaults[self.devices[place]]
        if self.engine in ("direct", "node") or place == own == ready[0]:
            stream.merge(ready[1])
            block.recorded.append(stream)
        elif place == own and self.engine == "device":
            stream.merge(default.clock)
            block.recorded.append(stream)
        elif self.engine == "device":
            default.merge(ready[1])
            block.recorded.append(default)

    def in_backward(self, plain):
        kind = plain.__qualname__.partition(".")[0]

        def place_of(ctx, index, own):
            """Where a gradient of that index lies."""
            if kind in ("Scatter", "Copies"):
                return self.places[index]
            if kind == "Broadcast" and not ctx.linked:
                rank = index // ctx.bucket.count
                return self.places[rank] if rank < len(ctx.bucket.devices) else own
            return own

        @functools.wraps(plain)
        def backward(ctx, *gradients):
            stream = ctx.orders_stream
            own = self.devices.index(stream.device)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self._receive(stream, gradient, place_of(ctx, index, own))
            outer = dict(self.gpus.current), self.gpus.node, self.target
            self.gpus.current.update({**self._defaults, stream.device: stream})
            self.gpus.node, self.target = stream.device, ctx.orders_input
            try:
                outputs = plain(ctx, *gradients)
            finally:
                self.gpus.current.update(outer[0])
                self.gpus.node, self.target = outer[1:]
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, torch.Tensor):
                    block = self._block(output, None)
                    is_there = output.numel() == 0 or block.place == own
                    other = self._defaults[self.devices[block.place]]
                    maker = stream if is_there or self.engine == "node" else other
                    ready = block.ready = own, dict(maker.clock)
                    if output.numel() == 0:
                        output.orders_ready, output.orders_place = ready, own
            return outputs

        return backward

    def aside(self, place, act):
        """act() on a side stream of the replica's device, before and after which it is waited for,
        as user code does."""
        own = self.current(place)
        side = Stream(f"u{len(self.gpus.streams)}", self.devices[place])
        self.gpus.streams.append(side)
        side.merge(own.clock)
        self.gpus.current[self.devices[place]] = side
        try:
            return act()
        finally:
            self.gpus.current[self.devices[place]] = own
            own.merge(side.clock)

    def other_streams(self, count=itertools.count()):
        """Makes other streams current, as a user may; what they do on home comes after what was
        done there before."""
        number = next(count)
        for device in self.devices:
            stream = Stream(f"d{number}.{device.index}", device)
            if device == self.gpus.home:
                stream.merge(self.gpus.current[device].clock)
            self.gpus.streams.append(stream)
            self.gpus.current[device] = stream
