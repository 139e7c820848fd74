"""BEHAVIOUR F, H and parity: repeated devices, devices that fastdp does not know, the current
device, what goes on beside training, and the environment of the process."""

import contextlib
import gc
import threading
import time

import cuda_child
import oracle
import pytest
import torch
from conftest import no_cuda_reason
from fastdp import captures
from nets import CLOSE, Apply, Net, close, grads, ints, linear, same
from torch import nn

row = pytest.mark.row


# A repeated device.


class Everything(nn.Module):
    """What may tell replicas on one device from replicas on several: buffers, written and not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.rows.add_(x.size(0))
        return self.net(x)


@row("F10", "X21")
@pytest.mark.parametrize("n", [2, 3])
def test_a_repeated_device_is_as_good_as_several(fast, n):
    """Against torch's own on n devices of their own, over steps of an optimizer."""
    ours, theirs = Everything().to(fast.home), Everything()
    runs = [
        (ours, fast.api.DataParallel(ours, device_ids=[fast.home_id] * n)),
        (theirs, oracle.DataParallel(theirs, device_ids=list(range(n)))),
    ]
    assert len(runs[0][1].device_ids) == n
    opts = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.5) for module, _ in runs]
    for step in range(4):
        outs = []
        for (module, dp), opt in zip(runs, opts, strict=True):
            opt.zero_grad()
            outs.append(dp(ints(3 * n - 1, 3, seed=step)))
            outs[-1].sum().backward()
            opt.step()
        close(*outs, **CLOSE)
    for got, want in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        (close if got.is_floating_point() else same)(got, want)
    assert ours.rows.item() == 4 * 3


@row("F10", "X21")
def test_replicas_on_one_device_are_distinct_objects(fast):
    seen = []
    module = Apply(lambda s, x: seen.append((s, s.lin.weight.data_ptr())) or s.lin(x))
    dp = fast.api.DataParallel(module.to(fast.home), device_ids=[fast.home_id] * 4)
    dp(ints(8, 3))
    assert len({id(replica) for replica, _ in seen}) == len({place for _, place in seen}) == 4


# Devices that fastdp does not know.


@row("F14")
@pytest.mark.parametrize("kind", ["xpu:0", "mps", "meta", torch.device("xpu", 1)])
def test_other_devices_are_refused_by_name(fast, kind):
    with pytest.raises(ValueError) as caught:
        fast.api.DataParallel(linear(), device_ids=["cpu", kind])
    assert str(caught.value).startswith(
        f"device_ids[1] is '{kind}': fastdp takes CUDA devices and 'cpu'"
    )


@row("F14")
def test_a_module_on_another_kind_of_device_is_called_directly(monkeypatch):
    """No GPU and no ids, as in torch: wherever its weights are."""
    import fastdp

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = fastdp.DataParallel(linear().to("meta"))(ints(4, 3).to("meta"))
    assert out.device.type == "meta" and out.shape == (4, 2)


# The current device, and torch's default one.


@row("X27")
def test_the_default_device_is_not_where_copies_go(impl):
    """`torch.set_default_device` must not move what the wrapper allocates."""
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    with torch.device("meta"):
        same(out := dp(ints_here(5, 3)), plain(ints_here(5, 3)))
        out.sum().backward()
    plain(ints_here(5, 3)).sum().backward()
    same(grads(module), grads(plain))


def ints_here(*shape):
    with torch.device("cpu"):
        return ints(*shape)


@row("X27")
def test_the_current_device_changed_by_the_caller(fast):
    """Before, between and inside forwards; it is as the caller left it afterwards."""

    def forward(self, x):
        current.append(torch.cuda.current_device() if x.is_cuda else x.device)
        if self.turns and x.is_cuda:
            torch.cuda.set_device(fast.gpus - 1)
        return self.lin(x)

    current = []
    module, plain = Apply(forward), linear()
    dp = fast.wrap(module, 2)
    for turns in (False, True):
        module.turns = turns
        here = contextlib.nullcontext()
        if fast.home.type == "cuda":
            here = torch.cuda.device(fast.gpus - 1)
        with here:
            before = torch.cuda.current_device() if fast.home.type == "cuda" else None
            same(out := dp(ints(4, 3)), want := plain(ints(4, 3)))
            out.sum().backward()
            want.sum().backward()
            after = torch.cuda.current_device() if fast.home.type == "cuda" else None
            assert before == after
    same(module.lin.weight.grad, plain.weight.grad)
    wanted = [fast.device(rank) for rank in (0, 1)] * 2
    if fast.home.type == "cuda":
        wanted = [device.index for device in wanted]
    assert sorted(map(str, current)) == sorted(map(str, wanted))


