"""Failures on GPUs: each gives its clear error, and the wrapper stays usable. And the uses that
look like mistakes but are none: other orders of devices, inputs and outputs anywhere."""

import re

import cuda_child
import pytest
import torch
from conftest import no_cuda_reason
from cuda_sums import wrong_training
from gpu_lists import MANY, ON_ONE, PAIRS, here, need
from nets import Apply, Net, grads, ints, linear, same
from torch import nn

import fastdp


def gpu_test(function):
    reason = no_cuda_reason()
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(function))


def needs_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0), *PAIRS], ids=str)
def ids(request):
    return need(request.param)


def home_of(ids):
    return torch.device("cuda", ids[0])


# No GPU, no driver.


@pytest.fixture(scope="module")
def hidden():
    return cuda_child.answer(cuda_child.start("without_gpu", CUDA_VISIBLE_DEVICES=""))


def test_without_a_gpu_a_wrapper_means_what_torchs_does(hidden):
    assert hidden["seen"] == 0 and hidden["device_ids"] == []
    assert hidden["right"] and hidden["host"]
    assert hidden["functional"].startswith("RuntimeError: no available devices were found")


def test_without_a_gpu_the_core_says_what_is_missing(hidden):
    if not fastdp.build_info()["cuda"]:
        assert "cuda:0: this build has no CUDA backend" in hidden["core"]
        return
    kind, message = hidden["core"].split(": ", 1)
    assert kind == "NotImplementedError"
    assert message.startswith(
        ("cuda:0: this machine shows no NVIDIA GPU", "cuda:0: no NVIDIA driver found")
    )


# Transports.

LISTS = [[0, 0], [0, 1], [1, 0], [0, 1, 0, 1]]
MORE = [list(ON_ONE), *map(list, MANY)]


@pytest.fixture(scope="module")
def children():
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    lists = here(LISTS)
    started = {
        name: cuda_child.start("training", *lists, *here(MORE), FASTDP_TRANSPORT=name)
        for name in ("local", "peer", "nccl", "host")
    }
    started["bad peer"] = cuda_child.start("training", *lists, FASTDP_TEST_BAD_PEER="0-1")
    started["bad peer, forced"] = cuda_child.start(
        "training", *lists, FASTDP_TEST_BAD_PEER="1-0", FASTDP_TRANSPORT="peer"
    )
    yield lists, started
    cuda_child.stop(started.values())


def answers(children, name):
    """({devices: result}, log)"""
    lists, started = children
    if name in ("local", "peer", "nccl", "host"):
        lists = lists + here(MORE)
    found = cuda_child.answer(started[name])
    return dict(zip(map(tuple, lists), found["results"], strict=True)), found["log"]


@pytest.mark.row("H5")
@gpu_test
@pytest.mark.parametrize("name", ["peer", "host"])
def test_a_forced_transport_trains_right(children, name):
    results, log = answers(children, name)
    assert results == dict.fromkeys(results, [])
    assert log == []


@gpu_test
def test_local_joins_one_gpu_only(children):
    results, _ = answers(children, "local")
    for ids, result in results.items():
        if len(set(ids)) == 1:
            assert result == []
        else:
            assert result.startswith(
                "NotImplementedError: FASTDP_TRANSPORT=local does not join the devices: "
            )
            assert re.search(f"cuda:{ids[0]} and cuda:. are different memories", result), result


@gpu_test
def test_nccl_trains_right_or_says_why_not(children):
    results, _ = answers(children, "nccl")
    for result in results.values():
        assert result == [] or (
            result.startswith("NotImplementedError: FASTDP_TRANSPORT=nccl") and ": " in result[40:]
        )


@pytest.mark.row("H1", "H2")
@gpu_test
def test_bad_peer_copies_are_named_and_avoided(children):
    needs_two_gpus()
    results, log = answers(children, "bad peer")
    assert results == dict.fromkeys(results, [])
    warnings = [line for line in log if line.startswith("WARNING: ")]
    assert len(warnings) == 1, log
    assert "cuda:0 and cuda:1 failed the check of peer copies" in warnings[0]


@pytest.mark.row("H2")
@gpu_test
def test_bad_peer_copies_cannot_be_forced(children):
    needs_two_gpus()
    results, _ = answers(children, "bad peer, forced")
    for ids, result in results.items():
        if len(set(ids)) > 1:
            assert result.startswith("NotImplementedError: FASTDP_TRANSPORT=peer does not join")
            assert "cuda:0 and cuda:1 failed the check of peer copies" in result


# Errors in the middle of a step.


def check_right(dp, module, home, rows=6):
    """A step of Apply(linear) gives the numbers of the host."""
    reference = linear()
    x = ints(rows, 3)
    module.zero_grad(set_to_none=True)
    out = dp(x.to(home))
    out.sum().backward()
    want = reference(x)
    want.sum().backward()
    same(out, want)
    same(grads(module)["lin.weight"], reference.weight.grad)
    same(grads(module)["lin.bias"], reference.bias.grad)


@pytest.mark.row("G4")
@gpu_test
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_in_one_replica_then_a_smaller_batch(ids, rank):
    def forward(self, x):
        if x.shape[0] > 4 and bool(x[0, 0] == rank):
            torch.empty(2**46, dtype=torch.uint8, device=x.device)
        return self.lin(x)

    home = home_of(ids)
    module = Apply(forward).to(home)
    dp = fastdp.DataParallel(module, device_ids=ids)
    large = torch.ones(16, 3, dtype=torch.float64)
    large[8:], large[:8] = 1, 0
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            dp(large.to(home))
        assert f"in replica {rank} on device cuda:{ids[rank]}" in str(caught.value)
        check_right(dp, module, home)


