"""A step of the replicas of one device on tensors without memory (torch's fake tensors), to see how
much it would take there. The moves of parameters and gradients are acted out: which memory they
make, and how long they hold what. Nothing of the module is written: replicas run, with parameters
that are fake."""

from __future__ import annotations

import contextlib
import copy
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence

from . import _torch_autograd
from .aside import Stop, run_aside
from .containers import tensors_of, with_items
from .ledger import Ledger
from .marks import Replicated
from .plans import Plan, Tensors
from .probes import Probes
from .scattered import Scattered

# As streams.py holds the gradients of a few buckets whose moves run beside compute.
_HELD_BUCKETS = 3


class Step(NamedTuple):
    """What is acted out. `plan` is None where the module is called directly."""

    dressed: Callable[[Any], List[nn.Module]]  # replicas with given (parameters, buffers)
    plan: Optional[Plan]
    tensors: Tensors  # of the module: parameters, then buffers
    parameter_count: int
    train: bool  # forward and backward, or forward alone
    joined: bool  # whether outputs are gathered
    in_turn: bool  # whether the replicas run on the caller's thread, one after another
    probes: Probes


class Part(NamedTuple):
    """One replica's arguments."""

    rank: int
    row: Any
    named: Any


class Place(NamedTuple):
    """A device and its replicas. `outputs_bytes` is what the other devices' outputs add where this
    one gathers them, None where it does not."""

    device: torch.device
    parts: Sequence[Part]
    copied: bool  # whether the arguments are copies that the step has made
    outputs_bytes: Optional[int]

    @property
    def is_home(self) -> bool:
        return self.parts[0].rank == 0


class Taken(NamedTuple):
    peak_bytes: int  # on the device
    output_bytes: int  # of its replicas


def rehearse(step: Step, place: Place) -> Taken:
    return run_aside(lambda stop: _rehearse(step, place, stop))


def _rehearse(step: Step, place: Place, stop: Stop) -> Taken:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(step.probes, fakes, stop)
    with _settings(step, place.device), fakes:
        own = _fakes_of(step, place.device)
        with ledger:
            ledger.ignore(own)
            try:
                output_bytes = _act(step, place, own, ledger)
            except Exception as error:
                reason = _reason(error)
                if reason is None:
                    raise
                raise RuntimeError(
                    "fits: the forward cannot run without the values of tensors, which an "
                    f"estimate has none of ({reason}): run a step, and read dp.memory()"
                ) from error
    return Taken(ledger.peak.get(place.device, 0), output_bytes)


def _act(step: Step, place: Place, own: Sequence[torch.Tensor], ledger: Ledger) -> int:
    """The order of a step: slices, copies of parameters, forwards, joined outputs, backward.

    The engine takes the nodes with the highest numbers first, and each thread counts its own. Where
    replicas run on threads, the first is the caller's, who counts all else that is done, too: its
    backward comes first, and its gradients wait for those of the others. Acting it out last does
    the same. In turn, on one thread, the last replica's backward comes first."""
    arguments = [
        (_placed(part.row, place, ledger), _placed(part.named, place, ledger))
        for part in place.parts
    ]
    # Nothing but these gets a gradient, whatever else the forward has reached.
    leaves = [each for each in (*own, *tensors_of(arguments)) if each.requires_grad]
    moved = [list(own)] if step.plan is None else _Moves(step.plan, place).copies(own)
    replicas = _replicas(step, moved)
    outputs = []
    for k in range(len(replicas)) if step.in_turn else reversed(range(len(replicas))):
        row, named = arguments[k]
        outputs += tensors_of(replicas[k](*row, **named))
    output_bytes = sum(map(_size_bytes, outputs))
    # Replicas are emptied before outputs are joined; a graph keeps what it needs of them.
    del arguments, moved, replicas, row, named
    joined = None
    if step.joined and place.outputs_bytes is not None:
        joined = _memory(output_bytes + place.outputs_bytes, place.device)
    elif not step.joined:
        joined = outputs  # the caller has them themselves
    wanted = [output for output in outputs if output.requires_grad]
    if step.train and wanted and leaves:
        whole_bytes = joined.numel() if isinstance(joined, torch.Tensor) else 0
        end = _Loss.apply(whole_bytes, *wanted)
        del outputs, wanted
        with _outside_autocast(place.device):
            end.backward(inputs=leaves)
    del joined  # not before: whoever calls the wrapper has a name for the output
    return output_bytes


def _memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


