"""Clocks of benchmarks/comm.py: device time and host time of some calls, apart."""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Sequence

import torch


class Timing(NamedTuple):
    device_us: float
    host_us: float


class HostClock:
    """Times calls on the host."""

    def time(self, call: Callable[[], Any], calls: int, held_ms: float) -> Timing:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent_us = (time.perf_counter() - start) * 1e6 / calls
        return Timing(spent_us, spent_us)


class Clock:
    """Times calls on some GPUs, apart on device and host."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._streams = [torch.cuda.current_stream(device) for device in self._devices]
        self._cycles_per_ms = self._calibrate()

    def _calibrate(self) -> float:
        cycles = 100_000_000
        torch.cuda._sleep(cycles)  # the GPU wakes up
        self._begin.record(self._streams[0])
        torch.cuda._sleep(cycles)
        self._end.record(self._streams[0])
        self.wait()
        return cycles / self._begin.elapsed_time(self._end)

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def time(self, call: Callable[[], Any], calls: int, held_ms: float) -> Timing:
        """All streams are held up for `held_ms`; then the calls run."""
        self.wait()
        home = self._streams[0]
        torch.cuda._sleep(int(held_ms * self._cycles_per_ms))
        self._begin.record(home)
        for stream in self._streams[1:]:
            stream.wait_event(self._begin)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host_s = time.perf_counter() - start
        for stream in self._streams[1:]:
            home.wait_stream(stream)
        self._end.record(home)
        self.wait()
        return Timing(
            self._begin.elapsed_time(self._end) * 1e3 / calls, host_s * 1e6 / calls
        )
