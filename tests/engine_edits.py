"""What the programs of engine_programs.py change between steps, in the model and around it."""

from __future__ import annotations

import copy
import io
import pickle
import types

import torch
from engine_blocks import Holds, Layer, Lean, Reads
from torch import nn


def owners(net, kind):
    """(module, name, tensor) of all parameters, or buffers."""
    held = "_parameters" if kind == "parameter" else "_buffers"
    return [
        (module, name, tensor)
        for module in net.modules()
        for name, tensor in getattr(module, held).items()
        if tensor is not None
    ]


def floats(found):
    return [item for item in found if item[2].is_floating_point() and item[2].numel()]


def a_parameter(twin, rng):
    return rng.choice(floats(owners(twin.net, "parameter")))


def load(twin, rng):
    state = {k: v.detach().clone() for k, v in twin.net.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.9)
    assign = rng.random() < 0.5
    twin.net.load_state_dict(state, assign=assign)
    if assign:
        twin.optimize(rng)


def data(twin, rng):
    target = a_parameter(twin, rng)[2]
    kind = rng.choice(["new", "copy", "turned", "turned in place", "another's", "view", "grown"])
    value = target.detach()
    if kind == "new":
        target.data = value * 0.9
    elif kind == "copy":
        target.data.copy_(value * 0.9)
    elif kind == "turned" and value.dim() == 2:
        target.data = value.t().contiguous().t()
    elif kind == "turned in place" and value.dim() == 2 and value.shape[0] == value.shape[1]:
        target.data = value.t()
    elif kind == "another's":
        same = [
            p for p in twin.net.parameters() if p.shape == value.shape and p.dtype == value.dtype
        ]
        target.data = rng.choice(same).data
    elif kind == "view":
        target.data = torch.stack([value, value])[1]
    else:
        with torch.no_grad():
            target.mul_(0.9)


def buffer(twin, rng):
    found = floats(owners(twin.net, "buffer"))
    if not found:
        return
    module, name, tensor = rng.choice(found)
    kind = rng.choice(["fill", "data", "set", "register", "gone"])
    if kind == "fill":
        tensor.fill_(0.5)
    elif kind == "data":
        tensor.data = tensor.data * 0.5
    elif kind == "set":
        setattr(module, name, tensor.clone() + 1)
    elif kind == "register":
        module.register_buffer("more", torch.ones(2, dtype=twin.dtype, device=twin.home))
    elif hasattr(module, "more"):
        del module.more


def replace(twin, rng):
    module, name, tensor = a_parameter(twin, rng)
    kind = rng.choice(["parameter", "same memory", "module", "order", "more", "tie", "bias"])
    linears = [m for m in twin.net.modules() if type(m) is nn.Linear]
    if kind == "parameter":
        setattr(module, name, nn.Parameter(tensor.detach() * 0.9))
    elif kind == "same memory":
        setattr(module, name, nn.Parameter(tensor.detach(), tensor.requires_grad))
    elif kind == "module":
        twin.net.head = copy.deepcopy(twin.net.head)
    elif kind == "order":
        twin.net.blocks = nn.ModuleList(list(twin.net.blocks)[::-1])
    elif kind == "more":
        twin.net.blocks.append(Layer().to(twin.home, twin.dtype))
    elif kind == "tie" and len(linears) > 1:
        linears[0].weight = linears[-1].weight
    elif kind == "bias":
        linear = rng.choice(linears[:-2] or linears)
        if "bias" in linear._parameters and linear not in (twin.net.head, twin.net.aside):
            linear.bias = None
    twin.optimize(rng)


def whole(twin, rng):
    """The wrapped module is another."""
    twin.count()
    twin.dp.module = copy.deepcopy(twin.net)
    _let_go(twin)
    twin.optimize(rng)


def copied(twin, rng):
    twin.count()
    if rng.random() < 0.5:
        twin.dp = copy.deepcopy(twin.dp)
    else:
        held = pickle.dumps(twin.dp) if rng.random() < 0.5 else _saved(twin.dp)
        twin.dp = pickle.loads(held) if isinstance(held, bytes) else _loaded(held)
    _let_go(twin)
    twin.optimize(rng)


def _let_go(twin):
    """Handles of hooks are the former one's."""
    twin.hooks = []


def _saved(dp):
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    return file


def _loaded(file):
    return torch.load(file, weights_only=False)


def freeze(twin, rng):
    if rng.random() < 0.7:
        target = a_parameter(twin, rng)[2]
        target.requires_grad_(not target.requires_grad)
    else:
        module = rng.choice(list(twin.net.modules()))
        module.requires_grad_(rng.random() < 0.7)


def mode(twin, rng):
    module = twin.dp if rng.random() < 0.5 else rng.choice(list(twin.net.modules()))
    module.train(not module.training)


