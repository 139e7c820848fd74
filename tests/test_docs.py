"""docs/: the code of each page runs, and what the tables of migrating.md say is so. One test per
row, named by the row's first cell; nn.DataParallel's side is torch's own code (oracle.py), DDP's
are two processes over gloo."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import fastdp
import gloo
import oracle
import pytest
import torch
from differences import OURS, THEIRS, Rows, call, per_replica, rank_of, wrap
from differences import cells as readme_cells
from nets import Apply, ints, linear, same
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PAGE = PAGES["migrating.md"]
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
DATA_PARALLEL = "fastdp.DataParallel(model)"
ON_TWO = 'fastdp.DataParallel(model, device_ids=["cpu", "cpu"])'


def blocks(language, name="", page=PAGE):
    return [body for kind, label, body in FENCE.findall(page) if (kind, label) == (language, name)]


def section(heading):
    """From a heading to the next of its level or above."""
    level = heading.split(" ")[0]
    text = PAGE.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{2,{len(level)}}} ", text)[0]


def table(heading):
    """The rows of the first table below a heading, as lists of cells."""
    lines = re.search(r"(^\|.*\n)+", section(heading), re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def run(code, page="migrating.md"):
    namespace = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), namespace)
    return namespace


def run_alone(tmp_path, code, *before, **environment):
    """What a script of its own prints; `before` stands between the interpreter and the script."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *before, str(script)], capture_output=True, text=True, timeout=300,
        env={**os.environ, **NO_GPU, **environment},
    )  # fmt: skip
    assert done.returncode == 0 or gloo.AT_EXIT in done.stderr, done.stdout + done.stderr
    return done.stdout


def torchrun(tmp_path, code):
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    return run_alone(tmp_path, code, *two)


# The page's code.


def test_each_block_is_of_a_kind_that_is_run():
    kinds = {(kind, label) for kind, label, _ in FENCE.findall(PAGE)}
    assert kinds == {
        ("python", ""),
        ("python", "ddp"),
        ("python", "fastdp"),
        ("diff", ""),
        ("console", ""),
    }
    assert PAGE.count("```") == 2 * len(FENCE.findall(PAGE))
    assert len(blocks("python")) > 8


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize(
    "page, body",
    [(name, body) for name, page in PAGES.items() for body in blocks("python", page=page)],
    ids=lambda value: value if value in PAGES else "",
)
def test_python_blocks_run(page, body):
    with warnings.catch_warnings():  # a block that changes the filters changes them for itself
        run(body, page)


def test_the_diff_changes_no_number():
    (diff,) = blocks("diff")
    assert all(line[:1] in ("", " ", "+", "-") for line in diff.splitlines())
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    old, new = run(before)["model"], run(after)["model"]
    assert type(old) is nn.DataParallel and type(new) is fastdp.DataParallel
    models = [new]
    if not torch.cuda.is_available():
        models.append(run(after.replace(DATA_PARALLEL, ON_TWO))["model"])
        assert len(models[1].device_ids) == 2
    for model in models:
        for got, want in zip(model.parameters(), old.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the losses would be those of all GPUs")
def test_the_two_scripts_print_the_same_losses(tmp_path, capsys):
    (before,), (after,) = blocks("python", "ddp"), blocks("python", "fastdp")
    assert after.count(DATA_PARALLEL) == 1
    theirs = torchrun(tmp_path, before)
    assert theirs.count("epoch") == 3
    for code in (after, after.replace(DATA_PARALLEL, ON_TWO)):
        run(code)
        ours = capsys.readouterr().out
        assert losses(ours) == pytest.approx(losses(theirs), abs=1.01e-4)
    first, *_, last = losses(ours)
    assert last < 0.7 * first


def losses(text):
    found = [float(loss) for loss in re.findall(r"^epoch \d loss ([\d.]+)$", text, re.MULTILINE)]
    assert len(found) == 3
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[name])
    assert len(links) > 5 or name != "migrating.md"
    for link in links:
        file, _, anchor = link.partition("#")
        target = DOCS / file if file else DOCS / name
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, link


def anchor_of(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    bodies = [body for *_, body in FENCE.findall(PAGES[name])]
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[name])) + bodies
    names = {name for text in code for name in re.findall(r"\bfastdp(?:\.\w+)+", text)}
    assert "fastdp.DataParallel" in names or name != "migrating.md"
    for dotted in names:
        thing = fastdp
        for part in dotted.split(".")[1:]:
            thing = getattr(thing, part)


def test_options_exist_and_are_off():
    cells = [cell for _, cell, _ in table("## Options for old workarounds")]
    named = re.findall(r"`(\w+)=", " ".join(cells))
    standard = fastdp.DataParallel.__init__.__kwdefaults__
    assert len(named) > 8
    for name in named:
        assert standard[name] in ((True,) if name == "gather_outputs" else (None, False)), name
    everywhere = re.findall(r"\b(\w+)=(?:True|False|\"\w+\")", FENCE.sub("", PAGE))
    assert set(everywhere) - {"drop_last", "shuffle", "find_unused_parameters"} <= set(standard)


