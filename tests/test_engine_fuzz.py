"""The graph engine under programs at random: models (engine_nets.py) trained and changed
(engine_actions.py, engine_mishaps.py, engine_edits.py) by a recorded wrapper and an eager twin,
which must stay equal to the bit (engine_programs.py). A failure names its seed; `replayed(seed)`
below is how to look at one. `--long` runs 60 programs for each one of the short form."""

import gc

import pytest
import torch
from engine_actions import STEPS
from engine_cases import settings
from engine_edits import EDITS
from engine_mishaps import MISHAPS
from engine_programs import Program, failing

ACTIONS = {**STEPS, **MISHAPS, **EDITS}
PARTS, PROGRAMS = 3, 12


def replayed(seed):
    """The program of that seed, run as far as it goes."""
    program = Program(seed, ACTIONS)
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


@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part, still, request):
    count = PROGRAMS * (60 if request.config.getoption("--long") else 1)
    ran = {"eager": 0, "graph": 0}
    for seed in range(part, PARTS * count, PARTS):
        for kind, steps in replayed(seed).recorded.harvest.items():
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
