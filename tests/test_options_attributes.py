"""The options `forward_attributes` and `transport`."""

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import no_cuda_reason
from nets import Net, exact, grads, ints, linear, same
from test_options_calls import Model
from torch import nn

import fastdp

row = pytest.mark.row


# forward_attributes.


@row("F2")
def test_without_the_option_the_error_is_torchs(impl):
    dp = impl.wrap(Model(), 2)
    words = f"'{type(dp).__name__}' object has no attribute 'config'"
    with pytest.raises(AttributeError) as error:
        dp.config
    assert str(error.value) == words
    assert not hasattr(dp, "generate") and getattr(dp, "width", 9) == 9


@row("F2")
def test_unknown_attributes_are_the_modules(fast):
    module = Model()
    dp = fast.wrap(module, 2, forward_attributes=True)
    assert dp.config is module.config and dp.scale == 3 and dp.width == 2
    assert dp.lin is module.lin and dp.count is module.count
    same(dp.generate(ints(4, 3).to(fast.home))["out"], linear()(ints(4, 3)))
    same(dp(ints(4, 3)), linear()(ints(4, 3)))
    # What the wrapper has is its own.
    assert dp.module is module and dp.dim == 0 and dp.training
    assert list(dp.state_dict()) == ["module.count", "module.lin.weight", "module.lin.bias"]
    assert [name for name, _ in dp.named_modules()] == ["", "module", "module.lin"]
    assert dp.forward.__self__ is dp


@row("F2")
def test_what_neither_has_is_an_attribute_error_of_the_wrapper(fast):
    dp = fast.wrap(Model(), 2, forward_attributes=True)
    for name in ("missing", "_private", "_missing", "__len__", "__array__", "__deepcopy__"):
        assert not hasattr(dp, name)
        with pytest.raises(AttributeError) as error:
            getattr(dp, name)
        assert str(error.value) == f"'DataParallel' object has no attribute '{name}'"
    assert not hasattr(dp, "broken")
    with pytest.raises(AttributeError) as error:
        dp.broken
    assert str(error.value.__cause__) == "'Model' object has no attribute 'broken'"


@row("F2")
def test_an_attribute_is_read_once(fast):
    reads = []

    class Counted(Model):
        @property
        def counted(self):
            reads.append(1)

    assert fast.wrap(Counted(), 2, forward_attributes=True).counted is None
    assert len(reads) == 1


@row("F2")
def test_writing_and_deleting_is_the_wrappers_own(fast):
    module = Model()
    dp = fast.wrap(module, 2, forward_attributes=True)
    dp.scale = 5
    assert dp.scale == 5 and module.scale == 3
    del dp.scale
    assert dp.scale == 3
    with pytest.raises(AttributeError):
        del dp.config
    dp.config["hidden"] = 7
    assert module.config == {"hidden": 7}
    dp.forward_attributes = False
    assert not hasattr(dp, "config")


@row("F2", "F4")
def test_copies_and_files_of_a_forwarding_wrapper(fast):
    dp = fast.wrap(Model(), 2, forward_attributes=True)
    dp(ints(4, 3))
    stream = io.BytesIO()
    torch.save(dp, stream)
    stream.seek(0)
    for twin in (
        copy.copy(dp),
        copy.deepcopy(dp),
        pickle.loads(pickle.dumps(dp)),
        torch.load(stream, weights_only=False),
    ):
        assert type(twin) is fastdp.DataParallel and type(twin.module) is Model
        assert twin.config == {"hidden": 2} and twin.width == 2
        same(twin(ints(4, 3)), linear()(ints(4, 3)))
    assert copy.deepcopy(dp).module is not dp.module
    empty = fastdp.DataParallel.__new__(fastdp.DataParallel)
    assert not hasattr(empty, "config")


@row("F2", "F5")
def test_a_subclass_may_look_up_attributes_itself(fast):
    """The recipe of torch's own tutorial."""

    class Recipe(fastdp.DataParallel):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    dp = fast.wrap_as(Recipe, Model(), 2)
    assert dp.config == {"hidden": 2}
    same(dp(ints(4, 3)), linear()(ints(4, 3)))


