"""What a step costs the host, piece by piece, beside torch's own way: time no GPU can win back.

    python benchmarks/host_cost.py [--repeats 60] [--json] [--check]

All on one thread of compute and on CPU replicas, with tensors so small that bytes do not count.
Each cost is measured in several ways in turn, in CPU time (the hand-off: wall time); the table
gives the median of the rounds, the tenth and ninetieth percentile, and how many times fastdp's
median that is. A row named "floor" is what no way can beat. --check exits 1 when a bar (at the
end) fails.

torch's nn.DataParallel knows no CPU replicas: its Python is run on them with its copies between
devices replaced by copies in host memory (torch_on_host.py).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Tuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: the host alone is measured

import torch
import torch_on_host
from measure import OURS, Bar, Cost, main
from torch import nn

import fastdp
from fastdp import _C, _torch_tensors
from fastdp.environment import DEFAULT_BUCKET_BYTES
from fastdp.replicas import Replicator

CPU = torch.device("cpu")
REPLICAS = 2

BORROW = "borrow of 161 tensors"
REFRESH = "refresh of a replica (151 modules, 161 parameters), and emptying it"
HAND_OFF = "hand-off to a waiting thread and back, on one core"
LINEARS = "1,000 Linears, forward + backward"
TWICE = "floor: the bare module, once for each replica"

BARS = (
    Bar(BORROW, "__dlpack__", 10),
    Bar(REFRESH, "torch's replicate, without its broadcast", 50),
    Bar(HAND_OFF, "queue.SimpleQueue", 1),
    Bar(LINEARS, "torch's nn.DataParallel", 3, beyond=TWICE),
)


# The module tree of torchvision's resnet50: the same modules, names and buffers, few channels.


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, is_first: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if is_first:
            self.downsample = nn.Sequential(
                _convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )
        self.stride = stride


class _ResNet50(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = width
        for i, count in enumerate((3, 4, 6, 3)):
            blocks = []
            for k in range(count):
                stride = 2 if i > 0 and k == 0 else 1
                blocks.append(_Bottleneck(inputs, width << i, stride, k == 0))
                inputs = 4 * (width << i)
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, 10)


def _resnet50() -> nn.Module:
    model = _ResNet50()
    counts = [len(list(each)) for each in (model.modules(), model.parameters(), model.buffers())]
    assert counts == [151, 161, 159], counts
    return model


# The costs.


def empty_call() -> Cost:
    return Cost(
        "empty call",
        {
            OURS: _C.nothing,
            "a Python function": lambda: None,
            "torch.is_grad_enabled()": torch.is_grad_enabled,
        },
    )


def borrow() -> Cost:
    parameters = tuple(_resnet50().parameters())
    detached = [parameter.detach() for parameter in parameters]  # __dlpack__ refuses requires_grad
    return Cost(
        BORROW,
        {
            "floor: data_ptr() of each": lambda: [p.data_ptr() for p in parameters],
            OURS: lambda: _C.borrow(parameters),
            "__dlpack__": lambda: [tensor.__dlpack__() for tensor in detached],
            "torch.from_dlpack": lambda: [torch.from_dlpack(tensor) for tensor in detached],
        },
    )


def _blank(module: nn.Module) -> nn.Module:
    replica = type(module).__new__(type(module))
    replica.__dict__.update(_parameters={}, _buffers={}, _modules={})
    return replica


def refresh() -> Cost:
    """With ready-made copies; torch puts plain tensors where fastdp puts parameters."""
    model = _resnet50()
    modules = tuple(model.modules())
    parameters, buffers = list(model.parameters()), list(model.buffers())
    copies = [parameter.detach().clone() for parameter in parameters]
    buffer_copies = [buffer.clone() for buffer in buffers]
    row = tuple(map(_torch_tensors.as_parameter, copies)), tuple(buffer_copies)
    tree = _C.Tree(modules)
    replica = _C.Replica(tree, tuple(map(_blank, modules)))

    tree.hold(model)
    tree.collect()

    def refresh_and_empty() -> None:
        replica.refresh(*row)
        replica.empty(False)

    def with_checks() -> None:
        """Also what a forward does once for all replicas, before and after."""
        tree.release()
        tree.hold(model)
        if replica.idle():
            replica.empty(False)
        tree.release()
        tree.hold(model)
        tree.collect()
        replica.refresh(*row)
        replica.settle()

    replicated = torch_on_host.replicate_without_broadcast(
        {id(parameters[0]): copies, id(buffers[0]): buffer_copies}
    )
    return Cost(
        REFRESH,
        {
            OURS: refresh_and_empty,
            "fastdp, with what a forward does once for all replicas": with_checks,
            "torch's replicate, without its broadcast": lambda: replicated(model, [0]),
            "copying 151 attribute dictionaries": lambda: [m.__dict__.copy() for m in modules],
        },
        end=tree.release,
    )


def replicate() -> Cost:
    model = _resnet50()
    replicator = Replicator(model, [CPU] * REPLICAS, DEFAULT_BUCKET_BYTES, "zero")

    def ours() -> None:
        replicator.give_back(replicator.take(REPLICAS, False)[1])

    def torchs() -> None:
        torch_on_host.replicate(model, list(range(REPLICAS)))

    return Cost(
        "two replicas of it, with their copies", {OURS: ours, "torch's replicate": torchs}
    )


def read() -> Cost:
    """In a replica on a GPU whose stream has waited for the bucket; the stream is pretended."""
    plain, replica = nn.Linear(4, 4), nn.Linear(4, 4)
    gate = _C.Gate(0, lambda event: None, lambda index: 0)
    gate.close([None])
    awaited = _C.AwaitedDict(gate)
    awaited.update(replica._parameters)
    awaited.bucket, replica._parameters = 0, awaited
    ways = {"floor: of a plain module": lambda: plain.weight, OURS: lambda: replica.weight}
    rival = {"nn.Module.get_parameter": lambda: plain.get_parameter("weight")}
    return Cost("read of an awaited parameter", ways | rival)


def slots() -> Cost:
    """Of a flat buffer as parameters, by torch's own methods: as on GPUs."""
    parameters = tuple(_resnet50().parameters())
    bucket = _C.Bucket(parameters)
    flat = torch.empty(bucket.size_elems)
    kinds, shapes = (nn.Parameter,) * len(parameters), bucket.slots

    def one_by_one() -> None:
        for offset, shape, strides in shapes:
            flat.as_strided(shape, strides, offset).data.__class__ = nn.Parameter

    ways = {OURS: lambda: _C.become(bucket.split(flat), kinds)}
    ways["as_strided(), .data, a class"] = one_by_one
    return Cost("161 slots of a flat buffer", ways)


