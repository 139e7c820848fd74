"""What the programs of eager_programs.py do beside what those of recorded steps do: each a function
of a side and of a generator, the same for both sides, whose result is compared."""

from __future__ import annotations

import collections
import contextlib
import copy
import warnings

import oracle
import torch
from eager_calls import CALLS, back, rows, wrap
from eager_nets import GIVEN, Clamps, Few, Held, Lost, Mine, Renormed, Row, Teacher
from engine_actions import STEPS, called, clear, form_of, learned, loss_of
from engine_blocks import WIDTH, Follows, Layer
from engine_cases import tensors
from engine_edits import EDITS, Noted
from engine_mishaps import MISHAPS, on_threads
from engine_nets import Named
from recipe_actions import RECIPES
from torch import nn

import fastdp


def tree_of(side, rng, count):
    """Containers of all kinds, as arguments."""
    h = rows(side, rng, count)
    ids = torch.arange(count) % 3
    kind = rng.choice(["named", "ordered", "mine", "row", "kinds", "held", "deep", "whole", "same"])
    if kind == "named":
        return Named(h, [h * 2, None, "text"])
    if kind == "ordered":
        return collections.OrderedDict(z=h, a=(ids, h > 0), n=3)
    if kind == "mine":
        return Mine(z=h, y={"x": h[:, 0]})
    if kind == "row":
        return Row([h, Few([h, h])])
    if kind == "kinds":
        return (ids, ids > 1, h.half(), h.bool(), ids.byte(), h[:, :0])
    if kind == "held":
        return [h, Held(0.5, torch.ones(2, 1, dtype=side.dtype))]
    if kind == "deep":
        return [{"a": [(h,), [[h]]]}, (), {}, []]
    if kind == "whole":
        return collections.defaultdict(list, a=h, b=[ids])
    return [h, h, {"again": h}]


def containers(side, rng):
    clear(side, rng)
    form = form_of(side, rng)
    inputs, named = form.arguments(side, rng.randrange(10**6))
    output = side.dp(*inputs, tree=tree_of(side, rng, form.rows), **named)
    back(side, rng, output)
    return output


def by_name(side, rng):
    """Keyword arguments alone."""
    clear(side, rng)
    count = rng.choice([6, 5, 2])
    x = rows(side, rng, count).requires_grad_(rng.random() < 0.5)
    named = {"x": x, "ids": torch.arange(count) % 3}
    output = side.dp(**{key: named[key] for key in rng.sample(list(named), 2)})
    back(side, rng, output)
    return output, torch.zeros_like(x) if x.grad is None else x.grad


def nothing(side, rng):
    """No arguments at all, or none that is cut."""
    clear(side, rng)
    side.net.blank = True
    try:
        output = side.dp() if rng.random() < 0.7 else side.dp(None, scale=0.5)
    finally:
        side.net.blank = False
    back(side, rng, output)
    return output


def gives(side, rng):
    side.net.gives = rng.choice([None, *GIVEN])


def used_again(side, rng):
    """Inputs that are made of others, and used outside too."""
    clear(side, rng)
    form = form_of(side, rng)
    inputs, named = form.arguments(side, rng.randrange(10**6))
    x = inputs[0].detach().requires_grad_()
    middle = torch.tanh(x)
    output = side.dp(middle, *inputs[1:], **named)
    if learned(output):
        (loss_of(side, output, rng) + (middle * x).sum()).backward()
    return output, x.grad


def functional(side, rng):
    clear(side, rng)
    form = form_of(side, rng)
    inputs, named = form.arguments(side, rng.randrange(10**6))
    ids = side.ids(rng.choice([1, 2, 3]))
    options = {"output_device": rng.choice([None, ids[0]])} if len(ids) > 1 else {}
    output = side.api.data_parallel(side.net, tuple(inputs), ids, module_kwargs=named, **options)
    back(side, rng, output)
    return output


def by_hand(side, rng):
    """Parameters without a gradient have none or zeros: the zeros come through the wrapper."""
    side.optimizer.zero_grad()
    form = form_of(side, rng)
    given, named = form.arguments(side, rng.randrange(10**6))
    api, ids = side.api, side.ids(rng.choice([2, 3]))
    inputs, kwargs = api.scatter_kwargs(tuple(given), named, ids)
    replicas = api.replicate(side.net, ids[: len(inputs)])
    outputs = api.parallel_apply(replicas, inputs, kwargs)
    output = api.gather(outputs, ids[0])
    back(side, rng, output)
    found = [
        torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad
        for p in side.net.parameters()
    ]
    side.optimizer.zero_grad()
    return output, found, inputs, kwargs


