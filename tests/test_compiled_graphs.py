"""Graphs of compiled replicas: cut where buckets begin, and waited for piece by piece."""

import contextlib
import threading
import types
import weakref

import fastdp
import pytest
import torch
from compiled_cases import refuses, seen_graph
from fastdp import (
    _C,
    _torch_compiler,
    compile_cuts,
    compile_graphs,
    compile_options,
    compile_plain,
    compiled,
    readiness,
)
from fastdp.compiled import Compiled, ReplicaCall
from pretended_gpus import Gpus, can_pretend
from torch import nn

CPU = torch.device("cpu")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

needs_pretence = can_pretend()


class Deep(nn.Module):
    """Four layers of 20 numbers each, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.norm = nn.BatchNorm1d(4)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def cut_by_layer(module, x, limit=8):
    graph, inputs, names = seen_graph(module, x)
    buckets = [None if n is None else int(n.split(".")[1]) if "." in n else 0 for n in names]
    return compile_cuts.cut(graph, inputs, buckets, limit, 1e9), graph, inputs


def parts_of(body):
    return [name for name, _ in body.named_children()]


@pytest.mark.parametrize("limit, parts", [(8, 4), (4, 4), (2, 2), (1, None)])
def test_a_graph_is_cut_where_buckets_begin(limit, parts):
    module, x = nn.Sequential(*Deep().layers), torch.randn(3, 4, dtype=torch.float64)
    graph, inputs, names = seen_graph(module, x)
    buckets = [None if name is None else int(name.split(".")[0]) for name in names]
    body = compile_cuts.cut(graph, inputs, buckets, limit, 1e9)
    if parts is None:
        assert body is None
        return
    assert len(parts_of(body)) == parts
    torch.testing.assert_close(body(*inputs)[0], module(x), rtol=0, atol=0)


def test_what_is_read_out_of_order_is_not_cut():
    class Backwards(Deep):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    body, _, _ = cut_by_layer(Backwards(), torch.randn(3, 4, dtype=torch.float64))
    assert body is None


def test_regions_of_autocast_and_grad_mode_go_across_edges():
    class Regions(Deep):
        def forward(self, x):
            x = self.layers[0](x)
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layers[1](x)
                x = self.layers[2](x)
            with torch.no_grad():
                shift = self.layers[3](x.float())
            return x.float() + shift

    module, x = Regions().float(), torch.randn(3, 4)
    body, graph, inputs = cut_by_layer(module, x)
    assert len(parts_of(body)) == 4
    got, want = body(*inputs)[0], module(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(want.sum(), module.layers[0].weight)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), module.layers[0].weight), grads)


def test_each_piece_gives_its_gradients_when_it_has_run():
    """By the nodes of autograd: a parameter's gradient hangs on its own piece alone."""
    module, x = nn.Sequential(*Deep().layers), torch.randn(3, 4, dtype=torch.float64)
    graph, inputs, names = seen_graph(module, x)
    places = [None if name is None else number for number, name in enumerate(names)]
    bucket_of = {n: int(name.split(".")[0]) for n, name in enumerate(names) if name is not None}
    plan = types.SimpleNamespace(
        communication=types.SimpleNamespace(apart=True, devices=[CPU]),
        bucket_of=bucket_of,
        buckets=range(4),
    )
    waited = []
    gate = types.SimpleNamespace(wait_for=waited.append)
    where = types.SimpleNamespace(gate=gate, plan=plan, device=CPU)
    options = compile_options.parse({"backend": "aot_eager"})
    run = compile_graphs.Graph(graph, inputs, places, plan, options, lambda device: None)
    with pytest.raises(readiness.NotReady):
        readiness.placed(where, lambda: run(*inputs))
    (output,) = readiness.compiling(lambda: readiness.placed(where, lambda: run(*inputs)))
    assert waited == [0, 1, 2, 3]
    waited.clear()
    where.wait = lambda: waited.append("all")
    whole = compile_graphs.Graph(graph, inputs, places, None, options, lambda device: None)
    readiness.compiling(lambda: readiness.placed(where, lambda: whole(*inputs)))
    assert len(whole.pieces) == 1 and waited[0] == "all"
    torch.testing.assert_close(output, module(x), rtol=0, atol=0)
    node, owners = output.grad_fn, []
    while node is not None:
        assert "Compiled" in node.name()
        leaves = [next_ for next_, _ in node.next_functions if hasattr(next_, "variable")]
        owners.append({id(leaf.variable) for leaf in leaves})
        node = next((n for n, _ in node.next_functions if n and not hasattr(n, "variable")), None)
    want = [{id(layer.weight), id(layer.bias)} for layer in reversed(module)]
    assert owners == want


