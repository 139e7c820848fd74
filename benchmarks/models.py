"""The models whose training steps the benchmarks time, as the tables in the README say: an MLP and
a ResNet-18 that are bound by launches, a ResNet-50 and a GPT-2 that can be bound by compute.
Weights are random and so is the data; inputs lie on the first GPU. `tiny` is for trying a script.
Weights are made where they stay: on the host a GPT-2 takes seconds, once for every rival.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, NamedTuple, Optional

import torch
from torch import nn


class Model(NamedTuple):
    """How to make a model, one batch for it, and its optimizer."""

    make: Callable[[torch.device], nn.Module]
    batch: Callable[[int, torch.device], Any]
    per_gpu: int  # batch per GPU unless another is asked for
    autocast: Optional[torch.dtype]
    fused_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scales: bool = False  # the loss, by a GradScaler

    def precision(self, device_type: str) -> ContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.autocast)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9, fused=True)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)


def _layers(count: int, width: int) -> Callable[[torch.device], nn.Module]:
    def make(device: torch.device) -> nn.Module:
        with device:
            layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]
            return nn.Sequential(*layers)

    return make


def _rows(width: int) -> Callable[[int, torch.device], Any]:
    return lambda count, device: torch.randn(count, width, device=device)


def _resnet18(device: torch.device) -> nn.Module:
    import torchvision

    with device:
        return torchvision.models.resnet18()


def _resnet50(device: torch.device) -> nn.Module:
    import torchvision

    with device:
        return torchvision.models.resnet50().to(memory_format=torch.channels_last)


def _images(size: int, memory_format: torch.memory_format) -> Callable[[int, torch.device], Any]:
    def batch(count: int, device: torch.device) -> Any:
        return torch.randn(count, 3, size, size, device=device).to(memory_format=memory_format)

    return batch


class _LossInside(nn.Module):
    """GPT-2 with its loss computed inside forward: one number per replica is gathered."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(attn_implementation="sdpa", use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, labels=ids).loss


def _gpt2(device: torch.device) -> nn.Module:
    with device:
        return _LossInside().to(device)


def _gpt(device: torch.device) -> nn.Module:
    from gpt import Gpt

    with device:
        return Gpt()


def _tokens(count: int, device: torch.device) -> Any:
    return torch.randint(0, 50257, (count, 512), device=device)


def _resnet50_in(autocast: Optional[torch.dtype], scales: bool = False) -> Model:
    return Model(_resnet50, _images(224, torch.channels_last), 128, autocast, _sgd, scales)


# The four that a run takes unless others are named.
STANDARD = ("mlp", "resnet18", "resnet50", "gpt2")

MODELS = {
    "mlp": Model(_layers(50, 256), _rows(256), 64, None, _sgd),
    "resnet18": Model(_resnet18, _images(64, torch.contiguous_format), 16, None, _sgd),
    "resnet50": _resnet50_in(torch.bfloat16),
    "resnet50-fp16": _resnet50_in(torch.float16, scales=True),
    "resnet50-fp32": _resnet50_in(None),
    "gpt2": Model(_gpt2, _tokens, 8, torch.bfloat16, _adamw),
    "gpt-causal": Model(_gpt, _tokens, 8, torch.bfloat16, _adamw),
    "tiny": Model(_layers(3, 8), _rows(8), 4, None, _sgd),
    "tiny-fp16": Model(_layers(3, 8), _rows(8), 4, torch.float16, _sgd, scales=True),
}
