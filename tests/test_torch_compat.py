"""Private attributes of torch: each that fastdp names is in a table of a fastdp/_torch_*.py, and is
there in this torch. A torch without them: test_torch_lacking.py."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch_owners import COMPILERS, PRIVATE, REPLICATE, TABLES, owners

import fastdp
from fastdp import _torch_compiler, buckets
from fastdp._torch_protocol import SHARED

PACKAGE = pathlib.Path(fastdp.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))
CORE = sorted((PACKAGE.parent / "csrc").glob("py_*.c"))


# The tables say what this torch has.

# torch 2.4 lacks all of these, 2.6 some, 2.9 none.
LATER = {
    "_cuda_endAllocateToPool",
    "_get_cublas_allow_fp16_accumulation",
    "_get_fp32_precision_getter",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_sdp_priority_order",
    "_top_saved_tensors_default_hooks",
}
# Other names of what newer torches have: of them no torch has all.
EARLIER = {"_cuda_endAllocateCurrentStreamToPool", "_torchdynamo_orig_callable"}
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.parametrize("name", PRIVATE)
def test_this_torch_has_it(name):
    if name.startswith("_cuda_") and torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    there = hasattr(owners()[name], name)
    if not there and (name in EARLIER or name in LATER and VERSION < (2, 9)):
        pytest.skip("a name that another torch has")
    assert there, (
        f"torch {torch.__version__} has lost {name}: fastdp goes on as the table says, "
        f"'{PRIVATE[name][1]}'"
    )


def test_this_torch_has_what_compiles():
    import torch._dynamo.convert_frame
    import torch._dynamo.eval_frame
    import torch._functorch._aot_autograd
    import torch._inductor

    made = torch.compile(nn.Linear(2, 2), backend="eager").dynamo_ctx.callback
    dynamo = torch._dynamo
    found = [torch, torch._functorch, dynamo.convert_frame, dynamo.eval_frame, made]
    if not hasattr(made, "_torchdynamo_orig_backend"):
        assert hasattr(made, "_torchdynamo_orig_callable") and VERSION < (2, 9)
        found.append(types.SimpleNamespace(_torchdynamo_orig_backend=None))
    assert [n for n in set(COMPILERS) - EARLIER if not any(hasattr(f, n) for f in found)] == []


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
        torch.ops.aten.add.Tensor,
        torch.utils,
        torch,
    ]


def test_this_torch_has_what_is_shared():
    import torch._dynamo  # noqa: F401

    owners = modules_that_have_them()
    in_source = {"_former_parameters": REPLICATE, "_is_param": torch.nn.parameter}
    missing = [
        name
        for name in SHARED
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
        name for name in SHARED if "hooks" in name and "optimizer" not in name
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


def tables(tree):
    """The strings of PRIVATE and SHARED."""
    return {
        id(each)
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and getattr(statement.targets[0], "id", "") in ("PRIVATE", "SHARED")
        for each in ast.walk(statement.value)
    }


def private_names(path):
    return filter(is_private, names_in(path))


def names_in(path):
    """Attributes that a file reads or writes, names that it imports, and strings that may be meant
    for getattr; those of the tables are not."""
    tree = ast.parse(path.read_text())
    skipped = docstrings(tree) | tables(tree)
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            parts = [part for alias in each.names for part in alias.name.split(".")]
            yield from parts + (getattr(each, "module", "") or "").split(".")
        elif isinstance(each, ast.keyword) and each.arg:
            yield each.arg
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            if id(each) not in skipped and re.fullmatch(r"[\w.]+", each.value):
                yield from each.value.split(".")


@functools.cache
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
NOT_TORCH |= {"_fastdp_registered"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_private_name_of_torch_outside_the_tables(path):
    allowed = {*SHARED, *TABLES.get(path.name, ())}
    found = set(private_names(path)) - own_names() - NOT_TORCH - {"_C"}
    assert found <= allowed, f"{path.name} names {sorted(found - allowed)}"


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
    assert named - own <= set(SHARED), sorted(named - own)


def test_the_tables_name_nothing_that_is_not_used():
    for file, table in TABLES.items():
        assert set(table) <= set(names_in(PACKAGE / file)), file
    text = "".join(path.read_text() for path in CORE)
    named = {name for path in SOURCES for name in private_names(path)}
    assert [name for name in SHARED if name not in named and f'"{name}"' not in text] == []


def test_the_scan_sees_a_private_name(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "'_no'\nSHARED = {'_listed': ''}\nimport torch._utils\nfrom torch import _prims\n"
        "torch._one(_two=1)\ngetattr(torch, '_three')\nx.__four__\nx['torch._five'].six\n"
    )
    assert set(private_names(file)) == {"_utils", "_prims", "_one", "_two", "_three", "_five"}


# Which torch.


@pytest.mark.parametrize("version", ["1.13.1", "2.3.1+cpu", "2.4.0", "2.10.0a0+git1234", "3.0"])
def test_a_torch_that_is_too_old_is_refused_at_import(version):
    code = f"import torch; torch.__version__ = {version!r}; import fastdp; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if version in ("1.13.1", "2.3.1+cpu"):
        text = f"ImportError: fastdp needs torch 2.4 or newer, and this is torch {version}: "
        assert done.returncode == 1 and text in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


def test_the_oldest_torch_is_that_of_the_package():
    """Told in three places."""
    found = (PACKAGE.parent / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>=2.4"]' in found and fastdp._OLDEST == (2, 4)
    assert "A torch of 2.4 or newer" in (PACKAGE.parent / "README.md").read_text()


# What crosses by DLPack.


class Convolutions(nn.Module):
    """Weights and a buffer with dimensions of size 1; `seen` gets the strides in each replica."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3)
        self.deep = nn.Conv2d(6, 6, 3, groups=6)
        self.last = nn.Conv2d(6, 4, 1).to(memory_format=torch.channels_last)
        self.register_buffer("row", torch.zeros(1, 5, 1, 3))
        self.seen = []

    def strides(self):
        layers = (self.first, self.deep, self.last)
        return [layer.weight.stride() for layer in layers] + [self.row.stride()]

    def forward(self, x):
        self.seen.append(self.strides())
        return self.last(self.deep(self.first(x)))