TRAIN = """
import sys
import torch
from torch.nn import DataParallel as Wrapper

assert sys.argv == ["train.py", "--epochs", "3"]
model = Wrapper(torch.nn.Linear(8, 2), device_ids=["cpu", "cpu"])
print(type(model).__name__, len(model.device_ids), *model(torch.ones(5, 8)).shape)
sys.exit(3)
"""


def test_the_command_runs_a_script(tmp_path):
    (block,) = blocks("console")
    (command,) = re.findall(r"^\$ python (.*)$", block, re.MULTILINE)
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **NO_GPU}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stdout == "DataParallel 2 5 2\n"
    assert re.search(r"train\.py:7: DataParallel, 2 replicas", done.stderr)


# From nn.DataParallel: what stays as it is.

stays = Rows()


def test_each_row_that_stays_has_a_test():
    assert [cells[0] for cells in table("### Nothing to do")] == list(stays)


def both():
    return (THEIRS, OURS)


def wrap_n(side, module, n):
    if side == THEIRS:
        return oracle.DataParallel(module, device_ids=list(range(n)))
    return fastdp.DataParallel(module, device_ids=["cpu"] * n)


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@stays("chunks")
def test_chunks():
    for side in both():
        for rows, sizes in ((10, [3, 3, 3, 1]), (5, [2, 2, 1])):
            seen = []
            module = Apply(lambda self, x, seen=seen: (seen.append(len(x)), x)[1])
            wrap_n(side, module, 4)(ints(rows, 3))
            assert sorted(seen, reverse=True) == sizes


@stays("0-dim outputs, such as a loss computed in `forward`")
def test_scalars():
    for side in both():
        with pytest.warns(UserWarning, match="scalars"):
            out = call(side, lambda self, x: self.lin(x).sum())
        assert out.shape == (2,)


@stays("the mean of that vector")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_mean_of_means():
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0]).double()
    for side in both():
        assert call(side, lambda self, x: x.mean(), x).mean() == (0 + 5) / 2.0 != x.mean()


@stays("batch norm")
def test_batch_norm():
    x = ints(4, 3)
    want = nn.BatchNorm1d(3).double()
    outs = want(x[:2])
    statistics = want.running_mean.clone()
    outs = torch.cat([outs, want(x[2:])])
    for side in both():
        norm = nn.BatchNorm1d(3).double()
        same(wrap(side, norm)(x), outs)
        same(norm.running_mean, statistics)


@stays("attributes set in `forward`")
def test_attributes():
    def forward(self, x):
        self.seen = len(x)
        return x

    for side in both():
        module = Apply(forward)
        wrap(side, module)(ints(4, 3))
        assert not hasattr(module, "seen")


@stays("a parameter that nothing used")
def test_unused_parameter():
    def unused(side, **options):
        module = Apply(lambda self, x: self.lin(x))
        module.unused = nn.Parameter(torch.ones(2))
        wrap(side, module, **options)(ints(4, 3)).sum().backward()
        return module.unused.grad

    for side in both():
        same(unused(side), torch.zeros(2))
    assert unused(OURS, unused_grad="none") is None


@stays("a list or tuple argument")
def test_lists():
    for side in both():
        seen = []
        module = Apply(lambda self, items, seen=seen: (seen.append(items), items[0])[1])
        wrap(side, module)([ints(4, 3), "ab"])
        assert [(len(tensor), text) for tensor, text in seen] == [(2, "ab")] * 2


@stays("methods other than `forward`")
def test_methods():
    class Model(nn.Linear):
        def generate(self, x):
            return len(x)

    for side in both():
        dp = wrap(side, Model(3, 2))
        assert dp.module.generate(ints(4, 3)) == 4
        with pytest.raises(AttributeError):
            dp.generate(ints(4, 3))


@stays("attributes of the model")
def test_attribute_access():
    for side in both():
        module = linear()
        module.config = 5
        dp = wrap(side, module)
        assert dp.module.config == 5
        with pytest.raises(AttributeError, match="config"):
            _ = dp.config


# What gets better.

better = Rows()


def test_each_row_that_got_better_has_a_test():
    assert [cells[0] for cells in table("### What gets better")] == list(better)


@better("overhead of a step")
def test_replicas_and_threads_are_kept():
    import threading

    threads, places = set(), []

    def forward(self, x):
        threads.add(threading.get_ident())
        places.append(id(self.lin))
        return x

    dp = wrap(OURS, Apply(forward))
    for _ in range(5):
        dp(ints(4, 3))
    assert len(threads) == 2 and len(set(places)) == 2


@better("`next(self.parameters())` in `forward`")
def test_parameters_in_forward():
    assert per_replica(THEIRS, lambda self: len(list(self.parameters()))) == [0, 0]
    assert per_replica(OURS, lambda self: len(list(self.parameters()))) == [2, 2]


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
@better("a last batch with fewer rows than devices, and a constant argument")
def test_short_batch():
    def forward(self, x, flag=False):
        return self.lin(x)

    with pytest.raises(TypeError, match="missing"):
        call(THEIRS, forward, ints(1, 3), flag=True)
    same(call(OURS, forward, ints(1, 3), flag=True), linear()(ints(1, 3)))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