@row("F2", "F5")
@pytest.mark.parametrize("name", ["memory", "engine", "call", "sequential"])
@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
def test_what_is_registered_may_have_the_name_of_an_option_or_method(name, patched):
    with fastdp.patch() if patched else contextlib.nullcontext():
        cls = nn.DataParallel if patched else fastdp.DataParallel
        made = [cls(linear(), ["cpu"] * 2) for _ in range(4)]
        made[0].register_buffer(name, ints(2))
        made[1].register_parameter(name, nn.Parameter(ints(2)))
        setattr(made[2], name, nn.Parameter(ints(2)))
        made[3].register_module(name, linear())
        for dp in made:
            assert any(key.startswith(name) for key in dp.state_dict())
            part = getattr(dp, name)
            assert isinstance(part, (torch.Tensor, nn.Linear))
            with pytest.raises(KeyError, match="already exists"):
                dp.register_buffer("dim", ints(2))
            same(dp(ints(4, 3)), linear()(ints(4, 3)))
            assert hasattr(cls(linear(), ["cpu"] * 2), name)
        setattr(made[0], name, ints(3))
        same(dict(made[0].named_buffers())[name], ints(3))
        delattr(made[0], name)
        assert not isinstance(getattr(made[0], name), torch.Tensor)


@row("F5")
@pytest.mark.parametrize("function", ["register_buffer", "register_parameter", "add_module"])
def test_a_class_behind_the_wrappers_may_register_in_its_own_way(impl, function):
    class Prefix(nn.Module):
        pass

    def prefixed(self, name, *args, **kwargs):
        getattr(nn.Module, function)(self, f"own_{name}", *args, **kwargs)

    setattr(Prefix, function, prefixed)
    dp = impl.wrap_as(type("Both", (impl.api.DataParallel, Prefix), {}), linear(), 2)
    getattr(dp, function)("part", None)
    names = [*dp._buffers, *dp._parameters, *dp._modules]
    assert "own_part" in names and "part" not in names


@row("F4")
def test_every_option_survives_a_copy(fast):
    options = {
        "chunk_sizes": [3, 1],
        "split_lists": True,
        "replicate_scalars": True,
        "gather_outputs": False,
        "loss_weighting": "chunk",
        "sequential": True,
        "forward_attributes": True,
        "unused_grad": "none",
        "bucket_bytes": 7,
        "transport": "local",
        "timeout_s": 600.0,
    }
    dp = fast.wrap(Model(), 2, **options)
    for twin in (dp, copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert {name: getattr(twin, name) for name in options} == options


# transport.


@row("H5")
@pytest.mark.parametrize("name", [None, "auto", "host"])
def test_a_transport_can_be_chosen(fast, name):
    module, plain = Net(), Net()
    dp = fast.wrap(module, 2, transport=name)
    assert dp.transport == name
    same(dp(ints(4, 3)), plain(ints(4, 3)))
    dp(ints(4, 3)).sum().backward()
    plain(ints(4, 3)).sum().backward()
    same(grads(module), grads(plain))


@row("H5")
@pytest.mark.parametrize("ids, name", [(["cpu", "cpu"], "peer"), (["cpu"] * 3, "nccl")])
def test_a_transport_that_cannot_join_the_devices_says_so(ids, name):
    dp = fastdp.DataParallel(Net(), ids, transport=name)
    with pytest.raises(NotImplementedError, match=f"transport={name} does not join the devices"):
        dp(ints(4, 3))
    dp.transport = None
    same(dp(ints(4, 3)), Net()(ints(4, 3)))


@row("H5")
@pytest.mark.parametrize("value", ["", "pigeon", "NCCL", 3, ["host"]])
def test_an_unknown_transport_is_refused_with_the_names(value):
    with pytest.raises(ValueError) as error:
        fastdp.DataParallel(exact(nn.Linear(2, 2)), ["cpu", "cpu"], transport=value)
    assert f"transport is {value!r}: it must be one of auto, local, peer, nccl, host" in str(
        error.value
    )


@row("H5")
def test_a_keyword_beats_the_environment(fast, monkeypatch):
    monkeypatch.setenv("FASTDP_UNUSED_GRAD", "none")
    monkeypatch.setenv("FASTDP_BUCKET_BYTES", "9")
    dp = fast.wrap(linear(), 2)
    assert (dp.unused_grad, dp.bucket_bytes) == ("none", 9)
    dp = fast.wrap(linear(), 2, unused_grad="zero", bucket_bytes=11)
    assert (dp.unused_grad, dp.bucket_bytes) == ("zero", 11)


TRANSPORT_SCRIPT = """
import torch
import fastdp
from fastdp.buckets import find_transport

net, x = torch.nn.Linear(3, 2).cuda(0), torch.ones(4, 3)
for transport in (None, "local"):
    dp = fastdp.DataParallel(net, [0, 0], transport=transport)
    assert torch.equal(dp(x), net(x.cuda(0)))
    print(find_transport([torch.device("cuda", 0)] * 2, dp.transport)[0])
"""


@row("H5")
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
def test_the_transport_of_a_keyword_beats_the_environment():
    """The core reads the variable once in a process, and for GPUs only."""
    run = subprocess.run(
        [sys.executable, "-c", TRANSPORT_SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FASTDP_TRANSPORT": "host"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["host", "local"]
