"""What a reader who tried to break the drop-in promise found: old code around the wrapper that met
one of fastdp's own names, or a step that did not go as torch's."""

import copy
import re

import fastdp
import pytest
import torch
from nets import Net, grads, ints, same
from patch_cases import patch_and_undo
from torch import nn
from torch_features import needs_total_norm

row = pytest.mark.row

# The options, and values that old code may have under their names: of another kind, or fitting.
OPTIONS = {
    "chunk_sizes": "3,5",
    "split_lists": "yes",
    "replicate_scalars": 3,
    "gather_outputs": None,
    "loss_weighting": 0.5,
    "sequential": "LSTM",
    "forward_attributes": ["a", "b"],
    "unused_grad": 0,
    "bucket_bytes": "many",
    "transport": {"kind": "tcp"},
    "engine": object(),
    "timeout_s": "soon",
}


def every_name(cls):
    """Attributes of fastdp's class, private ones included, that torch's has not."""
    mine = {name for part in cls.__mro__ for name in vars(part)}
    theirs = {name for part in nn.DataParallel.__mro__ for name in vars(part)}
    return sorted(mine - theirs)


def check_trains(dp, module):
    plain, x = Net(), ints(5, 3)
    same(out := dp(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("F2", "L3")
def test_private_names_cannot_be_met_by_accident():
    public = {*OPTIONS, "call", "warmup", "report", "dump", "trace", "memory", "fits"}
    public |= {"grad_norm", "clip_grad_norm_", "nonfinite", "watch_replicas"}
    for name in set(every_name(fastdp.DataParallel)) - public:
        assert name.startswith(("_fastdp_", "__")), name
    dp = fastdp.DataParallel(Net(), ["cpu", "cpu"])
    dp(ints(4, 3))
    torchs = set(vars(nn.DataParallel(Net()))) | {"output_device", "src_device_obj", "dim"}
    for name in set(vars(dp)) - torchs:
        assert name.startswith("_fastdp_"), name


@row("F2", "L3")
@pytest.mark.parametrize("engine", [None, "auto"])
def test_a_subclass_has_attributes_of_these_names(fast, engine):
    class Old(fast.api.DataParallel):
        def __init__(self, *args, **kwargs):
            self.sequential = True  # before there is anything
            super().__init__(*args, **kwargs)
            assert self.sequential is True
            for name, value in OPTIONS.items():
                setattr(self, name, value)

    module = Net()
    dp = fast.wrap_as(Old, module, 2, engine=engine)
    for each in (dp, copy.deepcopy(dp)):
        for name, value in OPTIONS.items():
            if name != "engine":
                assert getattr(each, name) == value
        each.zero_grad()
        check_trains(each, each.module)
    for name in OPTIONS:
        delattr(dp, name)
        getattr(dp, name)  # the option shows again
    assert dp.engine == (engine or "eager")


@row("F2")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_that_an_option_cannot_have(name):
    """fastdp's class says so where it is set; in torch's, patched, the name is the script's."""
    bad, module, x = OPTIONS[name], Net(), ints(4, 3)
    dp = fastdp.DataParallel(module, ["cpu", "cpu"])
    before = getattr(dp, name)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name} is {bad!r}")):
        setattr(dp, name, bad)
    assert getattr(dp, name) == before
    same(dp(x), Net()(x))
    with fastdp.patch():
        old = nn.DataParallel(module, ["cpu", "cpu"])
        setattr(old, name, bad)
        assert getattr(old, name) is bad
        for each in (old, copy.deepcopy(old)):
            same(each(x), Net()(x))


@row("F2", "L3")
def test_a_subclass_has_methods_properties_and_parts_of_these_names(fast):
    def method(self, *, needed):
        raise AssertionError("called by fastdp")

    def refuse(self):
        raise AssertionError("read by fastdp")

    names = [*OPTIONS, "call", "warmup", "report", "dump", "trace", "grad_norm", "nonfinite"]
    names += ["memory", "fits"]
    methods = type("Methods", (fast.api.DataParallel,), dict.fromkeys(names, method))
    properties = type(
        "Properties", (fast.api.DataParallel,), dict.fromkeys(names, property(refuse))
    )
    constants = type("Constants", (fast.api.DataParallel,), dict.fromkeys(names, "constant"))
    for cls in (methods, properties, constants):
        module = Net()
        check_trains(fast.wrap_as(cls, module, 2), module)

    class Parts(fast.api.DataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for name in OPTIONS:
                setattr(self, name, nn.Identity())

    module = Net()
    dp = fast.wrap_as(Parts, module, 2)
    assert all(isinstance(getattr(dp, name), nn.Identity) for name in OPTIONS)
    check_trains(dp, module)


@row("F2")
def test_a_subclass_that_reads_its_module_finds_what_is_there(impl):
    class Through(impl.api.DataParallel):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    module = Net()
    module.sequential, module.engine = nn.Sequential(nn.Identity()), "diesel"
    dp = impl.wrap_as(Through, module, 2)
    assert dp.sequential is module.sequential and dp.engine == "diesel"
    same(dp(ints(4, 3)), Net()(ints(4, 3)))


@row("F2")
def test_options_of_a_subclass_are_options_where_they_fit(fast):
    class Own(fast.api.DataParallel):
        pass

    sizes = []
    module = Net()
    module.register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    dp = fast.wrap_as(Own, module, 2)
    dp.chunk_sizes, dp.gather_outputs = [1, 3], False
    assert (dp.chunk_sizes, dp.gather_outputs) == ([1, 3], False)
    assert [len(out) for out in dp(ints(4, 3))] == [1, 3] and sorted(sizes) == [1, 3]


@row("F1")
@needs_total_norm
def test_what_is_fastdps_works_while_torchs_class_is_patched(fast):
    with patch_and_undo():
        dp = nn.DataParallel(Net().to(fast.home), fast.ids(2))
        dp(ints(4, 3)).sum().backward()
        assert torch.equal(dp.grad_norm(), nn.utils.get_total_norm(p.grad for p in dp.parameters()))
        assert not dp.nonfinite()
        assert dp.report()["engine"] == "eager" and isinstance(dp.dump(), str)
        fastdp.HealthMonitor(dp)
        for batch in fastdp.prefetch([ints(4, 3)], dp):
            same(dp(batch), Net()(ints(4, 3)))


@row("F4")
def test_the_class_takes_its_modules_type(fast):
    """As torch's: in annotations, in bases, and called."""
    typed = fast.api.DataParallel[Net]

    class Typed(fast.api.DataParallel[Net]):
        pass

    for cls in (typed, Typed):
        module = Net()
        check_trains(fast.wrap_as(cls, module, 2), module)
    with patch_and_undo():
        module = Net()
        check_trains(fast.wrap_as(Typed, module, 2), module)


@row("L3")
def test_a_subclass_that_skips_the_constructor(impl):
    """It does by hand what torch's constructor does."""

    class ByHand(impl.api.DataParallel):
        def __init__(self, module, device_ids, like):
            nn.Module.__init__(self)
            self.module, self.dim = module, 0
            self.device_ids, self.output_device = like.device_ids, like.output_device
            self.src_device_obj = like.src_device_obj

    module = Net().to(impl.home)
    check_trains(ByHand(module, None, impl.wrap(module, 2)), module)
