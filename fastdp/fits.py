"""Whether a step fits into the devices' memory, before it is run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Hashable, NamedTuple, Optional, Sequence, Tuple

import torch

from .apply import apply_modules
from .buckets import find_transport
from .cuts import replaced_scatter, scatter_call
from .devices import parse_device, parse_devices
from .diagnosis import size_text
from .engine_choice import forked_generators, own_method
from .environment import DEFAULT_BUCKET_BYTES
from .marks import unmarked
from .memory import devices_of, gradients_of, held_by, scratch_bytes, usage
from .optimizer_state import missing_bytes
from .placement import tensors_of
from .probes import CUDA_GRAIN_BYTES, Probes, ever_allocated
from .rehearsal import Part, Place, Step, Taken, map_tensors, rehearse
from .replicas import Replicator
from .scattered import Scattered
from .streams import distinct

MODES = ("train", "eval")

# Where what has a shape but no memory lies.
_NOWHERE = torch.device("meta")

# One in so many bytes is left for what torch's allocator cannot use, and for an estimate's error.
_MARGIN = 10

# As the core has it (csrc/limits.h): pools keep so many buffers of a size, one where they are
# large; from the third size on more than two GPUs broadcast a bucket in shards.
_POOL_DEPTH = 3
_POOL_DEEP_BYTES = 64 * 2**20
_SHARDED_BYTES = 512 * 2**10

Bytes = Dict[torch.device, int]


class DeviceFit(NamedTuple):
    """Of one device, in bytes."""

    held_bytes: int  # allocated now: on a GPU by torch in this process, on the host by the module
    optimizer_bytes: int  # state that the optimizer's first step will add
    step_bytes: int  # what the step takes at its peak, beyond these
    scratch_bytes: int  # what the core's scratch pools will take beyond what they have
    free_bytes: Optional[int]  # what can be taken now; None where the system does not tell

    @property
    def peak_bytes(self) -> int:
        """What will be allocated at the peak: on a GPU the later max_memory_allocated."""
        return self.held_bytes + self.optimizer_bytes + self.step_bytes

    @property
    def needed_bytes(self) -> int:
        """What has to be free now."""
        return self.optimizer_bytes + self.step_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool:
        """Whether that, and a tenth more, is free."""
        needed_bytes = self.needed_bytes + self.needed_bytes // _MARGIN
        return self.free_bytes is None or needed_bytes <= self.free_bytes


class Fit:
    """What `DataParallel.fits` found. True if the step fits; prints as text.

    - `fits`: whether it fits on every device, with a tenth to spare.
    - `devices`: a `DeviceFit` by device, such as "cuda:0".
    - `mode`: "train" or "eval".
    """

    def __init__(self, mode: str, devices: Dict[str, DeviceFit]) -> None:
        self.mode = mode
        self.devices = devices

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.devices.values())

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        kind = "a training step" if self.mode == "train" else "a forward without gradients"
        lines = [f"{kind} {'fits' if self.fits else 'does not fit'}"]
        for name, row in self.devices.items():
            free = "unknown" if row.free_bytes is None else size_text(row.free_bytes)
            lines.append(
                f"{name}: {size_text(row.peak_bytes)} at the peak, of them "
                f"{size_text(row.step_bytes)} for the step; {size_text(row.needed_bytes)} are "
                f"needed, {free} free{'' if row.fits else ': too little'}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Fit({self.mode!r}, {self.devices!r})"


def make_fit(
    wrapper: Any, inputs: Tuple[Any, ...], kwargs: Dict[str, Any], mode: str, optimizer: Any
) -> Fit:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: it must be one of {', '.join(MODES)}")
    train = mode == "train"
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    if runtime is not None:
        runtime.replicator.release()  # else they would count beside what takes their place
    state = {} if optimizer is None else missing_bytes(optimizer)
    devices = devices_of(wrapper)
    with forked_generators(devices):
        probes = Probes(_ready_libraries(wrapper))
        taken = _taken(wrapper, inputs, kwargs, train, probes)
    present = scratch_bytes()
    scratch = _scratch(wrapper)
    own = held_by([*tensors_of(wrapper.module), *gradients_of(wrapper.module)])
    rows = {}
    for device in devices:
        now = usage(device)
        allocated = now["allocated"]
        rows[str(device)] = DeviceFit(
            own.get(device, 0) if allocated is None else allocated,
            state.get(device, 0),
            taken.get(device, 0),
            max(0, scratch.get(device, 0) - present.get(device, 0)),
            now["free"],
        )
    return Fit(mode, rows)


# The step


def _taken(
    wrapper: Any, inputs: Any, kwargs: Any, train: bool, probes: Probes
) -> Bytes:
    """What the step takes of each device at its peak."""
    if not wrapper.device_ids:
        return _taken_directly(wrapper, unmarked(inputs), unmarked(kwargs), train, probes)
    devices = parse_devices(wrapper.device_ids, "device_ids")
    with torch.set_grad_enabled(train):
        rows, named = _cut(wrapper, inputs, kwargs)
    if not rows and not named:
        rows, named = ((),), ({},)  # as a forward without arguments runs: once
    ranks = len(rows)
    single = len(devices) == 1
    replicator = wrapper._fastdp_get_runtime().replicator
    plan = None
    if not single:
        with torch.set_grad_enabled(train):
            plan = replicator.plan_for(ranks, train)
    joined = wrapper._fastdp_gather_outputs and not single
    in_turn = wrapper._fastdp_sequential
    step = _step_of(replicator, plan, train, joined, in_turn, probes)
    output_device = parse_device(wrapper.output_device, "output_device")
    gradients = _gradient_bytes(wrapper, plan) if train else 0
    found: Bytes = {}
    outputs_bytes = 0
    known: Dict[Hashable, Taken] = {}
    # The device that joins the outputs comes last: what the others give is to be known by then.
    for device in sorted(dict.fromkeys(devices[:ranks]), key=lambda each: each == output_device):
        joins = joined and device == output_device
        parts = [Part(r, rows[r], named[r]) for r in range(ranks) if devices[r] == device]
        look = [(_look_of(part.row), _look_of(part.named)) for part in parts]
        key = device.type, joins, parts[0].rank == 0, tuple(look)
        if key not in known:
            place = Place(device, parts, True, outputs_bytes if joins else None)
            known[key] = rehearse(step, place)
        taken = known[key]
        outputs_bytes += taken.output_bytes
        found[device] = taken.peak_bytes + gradients * len(parts)
    if joined and output_device not in found:
        found[output_device] = outputs_bytes
    return found


def _taken_directly(
    wrapper: Any, inputs: Any, kwargs: Any, train: bool, probes: Probes
) -> Bytes:
    """Where the module is called with the arguments as they are."""
    device = devices_of(wrapper)[0]
    replicator = Replicator(wrapper.module, (device,), DEFAULT_BUCKET_BYTES, "zero")
    step = _step_of(replicator, None, train, False, True, probes)
    place = Place(device, [Part(0, inputs, kwargs)], False, None)
    return {device: rehearse(step, place).peak_bytes}


def _step_of(
    replicator: Replicator, plan: Any, train: bool, joined: bool, in_turn: bool, probes: Probes
) -> Step:
    parameters, buffers = replicator.tensors()
    tensors, count = parameters + buffers, len(parameters)
    return Step(replicator.dressed, plan, tensors, count, train, joined, in_turn, probes)


def _cut(wrapper: Any, inputs: Any, kwargs: Any) -> Tuple[Sequence[Any], Sequence[Any]]:
    """The arguments of each replica, cut as a forward would, but without memory, of which they may
    need more than the host has; and without a word about what may be a mistake, which is the
    forward's to say. A scatter of the user's has what a forward gives it, since it may look at
    values, or speak to torch's own."""
    ids, dim, rules = wrapper.device_ids, wrapper.dim, wrapper._fastdp_rules()
    if own_method(wrapper, "scatter"):
        rows, named = wrapper.scatter(inputs, kwargs, ids)
    elif replaced_scatter() is not None:
        devices = parse_devices(ids, "device_ids")
        rows, named = scatter_call(inputs, kwargs, devices, dim, rules)
    else:
        inputs, kwargs = map_tensors(inputs, _without_memory), map_tensors(kwargs, _without_memory)
        return scatter_call(inputs, kwargs, (_NOWHERE,) * len(ids), dim, rules)
    return map_tensors(rows, _without_memory), map_tensors(named, _without_memory)


