"""Who has torch's private attributes that the tables of fastdp/_torch_*.py name."""

import importlib
import pathlib

import torch
import torch.utils._device

import fastdp

# torch.nn.parallel.data_parallel is also a function of that name.
DATA_PARALLEL = importlib.import_module("torch.nn.parallel.data_parallel")
REPLICATE = importlib.import_module("torch.nn.parallel.replicate")

# file -> its table: name -> (where it lives, what fastdp does without it).
TABLES = {
    path.name: importlib.import_module(f"fastdp.{path.stem}").PRIVATE
    for path in sorted(pathlib.Path(fastdp.__file__).parent.glob("_torch_*.py"))
}
COMPILERS = TABLES["_torch_compiler.py"]
PRIVATE = {
    name: told
    for table in TABLES.values()
    if table is not COMPILERS
    for name, told in table.items()
}
# What an eager forward does not look at.
RECORDED = [name for name, (_, instead) in PRIVATE.items() if instead.startswith("recordings")]


def node():
    """A node of the graph, made by a Function: where `_set_sequence_nr` lives."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Same.apply(torch.ones(1, requires_grad=True)).grad_fn


def owners():
    """name -> the object that has it."""
    places = {
        "torch._C": torch._C,
        "torch._C._autograd": torch._C._autograd,
        "torch.nn.modules.module": torch.nn.modules.module,
    }
    return {
        **{name: places[PRIVATE[name][0]] for name in RECORDED},
        "_make_subclass": torch.Tensor,
        "_set_sequence_nr": node(),
        "_log_api_usage_once": torch._C,
        "_foreach_norm": torch,
        "_check_balance": DATA_PARALLEL,
        "_named_members": torch.nn.Module,
        "_is_profiler_enabled": torch.autograd.profiler,
        "_ExperimentalConfig": torch.profiler,
        "_current_level": torch.autograd.forward_ad,
        "_device": torch.utils,
        "_functorch": torch._C,
        "maybe_current_level": torch._C._functorch,
        "_cuda_getCurrentRawStream": torch._C,
        "_cuda_endAllocateToPool": torch._C,
        "_cuda_endAllocateCurrentStreamToPool": torch._C,
        "_cuda_releasePool": torch._C,
    }
