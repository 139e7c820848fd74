"""BEHAVIOUR E: compiled, scripted, traced and exported modules."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from nets import Net, close, grads, ints, linear, same
from torch import nn

from fastdp.fresh_replicas import WalkedTree

row = pytest.mark.row


@row("E8")
@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["DP(compile(m))", "compile(DP(m))", "m.compile()", "inner"])
def test_compiled_modules(fast, order, backend):
    torch._dynamo.reset()
    module, plain = Net(), Net()
    if order == "DP(compile(m))":
        run = fast.wrap(torch.compile(module, backend=backend), 2)
    elif order == "compile(DP(m))":
        run = torch.compile(fast.wrap(module, 2), backend=backend)
    elif order == "m.compile()":
        module.compile(backend=backend)
        run = fast.wrap(module, 2)
    else:
        module.first = torch.compile(module.first, backend=backend)
        run = fast.wrap(module, 2)
    opts = [torch.optim.SGD(m.parameters(), 2**-10) for m in (module, plain)]
    for step in range(3):
        x = ints(4, 3, seed=step)
        for m, r, opt in ((module, run, opts[0]), (plain, plain, opts[1])):
            m.zero_grad()
            r(x).sum().backward()
            opt.step()
        for got, want in zip(module.parameters(), plain.parameters(), strict=True):
            close(got, want)
            close(got.grad, want.grad)
    torch._dynamo.reset()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = linear()
        self.register_buffer("k", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.k.add_(x.size(0))
        return self.lin(x)


@row("E8", why="forward and _compiled_call_impl are bound to the base")
@pytest.mark.slow
@pytest.mark.parametrize("order", ["DP(compile(m))", "m.compile()", "inner"])
def test_compiled_modules_run_on_their_replica(fast, order):
    """A replica that ran the base's forward would write the base's buffer: 4 + 3 instead of 4."""
    torch._dynamo.reset()
    module = Counting()
    if order == "DP(compile(m))":
        dp = fast.wrap(torch.compile(module, backend="eager"), 2)
    elif order == "m.compile()":
        module.compile(backend="eager")
        dp = fast.wrap(module, 2)
    else:
        dp = fast.wrap(nn.Sequential(torch.compile(module, backend="eager")), 2)
    for step in range(2):
        same(dp(ints(7, 3)), linear()(ints(7, 3)))
        assert module.k.item() == 4 * (step + 1)
    torch._dynamo.reset()


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


@row("E9")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["pure", "child", "lstm"])
def test_scripted_modules(impl, kind):
    torch.manual_seed(0)
    plain = Lstm() if kind == "lstm" else Net()
    x = ints(4, 2, 3) if kind == "lstm" else ints(4, 3)
    module = scripted(copy.deepcopy(plain))
    if kind == "child":
        module = nn.Sequential(module)
    dp = impl.wrap(module, 2)
    if kind == "lstm" and impl.is_oracle and impl.gpus > 1:
        # Its replica's list of weights is still the module's own.
        with pytest.raises(RuntimeError, match="not at the same device"):
            dp(x)
        return
    close(out := dp(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        close(got.grad, expected.grad)
    with torch.no_grad():
        for parameter in (*module.parameters(), *plain.parameters()):
            parameter.mul_(2)
        close(dp(x), plain(x))


class Nested(nn.Module):
    """A counter below the root."""

    def __init__(self):
        super().__init__()
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(x)


@row("E9", "A12")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_children_of_scripted_modules_are_the_replicas_own(fast):
    """What one counts would be the base's: 4 + 3 instead of 4."""
    module = scripted(Nested())
    dp = fast.wrap(module, 2)
    for step in range(2):
        same(dp(ints(7, 3)), linear()(ints(7, 3)))
        assert module.counting.k.item() == 4 * (step + 1)


class Own(nn.Linear):
    """Replicates itself, and so all that is with it in one module."""

    def _replicate_for_data_parallel(self):
        return super()._replicate_for_data_parallel()


