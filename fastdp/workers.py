"""Threads that run replicas: kept from one forward to the next, one for each replica but the first.

A `Team` is a set of such threads that serves one call at a time. `Teams` lends them out, so that a
call inside a call, or two threads that use one wrapper, never wait for each other, and replica i of
one wrapper stays on one thread (cuDNN keeps its plans per thread). No lock is held while a replica
runs.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import sys
import threading
import time
import traceback
import weakref
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple

from . import _C
from .hints import hint
from .pace import Pace
from .phases import replica_phase
from .signals import is_from_handler
from .thread_state import ThreadState, Tracing, end_casts, restored_defaults


# How often whoever waits for a thread looks whether it is alive.
_LOOK_S = 1.0


class Job:
    """One replica's forward: what to run, where, and afterwards its result or error. It belongs to
    one call; a caller that is interrupted leaves it behind, and nobody waits for it any more."""

    __slots__ = (
        "run", "rank", "device", "state", "result", "error", "done", "turn", "pace", "thread"
    )

    def __init__(
        self, run: Callable[[], Any], rank: int, device: Any, state: Optional[ThreadState]
    ) -> None:
        self.run: Optional[Callable[[], Any]] = run
        self.rank = rank
        self.device = device
        self.state = state
        self.result: Any = None
        self.error: Optional[BaseException] = None
        self.done = _C.Handoff()
        self.turn: Optional[Any] = None  # a hand-off that says: the one before has finished
        self.pace: Optional[Pace] = None
        self.thread: Optional[threading.Thread] = None  # whoever is to run it

    def execute_here(self) -> None:
        """On the caller's own thread. What a signal handler raises goes through at once, and as it
        is: on the main thread of nn.DataParallel it would strike in a wait."""
        try:
            with restored_defaults(), replica_phase(self.rank):
                self.result = self.run()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if is_from_handler(error):
                raise
            self.error = replica_error(error, self.rank, self.device, self.run)
        finally:
            self.run = None

    def execute_on_worker(self) -> None:
        try:
            if self.turn is not None:
                self.pace.await_turn(self.turn)
            with replica_phase(self.rank):
                self.result = self.state.run(self.run)
        except BaseException as error:  # SystemExit too: the caller is to hear of it
            self.error = error  # even if there is no memory left to say more
            self.error = replica_error(error, self.rank, self.device, self.run)
        finally:
            self.run = None
            self.done.put(True)

    def give_up(self, error: BaseException) -> None:
        """What stands around the replica failed: the caller, who waits, is told that."""
        if self.error is None:
            self.error = error
        self.done.close()

    def wait(self) -> None:
        may_come = True
        while True:
            try:
                self.done.take(_LOOK_S if may_come else 0.0)
            except _C.TimeoutError:
                if may_come:  # a thread that is gone may have said its last between both looks
                    may_come = self.thread is None or self.thread.is_alive()
                    continue
                raise RuntimeError(
                    f"the thread of replica {self.rank} ended before the replica's forward"
                ) from None
            except _C.AbortedError:
                if self.error is None:
                    raise
            return


class _Text(str):
    """A KeyError shows the repr of its argument; this one's repr is the text itself."""

    def __repr__(self) -> str:
        return str(self)


def replica_error(error: BaseException, rank: int, device: Any, run: Any = None) -> BaseException:
    """The error that the caller is to see: of the same type, with the replica, its device and the
    original traceback in its text, and the original as `__cause__`. The original's frames are let
    go: they hold the replica's activations. `run` may have the replica as `module`."""
    kind = type(error)
    text = (
        f"Caught {kind.__name__} in replica {rank} on device {device}.\n"
        f"Original {''.join(traceback.format_exception(kind, error, error.__traceback__))}"
        f"{hint(error, getattr(run, 'module', None), device)}"
    )
    raised = _same_type(error, kind, text)
    _forget_frames(error)
    raised.__cause__ = error
    return raised


