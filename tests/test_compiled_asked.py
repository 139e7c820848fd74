"""What is asked for with `compile`, by torch.compile or in place: each way has the same replicas,
`fullgraph` raises, parts are named, and a kind of call that cannot be compiled stands by itself."""

import copy
import importlib
import io
import logging
import pickle

import fastdp
import pytest
import torch
from compiled_cases import Net, Twins, count_for, refuses
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize(
    "value, error, text",
    [
        ("inductor", TypeError, "compile is 'inductor'"),
        ({"engine": 1}, ValueError, "compile has the key 'engine'"),
        ({"dynamic": 1}, TypeError, r"compile\['dynamic'\] is 1"),
        ({"mode": "fastest"}, ValueError, "'fastest': it must be one of default, (?!def)"),
        ({"backend": "gcc"}, ValueError, r"\['backend'\] is 'gcc': it must be one of (?!cuda)"),
        ({"backend": "cudagraphs"}, ValueError, "makes CUDA graphs of its own"),
        ({"options": {"fast": True}}, ValueError, r"compile\['options'\] has 'fast'"),
        ({"options": {1: True}}, ValueError, r"compile\['options'\] has 1"),
        ({"mode": "default", "options": {}}, ValueError, "one of the two"),
    ],
    ids=["str", "key", "dynamic", "mode", "backend", "cudagraphs", "options", "number", "both"],
)
def test_bad_options_are_named(value, error, text):
    with pytest.raises(error, match=text):
        fastdp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], compile=value)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_compilers_own_graphs_are_off(mode):
    # torch._dynamo.reset() imports it after such a mode, and may fail if that is the first time.
    importlib.import_module("torch._inductor.cudagraph_trees")
    options = fastdp.compile_options.parse({"mode": mode})
    assert options._config["triton.cudagraphs"] is False
    module = torch.compile(nn.Linear(2, 2), mode=mode, fullgraph=True)
    options = fastdp.compile_options.of_compiled_module(module)
    assert options._config["triton.cudagraphs"] is False
    assert options.fullgraph and options.is_inductor
    assert options._config.get("max_autotune", False) is (mode == "max-autotune")


def test_the_module_by_torch_compile(fast):
    module = Net().double()
    twins = Twins(fast, module)
    options = dict(backend="aot_eager", dynamic=False)
    twins.compiled = fast.wrap(torch.compile(copy.deepcopy(module), **options), 2)
    twins.both = twins.compiled, twins.plain
    twins.optimizers[0] = torch.optim.SGD(twins.compiled.parameters(), 1e-2, momentum=0.9)
    for seed in range(3):
        twins.step(twins.rows(seed=seed))
    assert twins.count == count_for(fast, 2)
    assert set(twins.compiled.state_dict()) == {
        f"module.{name}" for name in torch.compile(module).state_dict()
    }
    assert twins.compiled.report()["compiled"]["backend"] == "aot_eager"


def test_compile_false_leaves_the_module_by_torch_compile_uncompiled(fast):
    dp = fast.wrap(torch.compile(Net(), backend="aot_eager"), 2, compile=False)
    dp(torch.zeros(4, 4, device=fast.home))
    assert dp.report()["compiled"] is None


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, breaks):
        x = self.net(x)
        if breaks:
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("way", ["option", "torch.compile", "in place"])
def test_fullgraph_raises_the_compilers_error_at_a_break(fast, way):
    given = {"backend": "aot_eager", "fullgraph": True}
    twins = Twins(fast, Choosing())
    if way == "option":
        twins.compiled = fast.wrap(twins.compiled.module, 2, compile=given)
    elif way == "torch.compile":
        twins.compiled = fast.wrap(torch.compile(twins.compiled.module, **given), 2)
    else:
        twins.compiled.module.compile(**given)
        twins.compiled = fast.wrap(twins.compiled.module, 2)
    twins.both = twins.compiled, twins.plain
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            twins.compiled(twins.rows(), breaks=True)
        twins.step(twins.rows(), breaks=False)
        assert [form["kind"] for form in twins.forms] == ["one size"]
    assert twins.count == count_for(fast, 2) and twins.reasons == []


def test_fullgraph_leaves_what_the_failed_forward_wrote_as_it_was(fast):
    dp = fast.wrap(Choosing(), 2, compile={"backend": refuses, "fullgraph": True})
    before = copy.deepcopy(dp.state_dict())
    with pytest.raises(Exception, match="this compiler can nothing"):
        dp(torch.ones(6, 4, device=fast.home), breaks=False)
    assert all(torch.equal(value, before[name]) for name, value in dp.state_dict().items())


@pytest.mark.parametrize("n", [1, 2])
def test_a_module_that_was_compiled_in_place(fast, n):
    """As that of torch.compile(module)."""
    module = Net()
    twins = Twins(fast, module, n=n)
    module.compile(backend="aot_eager", dynamic=False)
    twins.compiled = fast.wrap(module, n)
    twins.both = twins.compiled, twins.plain
    twins.optimizers[0] = torch.optim.SGD(twins.compiled.parameters(), 1e-2, momentum=0.9)
    for seed in range(3):
        twins.step(twins.rows(seed=seed))
    for length in (4, 8, 10):
        twins.look(twins.rows(length))
    assert {form["kind"] for form in twins.forms} == {"one size"} and len(twins.forms) == 4
    assert twins.compiled.report()["compiled"]["backend"] == "aot_eager"
    assert set(twins.compiled.state_dict()) == set(twins.plain.state_dict())


