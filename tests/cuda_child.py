"""What the CUDA tests run in processes of their own: other environment variables, a GPU that must
stay untouched, every CUDA call looked at. `start` begins a task, `answer` waits for what it says;
tasks that are started together run side by side.
"""

import ctypes
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 300.0


def start(task, *arguments, **environment):
    import fastdp

    paths = [str(Path(fastdp.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, __file__, task, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
    )


def answer(process):
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not done in {TIMEOUT_S} s:\n{err[-3000:]}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{err[-3000:]}"
    return json.loads(out.splitlines()[-1])


def stop(processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _or_error(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Tasks. Each gives what JSON can say.


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def training(*lists):
    """For each list of devices what is wrong with exact training; and the log."""
    from cuda_sums import wrong_training

    log = _Kept()
    logging.getLogger("fastdp").addHandler(log)
    results = [_or_error(wrong_training, ids) for ids in lists]
    return {"results": results, "log": log.lines}


def freed(ids):
    """What went wrong where memory that a stream still reads was freed, and all that torch keeps
    unused then given back, and taken by others."""
    import torch
    from torch import nn

    import fastdp

    length, cycles = 1 << 22, 200_000_000  # some 100 ms

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(length) % 64 / 8.0)

        def forward(self, x):
            weight = self.weight  # which has arrived when the GPU is held up
            torch.cuda._sleep(cycles)
            return (x * weight).sum(1, dtype=torch.float64)

    def give_back():
        for index in set(ids):
            with torch.cuda.device(index):
                torch.cuda.empty_cache()
                with torch.cuda.stream(torch.cuda.Stream(index)):
                    torch.full((length,), float("nan"), device=index)

    dp = fastdp.DataParallel(Late().to(ids[0]), ids)
    x = torch.ones(len(ids), length, device=ids[0])
    want = dp.module.weight.detach().sum(dtype=torch.float64)
    wrong = []
    for k in range(3):
        with torch.no_grad():
            out = dp(x)
        give_back()
        if not out.eq(want).all():
            wrong.append(f"forward {k} gave {out.tolist()}, not {want.item()}")
        dp(x).sum().backward()
        torch.cuda._sleep(cycles)
        total = dp.module.weight.grad.sum(dtype=torch.float64)
        dp.zero_grad(set_to_none=True)
        give_back()
        if total.item() != len(ids) * length:
            wrong.append(f"gradients of step {k} add up to {total.item()}")
    told = [c._tells for c in fastdp_communications(dp)]
    return {"wrong": wrong, "told": told}


def fastdp_communications(dp):
    """Those that are used beside compute."""
    plans = dp._fastdp_get_runtime().replicator._plans.values()
    return [plan.communication for plan in plans if plan.communication.apart]


def sums(*lists):
    """For each list of devices the sums that differ from the host's."""
    from cuda_sums import all_wrong_sums

    return [_or_error(all_wrong_sums, ids) for ids in lists]


def blocking_calls(ids):
    """Calls that wait, of steps in their steady state; and how many calls were seen."""
    import torch
    from cuda_calls import CudaCalls
    from cuda_steps import STEPS, Steps

    steps = Steps(ids)
    found = {}
    for name in STEPS:
        for _ in range(5):
            steps.take(name)
        steps.wait()
        try:
            calls = CudaCalls()
            with calls:
                for _ in range(3):
                    steps.take(name)
        except RuntimeError as error:
            return {"skipped": str(error)}
        steps.wait()
        found[name] = {"blocking": calls.blocking(), "calls": len(calls.names)}
    # That a wait would be seen.
    with CudaCalls() as calls:
        torch.cuda.synchronize(ids[0])
    found["synchronize"] = {"blocking": calls.blocking(), "calls": len(calls.names)}
    return found


def _alive():
    """The GPUs on which this process has a context."""
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    alive = []
    for index in range(torch.cuda.device_count()):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(device), index) == 0
        state = driver.cuDevicePrimaryCtxGetState(
            device, ctypes.byref(flags), ctypes.byref(active)
        )
        assert state == 0, f"cuDevicePrimaryCtxGetState: {state}"
        if active.value:
            alive.append(index)
    return alive


def contexts(ids):
    """GPUs with a context: after a step of the bare module, and after steps of the wrapper."""
    import torch
    from cuda_sums import wrong_training
    from nets import Net, ints

    home = torch.device("cuda", ids[0])
    Net().to(home)(ints(6, 3).to(home)).sum().backward()
    torch.cuda.synchronize(home)
    bare = _alive()
    wrong = wrong_training(ids)
    torch.cuda.synchronize(home)
    return {"bare": bare, "wrapped": _alive(), "wrong": wrong}


def without_gpu():
    """With GPUs hidden: what a wrapper is, and what the core says."""
    import torch
    from nets import Net, ints

    import fastdp
    from fastdp import _C

    module = Net()
    dp = fastdp.DataParallel(module, device_ids=[0, 1])
    x = ints(5, 3)
    return {
        "seen": torch.cuda.device_count(),
        "device_ids": dp.device_ids,
        "right": torch.equal(dp(x), module(x)),
        "functional": _or_error(fastdp.data_parallel, module, x, [0, 1]),
        "host": torch.equal(fastdp.DataParallel(module, ["cpu", "cpu"])(x), module(x)),
        "core": _or_error(_C.Array, (1,), (2, 32, 1), (2, 0)),
    }


if __name__ == "__main__":
    task, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(globals()[task](*arguments)))
