"""Steps for the tests that look at how a step reaches the GPUs, not at its numbers: training with a
fused optimizer, evaluation, and training on pinned inputs."""

import torch
from torch import nn

import fastdp

STEPS = ("training", "evaluation", "pinned")


class Steps:
    """A wrapper with several buckets and what it is fed with. No step waits for a GPU."""

    def __init__(self, ids, width=128, layers=8, batch=16):
        torch.manual_seed(0)
        self.devices = [torch.device("cuda", index) for index in dict.fromkeys(ids)]
        home = self.devices[0]
        body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.module = nn.Sequential(*body).to(home)
        self.dp = fastdp.DataParallel(self.module, device_ids=ids, bucket_bytes=200_000)
        self._optimizer = torch.optim.Adam(self.module.parameters(), fused=True)
        self._batch = torch.randn(batch, width).to(home)
        self._pinned = torch.randn(batch, width).pin_memory()

    def take(self, name):
        if name == "evaluation":
            with torch.no_grad():
                self.dp(self._batch)
            return
        self._optimizer.zero_grad(set_to_none=True)
        self.dp(self._pinned if name == "pinned" else self._batch).square().mean().backward()
        self._optimizer.step()

    def wait(self):
        for device in self.devices:
            torch.cuda.synchronize(device)
