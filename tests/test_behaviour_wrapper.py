"""BEHAVIOUR F: the wrapper as an object: state, copies, checks, modes, the functional form."""

import copy
import io
import pickle
import threading

import pytest
import torch
from nets import Apply, Net, exact, grads, ints, linear, same
from output_classes import Classified
from torch import nn

import fastdp

row = pytest.mark.row


@row("F1")
def test_state_dict_has_the_prefix(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    dp(ints(4, 3)).sum().backward()
    assert list(dp.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    assert [name for name, _ in dp.named_parameters()] == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]
    other = impl.wrap(Net(seed=5), 2)
    other.load_state_dict(dp.state_dict())
    same(other(ints(4, 3)), Net()(ints(4, 3)))
    with pytest.raises(RuntimeError, match="Missing key"):
        Net().load_state_dict(dp.state_dict())


@row("F2", "F3")
def test_attributes_are_not_forwarded(impl):
    module = Net()
    module.config = {"a": 1}
    dp = impl.wrap(module, 2)
    assert dp.module is module and dp.module.config == {"a": 1}
    with pytest.raises(AttributeError, match="config"):
        _ = dp.config
    module.generate = lambda x: module(x) * 2
    same(dp.module.generate(ints(4, 3).to(impl.home)), Net()(ints(4, 3)) * 2)


@row("F4")
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("used", [False, True])
def test_copies_of_the_wrapper(impl, how, used):
    module = Net()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    if used:
        dp(x).sum().backward()
    if how == "deepcopy":
        twin = copy.deepcopy(dp)
    elif how == "pickle":
        data = pickle.dumps(dp)
        twin = pickle.loads(data)
        if used:
            assert len(data) < 2 * len(pickle.dumps(module)) + 4096
    else:
        torch.save(dp, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(dp) and twin.device_ids == dp.device_ids
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    twin.zero_grad()
    doubled = Net()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    same(out := twin(x), want := doubled(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(twin.module), grads(doubled))
    same(dp(x), Net()(x))


@row("F4")
def test_options_survive_a_copy(fast):
    dp = fast.wrap(Apply(lambda s, x: s.lin(x)), 2, unused_grad="none")
    dp.module.idle = linear().to(fast.home)
    twin = copy.deepcopy(dp)
    twin(ints(4, 3)).sum().backward()
    assert twin.module.idle.weight.grad is None
    assert twin.module.lin.weight.grad is not None


@row("F5")
def test_is_a_real_subclass(fast):
    dp = fast.wrap(linear(), 2)
    assert isinstance(dp, nn.DataParallel) and issubclass(fast.api.DataParallel, nn.DataParallel)
    assert [name for name, _ in dp.named_children()] == ["module"]
    assert fast.api.DataParallel.__name__ == "DataParallel"


@row("F5")
def test_the_attributes_libraries_read(impl):
    dp = impl.wrap(linear(), 3, dim=1)
    assert list(dp.device_ids) == impl.ids(3) or [torch.device(d) for d in dp.device_ids] == [
        torch.device(d) for d in impl.ids(3)
    ]
    assert dp.dim == 1 and dp.src_device_obj == impl.home
    assert hasattr(dp, "output_device")
    assert "Linear" in repr(dp)


@row("F6")
def test_weights_that_left_the_home_device(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    dp(ints(4, 3))
    module.second.to("meta")
    with pytest.raises(RuntimeError, match=(
        r"module must have its parameters and buffers on device .* \(device_ids\[0\]\) "
        r"but found one of them on device: meta"
    )):  # fmt: skip
        dp(ints(4, 3))
    module.second = exact(nn.Linear(4, 2)).to(impl.home)
    assert dp(ints(4, 3)).shape == (4, 2)


@row("F6")
def test_a_buffer_that_left_the_home_device(impl):
    module = linear()
    module.register_buffer("b", torch.zeros(2))
    dp = impl.wrap(module, 2)
    module.b = module.b.to("meta")
    with pytest.raises(RuntimeError, match="found one of them on device: meta"):
        dp(ints(4, 3))


@row("K17")
def test_spellings_of_device_ids(fast):
    spelled = [torch.device("cpu"), "cpu", torch.device("cpu")]
    if fast.home.type == "cuda":
        spelled = [fast.home, fast.home.index, str(fast.home)]
    for ids in (spelled, tuple(spelled), iter(spelled)):
        dp = fast.api.DataParallel(linear().to(fast.home), ids)
        same(dp(ints(6, 3)), linear()(ints(6, 3)))
        assert len(dp.device_ids) == 3


@row("F8")
@pytest.mark.parametrize("bad", [0, None, 1.5, "meta", "nonsense", "cuda:99"])
def test_bad_device_ids_are_refused(fast, bad):
    """Beside "cpu", which says that the ids are meant: without a GPU torch ignores all ids."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"device_ids\[1\]"):
        fast.api.DataParallel(linear(), device_ids=["cpu", bad])


@row("F9")
@pytest.mark.parametrize("kind", [nn.DataParallel, fastdp.DataParallel])
@pytest.mark.parametrize("ids", [None, [], [0, 1]])
def test_without_a_gpu_the_module_is_called_directly(monkeypatch, kind, ids):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    module = Apply(lambda s, x, k=0: seen.append((s, x, k)) or s.lin(x))
    dp = kind(module, ids)
    x, k = ints(4, 3), {"a": 1}
    dp(x, k=k).sum().backward()
    assert dp.device_ids == []
    assert len(seen) == 1
    assert seen[0][0] is module and seen[0][1] is x and seen[0][2] is k
    same(module.lin.bias.grad, torch.full((2,), 4.0).double())


@row("F9")
def test_one_device_calls_the_module_itself(impl):
    seen = []
    module = Apply(lambda s, x: seen.append((s, threading.get_ident())) or s.lin(x))
    before = threading.active_count()
    same(impl.wrap(module, 1)(ints(4, 3)), linear()(ints(4, 3)))
    assert seen == [(module, threading.get_ident())] and threading.active_count() <= before


def test_options_are_keyword_only_and_checked(fast):
    with pytest.raises(TypeError):
        fast.api.DataParallel(linear(), fast.ids(2), None, 0, "none")
    with pytest.raises(TypeError):
        fast.wrap(linear(), 2, no_such_option=1)
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"bucket_bytes.*{value}"):
            fast.wrap(linear(), 2, bucket_bytes=value)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 30])
def test_any_bucket_size_gives_the_same_numbers(fast, bucket_bytes):
    module, plain = Net(), Net()
    dp = fast.wrap(module, 3, bucket_bytes=bucket_bytes)
    for _ in range(2):
        same(out := dp(ints(7, 3)), want := plain(ints(7, 3)))
        out.sum().backward()
        want.sum().backward()
    same(grads(module), grads(plain))


def torchs_inner_stays_home(impl, dp, x):
    """Over several GPUs torch's own refuses a wrapper within one: on the second GPU the inner one
    still scatters from the first."""
    if not impl.is_oracle or impl.gpus == 1:
        return False
    with pytest.raises(RuntimeError, match="on the same device"):
        dp(x)
    return True


@row("F11")
def test_nested_wrappers(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(impl.wrap(module, 2), 2)
    x = ints(8, 3)
    if torchs_inner_stays_home(impl, dp, x):
        return
    same(out := dp(x), want := plain(x))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("F11")
def test_nested_wrapper_does_not_split_again(fast):
    sizes = []
    inner = Apply(lambda s, x: sizes.append(x.size(0)) or s.lin(x))
    fast.wrap(nn.Sequential(fast.wrap(inner, 2)), 2)(ints(8, 3))
    assert sizes == [4, 4]


@row("F11")
def test_wrapper_below_a_plain_module_below_a_wrapper(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(nn.Sequential(nn.Sequential(impl.wrap(module, 2)), nn.Identity()), 2)
    if torchs_inner_stays_home(impl, dp, ints(8, 3)):
        return
    same(out := dp(ints(8, 3)), want := plain(ints(8, 3)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))


@row("F12")
def test_trainer_like_loop(fast):
    """Dict inputs by keyword, a ragged last batch, a ModelOutput with a scalar loss, `.module`."""
    def forward(self, input_ids=None, labels=None, return_dict=True, num_items=None):
        logits = self.lin(input_ids)
        return Classified(((logits - labels) ** 2).mean(), logits)

    module = Apply(forward)
    dp = fast.wrap(module, 2)
    opt = torch.optim.SGD(dp.parameters(), 2**-8)
    losses = []
    for step in range(12):
        batch = {"input_ids": ints(1 if step % 3 == 2 else 4, 3), "labels": None}
        batch["labels"] = batch["input_ids"][:, :2]
        if len(batch["input_ids"]) == 1:
            batch["return_dict"] = True
        with pytest.warns(UserWarning, match="scalars"):
            out = dp(**batch, num_items=None)
        loss = out.loss.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-3] < losses[0]
    assert getattr(dp, "module", dp) is module


@row("F13")
def test_modes_reach_the_replicas(impl):
    seen = []

    def forward(self, x):
        seen.append((self.training, self.lin.training, torch.is_grad_enabled()))
        return self.lin(x)

    module = Apply(forward)
    dp = impl.wrap(module, 2)
    for training in (True, False, True):
        dp.train(training)
        for grad in (True, False):
            seen.clear()
            with torch.set_grad_enabled(grad):
                out = dp(ints(4, 3))
            assert seen == [(training, training, grad)] * 2 and out.requires_grad == grad
    module.lin.eval()
    seen.clear()
    dp(ints(4, 3))
    assert seen == [(True, False, True)] * 2


@row("F13")
def test_inference_then_training(impl):
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    x = ints(4, 3)
    for _ in range(2):
        with torch.inference_mode():
            out = dp(x)
        same(out, plain(x))
        same(out := dp(x), want := plain(x))
        out.sum().backward()
        want.sum().backward()
        with torch.no_grad():
            same(dp(x), plain(x))
    same(grads(module), grads(plain))


@row("F13", why="mutant: buffers pooled under inference mode")
def test_buckets_of_inference_do_not_reach_training(fast):
    """Memory first taken under inference mode would be refused by autograd in the next step."""
    seen = []
    module = Apply(lambda s, x: seen.append(torch.is_inference_mode_enabled()) or s.lin(x) ** 2)
    dp = fast.wrap(module, 2)
    with torch.inference_mode():
        assert dp(ints(4, 3)).is_inference()
        dp(ints(4, 3))
    assert seen == [True] * 4
    dp(ints(4, 3)).sum().backward()
    dp(ints(4, 3)).sum().backward()
    plain = linear()
    (plain(ints(4, 3)) ** 2).sum().backward()
    same(module.lin.weight.grad, 2 * plain.weight.grad)


@row("L9", "L10")
def test_wrapper_moves_and_casts(impl):
    module = Net()
    dp = impl.wrap(module, 2)
    dp(ints(4, 3))
    dp.float()
    assert dp(ints(4, 3).float()).dtype == torch.float32
    dp.double()
    same(dp(ints(4, 3)), Net()(ints(4, 3)))
    dp.apply(lambda m: m.register_buffer("mark", torch.zeros(1, device=impl.home)))
    assert "module.first.mark" in dp.state_dict()
    same(dp(ints(4, 3)), Net()(ints(4, 3)))
    dp.requires_grad_(False)
    assert not dp(ints(4, 3)).requires_grad
