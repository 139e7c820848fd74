"""A torch that lacks private attributes: where the tables of fastdp/_torch_*.py promise a way
without one, that way gives the numbers."""

import contextlib
import subprocess
import sys
import types
import warnings

import pytest
import torch
from nets import Apply, Net, grads, ints, same
from torch import nn
from torch_owners import DATA_PARALLEL, PRIVATE, RECORDED, owners

from fastdp import _torch_autograd, _torch_cuda, _torch_protocol, _torch_state


class Lacking:
    """The object but for some names, with others put in."""

    def __init__(self, target, *names, **members):
        self.target, self.names = target, names
        self.__dict__.update(members)

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.target, name)


@contextlib.contextmanager
def without(monkeypatch, name):
    owner = owners()[name]
    with monkeypatch.context() as patch:
        if name == "_set_sequence_nr":
            # It cannot be deleted from a node: the function that looks it up sees something else.
            run_early = _torch_autograd.run_early
            patch.setattr(_torch_autograd, "run_early", lambda node: run_early(object()))
        elif name == "_log_api_usage_once":
            # torch itself cannot do without: only fastdp does not see it.
            core = Lacking(torch._C, name)
            patch.setattr(_torch_protocol, "torch", Lacking(torch, _C=core))
            assert not hasattr(_torch_protocol.torch._C, name)
        elif name == "_named_members":  # as above
            module = Lacking(nn.Module, name)
            patch.setattr(_torch_protocol, "torch", Lacking(torch, nn=Lacking(nn, Module=module)))
            patch.setattr(_torch_protocol, "_is_shown", False)
            assert not hasattr(_torch_protocol.torch.nn.Module, name)
        else:
            patch.delattr(owner, name, raising=False)
            assert not hasattr(owner, name)
        yield


PROMISED = [
    name
    for name, (_, instead) in PRIVATE.items()
    if not instead.startswith(("none", "recordings"))
]


def train(impl, x):
    net = Net()
    net.register_buffer("scale", torch.ones(2).double())
    net.first.bias.requires_grad_(False)
    dp = impl.wrap(net, 3)
    for _ in range(2):
        dp.zero_grad(set_to_none=True)
        out = dp(x)
        out.sum().backward()
    with torch.no_grad():
        evaluated = dp(x)
    return out.detach(), evaluated, grads(net)


def test_all_but_these_are_promised():
    others = {"_make_subclass", "_cuda_endAllocateToPool", "_cuda_releasePool"}
    assert set(PRIVATE) - set(PROMISED) - set(RECORDED) == others


@pytest.mark.parametrize("name", PROMISED)
def test_a_wrapper_works_without(fast, name, monkeypatch):
    x = ints(6, 3)
    want = train(fast, x)
    with without(monkeypatch, name):
        same(train(fast, x), want)


def test_a_wrapper_works_without_any_of_them(fast, monkeypatch):
    x = ints(6, 3)
    want = train(fast, x)
    with contextlib.ExitStack() as stack:
        for name in sorted(PROMISED, key=lambda each: each == "_functorch"):
            stack.enter_context(without(monkeypatch, name))
        same(train(fast, x), want)


class Named(nn.Parameter):
    """A class of a user's own."""


@pytest.mark.parametrize("kind", [nn.Parameter, Named])
def test_without_make_subclass(fast, kind, monkeypatch):
    """Ordinary parameters need it not; for others no way around is promised, nor wrong numbers."""
    x, net = ints(6, 3), Net()
    want = net(x).detach()
    net.first.weight = kind(net.first.weight.detach().to(fast.home))
    dp = fast.wrap(net, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "_make_subclass", None)
        if kind is Named:
            with pytest.raises(TypeError):
                dp(x)
        else:
            same(dp(x).detach(), want)
    same(dp(x).detach(), want)


def test_recordings_do_without(monkeypatch):
    """Each answer is then that nothing is there, and none is an error."""
    with torch.device("cpu"):
        assert len(_torch_state.function_modes()) == 1
    assert len(_torch_state.kernel_flags()) > 10
    core = Lacking(torch._C, *RECORDED)
    place = types.SimpleNamespace(modules=types.SimpleNamespace(module=object()))
    for file in (_torch_autograd, _torch_state):
        monkeypatch.setattr(file, "torch", Lacking(torch, _C=core, nn=place))
    monkeypatch.setattr(_torch_state, "_GETTERS", _torch_state._flag_getters())
    with torch.device("cpu"), torch.autograd.graph.save_on_cpu():
        assert _torch_state.function_modes() == ()
        assert not _torch_state.dispatch_mode_active()
        assert _torch_autograd.saved_tensors_hooks_active()  # asked in the public way
    assert not _torch_autograd.saved_tensors_hooks_active()
    assert _torch_state.kernel_flags() == ()
    assert _torch_state.global_module_hooks() == []


def test_kernel_flags_where_torch_refuses_to_answer(monkeypatch):
    def refuses():
        raise RuntimeError("legacy and new APIs are mixed")

    want = _torch_state.kernel_flags()
    getters = _torch_state._GETTERS
    monkeypatch.setattr(_torch_state, "_GETTERS", (refuses, *getters[1:]))
    assert _torch_state.kernel_flags() == (None, *want[1:])


