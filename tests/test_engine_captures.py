"""CUDA graphs themselves: captures that fail leave nothing broken behind, streams and memory are as
before, and real clocks choose."""

import gc

import pytest
import torch
from engine_cases import ON_GPUS, SETTLED, TIMED, WATCHED, Twins, identical, noise, reasons
from engine_cases import squares, steps
from nets import Apply
from torch import nn

import fastdp
from fastdp import captures

AHEAD = WATCHED["graph"]

pytestmark = pytest.mark.parametrize("means", ON_GPUS, indirect=True)


def layers(width=8):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()


def rows(means, seed=0, batch=6):
    return noise(means, batch, 4, seed=seed)


def three(x):
    return x[:, :3]


# Captures that fail.


def reads_a_number(module, x):
    y = module.lin(three(x))
    return y * (2 if y.sum().item() > 0 else 3)


def shapes_by_data(module, x):
    y = module.lin(three(x))
    return y * torch.nonzero(y[:, 0] > -1e9).sum()


def synchronizes(module, x):
    y = module.lin(three(x))
    torch.cuda.synchronize()
    return y


def to_the_host(module, x):
    return module.lin(three(x).cpu().to(x.device))


def fails_behind_dropout(module, x):
    y = nn.functional.dropout(module.lin(three(x)), 0.5, True)
    y.sum().item()
    return y


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 if gradient.sum().item() < 1e300 else 0)


def fails_in_backward(module, x):
    return FailsInBackward.apply(module.lin(three(x)))


FAILING = [
    reads_a_number,
    shapes_by_data,
    synchronizes,
    to_the_host,
    fails_behind_dropout,
    fails_in_backward,
]


@pytest.mark.parametrize("function", FAILING, ids=lambda f: f.__name__)
def test_a_capture_that_fails(means, function):
    """The step that met it is right; so are dropout, streams, autocast and memory afterwards; and
    another model is recorded in the same process."""
    twins = Twins(means, Apply(function), "auto", optimizer=False, sequential=True)
    found = []
    for dp in twins.both:
        torch.manual_seed(90)
        outputs = []
        for seed in range(SETTLED + 3):
            dp.zero_grad()
            before = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())]
            outputs.append(dp(rows(means, seed)))
            squares(outputs[-1]).backward()
            outputs.append([p.grad.clone() for p in dp.parameters()])
            outputs.append([torch.cuda.get_rng_state(i) for i in sorted(set(means.ids))])
            after = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())]
            assert before == after
            assert torch.is_autocast_cache_enabled()
            assert torch.cuda.current_device() == 0
            assert not torch.cuda.is_current_stream_capturing()
        found.append(outputs)
    identical(*found)
    twins.ran(eager=SETTLED + 3)
    assert reasons(twins.recorded)
    torch.cuda.synchronize()
    identical(nn.functional.dropout(rows(means), 0.0), rows(means))
    fine = Twins(means, layers())
    for seed in range(AHEAD + 2):
        fine.step(rows(means, seed))
    fine.ran(eager=AHEAD, graph=2)


def dropping(module, x):
    return nn.functional.dropout(module.lin(three(x)), 0.5, module.training)


def test_garbage_with_graphs_in_it(means):
    """What drops a CUDA graph while another is captured breaks it; the collector could do so at
    any allocation."""

    def captured():
        graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device=means.home)
        with torch.cuda.graph(graph):
            x.add(1)
        return graph

    graphs = [captured() for _ in range(100)]

    def litter(module, x):
        if graphs:
            cycle = [graphs.pop()]
            cycle.append(cycle)
            del cycle
        return dropping(module, x) + len([[k] for k in range(100)])

    twins = Twins(means, Apply(litter), optimizer=False, sequential=True)
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        for seed in range(AHEAD + 2):
            for dp in twins.both:
                torch.manual_seed(seed)
                dp.zero_grad()
                squares(dp(rows(means, seed))).backward()
            twins.check_gradients()
    finally:
        gc.set_threshold(*before)
    twins.ran(eager=AHEAD, graph=2)
    assert gc.isenabled()


def test_a_capture_that_breaks_after_its_rehearsal(means, monkeypatch):
    """An interrupt may do that. Random numbers go on as eager ones do, and what was recorded
    earlier, with a generator's state that is gone, is recorded again."""
    twins = Twins(means, Apply(dropping), optimizer=False, sequential=True)
    plain = captures.CudaRecorder.record

    def broken(self, device, pool, act):
        def act_and_break():
            act()
            torch.cuda.synchronize(device)

        return plain(self, device, pool, act if self._rehearsing else act_and_break)

    found = []
    for dp in twins.both:
        torch.manual_seed(91)
        outputs = []
        for seed in range(AHEAD + 2):
            outputs.append(dp(rows(means, seed)).detach())
        other = means.wrap(Apply(dropping), "auto", sequential=True)
        with monkeypatch.context() as patched:
            patched.setattr(captures.CudaRecorder, "record", broken)
            for seed in range(SETTLED + 1):
                outputs.append(other(rows(means, seed)).detach())
        assert reasons(other) and steps(other)["graph"] == 0
        for seed in range(2 * AHEAD + 2):
            outputs.append(dp(rows(means, seed)).detach())
            outputs.append(torch.rand(3, device=means.home))
        found.append(outputs)
    identical(*found)
    assert steps(twins.recorded)["graph"] >= 4
    torch.cuda.synchronize()


