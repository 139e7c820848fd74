"""benchmarks/bare.py: copies that take their steps beside each other and have nothing in common."""

import sys
import threading

import pytest
import torch
from benchmark_cases import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import bare  # noqa: E402
import contest  # noqa: E402
import models  # noqa: E402
import rivals  # noqa: E402
import step_bars  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def made():
    """Makes rivals, and ends them."""
    found = []

    def make(name="tiny", copies=2, per_gpu=2, part="step"):
        rival = bare.Bare(models.MODELS[name], [CPU] * copies, per_gpu, part, copies)
        found.append(rival)
        return rival

    yield make
    for rival in found:
        rival.end()


def modules_of(rival):
    return [trainer.module for trainer in rival._trainers]


def alone(name, module, share, scale):
    """The gradients of one share of the batch, by a bare module of those weights."""
    model = models.MODELS[name]
    own = model.make(CPU)
    own.load_state_dict(module.state_dict())
    with model.precision("cpu"):
        loss = own(share).float().mean() * scale
    loss.backward()
    return [parameter.grad for parameter in own.parameters()]


@pytest.mark.parametrize("way", [bare.AT_ONCE, bare.IN_TURN])
@pytest.mark.parametrize("name, scale", [("tiny", 1.0), ("tiny-fp16", 65536.0)])
def test_each_copy_has_the_gradients_of_its_share(made, way, name, scale):
    rival = made(name, copies=3, per_gpu=2, part="backward")
    rival.way = way
    shares = [trainer.batch for trainer in rival._trainers]
    assert [share.shape[0] for share in shares] == [2, 2, 2]
    assert not torch.equal(shares[0], shares[1])
    weights = [list(module.parameters()) for module in modules_of(rival)]
    for others in weights[1:]:
        assert all(torch.equal(a, b) and a is not b for a, b in zip(weights[0], others))
    before = [parameter.clone() for parameter in weights[0]]
    for _ in range(2):  # the second step does not add to the first one's
        rival.step()
    for module, share in zip(modules_of(rival), shares):
        wanted = alone(name, module, share, scale)
        for parameter, gradient in zip(module.parameters(), wanted):
            assert torch.equal(parameter.grad, gradient)
    assert all(map(torch.equal, weights[0], before))  # without an optimizer


def test_whole_steps_move_the_first_copy_alone(made):
    rival = made()
    first, second = modules_of(rival)
    before = [parameter.clone() for parameter in second.parameters()]
    rival.step()
    assert all(map(torch.equal, second.parameters(), before))
    for old, new in zip(before, first.parameters()):
        assert torch.equal(new, old - 1e-4 * new.grad)


def test_at_once_means_each_on_a_thread_that_stays(made):
    rival, seen = made(copies=3), []
    meeting = threading.Barrier(3)

    def meet(module, inputs):
        meeting.wait(60)  # nobody comes out before all are in
        seen.append((modules_of(rival).index(module), threading.get_ident()))

    for module in modules_of(rival):
        module.register_forward_pre_hook(meet)
    rival.step()
    rival.step()
    first, second = sorted(seen[:3]), sorted(seen[3:])
    assert first == second
    assert first[0] == (0, threading.get_ident())
    assert len({thread for _, thread in first}) == 3


def test_in_turn_means_all_on_the_callers_thread(made):
    rival, seen = made(copies=3), []
    rival.way = bare.IN_TURN
    for k, module in enumerate(modules_of(rival)):
        module.register_forward_hook(lambda *_, k=k: seen.append((k, threading.get_ident())))
    rival.step()
    assert seen == [(k, threading.get_ident()) for k in range(3)]


@pytest.mark.parametrize("faster", [bare.AT_ONCE, bare.IN_TURN])
def test_warming_up_keeps_the_faster_way(made, monkeypatch, faster):
    rival, asked = made(), []

    def take(step, steps, devices):
        asked.append((rival.way, steps))
        # The first steps of a way count not, be they fast; and one good try is enough.
        is_first, is_last = len(asked) <= 2, len(asked) > 2 * bare.TRIES
        step_ms = 1.0 if rival.way == faster else 2.0
        return rivals.Block(step_ms if is_last else 0.5 / step_ms if is_first else 9.0, 0.5)

    monkeypatch.setattr(bare, "take", take)
    rival.warm_up(5)
    assert rival.facts() == {"forward": faster} and rival.way == faster
    assert asked == [(bare.AT_ONCE, 5), (bare.IN_TURN, 5)] * (1 + bare.TRIES)
    assert rival.block(3).step_ms == 1.0 and asked[-1] == (faster, 3)


def test_a_batch_of_few_rows_has_fewer_copies(made):
    """As scatter cuts it: torch's own uses fewer replicas."""
    rival = bare.Bare(models.MODELS["tiny"], [CPU] * 3, 4, "step", 1)
    assert [trainer.batch.shape[0] for trainer in rival._trainers] == [2, 2]
    assert len(rival._workers) == 1
    rival.step()
    rival.end()


@pytest.mark.parametrize("copy", [0, 1])
def test_an_error_of_a_copy_is_the_rivals(made, copy):
    rival = made()

    def fail(module, inputs):
        raise KeyError("lost")

    modules_of(rival)[copy].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="lost"):
        rival.step()


def test_its_end_ends_its_threads():
    rival = bare.Bare(models.MODELS["tiny"], [CPU] * 3, 2, "step", 3)
    threads = [worker._thread for worker in rival._workers]
    rival.warm_up(1)
    assert len(threads) == 2 and all(thread.is_alive() for thread in threads)
    assert all(p.grad is None for module in modules_of(rival) for p in module.parameters())
    rival.end()
    assert not any(thread.is_alive() for thread in threads)


def test_no_floor_no_word(capsys):
    row = {"step_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "host_ms": 1.0, "s_per_1000_batches": 1.0}
    rows = [{"rival": name, **row} for name in ("torch DP", "fastdp eager")]
    contest.compare(rows)
    for each in rows:
        each |= {"allocated_mb": [], "reserved_mb": []}
    contest.show("title", rows, None)
    assert "torch DP is" not in capsys.readouterr().out
    rows.append({**rows[0], "rival": step_bars.BARE})
    contest.compare(rows)
    contest.show("title", rows[:1] + rows[2:], None)  # cut off: nobody asked how it ran
    assert "\ntorch DP is 1.00 over bare modules\n" in capsys.readouterr().out
