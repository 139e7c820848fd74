"""Private attributes of torch: each that fastdp names is in a table of fastdp/_torch_compat.py, is
there in this torch, and where the table promises a way without it, that way gives the numbers."""

import ast
import contextlib
import importlib
import pathlib
import re
import types
import warnings

import pytest
import torch
from nets import Apply, Net, grads, ints, same
from torch import nn

import fastdp
from fastdp import _compiler_compat, _torch_compat

PACKAGE = pathlib.Path(fastdp.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))
CORE = sorted((PACKAGE.parent / "csrc").glob("py_*.c"))
# torch.nn.parallel.data_parallel is also a function of that name.
DATA_PARALLEL = importlib.import_module("torch.nn.parallel.data_parallel")
REPLICATE = importlib.import_module("torch.nn.parallel.replicate")
COMPILERS = _compiler_compat.PRIVATE
TABLES = {**_torch_compat.PRIVATE, **_torch_compat.SHARED}

# What an eager forward does not look at.
RECORDED = [
    name for name, (_, instead) in _torch_compat.PRIVATE.items() if instead.startswith("recordings")
]


def node():
    """A node of the graph, made by a Function: where `_set_sequence_nr` lives."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Same.apply(torch.ones(1, requires_grad=True)).grad_fn


def owners():
    """name -> the object that has it."""
    places = {
        "torch._C": torch._C,
        "torch._C._autograd": torch._C._autograd,
        "torch.nn.modules.module": torch.nn.modules.module,
    }
    return {
        **{name: places[_torch_compat.PRIVATE[name][0]] for name in RECORDED},
        "_make_subclass": torch.Tensor,
        "_set_sequence_nr": node(),
        "_log_api_usage_once": torch._C,
        "_foreach_norm": torch,
        "_check_balance": DATA_PARALLEL,
        "_is_profiler_enabled": torch.autograd.profiler,
        "_ExperimentalConfig": torch.profiler,
        "_current_level": torch.autograd.forward_ad,
        "_functorch": torch._C,
        "maybe_current_level": torch._C._functorch,
        "_cuda_getCurrentRawStream": torch._C,
        "_cuda_endAllocateToPool": torch._C,
        "_cuda_releasePool": torch._C,
    }


# The tables say what this torch has.


@pytest.mark.parametrize("name", _torch_compat.PRIVATE)
def test_this_torch_has_it(name):
    if name.startswith("_cuda_") and torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    assert hasattr(owners()[name], name), (
        f"torch {torch.__version__} has lost {name}: fastdp goes on as the table says, "
        f"'{_torch_compat.PRIVATE[name][1]}'"
    )


def test_this_torch_has_what_compiles():
    import torch._dynamo.convert_frame
    import torch._dynamo.eval_frame
    import torch._functorch._aot_autograd
    import torch._inductor

    made = torch.compile(nn.Linear(2, 2), backend="eager").dynamo_ctx.callback
    dynamo = torch._dynamo
    found = [torch, torch._functorch, dynamo.convert_frame, dynamo.eval_frame, made]
    older = {"_torchdynamo_orig_callable"}
    assert [n for n in COMPILERS if n not in older and not any(hasattr(f, n) for f in found)] == []


def modules_that_have_them():
    linear, rnn = nn.Linear(2, 2), nn.LSTM(2, 2)
    replica = linear._replicate_for_data_parallel()
    return [
        linear,
        rnn,
        replica,
        torch.compile(nn.Linear(2, 2), backend="eager"),
        torch.eye(2).to_sparse(),
        torch.optim.SGD(linear.parameters()),
        torch.autograd.Function,
        torch.utils,
        torch,
    ]


def test_this_torch_has_what_is_shared():
    import torch._dynamo  # noqa: F401

    owners = modules_that_have_them()
    in_source = {"_former_parameters": REPLICATE, "_is_param": torch.nn.parameter}
    missing = [
        name
        for name in _torch_compat.SHARED
        if name not in in_source and not any(hasattr(each, name) for each in owners)
    ]
    assert missing == []
    for name, module in in_source.items():
        assert name in pathlib.Path(module.__file__).read_text()


def test_the_hooks_are_those_that_torch_copies():
    """A replica of torch's shares no hook dictionary with its base... but for those that it does
    share; fastdp's core copies each dictionary of the table, no less than torch does."""
    module = nn.Linear(2, 2)
    dictionaries = {
        name
        for name, value in module.__dict__.items()
        if isinstance(value, dict) and "hooks" in name
    }
    assert dictionaries - {"_non_persistent_buffers_set"} == {
        name for name in _torch_compat.SHARED if "hooks" in name and "optimizer" not in name
    }


