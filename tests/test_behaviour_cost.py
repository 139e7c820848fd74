"""BEHAVIOUR J: what a call costs, counted instead of timed: Python calls, core calls, nodes,
objects, threads. (Times are measured by benchmarks/.)"""

import sys
import threading
import warnings

import pytest
import torch
from nets import Apply, ints, linear, same
from torch import nn
from torch_features import HAS_TABLE, needs_exchange_table

import fastdp
from fastdp import _C

row = pytest.mark.row


def calls_during(work):
    """Calls of Python functions on this thread while work() runs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def tiny(layers):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).double()


def replicate_calls(impl, layers):
    """Calls of one forward beyond those that the module's own forward makes, in steady state."""
    module = tiny(layers)
    dp, x = impl.wrap(module, 2), ints(2, 4)
    with torch.no_grad():
        for _ in range(3):
            dp(x)
        return calls_during(lambda: dp(x)) - calls_during(lambda: module(x.to(impl.home)))


@row("J1")
@needs_exchange_table
def test_a_parameter_costs_at_most_one_call_and_a_module_none(fast):
    """torch's own rebuilds every module at every call."""
    few, many = replicate_calls(fast, 5), replicate_calls(fast, 100)
    assert many - few <= 95 * 2 + 50, f"{few} calls for 5 layers, {many} for 100"


@row("J1")
@needs_exchange_table
def test_torchs_own_makes_ten_times_as_many_calls(impl):
    """That the count shows it: some hundred calls for each layer."""
    calls = replicate_calls(impl, 100)
    assert calls > 5000 if impl.is_oracle else calls < 500


@row("J1")
def test_many_tiny_parameters_travel_in_one_copy(fast):
    """200 parameters: one broadcast forward, one reduction back, whatever their number."""
    module = tiny(100)
    dp, x = fast.wrap(module, 2), ints(4, 4)
    dp(x).sum().backward()
    before = _C.counters()
    dp(x).sum().backward()
    after = _C.counters()
    grown = {verb: after[verb]["calls"] - before.get(verb, {"calls": 0})["calls"] for verb in after}
    assert grown["bucket_broadcast"] == grown["bucket_reduce"] == 1, grown


@row("J1")
def test_the_gradient_of_many_parameters_is_one_node(fast):
    """The graph's fan-in is one node for the bucket, not one for each parameter."""
    module = tiny(100)
    output = fast.wrap(module, 2)(ints(4, 4))  # kept: it keeps the graph
    nodes, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo.extend(below for below, _ in node.next_functions)
    names = [node.name() for node in nodes]
    assert sum("Broadcast" in name for name in names) == 1, sorted(set(names))
    assert sum("AccumulateGrad" in name for name in names) == 200


@row("J2")
def test_an_empty_model_costs_few_calls(fast):
    """What there is beside the replicas' own forward: today some 70 calls for each replica, and on
    GPUs some 60 more in all, for streams."""
    x = ints(4, 4)
    costs = []
    for n in (2, 4):
        dp = fast.wrap(nn.Identity(), n)
        for _ in range(3):
            dp(x)
        costs.append(calls_during(lambda dp=dp: dp(x)))
    bound = 300 if fast.home.type == "cpu" else 400
    bound += 0 if HAS_TABLE else 20  # an older torch's grad modes and default device
    assert costs[0] < bound and costs[1] - costs[0] < 100, costs


@row("J4")
def test_the_second_call_makes_nothing_new(fast):
    """Threads, replicas and plans are made at the first call that needs them, and kept."""
    seen = []
    module = Apply(lambda s, x: seen.append((id(s), threading.get_ident())) or s.lin(x))
    before = threading.active_count()
    dp = fast.wrap(module, 3)
    assert threading.active_count() <= before
    dp(ints(6, 3)).sum().backward()
    threads, first = threading.active_count(), set(seen)
    assert threads <= before + 2
    for _ in range(3):
        seen.clear()
        dp(ints(6, 3)).sum().backward()
        assert set(seen) == first and threading.active_count() <= threads


@row("J4")
def test_nothing_is_made_before_the_first_call(fast):
    """No replica, no thread, no plan; the first call is right at once."""
    made, module = [], linear()

    class Told(type(module)):
        def __new__(cls, *args, **kwargs):
            made.append(cls)
            return super().__new__(cls)

    module.__class__ = Told
    dp = fast.wrap(module, 2)
    dp.state_dict(), list(dp.parameters()), repr(dp), dp.train()
    assert not made
    same(dp(ints(5, 3)), linear()(ints(5, 3)))
    assert len(made) == 2
    dp(ints(5, 3))
    assert len(made) == 2


@row("J2")
@pytest.mark.parametrize("n", [2, 3])
def test_replicas_are_inside_their_forwards_at_once(impl, n):
    """Each waits until all are in: one after the other they would never come together."""
    barrier = threading.Barrier(n, timeout=20)
    seen = []

    def forward(self, x):
        barrier.wait()
        seen.append(threading.get_ident())
        return self.lin(x)

    impl.wrap(Apply(forward), n)(ints(2 * n, 3))
    assert len(set(seen)) == n


# Devices that stay idle.


@row("J6")
def test_idle_replicas_are_told_of_once(fast):
    dp = fast.wrap(linear(), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (4, 2, 2, 1):
            same(dp(ints(rows, 3)), linear()(ints(rows, 3)))
    # Others may be of what earlier tests had left, such as files that are closed only now.
    [warning] = [each for each in caught if each.category is fastdp.DataParallelWarning]
    assert warning.filename == __file__
    assert "a batch of 2 gave work to 2 of 4 replicas only" in str(warning.message)


@row("J6")
def test_no_word_where_all_work_and_a_filter_silences_it(fast):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp = fast.wrap(linear(), 4)
        dp(ints(4, 3))
        dp(ints(7, 3))
        warnings.filterwarnings("ignore", category=fastdp.DataParallelWarning)
        dp(ints(2, 3))
    assert issubclass(fastdp.DataParallelWarning, UserWarning)
