"""docs/troubleshooting.md: every message that it quotes is provoked, on the host and, where there
is one, on a GPU. `...` in a quotation stands for anything; devices are compared by their place
only, since "cuda:0" of the page is the host here, and "cpu" a device that the replicas are not
on."""

import faulthandler
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from nets import Apply, linear
from torch import nn

import fastdp
from fastdp import doctor, validations
from test_doctor import GIB, Machine

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md").read_text()
QUOTED = dict(re.findall(r"^```text (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
DEVICE = re.compile(r"\b(cuda:(\d+|\.\.\.)|cpu|meta)")


def plain(text):
    return DEVICE.sub("<device>", " ".join(text.split()))


def pattern_of(quotation):
    parts = plain(quotation).split("...")
    return re.compile(r".*?".join(re.escape(part.strip()) for part in parts), re.DOTALL)


def said(act):
    """What act() raises, else what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(f"{each.category.__name__}: {each.message}" for each in caught)


def stranger(fast):
    """A device that the replicas are not on."""
    return "meta" if fast.home.type == "cpu" else "cpu"


def x(fast, rows, columns=3):
    return torch.ones(rows, columns, dtype=torch.float64, device=fast.home)


def home(fast, context):
    module = nn.Linear(3, 2, device=stranger(fast), dtype=torch.float64)
    return said(lambda: fastdp.DataParallel(module, fast.ids(2))(x(fast, 4)))


def spans(fast, context):
    module = nn.Sequential(linear().to(fast.home), nn.Linear(2, 2, device=stranger(fast)))
    return said(lambda: fastdp.DataParallel(module, fast.ids(2)))


def attribute(fast, context):
    module = Apply(lambda self, x: x * self.mask).to(fast.home)
    module.mask = torch.ones(3, device=stranger(fast), dtype=torch.float64)
    return said(lambda: fastdp.DataParallel(module, fast.ids(2))(x(fast, 4)))


def transport(fast, context):
    if fast.home.type == "cuda":
        pytest.skip("NCCL may join these GPUs: then there is no message")
    return said(lambda: fast.wrap(linear(), 2, transport="nccl")(x(fast, 4)))


def badpeer(fast, context):
    if fast.gpus < 2:
        pytest.skip("needs 2 GPUs")
    import cuda_child

    child = cuda_child.start("training", [0, 1], FASTDP_TEST_BAD_PEER="0-1")
    return "\n".join(cuda_child.answer(child)["log"])


def hang(fast, context):
    """Replica 1 waits until the traces of all threads are written."""
    path, there, go_on = context / "traces", threading.Event(), threading.Event()

    def forward(self, x):
        if threading.current_thread().name.startswith("fastdp-replica-"):
            there.set()
            assert go_on.wait(60)
        else:
            assert there.wait(60)
            with open(path, "w") as file:
                faulthandler.dump_traceback(file)
            go_on.set()
        return x

    fast.wrap(Apply(forward), 2)(x(fast, 4))
    return path.read_text()


def idle(fast, context):
    return said(lambda: fast.wrap(linear(), 2)(x(fast, 1)))


def report(fast, context):
    if fast.home.type == "cuda":
        pytest.skip("what a report says of replicas on the host")
    dp = fast.wrap(linear(), 2, engine="auto")
    dp(x(fast, 4))
    return str(dp.report())


def batchnorm(fast, context):
    return said(lambda: fast.wrap(nn.BatchNorm1d(3).double(), 2)(x(fast, 3)))


def sizes(fast, context):
    return said(lambda: fast.wrap(linear(), 2, chunk_sizes=[2, 2])(x(fast, 5)))


def ragged(fast, context):
    rows = torch.tensor([2, 2, 4, 4], device=fast.home).view(4, 1).expand(4, 4)
    return said(lambda: fast.wrap(Apply(lambda self, x: x[:, : int(x[0, 0])]), 2)(rows))


def first(self, x, *rest):
    return x


def unlike(fast, context):
    return said(lambda: fast.wrap(Apply(first), 2)(x(fast, 4), x(fast, 3)))


def uncut(fast, context):
    return said(lambda: fast.wrap(Apply(first), 2)(x(fast, 4), [1, 2, 3, 4]))


def memory(fast, context):
    if fast.home.type == "cpu":
        pytest.skip("needs 1 GPU: memory of the host has another message")

    def forward(self, x):
        return torch.empty(2**48, dtype=torch.uint8, device=x.device)

    return said(lambda: fast.wrap(Apply(forward), 2)(x(fast, 4)))


def uneven(fast, context):
    from fastdp import balance

    gpus = [torch.device("cuda", index) for index in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "distinct", lambda devices: gpus)
        patch.setattr(
            balance,
            "reading_of",
            lambda device: balance.Reading(str(device), *[(9 - 4 * device.index) * GIB] * 2),
        )
        dp = fast.wrap(linear(), 2)
        return said(lambda: [dp(x(fast, 4)) for _ in range(3)])


def reserve(fast, context):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validations, "free_bytes", lambda device: 3 * GIB)
        return said(fastdp.validation(fast.wrap(linear(), 2), 4 * GIB).__enter__)


def values(fast, context):
    dp = fast.wrap(Apply(lambda self, x: self.lin(x) * x.sum().item()), 2)
    return said(lambda: dp.fits(x(fast, 4)))


def mean_in_forward(fast):
    return fast.wrap(Apply(lambda self, x: self.lin(x).mean()), 2)


def vector(fast, context):
    return said(lambda: mean_in_forward(fast)(x(fast, 4)))


def implicit(fast, context):
    return said(lambda: mean_in_forward(fast)(x(fast, 4)).backward())


def keys(fast, context):
    return said(lambda: fast.wrap(linear(), 2).load_state_dict(linear().state_dict()))


def pretended(act):
    """What preflight says of a pretended machine."""

    def provoke(fast, context):
        with pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch)
            act(machine)
            return said(doctor.preflight)

    return provoke


def little_memory(machine):
    machine.facts["gpus"][0]["free_bytes"] = 3 * GIB
    machine.facts["driver"]["gpus"] = None


def changed_late(machine):
    machine.set("visible", variable="0,1", started=True, count=1, uuids=[None])


PROVOKED = {
    "bytes": pretended(little_memory),
    "visible": pretended(changed_late),
    "home": home,
    "spans": spans,
    "attribute": attribute,
    "transport": transport,
    "badpeer": badpeer,
    "hang": hang,
    "idle": idle,
    "report": report,
    "uneven": uneven,
    "batchnorm": batchnorm,
    "sizes": sizes,
    "ragged": ragged,
    "unlike": unlike,
    "list": uncut,
    "memory": memory,
    "reserve": reserve,
    "values": values,
    "vector": vector,
    "implicit": implicit,
    "keys": keys,
}


def test_all_that_is_quoted_is_provoked():
    assert list(QUOTED) == list(PROVOKED)
    assert PAGE.count("```text") == len(QUOTED)


@pytest.mark.parametrize("name", PROVOKED)
def test_a_quoted_message(fast, name, tmp_path):
    text = plain(PROVOKED[name](fast, tmp_path))
    assert pattern_of(QUOTED[name]).search(text), f"{QUOTED[name]}\n\nis not in\n\n{text}"


def test_the_comparison_can_fail():
    pattern = pattern_of("Error: on device\ncuda:0 of ... GiB\n")
    assert pattern.search(plain("Error: on device cpu of 3 GiB"))
    assert not pattern.search(plain("Error: on device cpu of 3 MiB"))
    assert not pattern.search(plain("Error: on device of 3 GiB"))
