"""The graph engine under programs at random: models (engine_nets.py) trained and changed
(engine_actions.py, engine_mishaps.py, engine_edits.py, recipe_actions.py) by a recorded wrapper and
an eager twin, which must stay equal to the bit (engine_programs.py). A failure names its seed;
`replayed(seed)` below is how to look at one. `--long` runs 60 programs for each one of the short
form.

On GPUs the recordings are CUDA graphs. Over several, autograd's threads would add up what outputs
give an activation in the order in which they come; backward runs on one thread there."""

import gc

import pytest
import torch
from conftest import no_cuda_reason
from engine_actions import STEPS
from engine_cases import settings
from engine_edits import EDITS
from engine_mishaps import MISHAPS
from engine_programs import Program, failing
from recipe_actions import RECIPES
from gpu_lists import lacking

ACTIONS = {**STEPS, **MISHAPS, **EDITS, **RECIPES}
PARTS = 3
# Where replicas run, one after the other, and how many programs each part has there.
PLACES = {"host": (("cpu",), 12), "a GPU": (("cuda:0",), 6), "GPUs": (("cuda:0", "cuda:1"), 6)}


def replayed(seed, devices=("cpu",)):
    """The program of that seed, run as far as it goes."""
    program = Program(seed, ACTIONS, devices)
    with torch.autograd.set_multithreading_enabled(len(devices) == 1):
        program.run(program.rng.randint(15, 40))
    return program


@pytest.fixture
def still(monkeypatch):
    """Programs collect garbage, which takes long where much has been imported."""
    with settings(monkeypatch):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part, place, still, request):
    devices, count = PLACES[place]
    if place != "host" and (reason := no_cuda_reason() or lacking(range(len(devices)))):
        pytest.skip(reason)
    count *= 60 if request.config.getoption("--long") else 1
    ran = {"eager": 0, "graph": 0}
    for seed in range(part, PARTS * count, PARTS):
        for kind, steps in replayed(seed, devices).recorded.harvest.items():
            ran[kind] += steps
    assert ran["graph"] > 0.2 * sum(ran.values()), ran


def test_a_wrong_number_would_be_found(still, monkeypatch):
    """What the programs compare: a recorded step whose output is off by one bit, once."""
    from fastdp import recordings

    join = recordings.Recording._join

    def wrong(recording, column):
        result = join(recording, column)
        if result.dtype == torch.float64 and result.numel():
            result.view(-1)[0] = torch.nextafter(result.view(-1)[0], torch.tensor(1e300).double())
        return result

    monkeypatch.setattr(recordings.Recording, "_join", wrong)
    found = failing(replayed, range(10))
    assert found > 5, found
