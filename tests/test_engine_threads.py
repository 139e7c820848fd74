"""Recorded steps and threads of the user: a recording that another thread lets go, goes backward
through, or is making."""

import threading

import pytest
import torch
from engine_cases import (
    SETTLED,
    WATCHED,
    Recorder,
    Scaled,
    Twins,
    graph_steps,
    identical,
    recorded_twins,
    rows_of_four,
    squares,
    still_fine,
)

from fastdp import engine_entries


def test_a_graph_that_another_thread_is_letting_go_is_waited_for(means, monkeypatch):
    """As autograd's threads do after an error."""
    monkeypatch.setattr(engine_entries, "_PATIENCE_S", 60.0)  # of a machine that is busy
    twins = recorded_twins(means, "graph")
    held = [twins.recorded(rows_of_four(means, 20))]
    thread = threading.Timer(0.02, held.clear)
    thread.start()
    twins.step(rows_of_four(means, 21))
    thread.join()
    still_fine(twins, means)


def test_a_backward_on_another_thread(means):
    twins = recorded_twins(means, "graph")
    for dp in twins.both:
        dp.zero_grad()
        loss = squares(dp(rows_of_four(means, 20)))
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    twins.check_gradients()
    del loss
    still_fine(twins, means)


@pytest.mark.parametrize("means", ["cpu", "cpu-twice"], indirect=True)
def test_nobody_waits_for_a_recording_that_is_made(means):
    """Another thread's forward is an eager step meanwhile."""
    recording, over = threading.Event(), threading.Event()

    class Slow(Recorder):
        def record(self, device, pool, act):
            recording.set()
            assert over.wait(30)
            return super().record(device, pool, act)

    twins = Twins(means, Scaled(), sequential=True)
    dp = twins.recorded
    dp._fastdp_get_runtime().recorder = Slow()
    for seed in range(WATCHED["graph"]):
        twins.look(rows_of_four(means, seed))

    def record():
        with torch.no_grad():
            dp(rows_of_four(means))

    maker = threading.Thread(target=record)
    maker.start()
    try:
        assert recording.wait(30)
        with torch.no_grad():
            identical(dp(rows_of_four(means, 9)), twins.eager(rows_of_four(means, 9)))
        assert maker.is_alive()
    finally:
        over.set()
        maker.join(60)
    assert graph_steps(twins) == 1


def test_two_threads_at_once(means):
    """One of them has the recording, the other an eager step; both have their own numbers."""
    twins = recorded_twins(means, "auto", sequential=True)
    for dp in twins.both:
        dp.module.requires_grad_(False)
    count, errors = 12, []
    places = [(name, k) for name in range(2) for k in range(count)]
    inputs = {(name, k): rows_of_four(means, 100 * name + k) for name, k in places}
    wants = {}
    for place, x in inputs.items():
        leaf = x.clone().requires_grad_()
        output = twins.eager(leaf)
        squares(output).backward()
        wants[place] = output.detach(), leaf.grad
    barrier = threading.Barrier(2)

    def work(name):
        try:
            for k in range(count):
                barrier.wait(30)
                leaf = inputs[name, k].clone().requires_grad_()
                output = twins.recorded(leaf)
                squares(output).backward()
                want, slope = wants[name, k]
                torch.testing.assert_close(output.detach(), want, rtol=0, atol=0)
                torch.testing.assert_close(leaf.grad, slope, rtol=0, atol=0)
                with torch.no_grad():
                    output = twins.recorded(inputs[name, k])
                torch.testing.assert_close(output, want, rtol=0, atol=0)
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not errors, errors
    assert not any(worker.is_alive() for worker in workers)
    assert graph_steps(twins) > SETTLED