def test_compile_false_leaves_the_module_that_was_compiled_in_place_uncompiled(fast):
    module = Net()
    module.compile(backend=refuses)
    module.first.compile(backend=refuses)
    dp = fast.wrap(module, 2, compile=False)
    dp(torch.zeros(4, 4, device=fast.home))
    assert dp.report()["compiled"] is None


def said(caplog):
    texts = [record.getMessage() for record in caplog.records if record.name == "fastdp"]
    return [text for text in texts if text.startswith("compile: ")]


@pytest.mark.parametrize("way", ["in place", "torch.compile"])
def test_parts_that_were_compiled_run_uncompiled_in_replicas_and_are_named(fast, caplog, way):
    caplog.set_level(logging.WARNING, "fastdp")
    module = Net()
    twins = Twins(fast, module)
    if way == "in place":
        module.first.compile(backend="aot_eager")
    else:
        module.first = torch.compile(module.first, backend="aot_eager")
    twins.compiled = fast.wrap(module, 2)
    twins.both = twins.compiled, twins.plain
    for seed in range(2):
        x = twins.rows(seed=seed)
        torch.testing.assert_close(twins.compiled(x), twins.plain(x), rtol=0, atol=1e-12)
    (reason,) = twins.reasons
    assert reason.endswith("runs uncompiled in replicas, unless compile=True: first")
    assert said(caplog) == [f"compile: {reason}"]
    report = str(twins.compiled.report())
    assert f"not compiled: {reason}" in report and "compiled   with" not in report


@pytest.mark.parametrize("part", ["", "first"], ids=["whole", "part"])
def test_what_was_compiled_with_the_compiler_off_is_as_any_other(fast, caplog, part):
    caplog.set_level(logging.WARNING, "fastdp")
    module = Net()
    module.get_submodule(part).compile(disable=True)
    dp = fast.wrap(module.double(), 2)
    x = torch.ones(6, 4, dtype=torch.float64)
    torch.testing.assert_close(dp(x), module(x.to(dp.src_device_obj)))
    assert dp.report()["compiled"] is None and said(caplog) == []


def test_parts_that_were_compiled_are_compiled_with_the_whole(fast, caplog):
    caplog.set_level(logging.WARNING, "fastdp")
    twins = Twins(fast, Net())
    twins.compiled.module.first.compile(backend="aot_eager")
    twins.step(twins.rows())
    assert twins.reasons == [] and said(caplog) == []
    assert twins.count == count_for(fast, 2)


def test_a_kind_that_cannot_be_compiled_leaves_the_others_to_be(fast):
    def refuses_to_train(graph, inputs):
        if torch.is_grad_enabled():
            raise RuntimeError("this compiler cannot train")
        return graph.forward

    twins = Twins(fast, Net(), compile={"backend": refuses_to_train})
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
        twins.each(lambda module: module.eval())
        twins.look(twins.rows())
        twins.each(lambda module: module.train())
    assert len(twins.reasons) == 1 and "this compiler cannot train" in twins.reasons[0]
    assert [form["kind"] for form in twins.forms] == ["one size"]
    assert twins.count >= count_for(fast, 2)


def test_what_cannot_be_compiled_runs_uncompiled_with_the_reason_once(fast, caplog):
    caplog.set_level(logging.WARNING, "fastdp")
    twins = Twins(fast, Net(), compile={"backend": refuses})
    for seed in range(3):
        twins.step(twins.rows(seed=seed))
    assert len(twins.reasons) == 1 and "this compiler can nothing" in twins.reasons[0]
    assert sum("this compiler can nothing" in r.getMessage() for r in caplog.records) == 1
    assert "not compiled: " in str(twins.compiled.report())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.lstm(x)[0])


def test_a_forward_of_which_nothing_is_compiled_runs_uncompiled(fast):
    twins = Twins(fast, Recurrent())
    for _ in range(2):
        twins.step(twins.rows(6, 12).view(6, 3, 4))
    assert len(twins.reasons) == 1 and "LSTM" in twins.reasons[0]
    assert twins.forms == []


def through(graph, inputs):
    return graph


@pytest.mark.parametrize("backend", ["aot_eager", through], ids=["name", "function"])
@pytest.mark.parametrize("way", ["pickle", "torch.save", "copy"])
def test_a_wrapper_that_was_saved_compiles_as_before(fast, backend, way):
    dp = fast.wrap(Net().double(), 2, compile={"backend": backend, "dynamic": False})
    x = torch.ones(6, 4, dtype=torch.float64, device=fast.home)
    want = dp(x)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(dp))
    elif way == "copy":
        again = copy.deepcopy(dp)
    else:
        file = io.BytesIO()
        torch.save(dp, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(x), want, rtol=0, atol=1e-12)
    assert again._fastdp_compiled.count == count_for(fast, 2)
    assert again._fastdp_compile.dynamic is False
