"""The option `gather_outputs`: outputs that stay where they are. Integers in fp64, so that equality
holds. Losses that do: test_options_losses.py."""

import gc
import weakref

import pytest
import torch
from nets import Apply, Net, Pair, grads, ints, linear, same
from output_classes import Fields

import fastdp
from fastdp import sum_losses

row = pytest.mark.row


class Items(list):
    """A list that cannot be made of its items alone."""

    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class Mine(dict):
    """A dictionary that cannot be made of its items alone."""

    def __init__(self, name, items=()):
        super().__init__(items)
        self.name = name


# gather_outputs.


@row("C13")
@pytest.mark.parametrize("batch, n, used", [(4, 2, 2), (5, 2, 2), (5, 4, 3), (1, 3, 1), (0, 2, 1)])
def test_outputs_stay_where_they_are(fast, batch, n, used):
    x = ints(batch, 3)
    outputs = fast.wrap(Net(), n, gather_outputs=False)(x)
    assert type(outputs) is list and len(outputs) == used
    for rank, (output, piece) in enumerate(zip(outputs, x.chunk(n))):
        same(output, Net()(piece))
        assert output.device == fast.device(rank)


@row("C13", "F9", "F11")
def test_one_replica_gives_a_list_too(fast):
    """What a call returns does not depend on the machine."""
    x = ints(4, 3)
    (output,) = fast.wrap(linear(), 1, gather_outputs=False)(x)
    same(output, linear()(x))
    direct = fastdp.DataParallel(linear(), device_ids=["cpu"], gather_outputs=False)
    direct.device_ids = []  # as on a machine without GPUs
    (output,) = direct(x)
    same(output, linear()(x))

    inner = fast.wrap(linear(), 2, gather_outputs=False)
    outer = fast.wrap(Apply(lambda s, x: s.inner(x)[0]), 2)
    outer.module.inner = inner
    same(outer(x), linear()(x))


@row("C12", "C13")
def test_outputs_that_do_not_fit_together_are_fine(fast):
    def forward(s, x):
        return {"x": x[:1, : len(x)], "n": len(x), "o": None if len(x) == 2 else "s"}

    outputs = fast.wrap(Apply(forward), 2, gather_outputs=False)(ints(5, 3))
    assert [tuple(o["x"].shape) for o in outputs] == [(1, 3), (1, 2)]
    assert [(o["n"], o["o"]) for o in outputs] == [(3, "s"), (2, None)]


@row("C13", "D1")
@pytest.mark.parametrize("unused", ["zero", "none"])
@pytest.mark.parametrize("rank", [0, 1])
def test_unused_parameters_get_what_they_get_from_a_gather(fast, unused, rank):
    """In buckets of their own, so that no used parameter brings the zeros along."""

    def model():
        module = Apply(lambda s, x: s.lin(x))
        module.idle = linear(seed=2)
        return module

    expected = {}
    for gather in (True, False):
        module = model()
        dp = fast.wrap(module, 2, gather_outputs=gather, unused_grad=unused, bucket_bytes=1)
        out = dp(ints(4, 3))
        (out.chunk(2)[rank] if gather else out[rank]).sum().backward()
        expected[gather] = grads(module)
    same(expected[False], expected[True])
    assert (expected[True]["idle.weight"] is None) == (unused == "none")


KINDS = {
    "dict": lambda x, kept: {"y": x, "kept": kept},
    "mine": lambda x, kept: Mine("name", {"y": x, "kept": kept}),
    "list": lambda x, kept: [x, kept],
    "items": lambda x, kept: Items("name", [x, kept]),
    "tuple": lambda x, kept: (x, (kept,)),
    "namedtuple": Pair,
    "dataclass": Fields,
}


@row("C13", "C11")
@pytest.mark.parametrize("kind", KINDS)
def test_containers_keep_their_type_and_what_else_they_hold(fast, kind):
    """They are made anew where they hold something differentiable; objects are the same ones."""
    made = []

    def forward(s, x):
        made.append(KINDS[kind](s.lin(x), s))
        return made[-1]

    x = ints(4, 3)
    outputs = fast.wrap(Apply(forward), 2, gather_outputs=False, sequential=True)(x)
    for output, before, piece in zip(outputs, made, x.chunk(2)):
        assert type(output) is type(before)
        assert getattr(output, "name", None) == getattr(before, "name", None)
        values = list(vars(output).values()) if kind == "dataclass" else None
        values = values or (list(output.values()) if isinstance(output, dict) else list(output))
        same(values[0], linear()(piece))
        kept = values[1][0] if kind == "tuple" else values[1]
        assert isinstance(kept, Apply)


@row("C13")
def test_without_gradients_outputs_are_the_very_objects(fast):
    made = []

    def forward(s, x):
        made.append({"y": s.lin(x)})
        return made[-1]

    dp = fast.wrap(Apply(forward), 2, gather_outputs=False, sequential=True)
    with torch.no_grad():
        outputs = dp(ints(4, 3))
    assert outputs[0] is made[0] and outputs[1] is made[1]


@row("C13", "L13")
def test_outputs_may_be_changed_in_place(fast):
    module = Apply(lambda s, x: s.lin(x))
    for output in (outputs := fast.wrap(module, 2, gather_outputs=False)(ints(4, 3))):
        output.mul_(2)
        output.relu_()
    sum_losses([output.sum() for output in outputs]).backward()
    plain = Apply(lambda s, x: s.lin(x))
    plain(ints(4, 3)).mul(2).relu().sum().backward()
    same(grads(module), grads(plain))


@row("C13", "G3")
def test_outputs_keep_nothing_alive_when_dropped(fast):
    module = Net()
    dp = fast.wrap(module, 2, gather_outputs=False)
    losses = [output.sum() for output in dp(ints(4, 3))]
    total = sum_losses(losses)
    seen = [weakref.ref(loss) for loss in losses]
    total.backward()
    del losses, total
    gc.disable()
    try:
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