def beside(side, rng):
    """Another wrapper of the same module, or of a part of it, that is kept."""
    clear(side, rng)
    if len(side.others) < 2 or rng.random() < 0.3:
        side.others[:] = side.others[-1:] + [wrap(side, side.net, rng.choice([1, 2, 3]))]
    other = side.others[rng.randrange(len(side.others))]
    if other.module is not side.net:
        side.others.clear()
        return None
    first = called(side, rng)[1]
    second = called(side, rng, module=other)[1]
    if learned(first) and learned(second):
        losses = [loss_of(side, first, rng), loss_of(side, second, rng)]
        for loss in losses if rng.random() < 0.5 else losses[::-1]:
            loss.backward()
    return first, second


def devices(side, rng):
    side.dp.device_ids = side.ids(rng.choice([1, 2, 2, 3, 3]))


def state_between(side, rng):
    """A state of the one class into the other, and back."""
    state = side.dp.state_dict()
    if rng.random() < 0.5:
        state = {key: value.clone() if isinstance(value, torch.Tensor) else value
                 for key, value in state.items()}  # fmt: skip
    module = copy.deepcopy(side.net)
    crossed = fastdp.DataParallel(module, ["cpu"] * 2)
    if side.api is not oracle:
        crossed = oracle.DataParallel(module, [0, 1])
    kind = rng.choice(["strict", "part", "assign", "wrong"])
    if kind == "part":
        state.pop(rng.choice(list(state)))
    elif kind == "wrong":
        state["module.unknown"] = torch.ones(1)
    crossed.load_state_dict(state, strict=kind != "part", assign=kind == "assign")
    again = crossed.state_dict()
    if kind == "strict":
        side.dp.load_state_dict(again)
    return [(k, v) for k, v in again.items()], again._metadata.keys() and list(again._metadata)


class Hook(Noted):
    """Of the wrapper, of whatever kind."""

    def __call__(self, *arguments, **named):
        self.log.append(self.name)


def outer_hook(side, rng):
    if side.hooks and rng.random() < 0.5:
        side.hooks.pop(rng.randrange(len(side.hooks))).remove()
        return
    target = side.dp if rng.random() < 0.7 else side.net
    kind = rng.choice(
        ["forward_pre", "forward", "full_backward", "full_backward_pre", "state_dict_pre",
         "load_state_dict_pre", "load_state_dict_post"]
    )  # fmt: skip
    options = {}
    if kind in ("forward_pre", "forward"):
        options = {"with_kwargs": rng.random() < 0.5, "prepend": rng.random() < 0.5}
        if kind == "forward":
            options["always_call"] = rng.random() < 0.5
    register = getattr(target, f"register_{kind}_hook")
    where = "outside" if target is side.dp else "inside"
    made = Hook(side, f"{where} {kind} {len(side.hooks)}")
    if target is side.dp:
        made.log = side.outer  # in their order
    side.hooks.append(register(made, **options))


def members(side, rng):
    net, kind = side.net, rng.choice(["gain", "no gain", "fixed gain", "add", "del", "buffer"])
    if kind == "gain":
        net.register_parameter("gain", nn.Parameter(torch.full((WIDTH,), 1.25).to(side.dtype)))
    elif kind == "no gain":
        del net.gain
        net.register_parameter("gain", None)
    elif kind == "fixed gain":
        del net.gain
        value = torch.full((1,), 0.75).to(side.dtype)
        if rng.random() < 0.5:
            net.register_buffer("gain", value, persistent=rng.random() < 0.5)
        else:
            net.gain = value
    elif kind == "add":
        block = Layer().to(side.dtype)
        if rng.random() < 0.5:
            net.blocks.insert(0, block)
        else:
            net.blocks.add_module(f"n{rng.randrange(100)}", block)
    elif kind == "del" and len(net.blocks) > 1:
        names = list(net.blocks._modules)
        delattr(net.blocks, rng.choice(names))
    elif "gain" in net._buffers and net.gain is not None:
        net.gain.mul_(0.5)
    side.optimize(rng)


FAILURES = [
    ValueError("a rank fails"), KeyError("key"), IndexError("place"), RuntimeError("run"),
    StopIteration("over"), NotImplementedError("not yet"), Lost("mine"),
    OSError(2, "no such"), AssertionError(), ZeroDivisionError("zero"),
]  # fmt: skip


def failing_rank(side, rng):
    """An error in some replica, which all others outlive."""
    clear(side, rng)
    count = rng.choice([6, 5, 3])
    x, who = rows(side, rng, count), torch.arange(count)
    side.net.fails = (rng.randrange(count), copy.copy(rng.choice(FAILURES)))
    try:
        output = side.dp(x, who=who)
        back(side, rng, output)
        return output
    except Exception as error:
        lines = [type(error).__name__]
    finally:
        side.net.fails = None
    output = called(side, rng)[1]
    back(side, rng, output)
    return lines, output


