"""What was compiled for one device serves another: guards, graphs, and generated code."""

import contextlib
import copy
import types
import weakref

import pytest
import torch
from compiled_cases import seen_graph
from fastdp import compile_graphs, compile_options, readiness, relocation
from fastdp.compiled import Compiled, ReplicaCall
from torch import nn

CPU, META = torch.device("cpu"), torch.device("meta")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


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