def test_a_capture_that_fails_is_an_error_where_one_insists(means):
    dp = means.wrap(Apply(reads_a_number))
    with pytest.raises(fastdp.EngineError, match="the forward is not recorded: "):
        for _ in range(AHEAD + 1):
            dp(rows(means))
    dp.engine = "eager"
    plain = means.wrap(Apply(reads_a_number), "eager")
    identical(dp(rows(means)), plain(rows(means)))


def test_failures_do_not_pile_up_memory(means):
    """Each of many shapes fails in its capture."""

    def memory():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(0)

    dp = means.wrap(Apply(reads_a_number), "auto")
    sizes = range(6, 18)
    marks = []
    for batch in sizes:
        for seed in range(WATCHED["auto"] + 1):
            dp(rows(means, seed, batch)).sum().backward()
        dp.zero_grad()
        marks.append(memory())
    assert marks[-1] - marks[3] < 1 << 20


# Streams.


@pytest.mark.parametrize("seconds", [0, 1])
def test_steps_on_a_stream_of_the_users(means, seconds):
    """Ordered behind what was enqueued there, and before what follows."""
    stream = torch.cuda.Stream(means.home)
    twins = Twins(means, layers())
    with torch.cuda.device(means.home):
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(stream):
            for seed in range(AHEAD + 4):
                x = torch.zeros(6, 4, device=means.home, dtype=torch.float64)
                fresh = rows(means, seed)
                if seconds:
                    torch.cuda._sleep(10_000_000)
                x.copy_(fresh)
                twins.step(x)
        torch.cuda.current_stream().wait_stream(stream)
    twins.ran(eager=AHEAD, graph=4)


def test_two_streams_in_turn(means):
    """One recording on two streams that nobody orders: its memory is used by one step at a time."""
    streams = [torch.cuda.Stream(means.home) for _ in range(2)]
    module = layers(2048)
    recorded, eager = means.twins(module)
    with torch.no_grad(), torch.cuda.device(means.home):
        xs = [rows(means, seed, 4096) for seed in range(8)]
        wants = [eager(x) for x in xs]
        for x in xs[: AHEAD + 1]:
            recorded(x)
        torch.cuda.synchronize()
        gots = []
        for turn in range(6):
            for k, x in enumerate(xs):
                with torch.cuda.stream(streams[k % 2]):
                    gots.append((k, recorded(x)))
        torch.cuda.synchronize()
    for k, got in gots:
        identical(got, wants[k])
    assert steps(recorded)["graph"] == 1 + 6 * 8


def test_side_streams_in_the_forward(means):
    """Forked from the recording's stream and joined again: part of the graph."""

    def forks(module, x):
        here = torch.cuda.current_stream(x.device)
        side = torch.cuda.Stream(x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            doubled = x * 2
        y = module.lin(three(x))
        here.wait_stream(side)
        return y + doubled[:, :2]

    twins = Twins(means, Apply(forks), "auto")
    for seed in range(SETTLED + 3):
        twins.step(rows(means, seed))
    assert steps(twins.recorded)["graph"] == 5 or reasons(twins.recorded)


def test_inside_a_capture_of_the_users(means):
    """Somebody else's graph around an eager forward: nothing of ours is recorded meanwhile."""
    if means.replicas > 1:
        means = type(means)((0,))
    dp = means.wrap(layers(), "auto")
    x = rows(means)
    with torch.no_grad():
        for _ in range(SETTLED + 1):
            want = dp(x)
        before = steps(dp)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = dp(x)
        graph.replay()
        torch.cuda.synchronize()
    identical(got, want)
    assert steps(dp) == before


# Memory and clocks.


def test_memory_does_not_grow(means):
    twins = Twins(means, layers(256), optimizer=False)
    dp = twins.recorded
    marks = []
    for seed in range(AHEAD + 30):
        dp.zero_grad()
        squares(dp(rows(means, seed, 512))).backward()
        if seed >= AHEAD + 4:
            torch.cuda.synchronize()
            marks.append(torch.cuda.memory_allocated(0))
    assert max(marks[10:]) <= max(marks[:10])


def test_a_dropped_wrapper_gives_all_memory_back(means):
    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return [torch.cuda.memory_allocated(i) for i in sorted(set(means.ids))]

    def live():
        dp = means.wrap(layers(1024))
        for seed in range(AHEAD + 3):
            squares(dp(rows(means, seed, 4096))).backward()
        assert steps(dp)["graph"] == 3

    live()
    before = used()
    live()
    assert used() == before


def test_real_clocks(means, monkeypatch):
    """The trial ends by itself, with times above zero, and the faster of them is kept."""
    monkeypatch.undo()
    torch.use_deterministic_algorithms(False)
    dp = means.wrap(nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)]), "auto")
    x = noise(means, 32, 64).float()
    for _ in range(WATCHED["auto"] + 2 * 8 + 4):
        dp.zero_grad()
        dp(x).square().sum().backward()
        torch.cuda.synchronize()
    (forward,) = dp.report()["forwards"]
    assert forward["graph_ms"] > 0 and forward["eager_ms"] > 0
    kept = "graph" if forward["graph_ms"] <= forward["eager_ms"] else "eager"
    assert forward["engine"] == kept == "graph", "host-bound: 24 small layers"


def test_marks_are_on_the_first_device(means, monkeypatch):
    monkeypatch.undo()
    recorder = captures.CudaRecorder([torch.device("cuda", i) for i in means.ids])
    first = recorder.mark()
    torch.cuda._sleep(50_000_000)
    second = recorder.mark()
    torch.cuda.synchronize()
    assert second.query() and first.elapsed_time(second) > 1
    assert TIMED == 2
