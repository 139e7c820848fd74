"""Training with transformers' Trainer, which wraps the model in `nn.DataParallel` by itself.

It does so where it sees several GPUs (`args.n_gpu > 1`). The number is set by hand here, since host
replicas are no GPUs; and `torch.nn.DataParallel`, which the Trainer calls with the model alone, is
the side's class, which puts its replicas on the side's devices. All else is the library's.
"""

import warnings
from functools import partial
from unittest import mock

import numpy
import pytest
import torch
from nets import same

import fastdp
from fastdp import placement, wrapper
from programs.sides import BOUND, Side, check, fastdps, near, weights

PIXELS = 16  # of 4 x 4: brightness as a number of 0..8 is the vocabulary
CLASSES = 10
PER_DEVICE = 6
STEPS = 7


class Pictures(torch.utils.data.Dataset):
    """Digits as texts of 16 words, with a mask that hides the end of each third one."""

    def __init__(self, digits, chosen, with_class):
        images, labels = (part[chosen] for part in digits)
        small = torch.nn.functional.avg_pool2d(images[:, None], 2)
        self.words = (small.reshape(-1, PIXELS) * 8).round().long()
        self.labels = labels
        self.with_class = with_class

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        mask = torch.ones(PIXELS, dtype=torch.long)
        if i % 3 == 0:
            mask[-4:] = 0
        labels = self.words[i].masked_fill(mask == 0, -100)
        if self.with_class:
            labels = self.labels[i]
        return {"input_ids": self.words[i], "attention_mask": mask, "labels": labels}


def classifier(transformers):
    """Returns a SequenceClassifierOutput whose loss is the mean of a chunk's."""
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=PIXELS, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language_model(transformers):
    """The Trainer hands its forward `num_items_in_batch`, and tied weights reach it twice."""
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=PIXELS, tie_word_embeddings=True,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Run:
    """One side's Trainer on one model. The plain side has one device with all samples."""

    def __init__(self, transformers, side, digits, make, folder):
        self.library = transformers
        self.side = side
        self.make = make
        self.folder = folder
        # The classifier's loss is a mean, and the mean of two chunks' means is the batch's only
        # where they are of one size; the language model's allows for any batch.
        sizes = (120, 36) if make is classifier else (115, 31)
        self.train_set = Pictures(digits, slice(0, sizes[0]), make is classifier)
        self.eval_set = Pictures(digits, slice(-sizes[1], None), make is classifier)

    def trainer(self, **more):
        replicas = len(self.side.ids) or 2
        per_device = PER_DEVICE if self.side.parent else PER_DEVICE * replicas
        args = self.library.TrainingArguments(
            output_dir=str(self.folder), max_steps=STEPS, save_steps=4, logging_steps=1,
            per_device_train_batch_size=per_device, per_device_eval_batch_size=per_device,
            learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1,
            gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, seed=3,
            use_cpu=self.side.home.type == "cpu", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
            # If set, the Trainer takes each loss times the number of GPUs, which is right where the
            # model divides by `num_items_in_batch`, as the classifier does not.
            average_tokens_across_devices=self.make is language_model,
            **more,
        )  # fmt: skip
        assert args.device.type == self.side.home.type
        args._n_gpu = replicas if self.side.parent else 1
        torch.manual_seed(0)
        trainer = self.library.Trainer(
            self.make(self.library).double(),
            args,
            train_dataset=self.train_set,
            eval_dataset=self.eval_set,
            compute_metrics=self.metrics,
        )
        trainer.remove_callback(self.library.PrinterCallback)
        return trainer

    def metrics(self, result):
        guesses = numpy.asarray(result.predictions).argmax(-1)
        return {"accuracy": float((guesses == result.label_ids).mean())}


def history(trainer):
    """What was logged, without the clock's part."""
    timed = ("runtime", "per_second", "total_flos")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in trainer.state.log_history
    ]


def train(run):
    trainer = run.trainer()
    trainer.train()
    wrapped = run.side.parent is not None
    assert (type(trainer.model_wrapped).__name__ == "DataParallel") is wrapped
    logs = history(trainer)
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    assert losses[-1] < losses[0]
    predictions = trainer.predict(run.eval_set)
    results = [torch.as_tensor(predictions.predictions), predictions.metrics["test_loss"]]
    if run.side.name == "fastdp":
        break_off_and_resume(run, trainer)
        take_elsewhere(run, trainer)
    return logs, results, weights(trainer.model)


def break_off_and_resume(run, trainer):
    """As somebody whose run ended at step 4."""
    resumed = run.trainer()
    resumed.train(resume_from_checkpoint=str(run.folder / "checkpoint-4"))
    assert history(resumed)[-1]["step"] == STEPS
    same(weights(resumed.model), weights(trainer.model))


def take_elsewhere(run, trainer):
    trainer.save_model(str(run.folder / "final"))
    loaded = type(trainer.model).from_pretrained(str(run.folder / "final"))
    same(weights(loaded), weights(trainer.model))


def run_wrapped(run):
    if run.side.parent is None:
        return train(run)
    with mock.patch.object(torch.nn, "DataParallel", run.side.DataParallel):
        return train(run)


@pytest.fixture
def transformers(library):
    library("accelerate")
    return library("transformers")


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")  # see test_nothing_is_warned_of
@pytest.mark.parametrize("make", [classifier, language_model])
def test_trainer(fast, transformers, digits, make, tmp_path):
    def program(side):
        return run_wrapped(Run(transformers, side, digits, make, tmp_path / side.name))

    # Within 1e-5 for the language model, whose loss the library computes in single precision.
    check(program, fast, bound=1e-5 if make is language_model else BOUND)


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_trainer_under_patch(fast, transformers, digits, tmp_path):
    """`fastdp.patch()` alone: the Trainer's own line makes the wrapper. Only what GPUs there are is
    told otherwise, since there may be none."""
    found = placement.choose_devices
    side = fastdps(fast, 2)
    devices = lambda ids: found(side.ids if ids is None else ids)
    want = run_wrapped(Run(transformers, side, digits, language_model, tmp_path / "wanted"))
    side.name = "patched"
    with fastdp.patch() as handle, mock.patch.object(wrapper, "choose_devices", devices):
        run = Run(transformers, side, digits, language_model, tmp_path / side.name)
        got = train(run)
    (same if fast.home.type == "cpu" else partial(near, bound=1e-5))(got, want)
    (place,) = handle.replaced
    assert place.file.endswith("trainer.py") and place.replicas == 2


@pytest.mark.xfail(
    raises=fastdp.DataParallelWarning,
    strict=True,
    reason="num_items_in_batch, one row for each replica as a (replicas, 1) tensor, is warned of",
)
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_nothing_is_warned_of(transformers, digits, tmp_path):
    side = Side("quiet", torch.device("cpu"), fastdp.DataParallel, ["cpu", "cpu"])
    run = Run(transformers, side, digits, language_model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastdp.DataParallelWarning)
        run_wrapped(run)
