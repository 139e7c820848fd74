"""What was compiled for one device serves another: guards, graphs, and generated code."""

import contextlib
import copy
import functools
import types
import weakref

import pytest
import torch
from compiled_cases import seen_graph
from fastdp import compile_graphs, compile_options, readiness, relocation
from fastdp.compiled import Compiled, ReplicaCall
from torch import nn

CPU, META = torch.device("cpu"), torch.device("meta")
HOME, OTHER = torch.device("cuda", 0), torch.device("cuda", 3)

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
    for _ in range(2):
        readiness.only_ready(lambda: first(x))
        readiness.only_ready(lambda: second(x.to(META)))
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
        act = functools.partial(run, torch.ones(3))
        output = readiness.compiling(functools.partial(readiness.placed, call, act))
        assert output.device == call.device
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


def test_a_graph_is_moved_with_all_that_it_names_and_holds():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.below = nn.Linear(2, 2)
            self.register_buffer("shift", torch.ones(2))
            self.register_buffer("none", None)
            self.register_buffer("elsewhere", torch.ones(2, device=META))

        def forward(self, x):
            x = x.to(device="cpu").to(device=torch.device("cpu")).to(dtype=torch.float32)
            return self.below(x * self.weight + self.shift)

    graph = torch.fx.symbolic_trace(Holding())
    graph.none = None
    graph.plain, graph.name = torch.ones(2), "cpu"
    moved = relocation.graph_on(graph, CPU, META)
    assert moved is graph and graph.plain.device == META and graph.name == "cpu"
    assert {t.device for t in (*moved.parameters(), *moved.buffers())} == {META}
    assert "'cpu'" not in moved.code and "type='cpu'" not in moved.code
    assert moved(torch.ones(3, 2, device=META)).device == META


def test_other_devices_and_words_of_a_graph_stay():
    class Named(nn.Module):
        def forward(self, x):
            x = x.to("cpu").to("cuda:5").to(device=torch.device("cuda", 5))
            return torch.nn.functional.pad(x, (0, 1), mode="constant")

    code = relocation.graph_on(torch.fx.symbolic_trace(Named()), CPU, META).code
    for there in ("to('meta')", "to('cuda:5')", "type='cuda', index=5", "mode = 'constant'"):
        assert there in code


@pytest.mark.parametrize("device, is_blind", [(CPU, True), (HOME, False)])
def test_a_part_without_inputs_on_the_gpu_cannot_tell_whose_they_are(
    loaded, monkeypatch, device, is_blind
):
    monkeypatch.setattr(relocation, "device_of", lambda inputs: device)
    shared = relocation.Shared(HOME)
    shared.note(lambda graph, inputs: made(), None, [])
    assert shared._parts[0]._is_blind is is_blind and shared.extend(OTHER) is not is_blind


@pytest.mark.parametrize(
    "inputs, where, want",
    [
        ([], None, CPU),
        ([3, "x", torch.ones(1)], None, CPU),
        ([torch.ones(1), 3, torch.ones(1, device=META)], None, META),
        ([torch.ones(1)], META, META),
        ([torch.ones(1, device=META)], CPU, META),
    ],
    ids=["nothing", "host", "mixed", "of the call", "of the inputs"],
)
def test_where_a_graph_runs(inputs, where, want):
    call = None if where is None else types.SimpleNamespace(device=where)
    assert relocation.device_of(inputs, call) == want


@pytest.mark.parametrize(
    "change, alike",
    [({}, True), ({"name": "B"}, False), ({"multi_processor_count": 4}, False),
     ({"major": 8}, False), ({"minor": 6}, False), ({"total_memory": 1}, True)],
    ids=["same", "name", "processors", "major", "minor", "memory"],
)
def test_gpus_that_are_alike(monkeypatch, change, alike):
    one = {"name": "A", "major": 9, "minor": 0, "multi_processor_count": 8, "total_memory": 2}
    properties = {HOME: one, OTHER: {**one, **change}}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(**properties[d])
    )
    assert relocation.are_alike(HOME, OTHER) is alike


class Constant:
    def __init__(self, device):
        self.device = device

    def to(self, device):
        return Constant(device)


@pytest.fixture
def loaded(monkeypatch):
    """(source, constants) of what was loaded for another GPU; its calls tell whose they are."""
    found = []

    def load(source, constants):
        found.append((source, constants))
        return types.SimpleNamespace(call=lambda given: "the other's")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(relocation, "are_alike", lambda one, other: True)
    monkeypatch.setattr(relocation._torch_compiler, "share_kernels", lambda index: None)
    monkeypatch.setattr(relocation._torch_compiler, "loaded", load)
    monkeypatch.setattr(
        relocation._torch_compiler,
        "aligned",
        lambda call, checked, mutated: lambda given: (call(given), checked, mutated),
    )
    return found


def made(**changes):
    """What Inductor gives, as far as it is looked at."""
    known = {
        "current_callable": lambda given: "home's",
        "source_code": "torch.cuda.set_device(0)",
        "constants": {"there": Constant(HOME), "here": Constant(CPU), "number": 3},
        "inputs_to_check": (1,),
        "mutated_input_idxs": (2,),
        "device_idxs": {0},
        "is_blind": False,  # of this test: all its inputs lie on the host
    }
    return types.SimpleNamespace(**{**known, **changes})


def shared_of(*parts):
    shared = relocation.Shared(HOME)
    for part in parts:
        shared.note(lambda graph, inputs, part=part: part, None, [])
        shared._parts[-1]._is_blind = part.is_blind
    return shared


def test_code_for_another_gpu_has_its_number_and_constants(loaded, monkeypatch):
    part = made()
    shared = shared_of(part)
    assert part.current_callable is shared._parts[0]
    assert shared.extend(OTHER) and shared.reason == ""
    [(source, constants)] = loaded
    assert source == "torch.cuda.set_device(3)" and constants["number"] == 3
    assert [constants[name].device for name in ("there", "here")] == [OTHER, CPU]
    for device, want in ((HOME, "home's"), (OTHER, ("the other's", [1], (2,)))):
        monkeypatch.setattr(relocation, "device_of", lambda inputs, device=device: device)
        assert part.current_callable([]) == want


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"source_code": ""}, "its code is not Python that runs on one GPU"),
        ({"current_callable": None}, "its code is not Python that runs on one GPU"),
        ({"device_idxs": {0, 1}}, "its code is not Python that runs on one GPU"),
        ({"source_code": "set_device(1)"}, "its code speaks of GPU 1, too"),
        ({"is_blind": True}, "a part of it has no input on the GPU"),
        (None, "it came from a cache of another compiler's"),
    ],
    ids=["no source", "no call", "two GPUs", "another GPU", "blind", "no part"],
)
def test_what_cannot_be_written_for_another_gpu_says_why(loaded, caplog, changes, words):
    """And nothing of it is: no part serves a device that another does not."""
    shared = shared_of() if changes is None else shared_of(made(), made(**changes))
    with caplog.at_level("INFO", logger="fastdp"):
        assert not shared.extend(OTHER)
    text = f"what is for cuda:0 was compiled again for cuda:3: ValueError: {words}"
    assert shared.reason == text and caplog.messages == [f"compile: {text}"]
    assert all(OTHER not in part.calls for part in shared._parts)


def test_gpus_of_different_kinds_share_nothing(loaded, monkeypatch):
    monkeypatch.setattr(relocation, "are_alike", lambda one, other: False)
    shared = shared_of(made())
    assert not shared.extend(OTHER) and "they are GPUs of different kinds" in shared.reason
    assert loaded == []


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
