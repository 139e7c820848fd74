"""What a signal handler raises, such as a timeout's, reaches the caller wherever it strikes, as it
is; and it is no reason against recording or compiling."""

import signal
import sys
import threading

import pytest
import torch
from engine_cases import WATCHED, Recorder, identical, steps
from nets import Apply, Net, ints

import fastdp
from fastdp.signals import is_from_handler

pytest.importorskip("resource", reason="needs signals as Unix has them")


class Late(Exception):
    pass


@pytest.fixture
def alarm():
    """Makes the handler run at once; on the main thread only, as all of Python's."""

    def handler(number, frame):
        raise Late("too late")

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def on_the_main_thread():
    return threading.current_thread() is threading.main_thread()


def test_handlers_are_told_from_functions(alarm):
    class Handler:
        def method(self, *args):
            raise Late

    def passed_on(number, frame):
        Handler().method(number, frame)

    def with_option(*args, flushes=True):
        raise Late

    for handler in (Handler().method, passed_on, lambda *args: passed_on(*args), with_option):
        signal.signal(signal.SIGALRM, handler)
        with pytest.raises(Late) as caught:
            alarm()
        assert is_from_handler(caught.value)
    with pytest.raises(Late) as caught:
        Handler().method(signal.SIGALRM, None)
    assert not is_from_handler(caught.value)

    def looks_up(value=None):  # as typeguard does
        frame = sys._getframe(1)
        raise Late(frame)

    with pytest.raises(Late) as caught:
        looks_up()
    assert not is_from_handler(caught.value)


def test_in_the_first_replica(alarm):
    """It is the caller's thread; the other one is not waited for."""
    late = threading.Event()

    def forward(module, x):
        if on_the_main_thread():
            alarm()
        late.wait(60)
        return module.lin(x)

    dp = fastdp.DataParallel(Apply(forward), ["cpu"] * 2)
    with pytest.raises(Late, match="^too late$") as caught:
        dp(ints(4, 3))
    assert caught.value.__cause__ is None
    late.set()


@pytest.mark.parametrize("engine", ["graph", "auto"])
def test_while_a_step_is_recorded(alarm, engine):
    class Model(Net):
        rings = False

        def forward(self, x):
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                met.append(self)
                if len(met) == 1:
                    alarm()
            return super().forward(x)

    met = []
    dp = fastdp.DataParallel(Model(), ["cpu"] * 2, engine=engine)
    dp._fastdp_get_runtime().recorder = Recorder()
    x = ints(4, 3)
    for _ in range(WATCHED[engine]):
        want = dp(x).detach()
    with pytest.raises(Late, match="^too late$"):
        dp(x)
    for _ in range(WATCHED[engine]):
        identical(dp(x).detach(), want)
    assert steps(dp)["graph"] > 0 and dp.report()["reasons"] == []


def test_while_a_replica_is_compiled(alarm):
    rings = [True]

    def backend(graph, inputs):
        if rings:
            rings.clear()
            alarm()
        return graph.forward

    dp = fastdp.DataParallel(Net(), ["cpu"] * 2, compile={"backend": backend})
    x = ints(4, 3)
    want = dp.module(x)
    with pytest.raises(Exception, match="too late"):
        dp(x)
    identical(dp(x).detach(), want.detach())
    compiled = dp.report()["compiled"]
    assert compiled["reasons"] == [] and compiled["forms"]
