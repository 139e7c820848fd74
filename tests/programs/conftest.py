"""Whole programs, as people write them around nn.DataParallel, with only that class replaced."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from programs import vision


@pytest.fixture(autouse=True)
def _small_and_quiet():
    """No library looks for a network, and no small operation is spread over threads of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def missing(what):
    """Skips, but fails where `make test` has installed all libraries."""
    if Path(sys.prefix, "fastdp-programs-ready").exists():
        pytest.fail(f"{what}, though it was installed")
    pytest.skip(what)


@pytest.fixture
def library():
    """library(name): the module; where it is missing the test is skipped and says so."""

    def find(name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing(f"{name} cannot be imported: {error}")

    return find


@pytest.fixture
def torchvision():
    try:
        return vision.find()
    except ImportError as error:
        missing(f"torchvision cannot be used: {error}")


@pytest.fixture(scope="session")
def digits():
    """(images, labels): scikit-learn's handwritten digits, (1797, 8, 8) in 0..1, fp64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).reshape(-1, 8, 8) / 16, torch.from_numpy(labels).long()
