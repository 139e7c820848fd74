"""Ctrl-C at every point of a step of compiled replicas, where the traceback is kept: its thread
compiles what comes next, and has the autocast that it had."""

import torch
from interrupting import interrupt_at
from nets import Net, grads, ints, same

import fastdp
from fastdp import readiness

ENOUGH = 100  # points; fewer would mean that the profiler saw nothing


def state_of_this_thread():
    return (
        readiness.may_compile(), readiness.is_compiling(), readiness.is_uncompiled(),
        readiness.current_place(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled(),
    )  # fmt: skip


def trained(dp, x):
    dp.zero_grad(set_to_none=True)
    output = dp(x)
    output.sum().backward()
    return output.detach(), grads(dp.module)


def test_an_interrupt_anywhere_in_a_step_of_compiled_replicas():
    dp = fastdp.DataParallel(Net(), ["cpu"] * 2, compile={"backend": "aot_eager"})
    x = ints(4, 3)
    want = trained(fastdp.DataParallel(Net(), ["cpu"] * 2), x)
    trained(dp, x)
    before = state_of_this_thread()
    point, where, kept, wrong = 0, [None], [], []
    while where:
        point += 1
        try:
            with interrupt_at(point) as where:
                dp(x).sum().backward()
        except KeyboardInterrupt as error:
            kept.append(error)
        if state_of_this_thread() != before:
            wrong.append(where)
        same(trained(dp, x), want)
        kept.clear()
    assert not wrong
    assert point > ENOUGH
    assert dp.report()["compiled"]["reasons"] == []
