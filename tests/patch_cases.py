"""What the tests of fastdp.patch() share: a library that knew torch's class before, a patch whose
undo is looked at, and how a wrapper is told to be fastdp's."""

import contextlib
import sys
import types

from nets import Net, grads, ints, same
from torch import nn

import fastdp

Fast = fastdp.DataParallel
# The module, which torch.nn.parallel's function of that name hides.
home = sys.modules["torch.nn.parallel.data_parallel"]

# A library that took its references before anything was patched.
LIBRARY = types.ModuleType("a_library")
exec(
    """
import functools, torch
from torch.nn import DataParallel
from torch.nn.parallel import DataParallel as Other, data_parallel
from torch.nn.parallel.data_parallel import data_parallel as renamed

WRAPPERS = {"dp": (DataParallel, torch.nn.parallel.DistributedDataParallel)}
partial = functools.partial(DataParallel, dim=0)
alias = DataParallel[torch.nn.Module]

def default(module, device_ids, wrapper=DataParallel):
    return wrapper(module, device_ids)

def _closed():
    wrapper = Other
    return lambda module, device_ids: wrapper(module, device_ids=device_ids)

closure = _closed()

class Before(Other):
    def __init__(self, module, device_ids):
        self.early = True
        super().__init__(module, device_ids)

class Grandchild(Before):
    def scatter(self, *args):
        self.__dict__["scattered"] = True
        return super().scatter(*args)

def is_parallel(model):
    return type(model) in (DataParallel, torch.nn.parallel.DistributedDataParallel)
""",
    LIBRARY.__dict__,
)


@contextlib.contextmanager
def patch_and_undo():
    """For a fixture: fastdp.patch(), which must change no name, and undo, which must leave nothing
    behind."""
    before = {name: dict(vars(module)) for name, module in _torch_modules().items()}
    attributes, code = dict(vars(nn.DataParallel)), home.data_parallel.__code__
    with fastdp.patch() as handle:
        for name, module in _torch_modules().items():
            assert {k: v for k, v in before.get(name, vars(module)).items()} == dict(vars(module))
        yield handle
        handle.undo()
    attributes.pop("__slotnames__", None)  # copyreg's cache
    now = {k: v for k, v in vars(nn.DataParallel).items() if k != "__slotnames__"}
    assert now == attributes and list(now) == list(attributes)
    assert home.data_parallel.__code__ is code and fastdp.DataParallel is Fast


def _torch_modules():
    """Those where somebody might bind a name anew."""
    return {n: m for n, m in list(sys.modules.items()) if n == "torch" or n.startswith("torch.nn")}


def counted(module):
    calls = []
    module.register_forward_hook(lambda m, inputs, output: calls.append(len(output)))
    return calls


def check_is_fast(wrapped, module, fast):
    assert wrapped.device_ids == Fast(Net().to(fast.home), fast.ids(2)).device_ids
    calls, plain, x = counted(module), Net(), ints(5, 3)
    same(out := wrapped(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))
    assert sorted(calls) == [2, 3]