# The tables say what the source names.


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return {
        id(each.body[0].value)
        for each in ast.walk(tree)
        if isinstance(each, kinds) and each.body and isinstance(each.body[0], ast.Expr)
    }


def is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*[A-Za-z0-9]", name) is not None


def private_names(path):
    """Private names in a file: attributes that are read or written, names imported, and strings
    that may be meant for getattr."""
    tree = ast.parse(path.read_text())
    skipped = docstrings(tree)
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute):
            yield from filter(is_private, [each.attr])
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            parts = [part for alias in each.names for part in alias.name.split(".")]
            yield from filter(is_private, parts + (getattr(each, "module", "") or "").split("."))
        elif isinstance(each, ast.keyword) and each.arg:
            yield from filter(is_private, [each.arg])
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            if id(each) not in skipped and re.fullmatch(r"[\w.]+", each.value):
                yield from filter(is_private, each.value.split("."))


def own_names():
    """What the package itself defines: functions, classes, globals, attributes of self, members of
    its core."""
    names = {path.stem for path in PACKAGE.iterdir()} | {"_C", "_numpy"}
    for path in [*SOURCES, PACKAGE / "_C.pyi"]:
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                names.add(each.name)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                names.add(each.id)
            elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                if isinstance(each.value, ast.Name) and each.value.id == "self":
                    names.add(each.attr)
    return names