def attribute(twin, rng):
    found = [m for m in twin.net.modules() if isinstance(m, (Reads, Layer, Lean))]
    found += [m.held[0] for m in twin.net.modules() if isinstance(m, Holds)]
    norms = [m for m in twin.net.modules() if isinstance(m, nn.BatchNorm1d)]
    if norms and (not found or rng.random() < 0.3):
        norm = rng.choice(norms)
        name, value = rng.choice([("momentum", 0.3), ("eps", 1e-3), ("momentum", None)])
        setattr(norm, name, value)
        return
    if not found:
        twin.net.note = rng.randrange(3)
        return
    module = rng.choice(found)
    if isinstance(module, Layer):
        module.times = rng.choice([0, 1, 2])
        return
    if isinstance(module, Lean):
        _edit_lean(module, rng)
        return
    kind = rng.choice(["rate", "deep", "items", "set", "plain", "plain in place"])
    if kind == "rate":
        module.rate = rng.choice([1.0, 1, 0.5])
    elif kind == "deep":
        module.deep = not module.deep
    elif kind == "items":
        module.items["gain"][0] = rng.choice([1, 2, 0.5])
    elif kind == "set":
        module.items["set"] ^= {2}
    elif kind == "plain":
        module.plain = module.plain + 1
    else:
        module.plain.add_(1)


def _edit_lean(module, rng):
    kind = rng.choice(["act", "scale", "names", "record", "deep", "forward"])
    if kind == "act":
        module.act = module._second if module.act == module._first else module._first
    elif kind == "scale":
        module.config.scale = rng.choice([0.5, 0.25])
    elif kind == "names":
        module.config.names.append("c")
    elif kind == "record":
        module.record.rows = rng.choice([2.0, 1.0, 2])
    elif kind == "deep":
        module.record.rest["deep"][0] = rng.choice([1.0, 0.5])
    elif "forward" in module.__dict__:
        del module.forward
    else:
        module.forward = types.MethodType(other_forward, module)


def other_forward(module, h, ids):
    return module.linear(h) * module.config.scale


def option(twin, rng):
    """Another makes all of a wrapper anew."""
    name, value = rng.choice(
        [
            ("unused_grad", "zero"),
            ("bucket_bytes", 100),
            ("bucket_bytes", 10**6),
            ("sequential", True),
        ]
    )
    if (name != "unused_grad" or not twin.program.fixed_loss) and twin.engine != "torch's":
        twin.count()
        setattr(twin.dp, name, value)


class Noted:
    """A hook that can be copied and pickled, and of which no copy is left on a copy of the model:
    it writes into the twin's log as long as that is the same twin."""

    def __init__(self, twin, name, factor=None):
        self.log, self.name, self.factor = twin.log, name, factor

    def __call__(self, *arguments):
        self.log.append(self.name)
        if self.factor is None:
            return None
        result = arguments[-1]
        if isinstance(result, tuple):
            return tuple(None if t is None else t * self.factor for t in result)
        return result * self.factor if isinstance(result, torch.Tensor) else None


def hook(twin, rng):
    if twin.hooks and rng.random() < 0.6:
        twin.hooks.pop(rng.randrange(len(twin.hooks))).remove()
        return
    kind = rng.choice(["forward", "pre", "backward", "tensor", "tensor", "after", "after", "outer"])
    linears = [m for m in twin.net.modules() if type(m) is nn.Linear]
    parameter = a_parameter(twin, rng)[2]
    if kind == "forward":
        made = rng.choice(linears).register_forward_hook(Noted(twin, "forward", 2))
    elif kind == "pre":
        made = rng.choice(linears).register_forward_pre_hook(Noted(twin, "pre"))
    elif kind == "backward":
        made = rng.choice(linears).register_full_backward_hook(Noted(twin, "backward"))
    elif kind == "outer":
        made = twin.dp.register_forward_hook(Noted(twin, "outer"))
    elif not parameter.requires_grad:
        return
    elif kind == "tensor":
        made = parameter.register_hook(Noted(twin, "tensor", 3))
    else:
        made = parameter.register_post_accumulate_grad_hook(Noted(twin, "after"))
    twin.hooks.append(made)


def dtype(twin, rng):
    twin.dtype = torch.float32 if twin.dtype == torch.float64 else torch.float64
    twin.dp.to(twin.dtype)
    twin.optimizer.zero_grad()
    twin.optimize(rng)


def rate(twin, rng):
    for group in twin.optimizer.param_groups:
        group["lr"] = rng.choice([1e-2, 1e-3, 0.0])


def optimizer(twin, rng):
    twin.optimize(rng)


def gradient(twin, rng):
    target = a_parameter(twin, rng)[2]
    target.grad = rng.choice([None, torch.ones_like(target).detach()])


def engine(twin, rng):
    kind = rng.choice(["auto", "graph"])
    if twin.engine == twin.program.engine == "graph":
        twin.count()
        twin.dp.engine = kind


EDITS = {
    "load": (2, load),
    "data": (3, data),
    "buffer": (2, buffer),
    "replace": (2, replace),
    "whole": (0.5, whole),
    "copied": (0.7, copied),
    "freeze": (2, freeze),
    "mode": (2, mode),
    "attribute": (2, attribute),
    "hook": (3, hook),
    "dtype": (0.7, dtype),
    "rate": (1, rate),
    "optimizer": (1, optimizer),
    "gradient": (1, gradient),
    "engine": (0.5, engine),
    "option": (0.5, option),
}
