"""Watch: each thing that a recording would freeze is named, and nothing else is; whatever it
replaces is put back. global_state: each global setting that kernels depend on is in it."""

import contextlib
import functools
import gc
import io
import logging
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from nets import Apply, ints, ranked
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import _C, listeners
from fastdp.listeners import Listener
from fastdp.watch import Watch, global_state, records, snapshot_of

GLOBAL = [0]
LOG = logging.getLogger("a.user")


class Watched(fastdp.DataParallel):
    """Watches the replicas' forward of every step."""

    def parallel_apply(self, replicas, inputs, kwargs):
        with Watch(replicas) as watch:
            self.watch = watch
            return super().parallel_apply(replicas, inputs, kwargs)


def watched(module, x=None, steps=2):
    dp = Watched(module, device_ids=["cpu", "cpu"])
    for _ in range(steps):
        dp(ints(4, 3) if x is None else x)
    return dp.watch


def untouched():
    """Nothing of ours is left in the streams and in logging."""
    assert listeners._listeners == () and listeners._taps == []
    for stream in (sys.stdout, sys.stderr):
        assert "write" not in vars(stream)
    return logging.getLogRecordFactory() is FACTORY


FACTORY = logging.getLogRecordFactory()


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert untouched()
    yield
    gc.collect()
    assert untouched()


# What a forward does.


def forward_of(act):
    """A module whose forward calls act(self) first."""

    def forward(self, x):
        act(self)
        return self.lin(x)

    module = Apply(forward)
    module.calls = 0
    module.seen = []
    module.table = {"a": 1}
    module.config = types.SimpleNamespace(n=0)
    module.own = random.Random(0)
    module.numpy_own = np.random.default_rng(0)
    module.generator = torch.Generator()
    module.register_buffer("count", torch.zeros(1))
    return module


def add_call(self):
    self.calls += 1


def early_writer(self, stream=sys.__stderr__):
    (self.stream if hasattr(self, "stream") else stream).write("x")


def set_and_put_back(self):
    self.training = not self.training
    self.training = not self.training


def counted(self):
    self.count.add_(1)


def replaced(self):
    self.count = self.count + 1


def quiet(self):
    with contextlib.redirect_stdout(io.StringIO()):
        print("to nobody")


def global_counter(self):
    GLOBAL[0] += 1


REASONS = {
    "counter": (add_call, "it changes what modules hold: Apply.calls changed from 0 to 1"),
    "new attribute": (lambda s: setattr(s, "last", 1), "Apply.last was added"),
    "removed": (lambda s: delattr(s, "calls"), "Apply.calls was removed"),
    "child's": (lambda s: setattr(s.lin, "scale", 1), "Linear.scale was added (modules[1])"),
    "append": (lambda s: s.seen.append(1), "Apply.seen had "),
    "dict": (lambda s: s.table.update(a=time.perf_counter()), "Apply.table['a'] changed from"),
    "record": (lambda s: setattr(s.config, "n", s.config.n + 1), "Apply.config.n changed from"),
    "training": (lambda s: s.lin.train(not s.lin.training), "Linear.training changed from True"),
    "tensor": (lambda s: setattr(s, "out", torch.ones(1)), "Apply.out was added"),
    "random": (lambda s: random.random(), "it draws from Python's random"),
    "seeded": (lambda s: random.seed(), "it draws from Python's random"),
    "numpy": (lambda s: np.random.rand(), "it draws from NumPy's global generator"),
    "torch": (lambda s: torch.rand(1), "it draws from torch's generator of the host"),
    "dropout": (lambda s: nn.functional.dropout(torch.ones(4), 0.5),
                "it draws from torch's generator of the host"),
    "print": (lambda s: print("step", 1), "it writes to sys.stdout: 'step'"),
    "stderr": (lambda s: sys.stderr.write("oh no"), "it writes to sys.stderr: 'oh no'"),
    "lines": (lambda s: sys.stdout.writelines(["a\n", "b"]), "it writes to sys.stdout: 'a'"),
    "long": (lambda s: print("x" * 99), f"it writes to sys.stdout: '{'x' * 40}...'"),
    "log": (lambda s: LOG.warning("%d is odd", 3), "it makes log records: a.user: '%d is odd'"),
}  # fmt: skip