def regions(side, rng):
    """Autocast around parts of a step, of several, or off inside."""
    clear(side, rng)
    kind = rng.choice(["forward", "both", "two", "off", "dtype", "uncached", "no grad"])
    form, results = form_of(side, rng), []
    options = {"enabled": kind != "off", "cache_enabled": kind != "uncached"}
    with torch.autocast("cpu", torch.bfloat16, **options):
        results.append(called(side, rng, form)[1])
        if kind == "two":
            results.append(called(side, rng, form)[1])
        if kind == "no grad":
            with torch.no_grad():
                results.append(called(side, rng, form)[1])
        if kind == "both":
            back(side, rng, results)
            return results
    back(side, rng, results)
    return results


def age():
    """The nodes of this thread's graphs are later ones than any replica's: the order in which
    autograd sums depends on that, and torch's own replicas are always on new threads."""
    x = torch.ones((), requires_grad=True)
    for _ in range(3000):
        x = x * 1


# What writes its parameters in the forward.
WRITERS = (Clamps, Follows, Renormed, Teacher)


def threads_asking(side, rng):
    """Two at once, which ask for gradients; nobody writes."""
    if list(side.net.buffers()) or any(hasattr(m, "calls") for m in side.net.modules()):
        return None
    if any(isinstance(m, WRITERS) for m in side.net.modules()):
        return None
    if len(side.dp.device_ids) == 1:  # the module itself, which hooks write
        return None
    form, seeds = side.program.forms[0], [rng.randrange(10**6) for _ in range(2)]

    def ask(seed):
        age()
        inputs, named = form.arguments(side, seed)
        output = side.dp(*inputs, **named)
        asked = [p for p in side.net.parameters() if p.requires_grad]
        if not learned(output) or not asked:
            return output
        total = sum(t.sum().double() for t in tensors(output) if t.requires_grad).abs()
        return output, torch.autograd.grad(total, asked, allow_unused=True, materialize_grads=True)

    return on_threads(ask, seeds)


def clipped(side, rng):
    side.optimizer.zero_grad()
    for _ in range(rng.randint(1, 3)):
        output = called(side, rng)[1]
        back(side, rng, output)
    if any(p.grad is not None and p.grad.is_sparse for p in side.net.parameters()):
        return output
    kind = rng.randrange(3)
    norm = None
    if kind == 0:
        norm = nn.utils.clip_grad_norm_(side.dp.parameters(), 0.1, norm_type=rng.choice([2, 1]))
    elif kind == 1:
        reals = [p for p in side.dp.parameters() if not p.is_complex()]
        nn.utils.clip_grad_value_(reals, 0.01)
    side.optimizer.step()
    return output, norm


def shapes(side, rng):
    """What does not fit, and batches of odd sizes."""
    kind = rng.choice(["scalar", "wide", "one", "lists", "unequal", "number", "text"])
    x = rows(side, rng, 4)
    if kind == "scalar":
        return side.dp(x.sum())
    if kind == "wide":
        return side.dp(x[:, :2])
    if kind == "one":
        return side.dp(x[:1])
    if kind == "lists":
        return side.dp([x, x])
    if kind == "unequal":
        return side.dp(x, extra={"shift": x[:3]})
    return side.dp(3 if kind == "number" else "text")


def failing_backward(side, rng):
    """Whichever error comes first, of the hook or of a buffer that was written; which gradients are
    there by then, and warned of, is left open."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        MISHAPS["failing backward"][1](side, rng)
    side.clear_gradients()
    side.log.clear()


def penalty(side, rng):
    """Whether a slope that is fixed needs gradients depends on what is in one bucket with it."""
    slopes = STEPS["penalty"][1](side, rng)
    return [None if slope is None else slope.detach() for slope in tensors(slopes)]


OWN = {
    "containers": (4, containers), "by name": (2, by_name), "nothing": (1, nothing),
    "gives": (2, gives), "used again": (2, used_again), "functional": (3, functional),
    "by hand": (3, by_hand), "beside": (3, beside), "devices": (2, devices),
    "state between": (2, state_between), "outer hook": (3, outer_hook), "members": (3, members),
    "failing rank": (3, failing_rank), "regions": (3, regions),
    "threads asking": (2, threads_asking), "clipped": (2, clipped), "shapes": (2, shapes),
    "penalty": (1, penalty), "failing backward": (2, failing_backward),
}  # fmt: skip
ACTIONS = {**STEPS, **MISHAPS, **EDITS, **OWN, **CALLS, **RECIPES}
for only_recorded in ("warm", "engine"):
    del ACTIONS[only_recorded]
