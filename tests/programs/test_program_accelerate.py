"""A training loop with Accelerate, which prepares the wrapped model like any other."""

import torch
from torch import nn
from torch.nn import functional

from programs.sides import check, weights

BATCH = 14
EPOCHS = 2


def net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 10)
    ).double()


class Loop:
    def __init__(self, accelerate, side, digits):
        # The library keeps the first device that a process asked for.
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=side.home.type == "cpu", gradient_accumulation_steps=2
        )
        assert self.accelerator.device.type == side.home.type
        torch.manual_seed(0)
        model = side.wrap(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        data = torch.utils.data.TensorDataset(digits[0][:67], digits[1][:67])
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses = []

    def epoch(self):
        self.model.train()
        for images, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = functional.cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def evaluate(self):
        self.model.eval()
        guesses, truth = [], []
        with torch.no_grad():
            for images, labels in self.loader:
                scores = self.accelerator.gather_for_metrics((self.model(images), labels))
                guesses.append(scores[0].cpu())
                truth.append(scores[1].cpu())
        guesses = torch.cat(guesses)
        return guesses, (guesses.argmax(1) == torch.cat(truth)).double().mean().item()


def train(accelerate, side, digits, folder):
    """Saves after the first epoch; a loop that starts from there must end with equal weights."""
    loop = Loop(accelerate, side, digits)
    loop.epoch()
    loop.accelerator.save_state(str(folder))
    loop.epoch()
    results = loop.evaluate()

    resumed = Loop(accelerate, side, digits)
    resumed.accelerator.load_state(str(folder))
    resumed.epoch()
    assert resumed.losses == loop.losses[len(resumed.losses) :]
    bare = loop.accelerator.unwrap_model(loop.model)
    assert type(bare) is nn.Sequential
    assert torch.equal(bare[1].weight, resumed.accelerator.unwrap_model(resumed.model)[1].weight)
    assert loop.losses[-1] < loop.losses[0]
    return loop.losses, results, weights(bare)


def test_loop(fast, library, digits, tmp_path):
    accelerate = library("accelerate")
    check(lambda side: train(accelerate, side, digits, tmp_path / side.name), fast)