@row("X28")
def test_a_call_while_a_graph_is_captured(fast):
    """Right on replay, or refused and usable afterwards."""
    if fast.home.type == "cpu":
        pytest.skip("needs 1 GPU: the host has no graphs")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    module, plain = Net(), Net()
    dp = fast.wrap(module, 2)
    x = ints(4, 3).to(fast.home)
    with torch.no_grad():
        for _ in range(3):
            dp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        out = None
        try:
            # A capture that fails would leave torch's generator broken for the tests that follow.
            with captures.CudaRecorder(devices).rehearsal(), torch.cuda.graph(graph):
                out = dp(x)
        except RuntimeError as error:
            assert fast.gpus == 1 or 'engine="graph"' in str(error)
        for device in devices:
            torch.cuda.synchronize(device)
        if out is not None:
            x.copy_(ints(4, 3, seed=7))
            graph.replay()
            same(out, plain(ints(4, 3, seed=7)))
        same(dp(x), plain(x.cpu()))


@row("X28")
def test_pinned_batches_after_one_in_a_captured_graph(fast):
    """An event that was recorded in a capture can never be asked whether it has passed."""
    if fast.home.type == "cpu":
        pytest.skip("needs 1 GPU: the host has no graphs")
    if fast.gpus > 1:
        pytest.skip("needs one GPU: several are refused, see above")
    module, plain = Net(), Net()
    dp = fast.wrap(module, 2)
    x = ints(4, 3).pin_memory()
    with torch.no_grad():
        for _ in range(3):
            dp(x)
        torch.cuda.synchronize()
        graph, out = torch.cuda.CUDAGraph(), None
        try:
            with captures.CudaRecorder([fast.home]).rehearsal(), torch.cuda.graph(graph):
                out = dp(x)
        except RuntimeError as error:
            assert "captur" in str(error)
        torch.cuda.synchronize()
        if out is not None:
            x.copy_(ints(4, 3, seed=7))
            graph.replay()
            same(out, plain(ints(4, 3, seed=7)))
        for seed in range(3):
            batch = ints(4, 3, seed=seed)
            same(dp(batch.pin_memory()), plain(batch))


# Beside training.


@row("H3")
def test_memory_is_emptied_beside_training(impl):
    """Allocator and garbage collector at work in another thread, all the time."""
    stop, errors = threading.Event(), []

    def disturb():
        try:
            while not stop.is_set():
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                gc.collect(0)
                time.sleep(0.001)
                torch.empty(1 << 12, device=impl.home)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        module, plain = Net(), Net()
        dp = impl.wrap(module, 2)
        for step in range(20):
            dp(ints(5, 3, seed=step)).sum().backward()
            plain(ints(5, 3, seed=step)).sum().backward()
    finally:
        stop.set()
        thread.join(20)
    assert not errors and not thread.is_alive()
    same(grads(module), grads(plain))


@row("H3", "H7")
def test_a_loader_with_a_pin_thread_beside_training(impl):
    """The loader's own thread pins batches where there is a GPU."""
    data = torch.utils.data.TensorDataset(ints(24, 3))
    loader = torch.utils.data.DataLoader(
        data, batch_size=5, num_workers=1, pin_memory=impl.home.type == "cuda",
        multiprocessing_context="fork",
    )  # fmt: skip
    module, plain = Net(), Net()
    dp = impl.wrap(module, 2)
    for (batch,) in loader:
        dp(batch).sum().backward()
        plain(batch).sum().backward()
    same(grads(module), grads(plain))


@row("H4")
def test_two_wrappers_train_in_two_threads(impl):
    """On the same devices, each with a module of its own, in step and out of step."""
    errors, kept = [], {}
    ids = impl.ids(3)

    def train(seed, steps):
        try:
            module, plain = Net(seed), Net(seed)
            dp = impl.api.DataParallel(module.to(impl.home), device_ids=ids)
            for step in range(steps):
                for m, run in ((module, dp), (plain, plain)):
                    run(ints(7, 3, seed=step + seed)).sum().backward()
            kept[seed] = grads(module), grads(plain)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed, 10 + 5 * seed)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(kept) == 2
    for got, want in kept.values():
        same(got, want)


# The environment of the process.


@pytest.fixture(scope="module")
def children():
    """One process for each environment; they run side by side."""
    count = torch.cuda.device_count() if not no_cuda_reason() else 0
    lists = [["cpu", "cpu"], *[[0, 0]] * (count > 0), *[[0, 1]] * (count > 1)]
    started = {
        name: cuda_child.start("training", *lists, **{name: value})
        for name, value in (
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        )
    }
    yield lists, started
    cuda_child.stop(started.values())


@row("X58", "X59")
@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF"])
def test_training_under_an_environment(children, name):
    """Launches that block, and memory that grows in place, of which a peer may not see all."""
    lists, started = children
    found = cuda_child.answer(started[name])
    assert found["results"] == [[]] * len(lists), found
    assert not [line for line in found["log"] if line.startswith("ERROR")]


@row("H5", "X26")
@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.parametrize("n", [9, 16])
def test_more_replicas_than_any_machine_has_devices(fast, n):
    """No limit of eight, as peer access had; more replicas than rows too."""
    module, plain = Net(), Net()
    dp = fast.wrap(module, n)
    for batch in (2 * n, n - 1):
        same(out := dp(ints(batch, 3)), want := plain(ints(batch, 3)))
        out.sum().backward()
        want.sum().backward()
    same(grads(module), grads(plain))
