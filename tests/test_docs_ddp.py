"""docs/migrating.md, from DistributedDataParallel: what its tables say about gradients, losses and
buffers is so. DDP's side is two processes over gloo."""

import json
import re
import textwrap

import fastdp
import pytest
import torch
from differences import OURS, Rows, wrap
from docs_page import table, torchrun
from nets import ints, linear, same
from torch import nn

DDP_CASES = textwrap.dedent(
    """
    import json, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(6, 3).double()
    mask = torch.tensor([1, 1, 1, 0, 0, 1]).double()
    found = {}

    def gradient(name, loss_of, model, x, mask):
        ddp = DistributedDataParallel(model)
        loss_of(ddp(x), mask).backward()
        found[name] = [p.grad.flatten().tolist() for p in model.parameters()]

    def model():
        torch.manual_seed(1)
        return nn.Linear(3, 2).double()

    class Inside(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    def inside():
        torch.manual_seed(1)
        return Inside(3, 2).double()

    half = slice(3 * rank, 3 * rank + 3)
    mine, my_mask = x[half], mask[half]
    part = slice(0, 4) if rank == 0 else slice(4, 6)
    gradient("mean", lambda y, m: y.square().mean(), model(), mine, my_mask)
    gradient("sum", lambda y, m: y.square().sum(), model(), mine, my_mask)
    gradient("masked", lambda y, m: (y.square().sum(1) * m).sum() / m.sum(), model(), mine, my_mask)
    gradient("inside", lambda y, m: y, inside(), mine, my_mask)
    gradient("unequal", lambda y, m: y, inside(), x[part], mask[part])

    norm = nn.BatchNorm1d(3).double()
    ddp = DistributedDataParallel(norm)
    ddp(mine)
    ddp(mine)  # sends rank 0's buffers to all before it runs
    norm.eval()
    ddp(mine)
    found["running_mean"] = norm.running_mean.tolist()
    found["keys"] = list(ddp.state_dict())
    if rank == 0:
        print("FOUND" + json.dumps(found))
    dist.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """What two processes under DDP compute."""
    out = torchrun(tmp_path_factory.mktemp("ddp"), DDP_CASES)
    return json.loads(re.search(r"^FOUND(.*)$", out, re.MULTILINE)[1])


def batch():
    torch.manual_seed(0)
    return torch.randn(6, 3).double(), torch.tensor([1, 1, 1, 0, 0, 1]).double()


class Inside(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def gradient(loss_of, cls=nn.Linear, **options):
    """As DDP_CASES computes it, with the whole batch."""
    torch.manual_seed(1)
    module = cls(3, 2).double()
    dp = fastdp.DataParallel(module, device_ids=["cpu", "cpu"], **options)
    x, mask = batch()
    loss_of(dp(x), mask).backward()
    return [p.grad.flatten().tolist() for p in module.parameters()]


def scaled(gradients, factor):
    return [[factor * value for value in values] for values in gradients]


def near(gradients):
    return [pytest.approx(values, abs=1e-12) for values in gradients]


loss_rows = Rows()


def test_each_row_about_losses_has_a_test():
    assert [cells[0] for cells in table("### Mean losses and summed losses")] == list(loss_rows)


@loss_rows("a mean, computed from the outputs outside of the model")
def test_mean_loss(ddp):
    assert gradient(lambda y, mask: y.square().mean()) == near(ddp["mean"])


@loss_rows("a sum, computed outside of the model")
def test_sum_loss(ddp):
    ours = gradient(lambda y, mask: y.square().sum())
    assert ours == near(scaled(ddp["sum"], 2))
    assert gradient(lambda y, mask: y.square().sum() / 2) == near(ddp["sum"])


@loss_rows("a mean over something other than samples, such as tokens that are not padding")
def test_masked_mean(ddp):
    def loss(y, mask):
        return (y.square().sum(1) * mask).sum() / mask.sum()

    ours = gradient(loss)
    torch.manual_seed(1)
    plain = nn.Linear(3, 2).double()
    x, mask = batch()
    loss(plain(x), mask).backward()
    assert ours == near([p.grad.flatten().tolist() for p in plain.parameters()])
    assert ours != near(ddp["masked"])


@loss_rows("a mean, returned by `forward`")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_mean_inside(ddp):
    assert gradient(lambda y, mask: y.mean(), Inside) == near(ddp["inside"])
    assert ddp["unequal"] != near(ddp["inside"])  # 4 and 2 samples count alike per process


@loss_rows("a loss that compares samples, such as a contrastive one")
def test_comparing_loss():
    def loss(y):
        return torch.cdist(y, y).sum()

    module = linear()
    same(loss(wrap(OURS, module)(ints(6, 3))), loss(module(ints(6, 3))))


def test_what_falls_away_is_not_needed(ddp):
    """Accumulation, unused parameters, keys, SyncBatchNorm: the rows that fastdp answers."""
    module, twice = linear(), linear()
    dp = wrap(OURS, module)
    for part in ints(8, 3).split(4):
        dp(part).sum().backward()
    twice(ints(8, 3)).sum().backward()
    same(module.weight.grad, twice.weight.grad)

    norm = nn.BatchNorm1d(3).double()
    assert list(wrap(OURS, norm).state_dict()) == ddp["keys"]

    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))
    x = ints(4, 3)
    plain = nn.BatchNorm1d(3).double()
    same(wrap(OURS, synchronized)(x), torch.cat([plain(x[:2]), plain(x[2:])]))


def test_buffers_have_the_same_end_as_under_ddp(ddp):
    norm = nn.BatchNorm1d(3).double()
    dp = wrap(OURS, norm)
    x, _ = batch()
    dp(x)
    dp(x)
    assert norm.running_mean.tolist() == pytest.approx(ddp["running_mean"], abs=1e-12)