@needs_pretence
def test_pieces_wait_for_their_buckets_and_steps_are_those_of_plain_replicas(monkeypatch):
    def trained(dp):
        trace = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
            dp.module.zero_grad()
            output = dp(x)
            output.square().sum().backward()
            trace += [output.detach(), *(p.grad.clone() for p in dp.module.parameters())]
            trace += [buffer.clone() for buffer in dp.module.buffers()]
            with torch.no_grad():
                for parameter in dp.module.parameters():
                    parameter -= 0.1 * parameter.grad
        return trace

    want = trained(fastdp.DataParallel(Deep(), ["cpu", "cpu"], bucket_bytes=160))
    gpus = Gpus(monkeypatch, True)
    replica = Compiled.replica
    waited = []

    def seen(self, root, device, gate):
        def wait_for(bucket):
            waited.append((device.index, bucket))
            gate.wait_for(bucket)

        return replica(self, root, CPU, types.SimpleNamespace(wait_for=wait_for))

    monkeypatch.setattr(Compiled, "replica", seen)
    dp = fastdp.DataParallel(
        Deep(), ["cpu", "cpu"], bucket_bytes=160, compile={"backend": "aot_eager"}
    )
    torch.testing.assert_close(trained(dp), want, rtol=0, atol=1e-12)
    (form,) = dp.report()["compiled"]["forms"]
    assert form["pieces"] == 5 and form["graphs"] == 1
    gpus.waits()
    waited.clear()
    dp(torch.zeros(6, 4, dtype=torch.float64))
    assert gpus.waits()["c1"].count("s1") >= 5
    buckets = range(2, 7)  # behind those of the two kinds of buffers
    for rank in range(2):
        assert [bucket for who, bucket in waited if who == rank] == list(buckets)


class Rebinding(Deep):
    """Binds a buffer anew, and looks whether that is so."""

    def forward(self, x):
        x = super().forward(x)
        self.norm.num_batches_tracked = self.norm.num_batches_tracked + 1
        return x * self.norm.num_batches_tracked


@needs_pretence
@pytest.mark.parametrize("cls", [Deep, Rebinding])
def test_replicas_that_cannot_be_compiled_wait_where_they_read(monkeypatch, cls):
    """As uncompiled ones do, bucket by bucket."""

    gpus = Gpus(monkeypatch, True)
    replica = Compiled.replica
    monkeypatch.setattr(
        Compiled, "replica", lambda self, root, device, gate: replica(self, root, CPU, gate)
    )
    x = torch.randn(6, 4, dtype=torch.float64)
    results, logs = [], []
    for compile in (None, {"backend": refuses}):
        dp = fastdp.DataParallel(cls(), ["cpu", "cpu"], bucket_bytes=160, compile=compile)
        dp(x)
        gpus.waits()
        results.append(dp(x))
        logs.append({name: waits for name, waits in gpus.waits().items() if name[0] == "c"})
        results += [buffer.clone() for buffer in dp.module.buffers()]
    half = len(results) // 2
    torch.testing.assert_close(results[:half], results[half:], rtol=0, atol=0)
    assert logs[0] == logs[1] and logs[0]["c1"].count("s1") >= 5


