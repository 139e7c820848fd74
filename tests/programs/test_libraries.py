"""Which versions of the libraries go together."""

import importlib.util
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "build_tools"


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("programs_tool", TOOLS / "programs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "version, wanted", [("2.4.1", "0.19"), ("2.11.0", "0.26"), ("2.13.0+cpu", "0.28")]
)
def test_torchvision_for_a_torch(programs, version, wanted):
    assert programs.torchvision_for(version) == f"torchvision=={wanted}.*"


def test_torchvision_here(programs, torchvision):
    """What was installed is what the rule says."""
    wanted = programs.torchvision_for(torch.__version__).removesuffix("*")
    assert f"torchvision=={torchvision.__version__}".startswith(wanted)