@better("a dataclass as output")
def test_dataclass():
    with pytest.raises(TypeError):
        call(THEIRS, lambda self, x: Output(self.lin(x)))
    same(call(OURS, lambda self, x: Output(self.lin(x))).logits, linear()(ints(4, 3)))


@better("numbers and strings in the output")
def test_numbers():
    with pytest.raises(TypeError):
        call(THEIRS, lambda self, x: (x, 3))
    assert call(OURS, lambda self, x: (x, 3, "ok"))[1:] == ([3, 3], ["ok", "ok"])


@better("autocast")
def test_autocast_dtype():
    with torch.autocast("cpu", torch.float16):
        assert call(OURS, lambda self, x: self.lin(x).float(), ints(4, 3)) is not None
        seen = per_replica(OURS, lambda self: torch.get_autocast_dtype("cpu"))
    assert seen == [torch.float16] * 2


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@better("an error in a replica")
def test_error():
    def forward(self, x):
        raise Odd("a", "b")

    with pytest.raises(RuntimeError):
        call(THEIRS, forward)
    with pytest.raises(Odd, match="replica 0") as caught:
        call(OURS, forward)
    assert type(caught.value.__cause__) is Odd


@better("outputs that cannot be joined")
def test_unequal_shapes():
    with pytest.raises(RuntimeError, match="replica 1") as caught:
        call(OURS, lambda self, x: {"y": x[:, : 1 + rank_of(x)]}, torch.tensor([[0, 0], [1, 1]]))
    assert "'y'" in str(caught.value) and "(1, 2)" in str(caught.value)


@better("the same inputs twice")
def test_same_bits():
    module = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    dp, x = fastdp.DataParallel(module, device_ids=["cpu"] * 4), torch.randn(64, 3)
    first, second = (
        torch.autograd.grad(dp(x).square().sum(), list(module.parameters())) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@better("a machine without GPUs")
def test_host_replicas():
    assert len(per_replica(OURS, id)) == 2


# What differs: README.md's rows, which have tests of their own on both sides.


def test_rows_that_differ_are_rows_of_the_readme():
    titles = ("Devices and inputs", "Outputs", "Replicas", "Threads, errors, gradients")
    ours = [cells[0] for cells in table("### What differs")]
    assert len(ours) > 5 and not set(ours) - set(readme_cells(*titles))


@pytest.mark.parametrize("way", ["del", "functional_call"])
def test_ways_around_an_assigned_weight(way):
    def assign(self, x):
        doubled = self.lin.weight * 2
        if way == "functional_call":
            return torch.func.functional_call(self.lin, {"weight": doubled}, (x,))
        del self.lin.weight
        self.lin.weight = doubled
        return self.lin(x)

    plain = Apply(lambda self, x: nn.functional.linear(x, self.lin.weight * 2, self.lin.bias))
    same(call(OURS, assign), plain(ints(4, 3)))


def test_frozen_before_the_forward():
    module = linear()
    module.weight.requires_grad_(False)
    wrap(OURS, module)(ints(4, 3)).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None


def test_packing_in_the_forward():
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.size(1))
        return out

    x, lengths = ints(4, 5, 3), torch.tensor([5, 2, 3, 1])
    want = x * (torch.arange(5) < lengths.unsqueeze(1)).unsqueeze(2)
    same(call(OURS, forward, x, lengths), want)


# From DDP.

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


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_options_that_no_block_shows():
    dp = wrap(OURS, Apply(lambda self, x, k: x * k), replicate_scalars=True)
    same(dp(ints(4, 3), torch.tensor(3)), ints(4, 3) * 3)
    with pytest.raises(ValueError, match="room for 4 samples, but the batch has 5"):
        wrap(OURS, linear(), chunk_sizes=[1, 3])(ints(5, 3))
    module = linear()
    same(wrap(OURS, module, transport="local")(ints(4, 3)), module(ints(4, 3)))


def test_the_engine_says_why_nothing_is_recorded_on_the_host():
    module = linear()
    dp = fastdp.DataParallel(module, device_ids=["cpu", "cpu"], engine="auto")
    same(dp(ints(4, 3)), module(ints(4, 3)))
    assert "on the host, where there is nothing to record" in str(dp.report())


def test_warnings_come_once_for_each_argument():
    dp = wrap(OURS, Apply(lambda self, x, names: x))
    with pytest.warns(fastdp.DataParallelWarning, match="split_lists"):
        dp(ints(4, 3), ["a", "b", "c", "d"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp(ints(4, 3), ["a", "b", "c", "d"])


def test_batch_norm_refuses_a_chunk_of_one_row():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        wrap(OURS, nn.BatchNorm1d(3).double())(ints(3, 3))


def test_gradients_arrive_on_the_model_once_per_step():
    module, seen = linear(), []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    wrap(OURS, module)(ints(4, 3)).sum().backward()
    assert len(seen) == 1
    same(seen[0], module.weight.grad)


def test_the_page_is_in_the_source_distribution():
    manifest = (ROOT / "MANIFEST.in").read_text()
    assert "recursive-include docs *.md" in manifest
    assert "recursive-include examples *.py" in manifest
