"""Evaluation, no_grad and inference_mode have recordings of their own, and may come between a
forward and its backward."""

import contextlib

import pytest
import torch
from engine_cases import SETTLED, WATCHED, Twins, identical, reasons, squares, steps
from engine_cases import rows_of_four as rows
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

AHEAD = WATCHED["graph"]


def norms():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def outputs(twins, *inputs):
    got, want = [dp(*inputs) for dp in twins.both]
    twins.check_outputs(got, want)
    return got


def test_train_and_eval_are_signatures(means):
    twins = Twins(means, norms())
    for seed in range(AHEAD + 4):
        for training in (True, False):
            for dp in twins.both:
                dp.train(training)
            if training:
                twins.step(rows(means, seed))
            else:
                twins.look(rows(means, seed))
                outputs(twins, rows(means, seed))
    # Of eval there are two: with gradients and without.
    twins.ran(eager=3 * AHEAD, graph=3 * 4)


def test_a_part_in_eval(means):
    """A frozen norm in a module that trains; then thawed, which is seen, and frozen again."""
    twins = Twins(means, norms())
    counts = []
    for frozen in (True, False, True):
        twins.each(lambda module: module[1].train(not frozen))
        for seed in range(AHEAD + 2):
            twins.step(rows(means, seed))
        counts.append(steps(twins.recorded)["graph"])
    assert counts == [2, 4, 6]


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_modes(means, mode, engine):
    ahead = {"auto": SETTLED - 2, "graph": AHEAD}[engine]
    twins = Twins(means, norms().eval(), engine)
    kept = []
    for seed in range(SETTLED + 4):
        with MODES[mode]():
            got = outputs(twins, rows(means, seed))
        assert got.is_inference() == (mode == "inference_mode")
        assert got.requires_grad == (mode == "grad")
        if mode != "grad":
            kept.append((got, got.clone()))
        del got
    for got, value in kept:
        assert torch.equal(got, value)
    twins.ran(eager=ahead, graph=SETTLED + 4 - ahead)


def test_modes_in_turn(means):
    """Each recording serves its own mode, whatever ran before."""
    twins = Twins(means, norms())
    for seed in range(AHEAD + 4):
        twins.step(rows(means, seed))
        for mode in ("no_grad", "inference_mode"):
            with MODES[mode]():
                got = outputs(twins, rows(means, seed))
            assert got.is_inference() == (mode == "inference_mode")
    twins.ran(eager=3 * AHEAD, graph=3 * 4)
    twins.check_state()


def test_buffers_are_written_under_no_grad_too(means):
    twins = Twins(means, norms())
    for seed in range(AHEAD + 3):
        before = twins.recorded.module[1].running_mean.clone()
        twins.look(rows(means, seed))
        assert not torch.equal(twins.recorded.module[1].running_mean, before)
    twins.ran(eager=AHEAD, graph=3)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_validation_between_forward_and_backward(means, mode):
    """Its replay may not overwrite what the backward is to read."""
    twins = Twins(means, norms())
    for seed in range(AHEAD + 3):
        losses = []
        for dp in twins.both:
            output = dp(rows(means, seed))
            dp.eval()
            with MODES[mode]():
                looked = dp(rows(means, seed + 50))
            dp.train()
            losses.append((squares(output), looked))
        identical(*[looked for _, looked in losses])
        for (loss, _), optimizer in zip(losses, twins.optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        twins.check_gradients()
        twins.check_state()
    twins.ran(eager=2 * AHEAD, graph=6)


def test_no_grad_with_the_training_forward_open(means):
    """The same shapes and the same mode of the module: still another recording."""
    twins = Twins(means, norms())
    for seed in range(AHEAD + 3):
        opened = [dp(rows(means, seed)) for dp in twins.both]
        twins.look(rows(means, seed + 50))
        for output in opened:
            squares(output).backward()
        twins.check_gradients()
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.ran(eager=2 * AHEAD, graph=6)


def test_weights_trained_between_validations(means):
    """Validation reads the weights as they are, not as they were recorded."""
    twins = Twins(means, norms())
    seen = []
    for seed in range(AHEAD + 4):
        twins.step(rows(means, seed))
        for dp in twins.both:
            dp.eval()
        first = twins.look(rows(means, 77))
        for dp in twins.both:
            dp.train()
        assert not any(torch.equal(first, earlier) for earlier in seen)
        seen.append(first)
    twins.ran(eager=2 * AHEAD, graph=8)


@pytest.mark.parametrize("setting", ["float32 matmul", "default dtype", "deterministic"])
def test_global_settings_are_signatures(means, setting):
    """What kernels are chosen by when they are recorded."""
    twins = Twins(means, norms())
    for seed in range(AHEAD + 1):
        twins.step(rows(means, seed))
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        if setting == "float32 matmul":
            torch.set_float32_matmul_precision("medium")
        elif setting == "default dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.use_deterministic_algorithms(False)
        twins.step(rows(means, 9))
        twins.ran(eager=AHEAD + 1, graph=1)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_default_dtype(before[1])
        torch.use_deterministic_algorithms(True)
    twins.step(rows(means, 10))
    twins.ran(eager=AHEAD + 1, graph=2)


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def every_module_hooked():
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        yield
    finally:
        handle.remove()


WATCHERS = {
    "dispatch mode": (Dispatched, "dispatch mode is active"),
    "function mode": (Called, "function mode Called is active"),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "saved-tensors hooks are active",
    ),
    "anomaly": (torch.autograd.detect_anomaly, "anomaly mode is on"),
    "every module": (every_module_hooked, "on every module"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", WATCHERS)
def test_what_is_to_be_told_of_each_operator(means, name):
    """It comes once steps were recorded: they are eager as long as it is there."""
    make, words = WATCHERS[name]
    twins = Twins(means, norms(), "auto")
    for seed in range(SETTLED + 1):
        twins.step(rows(means, seed))
    before = steps(twins.recorded)
    with make():
        for seed in range(SETTLED):
            twins.step(rows(means, seed))
    assert steps(twins.recorded) == {**before, "eager": before["eager"] + SETTLED}
    assert words in reasons(twins.recorded)
    twins.step(rows(means, 0))
    assert steps(twins.recorded)["graph"] == before["graph"] + 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_finds_what_it_looks_for(means):
    dp = means.wrap(norms(), "auto")
    for seed in range(SETTLED + 1):
        dp(rows(means, seed)).sum().backward()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        dp(rows(means, 9) * float("nan")).sum().backward()
