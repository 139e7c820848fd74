"""What a wrapper did so far, and why, as a dictionary that prints as text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Dict, List, Sequence

from . import _C
from .buckets import transport_or_lack
from .compile_report import compile_lines, compile_report
from .devices import parse_devices
from .memory import Memory, make_memory
from .shown import Shown
from .traces import Trace

if TYPE_CHECKING:
    from .fits import Fit


class Report(Shown, Dict[str, Any]):
    """Keys: `devices` (one str per replica), `engine` (as asked for), `transport` (name and reason;
    no name where the one asked for cannot join the devices; None with fewer than two replicas),
    `buckets` (of parameters and buffers, as they travelled with most replicas: one dictionary with
    `tensors`, `bytes` as laid out, `dtype`, `requires_grad` for each), `hidden` (whether their
    moves are on streams beside compute; None before the first forward),
    `forwards` (one dictionary per kind of forward: `engine` now in use, `steps` by each engine,
    `reason` against recording or of the latest eager step, `graph_ms` and `eager_ms` if they were
    timed, `bytes` of memory that the recording holds), `reasons` (each reason against recording,
    once), `compiled` (of compiled replicas, else None: compile_report.py says what is in it)."""

    def __str__(self) -> str:
        devices = ", ".join(self["devices"]) or "none: the module is called directly"
        lines = [f"devices    {devices}", f"engine     {self['engine']}"]
        if self["transport"]:
            name, reason = self["transport"]
            lines.append(f"transport  {name}, since {reason}" if name else f"transport  {reason}")
        if self["hidden"] is not None:
            lines.append(f"buckets    {_buckets_text(self['buckets'], self['hidden'])}")
        lines.extend(compile_lines(self["compiled"]))
        for number, forward in enumerate(self["forwards"]):
            steps = ", ".join(f"{count} {name}" for name, count in forward["steps"].items())
            lines.append(f"forward {number}  {forward['engine']} (steps: {steps})")
            if "bytes" in forward:
                lines.append(f"           holds {forward['bytes'] / 2**20:.1f} MiB")
            if "graph_ms" in forward:
                graph, eager = forward["graph_ms"], forward["eager_ms"]
                lines.append(f"           graph {graph:.2f} ms, eager {eager:.2f} ms per step")
            if "reason" in forward:
                lines.append(f"           {forward['reason']}")
        shown = [forward.get("reason") for forward in self["forwards"]]
        lines.extend(f"not recorded: {r}" for r in self["reasons"] if r not in shown)
        return "\n".join(lines)


def _buckets_text(buckets: Sequence[Dict[str, Any]], hidden: bool) -> str:
    size_bytes = sum(bucket["bytes"] for bucket in buckets)
    count = sum(bucket["tensors"] for bucket in buckets)
    where = "beside compute" if hidden else "in line with compute"
    return f"{len(buckets)} with {count} tensors, {size_bytes / 2**20:.2f} MiB, moved {where}"


def _buckets(plan: Any) -> List[Dict[str, Any]]:
    return [
        {
            "tensors": bucket.count,
            "bytes": bucket.core.size_bytes,
            "dtype": str(bucket.dtype),
            "requires_grad": bucket.requires_grad,
        }
        for bucket in plan.buckets
    ]


def make_report(wrapper: Any) -> Report:
    ids = wrapper.device_ids
    devices: List[Any] = list(parse_devices(ids, "device_ids")) if ids else []
    runtime = wrapper.__dict__.get("_fastdp_runtime")
    forwards, reasons = ([], []) if runtime is None else runtime.reports()
    plan = None if runtime is None else runtime.replicator.plan_in_use()
    return Report(
        devices=[str(device) for device in devices],
        engine=wrapper._fastdp_engine,
        transport=transport_or_lack(devices, wrapper._fastdp_transport),
        buckets=_buckets(plan) if plan else [],
        hidden=plan.communication.apart if plan else None,
        forwards=forwards,
        reasons=reasons,
        compiled=compile_report(wrapper),
    )


class Reporting:
    """The part of `DataParallel` that tells what it does."""

    def report(self) -> Report:
        """What ran so far and why: engine, transport, and for each kind of forward the steps by
        each engine and what stood against recording it. A dictionary that prints as text."""
        return make_report(self)

    def memory(self) -> Memory:
        """What this wrapper holds on each of its devices, and what is free there, in bytes: a
        dictionary by device that prints as a table. `fastdp.memory.Memory` says what each entry is.
        Reading it waits for no GPU."""
        return make_memory(self)

    def fits(
        self, *inputs: Any, mode: str = "train", optimizer: Any = None, **kwargs: Any
    ) -> Fit:
        """Whether a step with arguments like these fits into the devices' memory, and how much it
        takes at its peak, without running it.

        Args:
            inputs, kwargs: example arguments, as for a forward. Shapes, dtypes and devices count,
                values do not.
            mode: "train": forward and backward, with the module as in training; "eval": forward
                alone, as in evaluation and without gradients.
            optimizer: the optimizer that is to be used: what its state will take is added, unless
                it is there already. It is not changed.

        Returns:
            A `Fit`: true if the step fits; `fits`, `devices` with an estimate for each; prints as
            text.

        Raises:
            ValueError: another mode. TypeError: something else than an optimizer.
            RuntimeError: a forward that looks at values (`.item()`, a branch on a tensor), or runs
                operators that torch knows no shapes of.
            What a forward raises.

        How: the forward of each kind of replica, and its backward, run once on torch's fake
        tensors, under the caller's autocast. Counted is when each result's memory begins and ends,
        with the memory of the moves acted out beside it: slices of the arguments, copies of the
        parameters, joined outputs, gradients until their bucket is summed, and the sums. The
        backward is taken to run outside of autocast, which lets go of what it has cast.
        Convolutions (on GPUs) and recurrent layers, whose libraries take memory that no shape
        tells of, are run once each, by themselves and on zeros, to see it. On GPUs the threads of
        the step make their cuBLAS handles first, whose workspaces then count. A scatter of your
        own, in a subclass or in the place of torch's, cuts the example as in a forward: its pieces
        lie on the replicas' devices for that time.

        Bound: meant to be within 10 % of torch's peak of allocated memory, of a step whose loss is
        a small function of the outputs. Not in it: a loss outside of the model that keeps tensors
        as large as outputs; what fused operators other than torch's layers of attention take while
        they run; what torch's allocator cannot use for fragmentation, for which a tenth is left
        before `fits` is true. Gradients that are there at the call count as kept. Replicas that
        share a device are taken to run one after another: where their threads overlap, what a
        convolution takes while it runs may be there once for each.
        A step that engine "auto" or "graph" records keeps what is estimated, and each replica's
        gradients, which are added.

        Nothing of the module changes: parameters, gradients, buffers and random numbers stay as
        they are. Its Python runs, on replicas, as in a forward.
        """
        from .fits import make_fit

        return make_fit(self, inputs, kwargs, mode, optimizer)

    def dump(self) -> str:
        """The flight recorder as text: the last operations of fastdp's core in this process, of all
        wrappers, the newest last. One line each: number, verb, bucket, bytes, device, stream, how
        many others took part, how long ago it began, and whether it runs, was enqueued or failed.

        Of a hang, from outside: with FASTDP_DUMP=signal (or both), SIGUSR1 writes the same to the
        standard error. With FASTDP_DUMP=error (or both) it is part of the core's errors. It says
        what the host enqueued, not what a GPU has finished; what a recorded step (engine "graph")
        replays is not in it.
        """
        return _C.dump()

    def trace(self, path: Any) -> Trace:
        """A context around a few steps, which writes what ran on every thread, device and stream to
        a file that Perfetto opens (https://ui.perfetto.dev), and `python -m fastdp report`.

        Args:
            path: of the file, which ends with .json or .json.gz.

        Raises:
            ValueError: another ending. FileNotFoundError: no such folder.
            RuntimeError: another profiler is on, or came in between: torch runs one at a time.

        torch's profiler slows steps down; phases are named as fastdp/phases.py says. If the steps
        raise, no file is written.
        """
        # Not self.report: a subclass may have the name for something else.
        return Trace(path, functools.partial(make_report, self))
