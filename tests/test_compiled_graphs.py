"""Graphs of compiled replicas: cut where buckets begin, waited for piece by piece, and served to
other devices."""

import contextlib
import copy
import threading
import types
import weakref

import fastdp
import pytest
import torch
from fastdp import (
    _compiler_compat,
    compile_graphs,
    compile_options,
    compile_plain,
    readiness,
    relocation,
)
from fastdp.compiled import Compiled, ReplicaCall
from pretended_gpus import Gpus
from torch import nn

pytestmark = pytest.mark.slow

needs_pretence = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="needs GPUs, or a torch without CUDA: this one asks the driver that is not there",
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


def seen_graph(module, x):
    """What torch.compile finds in a call: the graph, its inputs, and which parameter each is."""
    found = []

    def backend(graph, inputs):
        found.append((copy.deepcopy(graph), list(inputs)))
        return graph.forward

    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
    (graph, inputs), = found
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return graph, inputs, [names.get(id(tensor)) for tensor in inputs]


def cut_by_layer(module, x, limit=8):
    graph, inputs, names = seen_graph(module, x)
    buckets = [None if n is None else int(n.split(".")[1]) if "." in n else 0 for n in names]
    return compile_graphs.cut(graph, inputs, buckets, limit), graph, inputs


def parts_of(body):
    return [name for name, _ in body.named_children()]


@pytest.mark.parametrize("limit, parts", [(8, 4), (4, 4), (2, 2), (1, None)])
def test_a_graph_is_cut_where_buckets_begin(limit, parts):
    module, x = nn.Sequential(*Deep().layers), torch.randn(3, 4, dtype=torch.float64)
    graph, inputs, names = seen_graph(module, x)
    buckets = [None if name is None else int(name.split(".")[0]) for name in names]
    body = compile_graphs.cut(graph, inputs, buckets, limit)
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
        communication=types.SimpleNamespace(apart=True), bucket_of=bucket_of, buckets=range(4)
    )
    waited = []
    gate = types.SimpleNamespace(wait_for=waited.append)
    where = types.SimpleNamespace(gate=gate, plan=plan, device=CPU)
    options = compile_options.parse({"backend": "aot_eager"})
    run = compile_graphs.Graph(graph, inputs, places, plan, options, lambda device: None)
    with pytest.raises(readiness.NotReady), readiness.place(where):
        run(*inputs)
    with readiness.compiling(), readiness.place(where):
        (output,) = run(*inputs)
    assert waited == [0, 1, 2, 3]
    waited.clear()
    where.wait = lambda: waited.append("all")
    whole = compile_graphs.Graph(graph, inputs, places, None, options, lambda device: None)
    with readiness.compiling(), readiness.place(where):
        whole(*inputs)
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

    def refuses(graph, inputs):
        raise RuntimeError("this compiler can nothing")

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


@needs_pretence
def test_lists_of_weights_beside_the_dictionaries_are_waited_for_at_once(monkeypatch):
    waited = []
    module = nn.LSTM(4, 2)
    plan = types.SimpleNamespace(bucket_of=dict.fromkeys(range(4), 0), buckets=range(1))
    gate = types.SimpleNamespace(wait_for=waited.append)
    where = ReplicaCall(None, weakref.ref(module), CPU, gate, plan)
    compile_plain.plainly(where, module, (torch.zeros(1, 1, 4),), {})
    assert waited == [0]


CPU, META = torch.device("cpu"), torch.device("meta")


