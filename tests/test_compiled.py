"""Compiled replicas: `DataParallel(module, compile=...)` computes what uncompiled ones do, compiles
each kind of call once for all replicas, and says what it could not compile."""

import copy
import gc
import logging
import threading
import weakref

import fastdp
import pytest
import torch
from compiled_cases import Breaking, Net, Twins, count_for
from fastdp.compile_calls import Arguments
from nets import as_a_loader_that_pins_memory
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


def test_steps_are_those_of_plain_replicas_and_compiled_once(fast):
    twins = Twins(fast, Net(), n=3)
    for seed in range(5):
        twins.step(twins.rows(seed=seed))
    assert twins.count == count_for(fast, 3)
    assert [form["kind"] for form in twins.forms] == ["one size"]
    assert twins.reasons == []


def test_other_replica_objects_are_served_by_what_was_compiled(fast):
    """Checkpointing and kept replicas make the pool take another set."""
    twins = Twins(fast, Net())
    twins.step(twins.rows())
    held = []
    twins.compiled.module.register_forward_hook(lambda module, *rest: None).remove()
    for seed in range(1, 3):
        with torch.no_grad():
            held.append(twins.compiled.replicate(twins.compiled.module, twins.compiled.device_ids))
        twins.step(twins.rows(seed=seed))
    assert twins.count == count_for(fast, 2)


def test_threads_that_began_with_another_number_of_operators_threads_are_served(fast):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        as_a_loader_that_pins_memory()
        twins = Twins(fast, Net())
        for seed in range(3):
            twins.step(twins.rows(seed=seed))
        assert twins.count == count_for(fast, 2)
    finally:
        torch.set_num_threads(before)


def test_train_eval_and_no_grad_are_kinds_of_their_own_and_come_back(fast):
    twins = Twins(fast, Net())
    for _ in range(3):
        for dp in twins.both:
            dp.train()
        twins.step(twins.rows())
        for dp in twins.both:
            dp.eval()
        twins.look(twins.rows(seed=1))
    assert twins.count == 2 * count_for(fast, 2)


@pytest.mark.parametrize("n", [1, 2])
def test_one_device_and_none(fast, n):
    twins = Twins(fast, Net(), n=n)
    for seed in range(3):
        twins.step(twins.rows(seed=seed))
    assert twins.count == count_for(fast, n)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU: all are taken otherwise")
def test_a_module_that_is_called_directly_is_compiled_too():
    module = Net().double()
    plain = copy.deepcopy(module)
    dp = fastdp.DataParallel(module, compile={"backend": "aot_eager"})
    assert dp.device_ids == []
    x = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(dp(x), plain(x))
    assert dp._fastdp_compiled.count == 1