@pytest.mark.row("G4")
@gpu_test
def test_out_of_memory_for_the_copies(ids):
    home, last = home_of(ids), torch.device("cuda", ids[-1])
    module = nn.Linear(4096, 4096)  # 64 MiB
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))  # exact sums
    module.to(home)
    dp = fastdp.DataParallel(module, device_ids=ids)
    x = torch.ones(4, 4096, device=home)
    for device in {home, last}:
        (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum()
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(last)[1]
    limit = (torch.cuda.memory_reserved(last) + 2**25) / total
    torch.cuda.set_per_process_memory_fraction(limit, last)
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                dp(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, last)
    with torch.no_grad():
        want = torch.cat([module(chunk) for chunk in x.chunk(2)])
    out = dp(x)
    same(out, want)
    out.sum().backward()
    same(module.bias.grad, torch.full((4096,), 4.0))


@pytest.mark.row("I1")
@gpu_test
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_that_raises_while_the_other_computes(ids, rank):
    raises = True

    def forward(self, x):
        if raises and x[0, 0].item() == rank:
            raise KeyError("lost")
        torch.cuda._sleep(50_000_000)
        return self.lin(x)

    home = home_of(ids)
    module = Apply(forward).to(home)
    dp = fastdp.DataParallel(module, device_ids=ids)
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1] = 1
    for _ in range(2):
        raises = True
        with pytest.raises(KeyError) as caught:
            dp(x.to(home))
        assert f"in replica {rank} on device cuda:{ids[rank]}" in str(caught.value)
        raises = False
        check_right(dp, module, home)


# Devices that do not fit.


@pytest.mark.row("F6")
@gpu_test
@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_weights_that_are_not_on_the_first_device(where):
    if where == "cuda:1":
        needs_two_gpus()
    ids = [0, 0] if where == "cpu" else [0, 1]
    x = ints(4, 3).to("cuda:0")
    texts = []
    for kind in (fastdp.DataParallel, nn.DataParallel):
        with pytest.raises(RuntimeError) as caught:
            kind(linear().to(where), device_ids=ids)(x)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert f"on device cuda:0 (device_ids[0]) but found one of them on device: {where}" in texts[0]


@gpu_test
@pytest.mark.parametrize("mixed", [[0, "cpu"], ["cpu", 0], [0, -1]], ids=str)
def test_host_and_gpu_in_one_list(mixed):
    with pytest.raises(ValueError, match=r"device_ids\[1\] is .* cannot be mixed in one list"):
        fastdp.DataParallel(linear().cuda(0), device_ids=mixed)


@gpu_test
def test_a_gpu_that_is_not_there():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"device_ids\[1\] is cuda:{count}, but the visible"):
        fastdp.DataParallel(linear().cuda(0), device_ids=[0, count])


# Devices that do.


@pytest.mark.row("C14")
@gpu_test
def test_output_devices(ids):
    last = torch.device("cuda", ids[-1])
    places = {
        ids[-1]: last,
        last: last,
        str(last): last,
        "cpu": torch.device("cpu"),
        torch.device("cpu"): torch.device("cpu"),
        -1: torch.device("cpu"),
        None: home_of(ids),
    }
    for place, device in places.items():
        module, reference = Net().to(home_of(ids)), Net()
        dp = fastdp.DataParallel(module, device_ids=ids, output_device=place)
        x = ints(6, 3)
        out, want = dp(x.to(home_of(ids))), reference(x)
        assert out.device == device, f"output_device={place!r}"
        same(out, want)
        out.sum().backward()
        want.sum().backward()
        same(grads(module), grads(reference))


def other_than(index):
    return f"cuda:{0 if index else 1}"


def _strided(x, device):
    wide = torch.zeros(2 * x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=device)
    view = wide[::2, ::2]
    return view.copy_(x)


@pytest.mark.row("B19")
@gpu_test
@pytest.mark.parametrize("kind", ["cpu", "pinned", "strided", "strided cpu", "other GPU"])
def test_inputs_from_anywhere(ids, kind):
    home = home_of(ids)
    places = {
        "cpu": lambda x: x,
        "pinned": lambda x: x.pin_memory(),
        "strided": lambda x: _strided(x, home),
        "strided cpu": lambda x: _strided(x, "cpu"),
        "other GPU": lambda x: x.to(other_than(ids[0])),
    }
    if kind == "other GPU":
        needs_two_gpus()
    assert wrong_training(ids, place=places[kind]) == []


@pytest.mark.row("B20")
@gpu_test
@pytest.mark.parametrize("kind", ["cpu", "strided", "other GPU"])
def test_gradients_of_inputs_from_anywhere(ids, kind):
    if kind == "other GPU":
        needs_two_gpus()
    device = {"cpu": "cpu", "strided": home_of(ids), "other GPU": other_than(ids[0])}[kind]
    x, reference = ints(6, 3), ints(6, 3, grad=True)
    mine = (_strided(x, device) if kind == "strided" else x.to(device)).detach().requires_grad_()
    fastdp.DataParallel(Net().to(home_of(ids)), device_ids=ids)(mine).sum().backward()
    Net()(reference).sum().backward()
    assert mine.grad.device == torch.device(device)
    same(mine.grad, reference.grad)