@pytest.mark.parametrize("fails", [False, True])
def test_after_an_uncompiled_call_dictionaries_are_those_that_the_compiler_knows(fails):
    """With what the forward has bound anew, and also where it fails."""

    class Failing(Rebinding):
        def forward(self, x):
            seen.append(type(self.norm._buffers))
            x = super().forward(x)
            if fails:
                raise ValueError("no more")
            return x

    former = _C._use_exchange_table(False)
    try:
        waited, seen, module = [], [], Failing()
        gate = _C.Gate(0, waited.append, lambda ordinal: 1)
        gate.close(["first", "second"])
        plan = types.SimpleNamespace(bucket_of={n: int(n > 7) for n in range(13)}, buckets=range(2))
        where = ReplicaCall(None, weakref.ref(module), CPU, gate, plan)
        held = [(m, m._parameters, m._buffers) for m in module.modules()]
        x = torch.ones(3, 4, dtype=torch.float64)
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            compile_plain.plainly(where, module, (x,), {})
    finally:
        _C._use_exchange_table(former)
    assert seen == [_C.AwaitedDict] and waited == ["first", "second"]
    assert all(m._parameters is one and m._buffers is two for m, one, two in held)
    assert {type(each) for _, *two in held for each in two} == {dict}
    assert module.norm.num_batches_tracked.item() == 2


class Broken(Deep):
    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@pytest.mark.parametrize(
    "kind, cls", [("any size", Deep), ("breaks", Broken)], ids=["any size", "breaks"]
)
def test_all_tensors_are_waited_for_where_graphs_have_no_pieces(monkeypatch, kind, cls):
    """And before buffers are kept for a compilation that may fail."""
    log, module = [], cls()

    def noted(graph, inputs):
        return lambda *args: log.append("runs") or graph.forward(*args)

    class Kept(compiled.State):
        def __init__(self, *args):
            log.append("kept")
            super().__init__(*args)

    monkeypatch.setattr(compiled, "State", Kept)
    asked = {"backend": noted, "dynamic": True if kind == "any size" else None}
    owner = Compiled(compile_options.parse(asked), [CPU])
    plan = types.SimpleNamespace(bucket_of={}, buckets=range(3))
    gate = types.SimpleNamespace(wait_for=log.append)
    where = ReplicaCall(owner, weakref.ref(module), CPU, gate, plan)
    x = torch.ones(3, 4, dtype=torch.float64)
    where(x)
    assert log[:2] == [2, "kept"]
    assert [form["kind"] for form in owner.report()["forms"]] == [kind]
    log.clear()
    where(x)
    assert log in ([2, "runs"], [2, "runs", "runs"])


def test_lists_of_weights_beside_the_dictionaries_are_waited_for_at_once():
    waited = []
    module = nn.LSTM(4, 2)
    plan = types.SimpleNamespace(bucket_of=dict.fromkeys(range(4), 0), buckets=range(1))
    gate = types.SimpleNamespace(wait_for=waited.append)
    where = ReplicaCall(None, weakref.ref(module), CPU, gate, plan)
    compile_plain.plainly(where, module, (torch.zeros(1, 1, 4),), {})
    assert waited == [0]


def test_one_graph_is_compiled_in_turn():
    """The lock that all compilations take lets its own thread in again, and others wait."""
    dp, same = (
        fastdp.DataParallel(nn.Linear(4, 2), ["cpu"], compile={"backend": "aot_eager"})
        for _ in range(2)
    )
    other = threading.Thread(target=dp, args=(torch.zeros(2, 4),), daemon=True)
    with _torch_compiler.lock():
        same(torch.zeros(2, 4))
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join(300)
    assert dp._fastdp_compiled.count == 1


class Nested(nn.Module):
    """Calls a wrapper of its own."""

    def __init__(self, inner):
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        return self.inner(torch.relu(self.layer(x)))


@pytest.mark.parametrize("n", [1, 2])
def test_a_wrapper_inside_compiles_on_its_own_threads_while_the_outer_waits(n):
    options = {"compile": {"backend": "aot_eager"}}
    inner = fastdp.DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], **options)
    outer = fastdp.DataParallel(Nested(inner), ["cpu"] * n, **options)
    x, found = torch.randn(6 * n - 1, 4), []  # halves of other sizes: each is compiled

    def run():
        found.append(outer(x))

    # A thread that may be left behind, where this hangs.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert found, "the replicas of the inner wrapper wait for the outer one, and it for them"
    want = inner.module(torch.relu(outer.module.layer(x)))
    torch.testing.assert_close(found[0], want)