class WritesIntoItsInput(nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return x * y


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU: all are taken otherwise")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_arguments_that_share_memory_are_not_taken_for_such_that_lie_apart(backend):
    module = WritesIntoItsInput()
    dp = fastdp.DataParallel(module, compile={"backend": backend})
    for start in (4, 0, 2, 4):  # apart, the same, overlapping
        for _ in range(2):
            one, other = (torch.arange(8.0) for _ in range(2))
            got = dp(one[:4], one[start : start + 4])
            assert torch.equal(got, module(other[:4], other[start : start + 4]))
            assert torch.equal(one, other)


def test_tensors_that_are_conjugated_lazily_are_a_kind_of_their_own():
    x = torch.ones(2, dtype=torch.complex64)
    kinds = [x, x.conj(), x.conj().imag]
    found = {Arguments((each,), {}, x.device).structure for each in kinds}
    assert len(found) == 3


def test_an_attribute_that_changes_is_seen(fast):
    twins = Twins(fast, Net())
    for rate in (1.0, 2.0, 1.0):
        twins.each(lambda module: setattr(module, "rate", rate))
        twins.step(twins.rows())
    assert twins.count == 2 * count_for(fast, 2)


def test_frozen_and_unused_parameters(fast):
    module = Net()
    module.first.requires_grad_(False)
    module.spare = nn.Linear(2, 2)
    twins = Twins(fast, module)
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
    assert twins.compiled.module.first.weight.grad is None
    assert twins.compiled.module.spare.weight.grad.count_nonzero() == 0
    twins.each(lambda module: module.first.requires_grad_(True))
    twins.step(twins.rows())
    assert twins.compiled.module.first.weight.grad is not None


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


def test_dropout_draws_anew_at_each_step(fast):
    twins = Twins(fast, Noisy())
    x = twins.rows(64)
    first, second = twins.compiled(x), twins.compiled(x)
    assert not torch.equal(first == 0, second == 0)
    halves = first.chunk(2)
    if fast.gpus == 1:  # each GPU has a generator of its own, and they were seeded alike
        assert not torch.equal(halves[0] == 0, halves[1] == 0)
    assert twins.count == count_for(fast, 2)


def test_autocast(fast):
    """What was compiled without it does not serve; the casts are those of plain replicas."""
    twins = Twins(fast, Net(), atol=0.05)
    for dp in twins.both:
        dp.float()
    x = twins.rows().float()
    for _ in range(2):
        with torch.autocast(fast.home.type, torch.bfloat16):
            assert twins.step(x, loss=lambda out: out.float().square().mean()).dtype != x.dtype
        assert twins.step(x).dtype == x.dtype
    assert twins.count == 2 * count_for(fast, 2)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def test_checkpointing_inside(fast):
    twins = Twins(fast, Checkpointed())
    twins.each(lambda module: module.eval())  # eager ones write their buffers twice
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
    assert twins.count == count_for(fast, 2)


def test_checkpointing_around(fast):
    twins = Twins(fast, Net())
    twins.each(lambda module: module.eval())
    for seed in range(2):
        for dp in twins.both:
            dp.zero_grad()
            x = twins.rows(seed=seed).requires_grad_()
            checkpoint(dp, x, use_reentrant=False).square().sum().backward()
        twins.check_gradients()


def test_a_short_last_batch_is_right(fast):
    twins = Twins(fast, Net(), n=3)
    for length in (9, 9, 6, 9, 6, 8):
        twins.step(twins.rows(length))


def test_graph_breaks_are_right_and_named(fast):
    twins = Twins(fast, Breaking())
    for seed in range(4):
        twins.step(twins.rows(seed=seed))
    (form,) = {form["kind"]: form for form in twins.forms}.values()
    assert form["kind"] == "breaks" and form["graphs"] >= 2
    assert "graph_break" in form["reason"]
    assert "graph breaks" in str(twins.compiled.report())
    before = twins.count
    twins.step(twins.rows())
    assert twins.count == before


class Wants(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        if x.size(1) != 4:
            raise ValueError("four columns are wanted")
        return self.layer(x)


def test_the_models_own_error_is_raised_as_such_and_the_wrapper_stays_usable(fast):
    twins = Twins(fast, Wants())
    twins.step(twins.rows())
    with pytest.raises(ValueError, match="four columns are wanted"):
        twins.compiled(twins.rows(width=5))
    assert twins.reasons == []
    twins.plain.module.seen += 1  # the failed forward came as far as that
    before = twins.count
    twins.step(twins.rows())
    assert twins.count == before


def test_from_several_threads(fast):
    twins = Twins(fast, Net())
    twins.each(lambda module: module.eval())
    x, results = twins.rows(), []
    want = twins.plain(x)

    def run():
        for _ in range(3):
            results.append(twins.compiled(x))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    for result in results:
        torch.testing.assert_close(result, want, rtol=0, atol=1e-12)


def test_sequential_and_other_entries(fast):
    twins = Twins(fast, Net(), sequential=True)
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
    rows, named = twins.compiled.scatter((twins.rows(),), {}, twins.compiled.device_ids)
    with torch.no_grad():
        replicas = twins.compiled.replicate(twins.compiled.module, twins.compiled.device_ids)
        outputs = fastdp.parallel_apply(replicas, rows, named)
        copied = copy.deepcopy(replicas[1])
        torch.testing.assert_close(copied(*rows[1]), outputs[1], rtol=0, atol=1e-12)


def test_copies_and_pickles_take_nothing_compiled_along(fast):
    twins = Twins(fast, Net())
    twins.step(twins.rows())
    again = copy.deepcopy(twins.compiled)
    assert "_fastdp_compiled" not in again.__dict__
    twins.plain, twins.compiled = twins.compiled, again
    with torch.no_grad():
        want = twins.plain.eval()(twins.rows())
        torch.testing.assert_close(again.eval()(twins.rows()), want, rtol=0, atol=1e-12)


def test_compile_of_the_wrapper_around_compiled_replicas(fast):
    twins = Twins(fast, Net())
    outer = torch.compile(twins.compiled, backend="aot_eager")
    x = twins.rows()
    torch.testing.assert_close(outer(x), twins.plain(x), rtol=0, atol=1e-12)


def keeping_its_graph(output):
    """A loss whose graph goes backward twice."""
    loss = output.square().sum()
    loss.backward(retain_graph=True)
    return loss


def test_a_graph_that_is_kept_goes_backward_again(fast):
    twins = Twins(fast, Net())
    twins.step(twins.rows(), loss=keeping_its_graph)


def test_the_compiler_of_the_host(fast):
    """Inductor: with gcc here, with Triton on a GPU."""
    twins = Twins(fast, Net(), compile=True)
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
    twins.step(twins.rows(), loss=keeping_its_graph)
    assert twins.count == count_for(fast, 2)
    assert twins.reasons == []
    assert all("again" not in form for form in twins.forms)


def doubles_what_layers_give(module, args, output):
    return output * 2 if isinstance(module, nn.Linear) else None


@pytest.mark.parametrize("where", ["root", "inside", "everywhere"])
def test_hooks_that_come_and_go_after_it_was_compiled(fast, where):
    twins = Twins(fast, Net())
    twins.each(nn.Module.eval)
    before = twins.look(twins.rows())
    if where == "everywhere":
        register = torch.nn.modules.module.register_module_forward_hook
        hooks = [register(doubles_what_layers_give)]
    else:
        hooks = []
        twins.each(
            lambda module: hooks.append(
                (module if where == "root" else module.second).register_forward_hook(
                    lambda module, args, output: output * 2
                )
            )
        )
    assert not torch.equal(twins.look(twins.rows()), before)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(twins.look(twins.rows()), before, rtol=0, atol=1e-12)
    reason = ["as long as there are hooks on all modules"]
    assert twins.reasons == (reason if where == "everywhere" else [])


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y if x.sum().item() > 0 else -y


def test_a_value_that_is_read_breaks_the_graph_and_no_more(fast):
    twins = Twins(fast, Reading())
    for seed in range(4):
        twins.step(twins.rows(seed=seed))
    assert {form["kind"] for form in twins.forms} == {"breaks"}
    assert twins.reasons == []


speaker = logging.getLogger("speaking")


class Speaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        speaker.warning_once("said once")
        return self.layer(x)


def test_what_transformers_says_once_breaks_no_graph(fast):
    pytest.importorskip("transformers.utils.logging")
    twins = Twins(fast, Speaking())
    for seed in range(2):
        twins.step(twins.rows(seed=seed))
    assert [form["kind"] for form in twins.forms] == ["one size"]
    assert twins.count == count_for(fast, 2)


@pytest.mark.parametrize("compile", [True, {"backend": "aot_eager"}], ids=["inductor", "aot_eager"])
def test_what_was_compiled_goes_with_its_wrapper(fast, compile, monkeypatch):
    # pytest keeps what is logged, and with a compiler's traceback the frames of whoever called it.
    monkeypatch.setattr(logging.getLogger("torch._dynamo.metrics_context"), "disabled", True)
    dp = fast.wrap(Net(), 2, compile=compile)
    for _ in range(3):
        dp(torch.ones(6, 4, device=fast.home)).sum().backward()
    replicator = dp._fastdp_get_runtime().replicator
    assert (len(replicator._idle), len(replicator._lent)) == (1, 0)
    (family,) = dp._fastdp_compiled._families.values()
    (form,) = family.made
    (graph,) = form.graphs
    alive = [weakref.ref(each) for each in (dp._fastdp_compiled, form, graph, graph.pieces[0])]
    del dp, replicator, family, form, graph
    gc.collect()
    assert [each() for each in alive] == [None] * 4
