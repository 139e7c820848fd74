"""What the tests of `test_behaviour_alike_*` share: a case is something that a program does with a
wrapper; it is done with torch's own and with fastdp's, and what comes of it has to be the same.
"""

import warnings

import oracle
import torch
from nets import Apply, grads, ints


class Table(dict):
    """Cases by name; a case takes `wrap(module, n=2, **options)` and gives what is compared."""

    def __call__(self, case):
        self[case.__name__] = case
        return case


def alike(got, want):
    """Trees with tensors that may differ in their last bits: a GPU's kernels are not the host's."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
        got, want = got.detach().cpu(), want.detach()
        bound = {} if want.dtype != torch.float64 else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(got, want, **bound)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        alike(list(got.values()), list(want.values()))
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for left, right in zip(got, want, strict=True):
            alike(left, right)
    else:
        assert got == want


def check(case, fast):
    """The case with torch's own on the host and with fastdp's where `fast` is."""

    def theirs(module, n=2, **options):
        return oracle.DataParallel(module, device_ids=list(range(n)), **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        want = case(theirs)
        torch.manual_seed(0)
        alike(case(fast.wrap), want)


def trained(module, dp, *inputs):
    """(output, gradients by name, copies of the buffers) of one step."""
    out = dp(*inputs)
    tensors = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if t.requires_grad]
    sum(t.sum() for t in tensors).backward()
    return out, grads(module), [buffer.clone() for buffer in module.buffers()]


def run(wrap, forward, *inputs, **buffers):
    """Two steps of a module with this forward: what they give, and what the module is then."""
    module = Apply(forward)
    for name, value in buffers.items():
        module.register_buffer(name, value)
    dp = wrap(module)
    results = [trained(module, dp, *(inputs or (ints(4, 3),))) for _ in range(2)]
    return results, [parameter.detach() for parameter in module.parameters()], module.training