SILENT = {
    "nothing": lambda s: None,
    "buffer in place": counted,
    "buffer replaced": replaced,
    "put back": set_and_put_back,
    "same value": lambda s: setattr(s, "calls", 0),
    "below the level": lambda s: LOG.debug("unheard"),
    "fastdp's log": lambda s: logging.getLogger("fastdp").warning("ours"),
    "fastdp's own": lambda s: logging.getLogger("fastdp.part").warning("ours"),
    "warning": lambda s: warnings.warn("once", stacklevel=1),
    "not a stream": quiet,
    "empty": lambda s: print(end=""),
    # What the module's docstring says is not seen.
    "global": global_counter,
    "own random": lambda s: s.own.random(),
    "own numpy": lambda s: s.numpy_own.random(),
    "own torch": lambda s: torch.rand(1, generator=s.generator),
    "clock": lambda s: time.time(),
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_reason_is_named(kind):
    act, text = REASONS[kind]
    watch = watched(forward_of(act))
    assert text in watch.reason
    assert watch.passing == ("writes" in text or "log records" in text)


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.filterwarnings("always")
def test_there_is_no_reason(kind):
    watch = watched(forward_of(SILENT[kind]))
    assert watch.reason is None and not watch.passing


def test_reasons_are_joined():
    def act(self):
        random.random()
        print("a")

    watch = watched(forward_of(act))
    assert watch.reason == "it draws from Python's random; it writes to sys.stdout: 'a'"
    assert not watch.passing


class Blocks(nn.Module):
    """Of each family of modules some, none of which draws on the host."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(True))
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embedding = nn.EmbeddingBag(5, 4)
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Dropout(0.0)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x):
        y = self.conv(x.float().unsqueeze(1)).transpose(1, 2)
        y = self.attention(self.rnn(y)[0])
        y = y + self.embedding(torch.zeros(len(x), 1, dtype=torch.long)).unsqueeze(1)
        y = checkpoint(self.parts["a"], y, use_reentrant=False)
        return self.parts["b"](y) * self.scales[0]


KINDS = {
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2))),
    "compiled": lambda: torch.compile(nn.Linear(3, 2), backend="eager"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_replicate_themselves(kind):
    module = KINDS[kind]()
    snapshot = snapshot_of([module])
    assert watched(module, torch.ones(4, 3)).reason is None
    assert snapshot.differs() is None


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules_are_seen_through_their_python_side():
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 2)))
    snapshot = snapshot_of([module])
    # A replica of it is new at each forward, and fetches its method then.
    assert "forward was added" in watched(module, torch.ones(4, 3)).reason
    assert snapshot.differs() is None


def test_no_reason_where_modules_do_their_work():
    module = Blocks()
    dp = Watched(module, device_ids=["cpu", "cpu"])
    snapshot = snapshot_of([module])
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for training in (True, True, False, True):
        module.train(training)
        dp(ints(4, 3)).sum().backward()
        optimizer.step()
        assert dp.watch.reason is None
    assert snapshot.differs() is None


def test_an_error_in_the_forward():
    def act(self):
        random.random()
        raise ValueError("no")

    dp = Watched(forward_of(act), device_ids=["cpu", "cpu"])
    with pytest.raises(ValueError, match="no"):
        dp(ints(4, 3))
    assert dp.watch.reason is None


# Who is heard.


def act_in_rank_1(act):
    def forward(self, x):
        if x[0, 0] == 1:
            act()
        return self.lin(x)

    return Apply(forward)


@pytest.mark.parametrize("act", [lambda: print("one"), lambda: LOG.error("one")])
def test_a_worker_thread_is_heard(act):
    assert "one" in watched(act_in_rank_1(act), ranked(2)).reason


def talk(stop, started):
    while not stop.is_set():
        print("elsewhere")
        print("elsewhere", file=sys.stderr)
        LOG.error("elsewhere")
        started.set()


def test_another_thread_is_not_heard():
    stop, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=talk, args=(stop, started))
    thread.start()
    try:
        started.wait()
        for _ in range(20):
            assert watched(forward_of(lambda s: time.sleep(0.002)), steps=1).reason is None
    finally:
        stop.set()
        thread.join()


def test_a_progress_bar_of_another_thread_is_not_heard():
    tqdm = pytest.importorskip("tqdm")
    stop = threading.Event()

    def work():
        with tqdm.tqdm(total=10, mininterval=0) as bar:
            while not stop.is_set():
                bar.update(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            assert watched(forward_of(lambda s: time.sleep(0.002)), steps=1).reason is None
    finally:
        stop.set()
        thread.join()
    assert "writes to sys.stderr" in watched(forward_of(lambda s: list(tqdm.tqdm(range(3))))).reason


def test_a_stream_that_was_taken_earlier_is_heard():
    taken = sys.stderr
    handler = logging.StreamHandler(taken)
    assert "sys.stderr" in watched(forward_of(lambda s: taken.write("x"))).reason
    # A record is heard where it is made, and not where a handler writes it down.
    record = logging.LogRecord("fastdp", 40, "", 0, "text", None, None)
    assert watched(forward_of(lambda s: handler.emit(record))).reason is None


def test_everything_is_passed_on(capsys):
    with Watch([nn.Linear(1, 1)]) as watch:
        assert sys.stdout.write("abc") == 3
        print("def", file=sys.stderr)
        with pytest.raises(TypeError):
            sys.stdout.write(3)
    assert capsys.readouterr() == ("abc", "def\n")
    assert watch.reason == "it writes to sys.stdout: 'abc'"


def test_log_records_are_whole(caplog):
    with Watch([nn.Linear(1, 1)]) as watch:
        LOG.warning("%s and %s", 1, 2)
    assert [record.getMessage() for record in caplog.records] == ["1 and 2"]
    assert watch.reason == "it makes log records: a.user: '%s and %s'"


# What is put back, and when.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_all_is_put_back_after_an_error(error):
    for _ in range(3):
        with pytest.raises(error), Watch([nn.Linear(1, 1)]):
            assert "write" in vars(sys.stdout)
            raise error
        assert untouched()


def test_nested_watches():
    module = nn.Linear(1, 1)
    with Watch([module]) as outer:
        with Watch([module]) as inner:
            pass
        assert inner.reason is None
        print("between")
        with Watch([module]) as second:
            pass
        assert second.reason is None
        assert listeners._listeners != ()
    assert outer.reason == "it writes to sys.stdout: 'between'"


def test_a_forward_that_watches_itself():
    inner = Watched(act_in_rank_1(lambda: print("one")), device_ids=["cpu", "cpu"])
    outer = Watched(Apply(lambda self, x: inner(x)), device_ids=["cpu", "cpu"])
    outer(ranked(4))
    assert "one" in outer.watch.reason


def test_concurrent_watches_hear_their_own():
    found, barrier, module = {}, threading.Barrier(4), nn.Linear(1, 1)

    def work(k):
        barrier.wait()
        for step in range(50):
            with Watch([module]) as watch:
                if k % 2:
                    print(f"thread {k}")
            found[k, step] = watch.reason

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = {k: f"it writes to sys.stdout: 'thread {k}'" if k % 2 else None for k in range(4)}
    assert found == {(k, step): want[k] for k in range(4) for step in range(50)}


def test_streams_that_change_between_watches(monkeypatch):
    module, first, second = nn.Linear(1, 1), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", first)
    with Watch([module]) as outer:
        monkeypatch.setattr(sys, "stdout", second)
        with Watch([module]) as inner:
            print("to the second")
        assert inner.reason == "it writes to sys.stdout: 'to the second'"
        assert outer.reason is None
    assert outer.reason == inner.reason
    assert "write" not in vars(first) and "write" not in vars(second)
    assert second.getvalue() == "to the second\n"


class Slotted:
    __slots__ = ("text",)

    def write(self, text):
        self.text = text


@pytest.mark.parametrize("stream", [None, Slotted()])
def test_streams_that_cannot_be_listened_to(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    with Watch([nn.Linear(1, 1)]) as watch:
        print("unheard")
    monkeypatch.undo()
    assert watch.reason is None


def test_one_object_as_both_streams(monkeypatch):
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    with Watch([nn.Linear(1, 1)]) as watch:
        print("x", file=sys.stderr)
    monkeypatch.undo()
    assert watch.reason == "it writes to sys.stdout: 'x'"
    assert "write" not in vars(both) and both.getvalue() == "x\n"


def test_replacements_of_others():
    """One that was there before comes back; one that was put over ours stays."""
    stream = io.StringIO()
    before = stream.write = lambda text: io.StringIO.write(stream, text.upper())
    with contextlib.redirect_stdout(stream), Watch([nn.Linear(1, 1)]) as watch:
        print("first")
    assert stream.write is before and watch.reason == "it writes to sys.stdout: 'first'"
    listener = Listener()
    with contextlib.redirect_stdout(stream):
        listener.start()
        ours, factory = stream.write, logging.getLogRecordFactory()
        over = stream.write = lambda text: ours(text * 2)
        record_over = functools.partial(factory)
        logging.setLogRecordFactory(record_over)
        listener.stop()
        print("ab", end="")
    assert stream.write is over and logging.getLogRecordFactory() is record_over
    assert stream.getvalue() == "FIRST\nABAB"
    for _ in range(2):
        with Watch([nn.Linear(1, 1)]):
            LOG.error("through both")
    logging.setLogRecordFactory(FACTORY)


def test_an_interrupt_while_it_puts_back(monkeypatch):
    remove, interrupts = listeners._StreamTap.remove, [KeyboardInterrupt, KeyboardInterrupt]

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        remove(self)

    monkeypatch.setattr(listeners._StreamTap, "remove", interrupted)
    watch = Watch([nn.Linear(1, 1)])
    with pytest.raises(KeyboardInterrupt), watch:
        pass
    # The second try was interrupted too: the end of the watch itself is the third.
    assert listeners._taps
    del watch
    gc.collect()
    assert untouched()


def test_an_interrupt_while_it_starts(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(listeners._StreamTap, "put", interrupted)
        with pytest.raises(KeyboardInterrupt), Watch([nn.Linear(1, 1)]):
            raise AssertionError("the block was entered")
    assert untouched()


def test_a_watch_that_is_never_left():
    watch = Watch([nn.Linear(1, 1)])
    watch.__enter__()
    assert listeners._listeners != ()
    del watch
    gc.collect()
    assert untouched()


@pytest.mark.parametrize("arguments", [(), (3,), (nn.Linear(1, 1),)])
@pytest.mark.filterwarnings("error")
def test_bad_arguments(arguments):
    with pytest.raises(TypeError):
        Watch(*arguments)
    gc.collect()


def test_it_keeps_no_module():
    module = nn.Linear(1, 1)
    alive = weakref.ref(module)
    with Watch([module]) as watch:
        pass
    del module
    gc.collect()
    assert alive() is None and watch.reason is None


def test_a_forked_child_may_watch():
    held, go = threading.Event(), threading.Event()

    def hold():
        with listeners._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with Watch([nn.Linear(1, 1)]) as watch:
                random.random()
            status = 0 if watch.reason == "it draws from Python's random" else 2
        finally:
            os._exit(status)
    go.set()
    thread.join()
    deadline = time.monotonic() + 60
    pid = 0
    while pid == 0 and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if pid == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child waits for a lock that nobody holds")
    assert os.waitstatus_to_exitcode(status) == 0


# Generators.


def test_numpy_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    with Watch([nn.Linear(1, 1)]) as watch:
        assert "numpy.random" not in sys.modules
    assert "numpy.random" not in sys.modules and watch.reason is None


def test_another_bit_generator_of_numpys():
    former = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        with Watch([nn.Linear(1, 1)]) as watch:
            pass
        assert watch.reason is None
        with Watch([nn.Linear(1, 1)]) as watch:
            np.random.rand()
        assert watch.reason == "it draws from NumPy's global generator"
    finally:
        np.random.set_bit_generator(former)


# Hooks.


def hook(*args):
    return None


def on_child(method):
    def put(module):
        return getattr(module.lin, method)(hook)

    return put


HOOKS = {
    "forward": (on_child("register_forward_hook"), "the forward hook hook on lin (Linear)"),
    "pre": (on_child("register_forward_pre_hook"), "the forward pre-hook hook on lin (Linear)"),
    "backward": (on_child("register_full_backward_hook"), "the backward hook hook on lin"),
    "backward pre": (on_child("register_full_backward_pre_hook"), "the backward pre-hook hook on"),
    "root": (lambda m: m.register_forward_hook(hook), "hook on the module itself (Apply)"),
    "partial": (lambda m: m.register_forward_hook(functools.partial(hook, 1)), "forward hook hook"),
    "lambda": (lambda m: m.register_forward_hook(lambda *args: None), "<lambda> on the module"),
    "weight_norm": (lambda m: nn.utils.weight_norm(m.lin),
                    "torch.nn.utils.weight_norm's forward pre-hook on lin (Linear)"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m.lin),
                      "torch.nn.utils.spectral_norm's forward pre-hook on lin (Linear)"),
    "prune": (lambda m: nn.utils.prune.l1_unstructured(m.lin, "weight", 1),
              "torch.nn.utils.prune's forward pre-hook on lin (Linear)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.filterwarnings("ignore")
def test_hooks_are_named(kind):
    import torch.nn.utils.prune  # noqa: F401

    put, text = HOOKS[kind]
    module = Apply(lambda self, x: self.lin(x))
    put(module)
    reason = watched(module).reason
    assert reason.startswith("hooks would have to run at every step: ") and text in reason
    assert reason.count("hook") < 8, "replicas repeat it"


GLOBAL_HOOKS = {
    "register_module_forward_hook": "the forward hook hook on every module",
    "register_module_forward_pre_hook": "the forward pre-hook hook on every module",
    "register_module_full_backward_hook": "the backward hook hook on every module",
    "register_module_full_backward_pre_hook": "the backward pre-hook hook on every module",
}


@pytest.mark.parametrize("name", GLOBAL_HOOKS)
def test_global_hooks_are_named(name):
    handle = getattr(nn.modules.module, name)(hook)
    try:
        with Watch([nn.Linear(1, 1)]) as watch:
            pass
    finally:
        handle.remove()
    assert GLOBAL_HOOKS[name] in watch.reason
    with Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


def test_many_hooks_are_counted():
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    for each in module:
        each.register_forward_hook(hook)
    with Watch([module, module]) as watch:
        pass
    assert watch.reason.endswith("the forward hook hook on 2 (Linear), and 7 more")


def test_hooks_that_are_none_of_the_forwards():
    module = Apply(lambda self, x: self.lin(x))
    module._register_state_dict_hook(hook)
    module.register_state_dict_pre_hook(hook)
    module.register_load_state_dict_post_hook(hook)
    module.lin.weight.register_hook(lambda gradient: None)
    parametrize.register_parametrization(module.lin, "bias", nn.ReLU())
    nn.utils.parametrizations.weight_norm(module.lin)
    removed = module.register_forward_hook(hook)
    removed.remove()

    def own(*args):
        return None

    own.__module__ = "fastdp.anything"
    module.register_forward_hook(own)
    assert watched(module).reason is None


# Modes.


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "function": (FunctionMode, "the torch function mode FunctionMode is active"),
    "dispatch": (DispatchMode, "a torch dispatch mode is active"),
    "saved": (torch.autograd.graph.save_on_cpu, "saved-tensors hooks are active"),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode is on"),
    "dual": (torch.autograd.forward_ad.dual_level, "forward-mode differentiation is active"),
}


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.filterwarnings("ignore")
def test_modes_are_named(kind):
    mode, text = MODES[kind]
    with mode(), Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason.startswith(text)
    with Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


def test_a_transform_is_named():
    seen = []

    def function(x):
        with Watch([nn.Linear(1, 1)]) as watch:
            seen.append(watch)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen[0].reason == "it is transformed by torch.func"


def test_checkpointing_around_it_is_named():
    watches = []

    def function(x):
        with Watch([nn.Linear(1, 1)]) as watch:
            watches.append(watch)
        return x * 2

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert watches[0].reason.startswith("saved-tensors hooks are active")


def test_a_default_device_is_no_mode():
    with torch.device("cpu"), Watch([nn.Linear(1, 1)]) as watch:
        pass
    assert watch.reason is None


# Snapshots of roots.


def test_settings_objects_are_looked_into(monkeypatch):
    class PretrainedConfig:
        def __init__(self):
            self.use_cache = True

    place = types.ModuleType("transformers.configuration_utils")
    monkeypatch.setitem(sys.modules, place.__name__, place)
    assert len(records()) == 2
    place.PretrainedConfig = PretrainedConfig
    module = nn.Linear(1, 1)
    module.config = PretrainedConfig()
    snapshot = snapshot_of([module])
    assert snapshot.differs() is None
    module.config.use_cache = False
    text = "Linear.config.use_cache changed from True to False (modules[0])"
    assert snapshot.differs() == text


def test_a_snapshot_has_each_module_once():
    shared = nn.Linear(1, 1)
    snapshot = snapshot_of([nn.Sequential(shared), nn.Sequential(shared)])
    assert isinstance(snapshot, _C.Snapshot)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    snapshot = snapshot_of([first, second])
    shared.new = 1
    assert snapshot.differs() == "Linear.new was added (modules[1])"


# Global state.


def set_and_restore(get, put, value):
    @contextlib.contextmanager
    def manager():
        former = get()
        put(value)
        try:
            yield
        finally:
            put(former)

    return manager


def flip(get, put):
    @contextlib.contextmanager
    def manager():
        former = get()
        put(not former)
        try:
            yield
        finally:
            put(former)

    return manager


def flag(place, name):
    return flip(lambda: getattr(place, name), lambda given: setattr(place, name, given))


cuda, cudnn = torch.backends.cuda, torch.backends.cudnn

SETTINGS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast off cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "autocast cuda": set_and_restore(
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
        True,
    ),
    "autocast cuda dtype": set_and_restore(
        lambda: torch.get_autocast_dtype("cuda"),
        lambda dtype: torch.set_autocast_dtype("cuda", dtype),
        torch.bfloat16,
    ),
    "dtype": set_and_restore(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": lambda: torch.device("meta"),
    "precision": set_and_restore(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "tf32": flag(cuda.matmul, "allow_tf32"),
    "fp16": flag(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16": flag(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "cudnn": flag(cudnn, "enabled"),
    "benchmark": flag(cudnn, "benchmark"),
    "cudnn deterministic": flag(cudnn, "deterministic"),
    "cudnn tf32": flag(cudnn, "allow_tf32"),
    "flash": flip(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": flip(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": flip(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn sdp": flip(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "deterministic": flip(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "fill": flag(torch.utils.deterministic, "fill_uninitialized_memory"),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_a_setting_is_in_the_global_state(kind):
    before = global_state()
    with SETTINGS[kind]():
        inside = global_state()
        assert hash(inside) == hash(global_state()) and inside == global_state()
    assert inside != before
    assert global_state() == before


def test_warn_only_is_in_the_global_state():
    try:
        torch.use_deterministic_algorithms(True)
        strict = global_state()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert global_state() != strict
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_order_of_attention_kernels_is_in_the_global_state():
    if not hasattr(torch._C, "_get_sdp_priority_order"):
        pytest.skip("a torch without an order")
    kernels = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    with torch.nn.attention.sdpa_kernel(kernels, set_priority=True):
        first = global_state()
    with torch.nn.attention.sdpa_kernel(kernels[::-1], set_priority=True):
        assert global_state() != first


def test_the_global_state_is_the_threads_own():
    found = []
    with torch.no_grad():
        here = global_state()
        thread = threading.Thread(target=lambda: found.append(global_state()))
        thread.start()
        thread.join()
    assert found[0] != here and found[0] == global_state()


def test_what_it_costs(capsys):
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(150)))

    def best(act, calls, rounds=10):
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                act()
            times.append((time.perf_counter() - start) / calls)
        return min(times) * 1e6

    def watch():
        with Watch([module]):
            pass

    with capsys.disabled():
        print(f"\nglobal_state() {best(global_state, 1000):.1f} us")
        print(f"a watch of 151 modules {best(watch, 10):.0f} us")


def test_a_listener_that_stops_while_another_starts(monkeypatch):
    """A destructor may do that, at any allocation: the one that starts hears all the same."""
    first, second = Listener(), Listener()
    first.start()
    tap = listeners._tap

    def tap_in_between(made):
        tap(made)
        first.stop()

    first.stop()
    monkeypatch.setattr(listeners, "_tap", tap_in_between)
    second.start()
    try:
        logging.getLogger("model").warning("heard")
    finally:
        second.stop()
    assert "makes log records: model" in second.heard