def _same_type(error: BaseException, kind: type, text: str) -> BaseException:
    """An exception of the type, with the error's attributes, that says `text`."""
    message = _Text(text) if issubclass(kind, KeyError) else text
    raised = (
        _saying(text, error, kind, (message,))
        or _saying(text, error, kind, None)  # a constructor that wants something else
    )
    if raised is None:  # a __str__ that says something else
        attributes = {"__str__": lambda self: text, "__module__": kind.__module__}
        told = type(kind.__name__, (kind,), attributes)
        raised = _saying(text, error, told, error.args) or _saying(text, error, told, None)
    return RuntimeError(text) if raised is None else raised


def _saying(
    text: str, error: BaseException, kind: type, arguments: Optional[Tuple[Any, ...]]
) -> Optional[BaseException]:
    """A `kind` made of the arguments, or past its constructor; None unless it says the text."""
    try:
        raised = _past_constructor(kind, text) if arguments is None else kind(*arguments)
        for name, value in error.__dict__.items():
            raised.__dict__.setdefault(name, value)
        return raised if isinstance(raised, kind) and text in str(raised) else None
    except Exception:
        return None


def _past_constructor(kind: type, text: str) -> BaseException:
    raised = kind.__new__(kind)
    raised.args = (text,)
    return raised


def _forget_frames(error: Optional[BaseException]) -> None:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Team:
    """Threads for the replicas 1, 2, ... of one call at a time."""

    def __init__(self) -> None:
        self._inboxes: List[_C.Handoff] = []
        self._threads: List[Optional[threading.Thread]] = []
        self.pid = os.getpid()

    def grow(self, size: int) -> None:
        while len(self._inboxes) < size:
            self._threads.append(None)
            self._inboxes.append(_C.Handoff())  # first: a thread must not be beyond dismissal
            self._start_thread(len(self._inboxes) - 1)

    def _start_thread(self, index: int) -> None:
        arguments, name = (self._inboxes[index],), f"fastdp-replica-{index + 1}"
        thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self._threads[index] = thread
        thread.start()

    def start(self, index: int, job: Job) -> None:
        job.thread = self._threads[index]
        try:
            self._inboxes[index].put(job)
        except _C.AbortedError:
            # Its thread failed while it had nothing to do: another takes its place.
            self._inboxes[index] = _C.Handoff()
            self._start_thread(index)
            job.thread = self._threads[index]
            self._inboxes[index].put(job)

    def dismiss(self) -> None:
        """The threads end once they have finished what they do now."""
        for inbox in self.__dict__.get("_inboxes", ()):
            inbox.close()

    __del__ = dismiss


# Threads that run a replica, by their identities.
_busy: Set[int] = set()
# How long they are waited for when Python ends.
_EXIT_S = 0.5