@row("E9", "A22")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["scripted", "beside one that replicates itself"])
def test_an_rnns_list_of_weights_is_its_replicas(fast, kind):
    module = scripted(Lstm()) if kind == "scripted" else Lstm()
    if kind != "scripted":
        module.own = Own(2, 2).double()
    replicas = fast.api.replicate(module.to(fast.home), fast.ids(3))
    for replica in replicas:
        lstm = replica.lstm
        own = [getattr(lstm, name) for name in lstm._flat_weights_names]
        listed = lstm._flat_weights
        assert [w.data_ptr() for w in listed] == [w.data_ptr() for w in own]
        assert all(w.grad_fn is not None for w in listed)
    assert len({replica.lstm._flat_weights[0].data_ptr() for replica in replicas}) == 3


@row("A10", why="fresh replicas have what torch's have")
def test_the_marks_of_a_replica_that_made_itself(fast):
    module = nn.Sequential(Own(3, 2), nn.Linear(2, 2)).double().to(fast.home)
    for replica in fast.api.replicate(module, fast.ids(2)):
        for own in replica.modules():
            assert own._is_replica and own._former_parameters is own._parameters


@row("A10", why="fresh replicas: the tree they are walked by")
def test_a_walked_tree_knows_its_modules_and_holds_none():
    module = nn.Sequential(Own(3, 2), nn.Linear(2, 2))
    tree = WalkedTree(tuple(module.modules()))
    assert tree.hold(module) and tree.collect()[0] == tuple(module.parameters())
    tree.release()
    module[1] = last = nn.Linear(2, 2)  # another of its class
    assert not tree.hold(module)
    tree = WalkedTree(tuple(module.modules()))
    module.append(nn.Identity())
    assert not tree.hold(module)
    tree = WalkedTree(tuple(module.modules()))
    last.__class__ = Own
    assert not tree.hold(module)
    tree = WalkedTree(tuple(module.modules()))
    assert tree.hold(module)
    tree.release()
    known = weakref.ref(module)
    del module
    gc.collect()
    assert known() is None


@row("E8", why="what only looks like torch.compile's")
@pytest.mark.parametrize("name", ["_orig_mod", "inner"])
def test_a_forward_that_is_not_the_compilers(fast, name):
    """A module of the name that a compiled one has for its original, and the compiler's method."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, linear())

        def forward(self, x):
            return 2 * getattr(self, name)(x)

    if name != "_orig_mod":
        Holder._initialize = lambda self: None
    same(fast.wrap(Holder(), 2)(ints(4, 3)), 2 * linear()(ints(4, 3)))


@row("E9", why="fx GraphModules")
def test_traced_graph_module(impl):
    module, plain = torch.fx.symbolic_trace(Net()), Net()
    dp = impl.wrap(module, 2)
    for _ in range(2):
        same(out := dp(ints(4, 3)), want := plain(ints(4, 3)))
        out.sum().backward()
        want.sum().backward()
    same(grads(module), grads(plain))


@row("E9")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_python_children_of_a_scripted_module_are_refused(impl, monkeypatch):
    """Such a module comes of patching only: what it has for modules says so here."""
    module = nn.Sequential(scripted(Net()))
    kind = type(module[0])
    found = kind.modules
    monkeypatch.setattr(kind, "modules", lambda self: iter([*found(self), nn.Identity()]))
    with pytest.raises(RuntimeError, match="python modules are childrens? of ScriptModule"):
        impl.wrap(module, 2)(ints(4, 3))


@row("E9", "E10")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_modules_run_and_the_wrapper_is_not_traced(impl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.trace(Net(), ints(4, 3))
        same(impl.wrap(module, 2)(ints(5, 3)), Net()(ints(5, 3)))
        with pytest.raises(RuntimeError):
            torch.jit.trace(impl.wrap(Net(), 2), ints(4, 3).to(impl.home))


@row("E10")
def test_script_of_the_wrapper_is_refused_as_by_torch(fast):
    """A wrapper's forward takes *args: TorchScript refuses both alike."""
    with pytest.raises(Exception) as torchs:
        torch.jit.script(nn.DataParallel(linear()))
    with pytest.raises(torchs.type):
        torch.jit.script(fast.wrap(linear(), 2))


@row("E10")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_onnx_export_refuses_the_wrapper(fast):
    with pytest.raises(Exception, match="DataParallel"):
        torch.onnx.export(fast.wrap(linear(), 2), (ints(4, 3),), io.BytesIO(), dynamo=False)
