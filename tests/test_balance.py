"""The warning of a first GPU that holds more than the others, and its reason."""

import warnings

import pytest
import torch
from nets import NO_LIST, linear

import fastdp
from fastdp import balance
from fastdp.balance import Reading, judge

GIB = 2**30
GPUS = [torch.device("cuda", index) for index in range(2)]


def readings(first, *others):
    """(now, peak) of each GPU, in GiB."""
    pairs = enumerate((first, *others))
    return [Reading(f"cuda:{k}", int(now * GIB), int(peak * GIB)) for k, (now, peak) in pairs]


@pytest.mark.parametrize(
    "first, others",
    [
        ((9, 9), [(9, 9)]),
        ((9, 11), [(9, 9)]),  # 2 GiB, no more
        ((9, 11.9), [(9, 9.9)]),
        ((40, 49), [(40, 40)]),  # less than a quarter
        ((9, 12), [(9, 9), (9, 10.5)]),  # than the fullest of the others
        ((5, 5), [(9, 9)]),
    ],
    ids=["even", "2 GiB", "a fifth", "large", "another", "less"],
)
def test_no_word(first, others):
    assert judge(readings(first, *others), 0, 0) is None


def test_each_reason():
    outputs = judge(readings((13, 13), (9, 9), (8, 9)), 4 * GIB, 0)
    assert outputs == (
        "cuda:0 holds 4.0 GiB more than any other GPU of the wrapper: 13.0 GiB at its peak, the "
        "others at most 9.0 GiB. 4.0 GiB are outputs that are joined there (a loss inside of "
        "forward, or gather_outputs=False with fastdp.sum_losses, leaves them where they are). See "
        "docs/troubleshooting.md, Memory on the first GPU"
    )
    optimizer = judge(readings((13, 13), (9, 9)), 0, 0)
    assert "4.0 GiB are what lies there besides: the optimizer's state" in optimizer
    outside = judge(readings((9, 13), (9, 9)), 0, 0)
    assert "4.0 GiB are what comes and goes there in a step: a loss outside" in outside
    gradients = judge(readings((12.5, 12.5), (9, 9)), 0, 3 * GIB)
    assert "9.0 GiB. 3.0 GiB are sums of gradients; 512.0 MiB are what lies" in gradients


def test_the_largest_comes_first_and_small_ones_are_left_out():
    text = judge(readings((12, 16), (9, 10)), GIB, GIB // 10)
    said = text.split(". ")[1]
    assert [part.split(" are ")[1].split(" ")[0] for part in said.split("; ")] == [
        "what",  # 3 GiB come and go
        "what",  # 1.9 lie there
        "outputs",
    ]
    assert said.startswith("3.0 GiB are what comes and goes")
    assert "are sums of gradients" not in said


@pytest.fixture
def pretended(monkeypatch):
    """A wrapper whose replicas are taken to lie on two GPUs with these readings."""
    found = {GPUS[0]: (13, 13), GPUS[1]: (9, 9)}
    asked = []

    def reading_of(device):
        asked.append(device)
        now, peak = found[device]
        return Reading(str(device), now * GIB, peak * GIB)

    monkeypatch.setattr(balance, "distinct", lambda devices: list(dict.fromkeys(GPUS)))
    monkeypatch.setattr(balance, "reading_of", reading_of)
    dp = fastdp.DataParallel(linear(), ["cpu", "cpu"])
    return dp, found, asked


def forwards(dp, count):
    for _ in range(count):
        dp(torch.ones(4, 3).double()).sum().backward()


def test_it_is_said_once_for_the_callers_line(pretended):
    dp, _, asked = pretended
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forwards(dp, 2)
    assert asked == []
    with pytest.warns(fastdp.DataParallelWarning, match="cuda:0 holds 4.0 GiB more") as told:
        forwards(dp, 40)
    assert len(told) == 1 and told[0].filename == __file__
    assert asked == GPUS * 2  # at the third and the thirtieth


def test_it_may_come_later(pretended):
    dp, found, _ = pretended
    found[GPUS[0]] = (9, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forwards(dp, 29)
    found[GPUS[0]] = (9, 13)
    with pytest.warns(fastdp.DataParallelWarning, match="comes and goes there"):
        forwards(dp, 1)


def test_outputs_and_gradients_are_looked_at_where_they_are(pretended, monkeypatch):
    dp, _, _ = pretended
    seen = []
    monkeypatch.setattr(balance, "judge", lambda *given: seen.append(given[1:]))
    monkeypatch.setattr(
        balance, "held_by", lambda tensors: {GPUS[0]: sum(t.nbytes for t in tensors)}
    )
    forwards(dp, 3)
    assert seen == [(4 * 2 * 8, (6 + 2) * 8)]


@pytest.mark.parametrize(
    "ids", [NO_LIST, pytest.param(["cpu"], id="one"), pytest.param(["cpu"] * 2, id="two")]
)
def test_one_device_is_never_looked_at(monkeypatch, ids):
    monkeypatch.setattr(balance, "reading_of", lambda device: pytest.fail("it was looked at"))
    forwards(fastdp.DataParallel(linear(), ids), 4)
