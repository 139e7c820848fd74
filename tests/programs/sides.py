"""The sides that a program is run on, and the comparison of what they give.

A program is a function of a `Side`: it makes its model and data from fixed seeds, wraps the model
with `side.wrap`, and returns all that must be equal: losses, outputs, weights. Nothing in it knows
which side it is on, as nothing would in a user's file.

- `plain`: no wrapper.
- `torch`: torch's own nn.DataParallel over host replicas (tests/oracle.py).
- `fastdp`: on host replicas, and on a GPU where there is one.
- `wrong`: fastdp's with the gradients of all replicas but the first lost. Each program must tell it
  from the right one, else its comparison would show nothing.
"""

import dataclasses
from unittest import mock

import oracle
import torch
from nets import same
from torch.utils._pytree import tree_map_only

# Programs run in fp64: sums of another order differ in the last of 53 bits, and some hundred such
# differences, grown by a few steps of training, stay far below this. What `wrong` loses does not.
BOUND = 1e-9


@dataclasses.dataclass
class Side:
    """`places` has the device of each replica, `ids` what the wrapper calls them; `counts` gets the
    number of replicas of each forward of each wrapper. All are empty where plain."""

    name: str
    home: torch.device
    parent: type = None
    ids: tuple = ()
    places: tuple = ()
    counts: list = dataclasses.field(default_factory=list)

    def wrap(self, module, **options):
        module = module.to(self.home)
        return self.DataParallel(module, **options) if self.parent else module

    @property
    def DataParallel(self):
        """The class as a program would name it; it takes this side's replicas by default."""
        return self.of(self.parent)

    def of(self, parent):
        ids, counts = list(self.ids), self.counts

        class DataParallel(parent):
            def __init__(self, module, device_ids=None, **options):
                super().__init__(module, ids if device_ids is None else device_ids, **options)

            def parallel_apply(self, replicas, inputs, kwargs):
                counts.append(len(replicas))
                return super().parallel_apply(replicas, inputs, kwargs)

        return DataParallel


def plain(home):
    return Side("plain", torch.device(home))


def torchs(n):
    host = torch.device("cpu")
    return Side("torch", host, oracle.DataParallel, range(n), [host] * n)


def fastdps(impl, n):
    places = [impl.device(rank) for rank in range(n)]
    return Side("fastdp", impl.home, impl.api.DataParallel, impl.ids(n), places)


def wrong(impl, n):
    side = fastdps(impl, n)

    class LosesGradients(side.parent):
        def gather(self, outputs, output_device):
            first, *others = outputs
            cut = tree_map_only(torch.Tensor, torch.Tensor.detach, others)
            return super().gather([first, *cut], output_device)

    side.name, side.parent = "wrong", LosesGradients
    return side


def check(
    program,
    impl,
    n=2,
    *,
    like_plain=True,
    like_torch="exactly",
    used=None,
    reference=None,
    bound=BOUND,
):
    """Runs the program with fastdp and compares.

    On every device it must be within `bound` of the plain module there; or, where data parallelism
    means other numbers than the plain module's (`like_plain=False`), of torch's nn.DataParallel on
    the host. Host replicas must also be bit for bit like torch's; "nearly" (within `bound`) and
    "unable" (torch's cannot run it) are for reasons that the program gives. `used` is the set of
    the numbers of replicas that forwards had; None means {n}. `reference` is run for the other
    sides instead of the program itself.
    """
    side = fastdps(impl, n)
    got = program(side)
    assert set(side.counts) == ({n} if used is None else used)
    reference = reference or program
    on_host = impl.home.type == "cpu"
    if (on_host and like_torch != "unable") or not like_plain:
        # Libraries ask whether a model is a torch.nn.DataParallel, as fastdp's is.
        with mock.patch.object(torch.nn, "DataParallel", oracle.DataParallel):
            want = reference(torchs(n))
        if on_host and like_torch == "exactly":
            same(got, want)
        else:
            near(got, want, bound)
    if like_plain:
        want = reference(plain(impl.home))
        near(got, want, bound)
    broken = reference(wrong(impl, n))
    assert not is_near(broken, want, bound), "the program cannot tell a wrong wrapper"


def near(got, want, bound, path="result"):
    """Trees of equal structure whose tensors and floats are within `bound`; all else is equal."""
    if isinstance(want, (torch.Tensor, float)):
        torch.testing.assert_close(
            torch.as_tensor(got).detach().cpu(),
            torch.as_tensor(want).detach().cpu(),
            rtol=bound,
            atol=bound,
            msg=lambda text: f"{path}: {text}",
        )
    elif isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            near(got[key], want[key], bound, f"{path}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for i, (left, right) in enumerate(zip(got, want, strict=True)):
            near(left, right, bound, f"{path}[{i}]")
    else:
        assert got == want, path


def is_near(got, want, bound):
    try:
        near(got, want, bound)
    except AssertionError:
        return False
    return True


def inner(model):
    """The module in a wrapper, as programs find it that run with and without one."""
    return model.module if hasattr(model, "module") else model


def weights(model):
    """Copies of all parameters and buffers, without the wrapper's prefix."""
    return {name: t.detach().cpu().clone() for name, t in inner(model).state_dict().items()}