class Positions(nn.Module):
    """Makes a tensor on its own device."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rate = 2

    def forward(self, x):
        return self.layer(x) + torch.arange(4, device=x.device) * self.rate


def on_two_devices(backend="aot_eager"):
    """Replicas on two devices that share what is compiled. The second one has no numbers."""
    options = compile_options.parse({"backend": backend})
    one = Compiled(options, [CPU])
    one.shares = one._apart = True
    plan = types.SimpleNamespace(
        description=b"", communication=types.SimpleNamespace(apart=False), bucket_of={}, buckets=()
    )
    first = Positions()
    second = copy.deepcopy(first).to(META)
    modules = [(first, CPU), (second, META)]
    calls = [ReplicaCall(one, weakref.ref(m), device, None, plan) for m, device in modules]
    return one, [first, second], calls


def test_what_was_compiled_for_one_device_serves_the_other():
    one, modules, (first, second) = on_two_devices()
    x = torch.randn(3, 4)
    torch.testing.assert_close(first(x), modules[0](x))
    output = second(x.to(META))
    assert output.device == META and output.shape == (3, 4)
    assert one.count == 2  # once for each device
    (form,) = one.report()["forms"]
    assert form["graphs"] == 1 and set(form["seconds"]) == {"cpu", "meta"}
    assert one.reasons == []
    with readiness.only_ready():
        for _ in range(2):
            first(x)
            second(x.to(META))
    assert one.count == 2


def test_a_piece_that_is_given_nothing_on_its_device_runs_there_all_the_same():
    """What it makes there is for later pieces."""

    class Start(nn.Module):
        def forward(self, x):
            return torch.arange(3, device="cpu") + x.to("cpu").long().to("cpu")

    graph = torch.fx.symbolic_trace(Start())
    options = compile_options.parse({"backend": "aot_eager"})
    run = compile_graphs.Graph(graph, [torch.ones(3)], [None], None, options, lambda device: None)
    calls = [
        types.SimpleNamespace(device=d, gate=None, plan=None, wait=lambda: None)
        for d in (CPU, META)
    ]
    for call in (*calls, *calls):
        with readiness.compiling(), readiness.place(call):
            assert run(torch.ones(3)).device == call.device
    assert run.ready == [CPU, META]
    assert set(run.pieces[0]._runs) == {CPU, META}


def test_guards_but_for_those_on_devices_stay():
    one, modules, calls = on_two_devices()
    x = torch.randn(3, 4)
    for call, device in zip(calls, (CPU, META)):
        call(x.to(device))
    modules[0].rate = 3
    torch.testing.assert_close(calls[0](x), modules[0](x))
    assert one.count == 3
    calls[0](x[:2])  # another size is another form
    assert len(one.report()["forms"]) == 2
    with torch.no_grad():
        assert not calls[0](x).requires_grad
    assert calls[0](x).requires_grad


def test_a_graph_is_moved_with_its_constants():
    class Constant(nn.Module):
        def forward(self, x):
            return x.to("cpu") + torch.tensor([1.0, 2.0])

    graph = torch.fx.symbolic_trace(Constant())
    moved = relocation.graph_on(copy.deepcopy(graph), CPU, META)
    assert "to('meta')" in moved.code
    assert moved(torch.zeros(2, device=META)).device == META
    torch.testing.assert_close(graph(torch.zeros(2)), torch.tensor([1.0, 2.0]))


# As Inductor of torch 2.11 writes it, shortened.
GENERATED = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
    triton_meta={'signature': {'in_ptr0': '*fp32', 'xnumel': 'i32'}, 'device': \
DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9), 'constants': {}},
def triton_poi_fused_0(in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex), None)
''', device_str='cuda')
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((64, 256), (256, 1), torch.float32)
        buf1 = torch.ops.aten.full.default([], 0, device=device(type='cuda', index=0))
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(arg0_1, 16384, stream=stream0)
    return (buf0, )
def benchmark_compiled_module():
    arg0_1 = rand_strided((64, 256), (256, 1), device='cuda:0', dtype=torch.float32)
"""


def test_generated_code_is_written_for_another_gpu():
    text = relocation.text_for(GENERATED, 0, 3)
    for there in (
        "type='cuda', index=3, multi_processor_count=132",
        "_DeviceGuard(3)",
        "set_device(3)",
        "device(type='cuda', index=3)",
        "stream0 = get_raw_stream(3)",
        "device='cuda:3'",
        "tl.program_id(0)",
        "empty_strided_cuda((64, 256), (256, 1)",
    ):
        assert there in text
    assert relocation.text_for(text, 3, 0) == GENERATED
    with pytest.raises(ValueError, match="speaks of GPU 0"):
        relocation.text_for(GENERATED, 1, 2)


def test_what_inductor_made_is_loaded_again_for_another_device(monkeypatch, tmp_path):
    """On the host, where the other device is the same one: forward and backward, both noted."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(relocation, "are_alike", lambda one, other: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    graph, inputs, _ = seen_graph(module, x)
    options = compile_options.parse(True)
    shared = relocation.Shared(CPU)
    run = compile_graphs.compiled(options, graph, inputs, shared.note)
    assert len(shared._parts) == 2
    other = torch.device("cpu", 0)
    assert shared.extend(other) and shared.reason == ""
    shared._parts[1]._is_blind = True  # and speaks of no GPU: it serves as it is
    assert shared.extend(other) and shared._parts[1].calls[other] is shared._parts[1].calls[CPU]
    shared._parts[1]._devices = {None}
    assert not shared.extend(other) and "a part of it has no input on the GPU" in shared.reason
    shared._parts[1]._is_blind, shared._parts[1]._devices = False, set()
    assert shared.extend(other)
    want = torch.autograd.grad(run(*inputs)[0].square().sum(), list(module.parameters()))
    called = []
    for part in shared._parts:
        again = part.calls[other]
        part.calls[CPU] = lambda given, again=again: called.append(again) or again(given)
    output = run(*inputs)[0]
    got = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert len(called) == 2
    torch.testing.assert_close(output, module(x))
    torch.testing.assert_close(got, want)


def test_one_graph_is_compiled_in_turn():
    """The lock that all compilations take lets its own thread in again, and others wait."""
    dp, same = (
        fastdp.DataParallel(nn.Linear(4, 2), ["cpu"], compile={"backend": "aot_eager"})
        for _ in range(2)
    )
    other = threading.Thread(target=dp, args=(torch.zeros(2, 4),), daemon=True)
    with _compiler_compat.lock():
        same(torch.zeros(2, 4))
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join(60)
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
    thread.join(60)
    assert found, "the replicas of the inner wrapper wait for the outer one, and it for them"
    want = inner.module(torch.relu(outer.module.layer(x)))
    torch.testing.assert_close(found[0], want)
