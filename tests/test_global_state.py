"""global_state: each global setting that kernels depend on is in it."""

import contextlib
import threading
import time

import pytest
import torch
from test_watch import nothing_is_left  # noqa: F401
from torch import nn

from fastdp.watch import Watch, global_state


def set_and_restore(get, put, value):
    @contextlib.contextmanager
    def manager():
        former = get()
        put(value)
        try:
            yield
        finally:
            put(former)

    return manager


def flip(get, put):
    @contextlib.contextmanager
    def manager():
        former = get()
        put(not former)
        try:
            yield
        finally:
            put(former)

    return manager


def flag(place, name):
    return flip(lambda: getattr(place, name), lambda given: setattr(place, name, given))


cuda, cudnn = torch.backends.cuda, torch.backends.cudnn

SETTINGS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast off cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "autocast cuda": set_and_restore(
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
        True,
    ),
    "autocast cuda dtype": set_and_restore(
        lambda: torch.get_autocast_dtype("cuda"),
        lambda dtype: torch.set_autocast_dtype("cuda", dtype),
        torch.bfloat16,
    ),
    "dtype": set_and_restore(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": lambda: torch.device("meta"),
    "precision": set_and_restore(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "tf32": flag(cuda.matmul, "allow_tf32"),
    "fp16": flag(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16": flag(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "cudnn": flag(cudnn, "enabled"),
    "benchmark": flag(cudnn, "benchmark"),
    "cudnn deterministic": flag(cudnn, "deterministic"),
    "cudnn tf32": flag(cudnn, "allow_tf32"),
    "flash": flip(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": flip(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": flip(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn sdp": flip(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "deterministic": flip(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "fill": flag(torch.utils.deterministic, "fill_uninitialized_memory"),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_a_setting_is_in_the_global_state(kind):
    before = global_state()
    with SETTINGS[kind]():
        inside = global_state()
        assert hash(inside) == hash(global_state()) and inside == global_state()
    assert inside != before
    assert global_state() == before


def test_warn_only_is_in_the_global_state():
    try:
        torch.use_deterministic_algorithms(True)
        strict = global_state()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert global_state() != strict
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_order_of_attention_kernels_is_in_the_global_state():
    if not hasattr(torch._C, "_get_sdp_priority_order"):
        pytest.skip("a torch without an order")
    kernels = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    with torch.nn.attention.sdpa_kernel(kernels, set_priority=True):
        first = global_state()
    with torch.nn.attention.sdpa_kernel(kernels[::-1], set_priority=True):
        assert global_state() != first


def test_the_global_state_is_the_threads_own():
    found = []
    with torch.no_grad():
        here = global_state()
        thread = threading.Thread(target=lambda: found.append(global_state()))
        thread.start()
        thread.join()
    assert found[0] != here and found[0] == global_state()


def test_what_it_costs(capsys):
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(150)))

    def best(act, calls, rounds=10):
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                act()
            times.append((time.perf_counter() - start) / calls)
        return min(times) * 1e6

    def watch():
        with Watch([module]):
            pass

    with capsys.disabled():
        print(f"\nglobal_state() {best(global_state, 1000):.1f} us")
        print(f"a watch of 151 modules {best(watch, 10):.0f} us")