@pytest.mark.parametrize("table", [True, False])
def test_replicas_keep_the_strides_of_dimensions_of_size_1(fast, table):
    """By them a convolution tells its memory format: replicas would compute another way. A torch
    before 2.11 exports them changed."""
    former = fastdp._C._use_exchange_table(table)
    try:
        module = Convolutions().to(fast.home)
        want = module.strides()
        fast.wrap(module, 3)(torch.ones(6, 1, 8, 8)).sum().backward()
        assert module.seen == [want] * 3
        layers = (module.first, module.deep, module.last)
        assert [layer.weight.grad.stride() for layer in layers] == want[:3]
    finally:
        fastdp._C._use_exchange_table(former)


def test_strides_are_lost_where_dimensions_of_size_1_alone_differ():
    tensors = [torch.zeros(6, 1, 3, 3), torch.zeros(2, 3).t(), torch.zeros(2, 1), torch.zeros(0, 1)]
    exported = [(9, 1, 3, 1), (2, 1), (1, 1), (1, 7)]
    slots = [(0, tuple(tensor.shape), strides) for tensor, strides in zip(tensors, exported)]
    assert buckets._strides_lost(tensors, slots) == [(0, (6, 1, 3, 3), (9, 9, 3, 1))]


def test_slots_with_lost_strides_are_tensors_like_the_others(monkeypatch):
    lost = [(1, (2, 1, 3), (3, 99, 1))]
    monkeypatch.setattr(buckets, "_strides_lost", lambda tensors, slots: lost)
    tensors = [torch.ones(2, 3), torch.ones(2, 1, 3)]
    host = torch.device("cpu")
    bucket = buckets.Bucket(tensors, (0, 1), (True, True), (host,) * 2, None, "zero")
    flat = torch.zeros(bucket.length)
    for slots in (bucket.slots(flat), bucket.named_slots(flat)):
        assert isinstance(slots, tuple) and slots[1].stride() == (3, 99, 1)
        before = [slot._version for slot in slots]
        with torch.no_grad():
            slots[1].add_(1)
        assert [slot._version for slot in slots] == [before[0], before[1] + 1]
        offset, _, _ = bucket.core.slots[1]
        assert flat[offset : offset + 6].eq(1).all() and flat.sum() == 6
        assert slots[1]._base is None
        flat.zero_()
    assert type(slots[1]) is nn.Parameter


def test_a_compiler_of_2_4_is_left_alone_and_named(monkeypatch, caplog):
    """It would compile each replica for itself, at each step anew."""
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert "torch 2.4.1+cpu compiles each replica for itself" in _torch_compiler.reason_against()
    dp = fastdp.DataParallel(nn.Linear(3, 2), ["cpu"] * 2, compile=True)
    x = torch.ones(4, 3)
    assert torch.equal(dp(x), dp.module(x))
    assert dp.report()["compiled"]["reasons"] == [_torch_compiler.reason_against()]
    assert "replicas run uncompiled: torch 2.4.1+cpu compiles each" in caplog.text