def test_torch_func_raises_without_the_level_too(fast, monkeypatch):
    dp = fast.wrap(Apply(lambda self, x: self.lin(x)), 2)
    with without(monkeypatch, "maybe_current_level"), pytest.raises(RuntimeError):
        torch.func.grad(lambda x: dp(x).sum())(ints(4, 3))


def test_raw_stream_is_the_current_stream_either_way(monkeypatch):
    seen = []

    class Stream:
        cuda_stream = 77

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: seen.append(index) or Stream)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert _torch_cuda.raw_stream(1) == 77 and seen == [1]
    indices = []
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda index: indices.append(index) or 78,
        raising=False,
    )
    assert _torch_cuda.raw_stream(1) == 78 and indices == [1]


@pytest.mark.parametrize("disabled", [False, True])
def test_saved_tensors_hooks_are_asked_for_in_the_public_way(disabled, monkeypatch):
    """What a torch before 2.8 has alone. Asking leaves things as they were."""
    graph = torch.autograd.graph
    core = Lacking(torch._C, "_autograd")
    monkeypatch.setattr(_torch_autograd, "torch", Lacking(torch, _C=core))
    active = _torch_autograd.saved_tensors_hooks_active
    kept = []
    with graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        assert active() and active()
        torch.ones(1, requires_grad=True).exp()
    assert len(kept) == 1 and not active()
    if disabled:
        with graph.disable_saved_tensors_hooks("by the caller"):
            assert not active()
            with pytest.raises(RuntimeError, match="by the caller"):
                graph.save_on_cpu().__enter__()
    assert not active()
    with graph.save_on_cpu():
        assert active()


@pytest.mark.parametrize("torch_sees_contexts", [True, False])
def test_default_device(torch_sees_contexts, monkeypatch):
    """`torch.get_default_device` does not know of contexts in torch 2.6, and fails in 2.9 after the
    second of these."""
    if not torch_sees_contexts:
        monkeypatch.setattr(_torch_state, "_sees_contexts", lambda: False)
        monkeypatch.setattr(torch, "get_default_device", None)
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    assert _torch_state.default_device() is None
    with torch.device("meta"):
        assert _torch_state.default_device() == torch.device("meta")
        with torch.device("cpu"):
            assert _torch_state.default_device() is None
    torch.set_default_device("meta")
    try:
        assert _torch_state.default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    assert _torch_state.default_device() is None


@pytest.mark.parametrize(
    "name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"]
)
def test_a_pool_is_ended_under_either_name(name, monkeypatch):
    called = []

    def refuses(*args):
        called.append(args)
        raise RuntimeError("no such pool")

    core = types.SimpleNamespace(**{name: refuses, "_cuda_releasePool": refuses})
    monkeypatch.setattr(_torch_cuda, "torch", types.SimpleNamespace(_C=core))
    _torch_cuda.end_pool(torch.device("cuda", 1), (0, 7))
    assert called == [(1, (0, 7))] * 2


def test_forward_mode_and_transforms_are_noticed():
    assert not _torch_autograd.forward_mode_active()
    assert not _torch_autograd.inside_function_transform()
    with torch.autograd.forward_ad.dual_level():
        assert _torch_autograd.forward_mode_active()
    assert not _torch_autograd.forward_mode_active()
    seen = []
    inside = _torch_autograd.inside_function_transform
    torch.func.grad(lambda x: (seen.append(inside()), x.sum())[1])(torch.ones(2))
    assert seen == [True]


@pytest.mark.row("H6")
def test_balance_is_torchs_warning(monkeypatch):
    asked = []
    monkeypatch.setattr(DATA_PARALLEL, "_check_balance", asked.append, raising=False)
    _torch_protocol.check_balance([0, 1])
    assert asked == [[0, 1]]
    monkeypatch.delattr(DATA_PARALLEL, "_check_balance")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch_protocol.check_balance([0, 1])
    assert asked == [[0, 1]]


def test_two_threads_replace_torchs_list_of_members_at_once():
    """Whatever line the first is at, the second does all of it."""
    command = [sys.executable, "-c", MEETING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['weight', 'bias']\n" * 4), done.stderr


MEETING = """
import importlib, sys
import torch
from fastdp import _torch_protocol

own = torch.nn.Module._named_members

def struck(point):
    met = []

    def trace(frame, event, argument):
        if frame.f_code is code and event == "line":
            met.append(frame.f_lineno)
            if len(met) == point:
                sys.settrace(None)
                _torch_protocol.show_weights_of_replicas()
        return trace

    torch.nn.Module._named_members = own
    importlib.reload(_torch_protocol)
    code = _torch_protocol.show_weights_of_replicas.__code__
    sys.settrace(trace)
    _torch_protocol.show_weights_of_replicas()
    sys.settrace(None)
    assert torch.nn.Module._named_members is _torch_protocol._named_members
    print([name for name, _ in torch.nn.Linear(1, 1).named_parameters()])

for point in range(1, 5):
    struck(point)
"""
