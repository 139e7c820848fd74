"""A replica's thread that fails where no replica runs: before its first job, idle, with a job that
it has not begun. Nobody waits for ever, and the next call has a thread again."""

import threading

import pytest
import torch

from fastdp import _C, workers
from fastdp.thread_state import ThreadState

WAIT_S = 20.0  # at most: what is waited for comes at once, or never


class Failing:
    """Stands in place of what a thread does first; the first thread fails there, once it may."""

    def __init__(self, monkeypatch):
        self.may_fail = threading.Event()
        self.failed = 0
        self.plain = workers.Tracing
        monkeypatch.setattr(workers, "Tracing", self)

    def __call__(self):
        if self.failed == 0:
            self.failed += 1
            assert self.may_fail.wait(WAIT_S)
            raise MemoryError("on demand")
        return self.plain()


@pytest.fixture
def failing(monkeypatch):
    # The thread's own death is what is looked at, not its traceback.
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    return Failing(monkeypatch)


@pytest.fixture
def team(failing):
    team = workers.Team()
    team.grow(1)
    yield team
    team.dismiss()


def job_of(value):
    return workers.Job(lambda: value, 1, torch.device("cpu"), ThreadState())


def waited(job):
    """Waits for the job as its caller does, and fails instead of waiting for ever."""
    found = []

    def wait():
        try:
            found.append(job.wait())
        except Exception as error:
            found.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(WAIT_S)
    assert found, "the job's caller waits for ever"
    return found[0]


def test_a_thread_that_failed_before_a_job_came_is_replaced(failing, team):
    failing.may_fail.set()
    first = team._threads[0]
    first.join(WAIT_S)
    assert not first.is_alive()
    for value in (3, 4):
        job = job_of(value)
        team.start(0, job)
        assert waited(job) is None
        assert job.error is None and job.result == value
    assert failing.failed == 1 and team._threads[0] is not first


def test_a_thread_that_fails_with_a_job_in_its_inbox_gives_it_up(failing, team):
    job = job_of(3)
    team.start(0, job)
    failing.may_fail.set()
    assert waited(job) is None
    assert type(job.error) is MemoryError and str(job.error) == "on demand"
    after = job_of(4)
    team._threads[0].join(WAIT_S)
    team.start(0, after)
    assert waited(after) is None and after.result == 4


def test_an_inbox_whose_thread_is_gone_takes_no_more(failing, team):
    failing.may_fail.set()
    team._threads[0].join(WAIT_S)
    with pytest.raises(_C.AbortedError):
        team._inboxes[0].put(job_of(3))


@pytest.mark.parametrize("error", [None, MemoryError("on demand")], ids=["done", "failed"])
def test_the_last_word_of_a_thread_that_then_ends_is_heard(monkeypatch, error):
    """It comes when the caller has just looked in vain, and before it looks for the thread."""
    monkeypatch.setattr(workers, "_LOOK_S", 0.0)
    job = job_of(3)

    class Ends:
        def is_alive(self):
            job.done.put(True) if error is None else job.give_up(error)
            return False

    job.thread = Ends()
    job.wait()
    assert job.error is error


def test_a_thread_that_is_dismissed_ends_without_a_word(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    team = workers.Team()
    team.grow(2)
    threads = list(team._threads)
    team.dismiss()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads) and said == []


def test_a_thread_that_is_dismissed_ends(failing, team):
    failing.failed = 1
    team.grow(2)
    failing.may_fail.set()
    threads = list(team._threads)
    team.dismiss()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


class Odd(Exception):
    """Wants what its args do not tell, and says the same whatever they are."""

    def __init__(self, code, *, why):
        super().__init__()
        self.code, self.why = code, why

    def __str__(self):
        return "odd"


def test_an_error_that_cannot_be_made_anew_is_still_of_its_class():
    raised = workers.replica_error(Odd(3, why="x"), 1, torch.device("cpu"))
    assert isinstance(raised, Odd) and (raised.code, raised.why) == (3, "x")
    assert str(raised).startswith("Caught Odd in replica 1 on device cpu.\nOriginal ")