class _Loss(Function):
    """A number made of all outputs. In its backward the gradient of the joined ones is cut."""

    @staticmethod
    def forward(ctx: Any, whole_bytes: int, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.whole_bytes = whole_bytes
        ctx.like = [(o.shape, o.stride(), o.dtype, o.device) for o in outputs]
        return torch.empty((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = _memory(ctx.whole_bytes, gradient.device)
        cut = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in ctx.like
        ]
        del whole
        return (None, *cut)


def _replicas(step: Step, moved: Sequence[Sequence[torch.Tensor]]) -> List[nn.Module]:
    cut = step.parameter_count
    replicas = step.dressed([(tuple(row[:cut]), tuple(row[cut:])) for row in moved])
    for replica in replicas:
        if step.train != replica.training:
            for module in replica.modules():
                module.training = step.train
    return replicas


class _Moves:
    """The moves of parameters and gradients as one device sees them: their memory, nothing else."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.device = place.device
        self.is_home = place.is_home
        self.ranks = [part.rank for part in place.parts]
        self._plan = plan
        self._sums: List[torch.Tensor] = []
        self._retiring: List[Any] = []

    def copies(self, own: Sequence[torch.Tensor]) -> List[List[torch.Tensor]]:
        """Each replica's tensors, in the order of the module's."""
        found = [list(own) for _ in self.ranks]
        for k in self._plan.alone:
            for rank, row in zip(self.ranks, found):
                row[k] = own[k] if rank == 0 else torch.empty_like(own[k])
        for bucket in self._plan.buckets:
            chosen = [own[k] for k in bucket.places]
            if bucket.requires_grad and torch.is_grad_enabled():
                made = _Spread.apply(self, bucket, *chosen)
                _torch_autograd.run_early(made[0].grad_fn)
            else:
                made = self.slots(bucket, chosen)
            rest = iter(made)
            for row in found:
                for k, is_parameter in zip(bucket.places, bucket.parameters):
                    row[k] = next(rest)
                    if is_parameter:
                        row[k]._is_param = True  # as isinstance(..., nn.Parameter) asks
        return found

    def slots(self, bucket: Any, own: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """The bucket's tensors, replica by replica."""
        found: List[torch.Tensor] = []
        for rank in self.ranks:
            if rank == 0:
                found += [tensor.data for tensor in own]
                continue
            flat = torch.empty(bucket.length, dtype=bucket.dtype, device=self.device)
            slots = bucket.core.slots
            found += [flat.as_strided(shape, s, start).data for start, shape, s in slots]
        return tuple(found)

    def reduce(self, bucket: Any, gradients: Any) -> None:
        if self.is_home:
            self._sums.append(torch.empty(bucket.length, dtype=bucket.dtype, device=self.device))
        if self._plan.communication.apart:
            self._retiring = [*self._retiring, gradients][-_HELD_BUCKETS:]


class _Spread(Function):
    """A bucket's broadcast, as one device sees it; its backward is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, moves: _Moves, bucket: Any, *own: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.moves, ctx.bucket, ctx.count = moves, bucket, len(own)
        return moves.slots(bucket, own)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        ctx.moves.reduce(ctx.bucket, gradients)
        return (None,) * (2 + ctx.count)


# Around it


@contextlib.contextmanager
def _settings(step: Step, device: torch.device) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(step.train))
        # All in this thread, and so in the order of a device's own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if torch.is_anomaly_enabled():  # without its look for NaNs
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        if on_gpu:
            stack.enter_context(torch.cuda.device(device))
        try:
            yield
        finally:
            if torch.is_autocast_enabled(device.type):
                torch.clear_autocast_cache()  # of fake tensors


@contextlib.contextmanager
def _outside_autocast(device: torch.device) -> Iterator[None]:
    """As a step leaves autocast before its backward: what was cast of the parameters then belongs
    to the graph alone, which lets go of it layer by layer."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.clear_autocast_cache()
    with torch.autocast(device.type, enabled=False):
        yield


def _fakes_of(step: Step, device: torch.device) -> List[torch.Tensor]:
    """The module's tensors. On another device than the first they stand for the first's, so that
    no edge of the graph crosses devices."""
    found = []
    for k, tensor in enumerate(step.tensors):
        if tensor.layout != torch.strided:
            found.append(tensor)
            continue
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = k < step.parameter_count
        found.append(fake)
    return found


def _placed(tree: Any, place: Place, ledger: Ledger) -> Any:
    """The arguments, as fake tensors on the replica's device."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        device = place.device if place.copied else tensor.device
        shape, strides = tensor.shape, tensor.stride()
        result = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        return result.requires_grad_(tensor.requires_grad)

    if place.copied:
        return map_tensors(tree, fake)
    with _paused(ledger):
        return map_tensors(tree, fake)


@contextlib.contextmanager
def _paused(ledger: Ledger) -> Iterator[None]:
    """What is made meanwhile is there already."""
    ledger.counts = False
    try:
        yield
    finally:
        ledger.counts = True


def map_tensors(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with each tensor changed, and each `Scattered`, wherever a scatter finds them."""
    if isinstance(tree, (torch.Tensor, Scattered)):
        return change(tree)
    if isinstance(tree, Replicated):
        return Replicated(map_tensors(tree.value, change))
    if isinstance(tree, dict):
        changed = copy.copy(tree)
        for key, value in tree.items():
            changed[key] = map_tensors(value, change)
        return changed
    if isinstance(tree, (tuple, list)) and not isinstance(tree, (torch.Size, PackedSequence)):
        return with_items(tree, [map_tensors(item, change) for item in tree])
    return tree


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reason(error: BaseException) -> Optional[str]:
    """What of fake tensors stands behind an error, or None: it is the forward's own."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.UnsupportedFakeTensorException,
    )
    found: Optional[BaseException] = error
    while found is not None:
        if isinstance(found, kinds):
            return f"{type(found).__name__}: {found}{_asker(found)}"
        if str(found).startswith(".numpy() is not supported"):
            return f"a NumPy array of one{_asker(found)}"
        if "NestedTensor" in str(found):  # of what a padding mask leaves
            return "nested tensors; nn.TransformerEncoder with enable_nested_tensor=False has none"
        found = found.__cause__ or found.__context__
    return None


def _asker(error: BaseException) -> str:
    """Whose line it was: the last one outside of what carries operators out."""
    asked = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name == Ledger.__module__:
            break
        if not name.startswith(("torch._compile", "torch._dynamo", "torch._subclasses")):
            code = frame.f_code
            asked = f", in {code.co_name} of {Path(code.co_filename).name}, line {number}"
    return asked
