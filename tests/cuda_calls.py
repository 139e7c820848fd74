"""The CUDA calls of this process, of torch and of fastdp alike, as CUPTI tells them: those of the
runtime (also of one that is linked statically) and those of the driver.

CUPTI is the one that torch has loaded for its profiler. One subscriber at a time: not together with
a profiler.
"""

import ctypes
import re

_CALL_DOMAINS = (1, 2)  # the driver's and the runtime's functions

# What waits for a GPU, or may: waits by name, copies that are not asynchronous, and memory taken
# from the driver or given back, which a step in its steady state does not.
_BLOCKING = re.compile(
    r"(cuda|cu)(Ctx|Device|Thread|Stream|Event)Synchronize"
    r"|(cuda|cu)Memcpy(?!.*(Async|Batch))"
    r"|cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)(?!.*Async)"
    r"|cuMem(Alloc|Free|HostAlloc|HostRegister|HostUnregister)(?!.*Async)"
)


def is_blocking(name):
    return _BLOCKING.match(name) is not None


class _CallbackData(ctypes.Structure):
    _fields_ = [
        ("site", ctypes.c_int),  # 0: before the call
        ("function_name", ctypes.c_char_p),
        ("function_parameters", ctypes.c_void_p),
        ("function_result", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_id", ctypes.c_uint32),
        ("correlation_data", ctypes.c_void_p),
        ("correlation_id", ctypes.c_uint32),
    ]


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData)
)


def _loaded_cupti():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcupti.so" in line}
    if not paths:
        raise RuntimeError("torch has loaded no CUPTI")
    return ctypes.CDLL(min(paths))


class CudaCalls:
    """A context manager; `names` are the calls of all threads inside."""

    def __init__(self):
        self.names = []
        self._cupti = _loaded_cupti()
        self._subscriber = ctypes.c_void_p()
        self._callback = _Callback(self._on_call)  # has to outlive the subscription

    def _on_call(self, unused, domain, call, data):
        if domain in _CALL_DOMAINS and data.contents.site == 0:
            name = data.contents.function_name
            self.names.append("?" if name is None else name.decode())

    def _check(self, result, what):
        if result != 0:
            raise RuntimeError(f"CUPTI: {what} gave error {result}")

    def __enter__(self):
        result = self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None)
        self._check(result, "cuptiSubscribe")
        for domain in _CALL_DOMAINS:
            result = self._cupti.cuptiEnableDomain(ctypes.c_uint32(1), self._subscriber, domain)
            self._check(result, "cuptiEnableDomain")
        return self

    def __exit__(self, *unused):
        self._check(self._cupti.cuptiUnsubscribe(self._subscriber), "cuptiUnsubscribe")

    def blocking(self):
        return sorted({name for name in self.names if is_blocking(name)})