# Private by their look only: a namedtuple's documented method, parts of Python, an operator, our
# own keys and attributes.
NOT_TORCH = {"_make", "_fields", "_asdict", "_getframe", "_py_warnings", "_cudnn_rnn"}
NOT_TORCH |= {"_fastdp_runtime", "_fastdp_surprises", "_fastdp_witness", "_fastdp_compiled"}
NOT_TORCH |= {"_fastdp_compiled_for", "_fastdp_seen_call", "_fastdp_said_parts"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_private_name_of_torch_outside_the_tables(path):
    own = {"_torch_compat.py": _torch_compat.PRIVATE, "_compiler_compat.py": COMPILERS}
    allowed = {**_torch_compat.SHARED, **own.get(path.name, {})}
    found = set(private_names(path)) - own_names() - NOT_TORCH - {"_C"}
    assert found <= set(allowed), f"{path.name} names {sorted(found - set(allowed))}"


def test_the_core_names_no_private_attribute_outside_the_tables():
    named = {
        name
        for path in CORE
        for name in re.findall(
            r'"(_[a-z]\w+)"', re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        )
    }
    own = own_names() | {"_use_exchange_table", "_borrow"}
    assert "_parameters" in named, "the scan sees nothing"
    assert named - own <= set(_torch_compat.SHARED), sorted(named - own)


def test_the_tables_name_nothing_that_is_not_used():
    text = "".join(path.read_text() for path in CORE)
    # Their own file names them in the tables: look for a second time there.
    compat = (PACKAGE / "_torch_compat.py").read_text()
    others = [path for path in SOURCES if path.stem != "_torch_compat"]
    elsewhere = {name for path in others for name in private_names(path)}
    for name in TABLES:
        again = len(re.findall(rf"\b{name}\b", compat)) > 1
        assert name in elsewhere or f'"{name}"' in text or again, name


def test_the_compilers_table_names_nothing_that_is_not_used():
    text = (PACKAGE / "_compiler_compat.py").read_text()
    assert [name for name in COMPILERS if len(re.findall(rf"\b{name}\b", text)) < 2] == []


def test_the_scan_sees_a_private_name(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "'_no'\nimport torch._utils\nfrom torch import _prims\ntorch._one(_two=1)\n"
        "getattr(torch, '_three')\nx.__four__\nx['torch._five'].six\n"
    )
    assert set(private_names(file)) == {"_utils", "_prims", "_one", "_two", "_three", "_five"}


# What is promised where a torch lacks one.


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
            run_early = _torch_compat.run_early
            patch.setattr(_torch_compat, "run_early", lambda node: run_early(object()))
        elif name == "_log_api_usage_once":
            # torch itself cannot do without: only fastdp does not see it.
            core = Lacking(torch._C, name)
            patch.setattr(_torch_compat, "torch", Lacking(torch, _C=core))
            assert not hasattr(_torch_compat.torch._C, name)
        else:
            patch.delattr(owner, name, raising=False)
            assert not hasattr(owner, name)
        yield


PROMISED = [
    name
    for name, (_, instead) in _torch_compat.PRIVATE.items()
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
    assert set(_torch_compat.PRIVATE) - set(PROMISED) - set(RECORDED) == others


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
        assert len(_torch_compat.function_modes()) == 1
    assert len(_torch_compat.kernel_flags()) > 10
    core = Lacking(torch._C, *RECORDED)
    place = types.SimpleNamespace(modules=types.SimpleNamespace(module=object()))
    monkeypatch.setattr(_torch_compat, "torch", Lacking(torch, _C=core, nn=place))
    monkeypatch.setattr(_torch_compat, "_GETTERS", _torch_compat._flag_getters())
    with torch.device("cpu"), torch.autograd.graph.save_on_cpu():
        assert _torch_compat.function_modes() == ()
        assert not _torch_compat.dispatch_mode_active()
        assert not _torch_compat.saved_tensors_hooks_active()
    assert _torch_compat.kernel_flags() == ()
    assert _torch_compat.global_module_hooks() == []


def test_kernel_flags_where_torch_refuses_to_answer(monkeypatch):
    def refuses():
        raise RuntimeError("legacy and new APIs are mixed")

    want = _torch_compat.kernel_flags()
    getters = _torch_compat._GETTERS
    monkeypatch.setattr(_torch_compat, "_GETTERS", (refuses, *getters[1:]))
    assert _torch_compat.kernel_flags() == (None, *want[1:])


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
    assert _torch_compat.raw_stream(1) == 77 and seen == [1]
    indices = []
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda index: indices.append(index) or 78,
        raising=False,
    )
    assert _torch_compat.raw_stream(1) == 78 and indices == [1]


def test_forward_mode_and_transforms_are_noticed():
    assert not _torch_compat.forward_mode_active()
    assert not _torch_compat.inside_function_transform()
    with torch.autograd.forward_ad.dual_level():
        assert _torch_compat.forward_mode_active()
    assert not _torch_compat.forward_mode_active()
    seen = []
    torch.func.grad(lambda x: (seen.append(_torch_compat.inside_function_transform()), x.sum())[1])(
        torch.ones(2)
    )
    assert seen == [True]


@pytest.mark.row("H6")
def test_balance_is_torchs_warning(monkeypatch):
    asked = []
    monkeypatch.setattr(DATA_PARALLEL, "_check_balance", asked.append, raising=False)
    _torch_compat.check_balance([0, 1])
    assert asked == [[0, 1]]
    monkeypatch.delattr(DATA_PARALLEL, "_check_balance")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch_compat.check_balance([0, 1])
    assert asked == [[0, 1]]
