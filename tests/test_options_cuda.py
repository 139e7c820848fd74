"""The options on GPUs: no wait of the host, and right numbers while the GPUs are held up."""

import pytest
import torch
from conftest import no_cuda_reason
from gpu_lists import PAIRS, need
from nets import Net, exact, grads, ints, same
from torch import nn

import fastdp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason())),
]

HOLD_CYCLES = 20_000_000  # some 10 ms


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0), *PAIRS], ids=str)
def ids(request):
    return need(request.param)


class TableNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, table):
        return self.net(x) * (table**2).sum()

    def loss(self, x, table):
        return self(x, table).sum() / len(x)

    def of_lists(self, samples, table):
        return self(torch.stack(samples), table)


def steps_of(ids):
    """Name -> (module, step): one training step with each option, all tensors on the home GPU."""
    home = torch.device("cuda", ids[0])
    x, table = ints(8, 3).to(home), ints(3, 2).to(home).requires_grad_()
    labels = [ints(2, 2, seed=4).to(f"cuda:{ids[0]}"), ints(6, 2, seed=5).to(f"cuda:{ids[1]}")]

    def wrapped(**options):
        return fastdp.DataParallel(TableNet().to(home), ids, chunk_sizes=[2, 6], **options)

    left, weighted = wrapped(gather_outputs=False), wrapped(loss_weighting="chunk")
    ordered, listed = wrapped(sequential=True), wrapped(split_lists=True)

    def on_their_devices():
        outputs = left(x, fastdp.Replicated(table))
        losses = [((out - label) ** 2).sum() for out, label in zip(outputs, labels)]
        fastdp.sum_losses(losses, [0.25, 0.75]).backward()

    def twice():
        outputs = left(x, fastdp.Replicated(table))
        total = fastdp.sum_losses([out.sum() for out in outputs])
        (slope,) = torch.autograd.grad(total, table, create_graph=True)
        slope.square().sum().backward()

    def by_share():
        weighted.call("loss", x, fastdp.Replicated(table)).mean().backward()

    def in_order():
        ordered(x, fastdp.Replicated(table)).sum().backward()

    def in_lists():
        # Samples are views of the batch: their gradients meet there.
        listed.call("of_lists", list(x), fastdp.Replicated(table)).sum().backward()

    return table, {
        "sum_losses": (left.module, on_their_devices),
        "twice": (left.module, twice),
        "loss_weighting": (weighted.module, by_share),
        "sequential": (ordered.module, in_order),
        "split_lists": (listed.module, in_lists),
    }


NAMES = ["sum_losses", "twice", "loss_weighting", "sequential", "split_lists"]


@pytest.mark.row("C13", "C2", "B14", "J2")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_options_makes_the_host_wait_for_nothing(ids, name):
    _, steps = steps_of(ids)
    step = steps[name][1]
    for _ in range(3):
        step()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.row("C13", "C2", "B14", "H8")
@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("held", [0, 1])
def test_steps_with_options_are_right_while_a_gpu_is_held_up(ids, name, held):
    table, steps = steps_of(ids)
    module, step = steps[name]

    def gradients():
        module.zero_grad()
        table.grad = None
        step()
        return {**grads(module), "table": table.grad.cpu()}

    want = gradients()
    for _ in range(3):
        with torch.cuda.device(ids[held]):
            torch.cuda._sleep(HOLD_CYCLES)
        same(gradients(), want)


@pytest.mark.row("C13", "H8")
@pytest.mark.parametrize("held", [0, 1])
def test_a_sum_waits_for_losses_that_are_still_being_made(ids, held):
    devices = [torch.device("cuda", index) for index in ids]
    for k in range(5):
        leaves = [torch.full((), float(k + 1), device=d, requires_grad=True) for d in devices]
        with torch.cuda.device(devices[held]):
            torch.cuda._sleep(HOLD_CYCLES)
        total = fastdp.sum_losses([leaf * 2 for leaf in leaves], [1.0, 0.5])
        assert total.device == devices[0]
        total.backward()
        assert total.item() == 3.0 * (k + 1)
        assert [leaf.grad.item() for leaf in leaves] == [2.0, 1.0]


@pytest.mark.row("B14", "B19")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_marked_host_tensor_reaches_the_gpus_and_its_gradient_comes_back(ids, pinned):
    module, plain = exact(nn.Bilinear(3, 2, 1)), exact(nn.Bilinear(3, 2, 1))

    class Paired(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = module

        def forward(self, x, row):
            return self.pair(x, row.expand(len(x), 2))

    x = ints(5, 3)
    row = ints(1, 2).requires_grad_()
    given = row.pin_memory() if pinned else row
    home = torch.device("cuda", ids[0])
    dp = fastdp.DataParallel(Paired().to(home), ids)
    same(out := dp(x, fastdp.Replicated(given)), want := plain(x, ints(1, 2).expand(5, 2)))
    out.sum().backward()
    want.sum().backward()
    same(grads(module), grads(plain))
    other = ints(1, 2).requires_grad_()
    plain(x, other.expand(5, 2)).sum().backward()
    same(row.grad, other.grad)
    assert row.grad.device.type == "cpu"
