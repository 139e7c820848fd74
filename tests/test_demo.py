"""The example says what it proves, and fails when that does not hold."""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import digits  # noqa: E402


@pytest.fixture
def quick(monkeypatch):
    """Few epochs, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(digits, "EPOCHS", 3)
    yield monkeypatch
    torch.set_num_threads(threads)


def run_main():
    out = io.StringIO()
    with redirect_stdout(out):
        code = digits.main()
    return code, out.getvalue()


def test_both_parts_pass(quick):
    quick.setattr(digits, "LEAST_ACCURACY", 0.5)
    code, text = run_main()
    assert code == 0
    assert text.count("epoch ") == 9 and "epoch  3/3  loss " in text
    assert "\r" not in text  # no progress bar into a file
    assert "largest difference of a weight" in text


def test_low_accuracy_fails(quick):
    quick.setattr(digits, "LEAST_ACCURACY", 1.0)
    code, text = run_main()
    assert code == 1 and "must be above 100%: TOO LOW" in text


def test_other_weights_fail(quick):
    quick.setattr(digits, "LEAST_ACCURACY", 0.0)
    quick.setattr(digits, "EPOCHS", 1)
    train = digits.train

    def train_and_nudge(model, data):
        accuracy = train(model, data)
        with torch.no_grad():
            next(model.parameters()).view(-1)[0].add_(1e-9 * hasattr(model, "module"))
        return accuracy

    quick.setattr(digits, "train", train_and_nudge)
    code, text = run_main()
    assert code == 1 and "must be below 1e-10: TOO LARGE" in text


def test_the_held_out_images_are_not_trained_on():
    images, labels, test_images, test_labels = digits.load_images(torch.device("cpu"))
    assert (len(images), len(labels)) == (1437, 1437)
    assert (len(test_images), len(test_labels)) == (360, 360)
    assert images.shape[1:] == (1, 8, 8) and 0 <= images.min() and images.max() == 1