def _broadcasts() -> Tuple[List[torch.Tensor], Dict[str, Callable[[], Any]]]:
    """The Broadcast node of 161 parameters to two replicas: by fastdp, by torch. Each gives the
    copies, replica by replica."""
    parameters = list(_resnet50().parameters())
    module = nn.ParameterList(parameters)
    replicator = Replicator(module, [CPU] * REPLICAS, DEFAULT_BUCKET_BYTES, "zero")
    replicator.give_back(replicator.take(REPLICAS, False)[1])
    (plan,) = replicator._plans.values()

    def ours() -> Any:
        rows, _ = plan.copies(tuple(parameters), True)
        return [copy for copies, _ in rows for copy in copies]

    def torchs() -> Any:
        return torch_on_host.Broadcast.apply(list(range(REPLICAS)), *parameters)

    return parameters, {OURS: ours, "torch's Broadcast": torchs}


def broadcast_forward() -> Cost:
    parameters, ways = _broadcasts()
    flat = torch.cat([parameter.detach().view(-1) for parameter in parameters])
    return Cost(
        "Broadcast node of 161 parameters to two replicas, forward",
        {"floor: one copy of the bytes": flat.clone, **ways},
    )


def broadcast_backward() -> Cost:
    """The engine's own cost of 322 roots and 161 results is in both."""
    parameters, ways = _broadcasts()
    gradients = [torch.ones_like(parameter) for parameter in parameters] * REPLICAS

    def backward_of(outputs: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(outputs, parameters, gradients, retain_graph=True)

    flat = torch.cat([parameter.detach().view(-1) for parameter in parameters])
    return Cost(
        "the same, backward",
        {
            "floor: one sum of the bytes": lambda: flat + flat,
            **{way: backward_of(make()) for way, make in ways.items()},
        },
    )


def _echo(take: Callable[[], Any], put: Callable[[Any], Any]) -> threading.Thread:
    """A thread that gives back what it takes, until that is None."""

    def serve() -> None:
        while (item := take()) is not None:
            put(item)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def hand_off() -> Cost:
    """On one core: between two, most of the time is what an idle core takes to wake up, some 30 us,
    whoever wakes it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # this thread, and those that it starts
    to, back = _C.Handoff(), _C.Handoff()
    to_queue, back_queue = queue.SimpleQueue(), queue.SimpleQueue()
    threads = [
        _echo(lambda: to.take(-1.0), back.put),
        _echo(to_queue.get, back_queue.put),
    ]
    pool = ThreadPoolExecutor(1)

    def by_hand_off() -> None:
        to.put(True)
        back.take(-1.0)

    def by_queue() -> None:
        to_queue.put(True)
        back_queue.get()

    def by_new_thread() -> None:
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join()

    def end() -> None:
        to.put(None)
        to_queue.put(None)
        pool.shutdown()
        for thread in threads:
            thread.join()
        os.sched_setaffinity(0, cores)

    return Cost(
        HAND_OFF,
        {
            OURS: by_hand_off,
            "queue.SimpleQueue": by_queue,
            "ThreadPoolExecutor": lambda: pool.submit(bool).result(),
            "a new thread (torch's way)": by_new_thread,
        },
        clock_ns=time.perf_counter_ns,
        end=end,
    )


def _wrapped(name: str, module: nn.Module, features: int) -> Cost:
    """Forward and backward of a module under each wrapper, on two samples, counted over all
    threads: on the host the replicas' Python runs under one GIL, and their backward on one thread,
    so nothing is gained by replicas, and what is beyond the module's own work is the wrapper's."""
    inputs = torch.ones(REPLICAS, features, requires_grad=True)
    gradient = torch.ones(REPLICAS, features)
    leaves = [inputs, *module.parameters()]

    def step_of(model: nn.Module) -> Callable[[], Any]:
        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            model(inputs).backward(gradient)

        return step

    def once_per_replica() -> None:
        for k in range(REPLICAS):
            for leaf in leaves:
                leaf.grad = None
            module(inputs[k : k + 1]).backward(gradient[k : k + 1])

    ours = fastdp.DataParallel(module, device_ids=["cpu"] * REPLICAS)
    torchs = torch_on_host.DataParallel(module, device_ids=list(range(REPLICAS)))
    return Cost(
        name,
        {
            "the bare module": step_of(module),
            TWICE: once_per_replica,
            OURS: step_of(ours),
            "torch's nn.DataParallel": step_of(torchs),
        },
        clock_ns=time.process_time_ns,
    )


def empty_wrapper() -> Cost:
    return _wrapped("Identity, forward + backward", nn.Identity(), 4)


def one_linear() -> Cost:
    return _wrapped("one Linear, forward + backward", nn.Linear(4, 4), 4)


def many_linears() -> Cost:
    return _wrapped(LINEARS, nn.Sequential(*(nn.Linear(4, 4) for _ in range(1000))), 4)


COSTS = (
    empty_call,
    borrow,
    refresh,
    read,
    replicate,
    slots,
    broadcast_forward,
    broadcast_backward,
    hand_off,
    empty_wrapper,
    one_linear,
    many_linears,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(__doc__, COSTS, BARS))