def _end_all() -> None:
    """When Python ends, a forward that was interrupted may still run on its threads. One that came
    back from C++ afterwards would find no Python and take the process down (std::terminate): so
    they are told to end, which they do at their next line of Python, and get a moment for it."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for identity in list(_busy):
        raise_in(ctypes.c_ulong(identity), ctypes.py_object(SystemExit))
    ends = time.monotonic() + _EXIT_S
    while _busy and time.monotonic() < ends:
        time.sleep(0.001)


atexit.register(_end_all)


def _serve(inbox: Any) -> None:
    """A worker's life. Whatever fails in it, nobody waits for ever: a job that it has, or that is
    in its inbox, is given up, and an inbox without a thread takes no more."""
    job = None
    try:
        identity = threading.get_ident()
        tracing, forks = Tracing(), _forks
        while forks == _forks:  # else this is a child, forked inside a forward: nobody calls there
            job = None
            job = inbox.take(-1.0)
            tracing.follow()
            _busy.add(identity)
            try:
                job.execute_on_worker()
            finally:
                _busy.discard(identity)
    except BaseException as error:
        inbox.close()
        if job is None:
            try:
                job = inbox.take(0.0)
            except _C.Error:
                return  # dismissed, or its error is the caller's at the next put
        job.give_up(error)


class Teams:
    """Idle teams, lent out one per call."""

    def __init__(self) -> None:
        self._idle: List[Team] = []
        self.pace = Pace()
        _all_teams.add(self)

    def take(self, size: int) -> Team:
        try:
            team = self._idle.pop()
        except IndexError:
            team = Team()
        team.grow(size)
        return team

    def give_back(self, team: Team) -> None:
        if team.pid == os.getpid():
            self._idle.append(team)

    def forget(self) -> None:
        """In a forked child: the threads exist in the parent only."""
        self._idle = []


_all_teams: "weakref.WeakSet[Teams]" = weakref.WeakSet()


# How many forks lie between the first process and this one.
_forks = 0


def _forget_all() -> None:
    global _forks
    _forks += 1
    _busy.clear()
    for teams in list(_all_teams):
        teams.forget()


os.register_at_fork(after_in_child=_forget_all)


def check_threads_run() -> None:
    """Raises RuntimeError where Python ends, in destructors: it has stopped the threads, and one
    that is started then would be waited for for ever."""
    if sys.is_finalizing():
        raise RuntimeError("DataParallel cannot run while Python ends: its threads were stopped")


def threads_are_green() -> bool:
    """Whether what Python takes for threads are greenlets of one thread (gevent, eventlet): one
    that a hand-off waits for would never run. Debuggers replace the function too, by threads."""
    home = str(getattr(_thread.start_new_thread, "__module__", ""))
    return home.startswith(("gevent.", "eventlet."))


def run_jobs(
    teams: Teams,
    runs: Sequence[Callable[[], Any]],
    devices: Sequence[Any],
    sequential: bool = False,
    in_turn: bool = False,
) -> List[Any]:
    """Runs each on a thread of its own, the first on this one, and gives their results; with
    `in_turn` one after the other; with `sequential`, or where threads are no threads, all on this
    one, in order. All finish before the first error, by rank, is raised."""
    if sequential or threads_are_green():
        jobs = _jobs_in_order(runs, devices)
    else:
        jobs = _finished_jobs(teams, runs, devices, in_turn)
    if len(jobs) > 1:
        end_casts()
    error = next((job.error for job in jobs if job.error is not None), None)
    if error is None:
        return [job.result for job in jobs]
    del jobs
    try:
        raise error
    finally:
        del error  # a frame that names its own exception is a cycle


def _jobs_in_order(runs: Sequence[Callable[[], Any]], devices: Sequence[Any]) -> List[Job]:
    jobs = [Job(run, i, device, None) for i, (run, device) in enumerate(zip(runs, devices))]
    for job in jobs:
        job.execute_here()
    return jobs


def _finished_jobs(
    teams: Teams, runs: Sequence[Callable[[], Any]], devices: Sequence[Any], in_turn: bool
) -> List[Job]:
    state = ThreadState() if len(runs) > 1 else None
    jobs = [Job(run, i, device, state) for i, (run, device) in enumerate(zip(runs, devices))]
    if len(jobs) == 1:
        jobs[0].execute_here()
        return jobs
    check_threads_run()
    pace = Pace.unhurried() if in_turn else teams.pace
    turns = _take_turns(pace, jobs) if in_turn or pace.takes_turns(devices) else []
    team = teams.take(len(jobs) - 1)
    try:
        for i, job in enumerate(jobs[1:]):
            team.start(i, job)
        with pace.timed():
            jobs[0].execute_here()
        for i, job in enumerate(jobs[1:]):
            if turns:
                turns[i].put(True)
            job.wait()
    except BaseException:
        # Interrupted: whoever still runs finishes on its own, and its thread then ends.
        for turn in turns:
            turn.close()
        team.dismiss()
        raise
    teams.give_back(team)
    return jobs


def _take_turns(pace: Pace, jobs: Sequence[Job]) -> List[Any]:
    turns = []
    for job in jobs[1:]:
        job.turn, job.pace = _C.Handoff(), pace
        turns.append(job.turn)
    return turns
