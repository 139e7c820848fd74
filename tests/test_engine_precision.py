"""Recorded steps under a GradScaler, whose scale changes and whose overflows skip steps, and in
training loops that hold scales, schedules and averages of weights of their own."""

import copy

import pytest
import torch
from engine_cases import WATCHED, Twins, identical, noise, squares, steps
from torch import nn

AHEAD = WATCHED["graph"]


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def rows(means, seed=0):
    return noise(means, 6, 4, seed=seed).float()


def scaler_of(means, scale):
    return torch.amp.GradScaler(means.home.type, init_scale=scale, growth_interval=3)


def scaled_step(dp, optimizer, scaler, x, dtype):
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype):
        output = dp(x)
        loss = output.float().square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(dp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return output


def test_a_scaler(means):
    """It doubles its scale every third step, and the overflows at the end of that are skipped."""
    dtype = torch.bfloat16 if means.on_host else torch.float16
    twins = Twins(means, layers())
    scalers = [scaler_of(means, 2.0**126 if means.on_host else 2.0**16) for _ in twins.both]
    scales = []
    for seed in range(AHEAD + 12):
        outputs = [
            scaled_step(dp, optimizer, scaler, rows(means, seed), dtype)
            for dp, optimizer, scaler in zip(twins.both, twins.optimizers, scalers)
        ]
        twins.check_outputs(*outputs)
        twins.check_gradients()
        twins.check_state()
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale()
    drops = sum(after < before for before, after in zip(scales, scales[1:]))
    rises = sum(after > before for before, after in zip(scales, scales[1:]))
    assert drops > 0 and rises > 0
    twins.ran(eager=AHEAD, graph=12)


def test_gradients_that_overflow_once(means):
    """inf and nan are in the step that made them, and in no later one."""
    twins = Twins(means, layers(), optimizer=False)
    for seed in range(AHEAD + 6):
        x = rows(means, seed)
        if seed % 3 == 2:
            x = x * 3e38
        for dp in twins.both:
            dp.zero_grad()
        twins.step(x)
        spoilt = any(not p.grad.isfinite().all() for p in twins.recorded.parameters())
        assert spoilt == (seed % 3 == 2)
    twins.ran(eager=AHEAD, graph=6)


def test_a_learning_rate_schedule(means):
    twins = Twins(means, layers(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in twins.optimizers]
    for seed in range(AHEAD + 5):
        twins.step(rows(means, seed))
        for schedule in schedules:
            schedule.step()
    twins.ran(eager=AHEAD, graph=5)


def test_an_average_of_the_weights(means):
    """Validation by the average: another module, in the same wrapper's shapes."""
    twins = Twins(means, layers())
    averages = [torch.optim.swa_utils.AveragedModel(dp.module) for dp in twins.both]
    for seed in range(AHEAD + 4):
        twins.step(rows(means, seed))
        for average, dp in zip(averages, twins.both):
            average.update_parameters(dp.module)
    identical(*[dict(average.state_dict()) for average in averages])
    for dp, average in zip(twins.both, averages):
        kept = {name: value.clone() for name, value in dp.module.state_dict().items()}
        dp.module.load_state_dict(average.module.state_dict())
        dp.looked = dp(rows(means, 50)).detach()
        dp.module.load_state_dict(kept)
    identical(*[dp.looked for dp in twins.both])
    twins.ran(eager=AHEAD, graph=5)


def test_weights_that_are_swapped_for_a_moment(means):
    """Parameters whose .data points to other memory and back: both are recorded."""
    twins = Twins(means, layers(), optimizer=False)
    others = [[p.detach() * 2 for p in dp.parameters()] for dp in twins.both]
    for seed in range(2 * AHEAD + 4):
        for dp, tensors in zip(twins.both, others):
            for k, parameter in enumerate(dp.parameters()):
                parameter.data, tensors[k] = tensors[k], parameter.data
        twins.look(rows(means, seed))
    twins.ran(eager=2 * AHEAD, graph=4)


def test_second_order_optimizers(means):
    """LBFGS calls the closure, forward and backward, several times a step."""
    twins = Twins(means, layers().double(), optimizer=False)
    for dp in twins.both:
        optimizer = torch.optim.LBFGS(dp.parameters(), lr=0.1, max_iter=4)

        def closure(dp=dp, optimizer=optimizer):
            optimizer.zero_grad()
            loss = squares(dp(noise(means, 6, 4)))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    twins.check_state()
    assert steps(twins.recorded)["graph"] >= 4


def test_steps_of_two_wrappers_of_one_module(means):
    """Each has recordings of its own, over the same parameters."""
    module = layers()
    twin = copy.deepcopy(module)
    first, second = means.wrap(module), means.wrap(module)
    plain = means.wrap(twin, "eager")
    for seed in range(AHEAD + 2):
        for dp in (first, second):
            module.zero_grad()
            plain.zero_grad()
            output, want = dp(rows(means, seed)), plain(rows(means, seed))
            identical(output, want)
            squares(output).backward()
            squares(want).backward()
            for got, wanted in zip(module.parameters(), twin.parameters()):
                identical(got.grad, wanted.grad)
    assert steps(first) == steps(second) == {"eager": AHEAD, "graph": 2}


def test_a_wrapper_in_a_larger_module(means):
    """The rest is eager; the wrapper's part is recorded."""
    torch.manual_seed(4)
    inner = layers()
    recorded = nn.Sequential(nn.Linear(4, 4), means.wrap(copy.deepcopy(inner))).to(means.home)
    eager = nn.Sequential(copy.deepcopy(recorded[0]), means.wrap(copy.deepcopy(inner), "eager")).to(
        means.home
    )
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (recorded, eager)]
    for seed in range(AHEAD + 4):
        for module, optimizer in zip((recorded, eager), optimizers):
            optimizer.zero_grad()
            squares(module(rows(means, seed))).backward()
            optimizer.step()
        identical(dict(recorded.state_dict()), dict(eager.state_dict()))
    assert steps(recorded[1]) == {"eager": AHEAD, "graph": 4}


@pytest.mark.parametrize("means", ["cpu", "gpu"], indirect=True)
def test_one_device_is_a_wrapper_too(means):
    """The module's own gradients, into the module's own .grad."""
    module = layers()
    bare = copy.deepcopy(module).to(means.home)
    dp = means.wrap(module)
    for seed in range(AHEAD + 3):
        for model in (dp, bare):
            model.zero_grad()
            squares(model(rows(means, seed))).backward()
        for got, want in zip(module.parameters(), bare.parameters()):
            identical(got.grad, want.grad)
    assert steps(dp) == {"eager": AHEAD, "graph": 3}