def _without_memory(tensor: Any) -> Any:
    if isinstance(tensor, Scattered):
        parts = [_without_memory(part) for part in tensor.slices]
        return Scattered(parts, tensor.cut_dim)
    if tensor.layout != torch.strided:
        return tensor
    shape, strides = tensor.shape, tensor.stride()
    empty = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=_NOWHERE)
    return empty.requires_grad_(tensor.requires_grad)


def _look_of(tree: Any) -> Hashable:
    """What replicas with equal arguments have in common."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.requires_grad
    if isinstance(tree, (tuple, list)):
        return tuple(map(_look_of, tree))
    if isinstance(tree, dict):
        return tuple((id(key), _look_of(value)) for key, value in tree.items())
    return id(tree)


def _gradient_bytes(wrapper: Any, plan: Any) -> int:
    """What a recorded step keeps of each replica besides: its gradients, packed or as they were
    made."""
    if wrapper._fastdp_engine == "eager" or plan is None:
        return 0
    buckets = [bucket for bucket in plan.buckets if bucket.requires_grad]
    return sum(bucket.core.size_bytes for bucket in buckets)


# Beside the step


def _scratch(wrapper: Any) -> Bytes:
    """What the core's pools will hold on each GPU for moves of buckets between several."""
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    plan = None if runtime is None else runtime.replicator.plan_in_use()
    if plan is None or not plan.buckets:
        return {}
    ranks = parse_devices(wrapper.device_ids, "device_ids")[: len(plan.buckets[0].devices)]
    gpus = distinct(ranks)
    if len(gpus) < 2:
        return {}
    try:
        transport = find_transport(ranks, wrapper._fastdp_transport)[0]
    except NotImplementedError:
        return {}  # the step itself will say so
    # Each rank's gradients are brought together where it is, and by way of the host also at home.
    at_once = {gpu: ranks.count(gpu) for gpu in gpus}
    at_once[gpus[0]] = len(ranks) - ranks.count(gpus[0]) if transport == "host" else 1
    depth = _POOL_DEPTH if transport == "peer" else 1
    held = dict.fromkeys(gpus, 0)
    for size_bytes, count in Counter(bucket.core.size_bytes for bucket in plan.buckets).items():
        for gpu in gpus:
            held[gpu] += _buffers_bytes(size_bytes, min(count, depth), at_once[gpu])
        if transport == "peer" and len(gpus) > 2 and size_bytes >= _SHARDED_BYTES:
            shard_bytes = -(-size_bytes // (len(gpus) - 1))
            for gpu in gpus[1:]:
                held[gpu] += _buffers_bytes(shard_bytes, min(count, depth), 1)
    return held


def _buffers_bytes(size_bytes: int, count: int, at_once: int) -> int:
    """What so many buffers of a size take, if that many have to be there at once."""
    class_bytes = _class_bytes(size_bytes)
    return class_bytes * max(at_once, 1 if class_bytes > _POOL_DEEP_BYTES else count)


def _class_bytes(size_bytes: int) -> int:
    """As csrc/pool.c rounds up: four classes to each doubling."""
    octave = 512
    while octave * 2 <= size_bytes:
        octave *= 2
    quarter = octave // 4
    return max(octave, -(-size_bytes // quarter) * quarter)


def _draws(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.RNNBase) and module.dropout > 0


def _ready_libraries(wrapper: Any) -> Dict[Any, int]:
    """On GPUs: lets the threads of a step make their handles of cuBLAS, with the workspaces that
    these keep, as its first step would, so that they count as held. Gives what a product with a
    bias takes for as long as it runs."""
    gpus = distinct(devices_of(wrapper))
    if not gpus or not wrapper.device_ids:
        return {}
    devices = parse_devices(wrapper.device_ids, "device_ids")
    with torch.enable_grad(), torch.inference_mode(False):
        layers = [torch.nn.Linear(8, 8, device=device) for device in devices]
        ones = [torch.ones(8, 8, device=device) for device in devices]
        teams = wrapper._fastdp_get_runtime().teams
        sequential = wrapper._fastdp_sequential
        for output in apply_modules(teams, layers, ones, None, devices, sequential):
            output.sum().backward()
        if any(_draws(module) for module in wrapper.module.modules()):
            # torch keeps a recurrent layer's random state for good, from whichever call is the
            # first: that must not be one on fake tensors.
            for device in gpus:
                layer = torch.nn.LSTM(1, 1, 2, dropout=0.5, device=device)
                layer(torch.ones(1, 1, 1, device=device))
        if devices[0].type != "cuda":
            return {}
        with torch.cuda.device(devices[0]), torch.no_grad():
            layers[0](ones[0])
            before = ever_allocated(devices[0])
            layers[0](ones[0])  # gives less than the least that torch allocates
            taken = ever_allocated(devices[0]) - before
        return {torch.ops.aten.addmm: max(0, taken - CUDA_GRAIN_BYTES)}
