"""PyTorch Lightning: a module that holds a wrapped net, and Fabric, which takes a wrapped model."""

import pytest
import torch
from nets import same
from torch import nn
from torch.nn import functional

from programs.sides import check, weights

BATCH = 18
EPOCHS = 3


def net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    ).double()


def loaders(digits):
    images, labels = digits
    sets = [
        torch.utils.data.TensorDataset(images[s], labels[s]) for s in (slice(70), slice(-40, None))
    ]
    return [torch.utils.data.DataLoader(data, batch_size=BATCH) for data in sets]


def classifier(lightning, side):
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = side.wrap(net())
            self.losses = []
            self.validations = []

        def training_step(self, batch, index):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            assert not torch.is_grad_enabled() and not self.net.training
            scores = self.net(batch[0])
            self.validations.append(functional.cross_entropy(scores, batch[1]).item())
            self.log("accuracy", (scores.argmax(1) == batch[1]).double().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    torch.manual_seed(0)
    return Classifier()


def trainer(lightning, side, folder, epochs):
    keeper = lightning.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    return lightning.Trainer(
        accelerator="cpu" if side.home.type == "cpu" else "gpu", devices=1, max_epochs=epochs,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[keeper],
        gradient_clip_val=0.5, num_sanity_val_steps=1, default_root_dir=folder,
    )  # fmt: skip


def train(lightning, side, digits, folder):
    """A run that goes on from the second epoch's file must end with equal weights."""
    run = trainer(lightning, side, folder, EPOCHS)
    model = classifier(lightning, side)
    run.fit(model, *loaders(digits))
    accuracy = run.callback_metrics["accuracy"].item()
    assert model.losses[-1] < model.losses[0]

    resumed = classifier(lightning, side)
    trainer(lightning, side, folder / "again", EPOCHS).fit(
        resumed, *loaders(digits), ckpt_path=folder / "epoch=1.ckpt"
    )
    assert resumed.losses == model.losses[-len(resumed.losses) :]
    same(weights(resumed.net), weights(model.net))
    return model.losses, model.validations, accuracy, weights(model.net)


def with_fabric(lightning, side, digits):
    fabric = lightning.fabric.Fabric(
        accelerator="cpu" if side.home.type == "cpu" else "gpu", devices=1
    )
    torch.manual_seed(0)
    model = side.wrap(net())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for images, labels in fabric.setup_dataloaders(loaders(digits)[0]):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(loss.item())
    kept = model.module if side.parent is None else model.module.module
    return losses, weights(kept)


@pytest.fixture
def lightning(library):
    return library("pytorch_lightning")


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")
def test_trainer(fast, lightning, digits, tmp_path):
    check(lambda side: train(lightning, side, digits, tmp_path / side.name), fast)


def test_fabric(fast, lightning, library, digits):
    lightning.fabric = library("lightning_fabric")
    check(lambda side: with_fabric(lightning, side, digits), fast)
