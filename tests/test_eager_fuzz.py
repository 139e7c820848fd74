"""Programs at random on eager wrappers: models (eager_nets.py) trained, changed and misused
(eager_actions.py) by fastdp's and by torch's own wrapper, which must stay equal to the bit
(eager_programs.py); and on compiled replicas beside plain ones (compiled_programs.py). A failure
names its seed; `replayed(seed)` below is how to look at one.
`--long` runs 60 programs for each one of the short form."""

import gc

import pytest
import torch
from compiled_programs import CompiledProgram
from eager_actions import ACTIONS, age
from eager_programs import Program
from engine_cases import settings
from engine_programs import failing

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS, PROGRAMS = 3, 8


def replayed(seed):
    """The program of that seed, run as far as it goes."""
    age()
    program = Program(seed, ACTIONS)
    program.run(program.rng.randint(10, 25))
    return program


@pytest.fixture
def still(monkeypatch):
    """What makes two runs alike: each warning every time, and scripted modules that are compiled
    at once, not after calls whose order differs."""
    always = torch.is_warn_always_enabled()
    profiling = torch._C._jit_set_profiling_executor(False)
    torch.set_warn_always(True)
    with settings(monkeypatch):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
    torch.set_warn_always(always)
    torch._C._jit_set_profiling_executor(profiling)


@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part, still, request):
    count = PROGRAMS * (60 if request.config.getoption("--long") else 1)
    acts = [len(replayed(seed).trace) for seed in range(part, PARTS * count, PARTS)]
    assert sum(acts) > 10 * count, acts


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_compiled_programs(engine, still, fresh_compiler, request):
    count, acts, compiled = 25 if request.config.getoption("--long") else 2, 0, 0
    for seed in range(count):
        torch._dynamo.reset()
        age()
        program = CompiledProgram(seed, ACTIONS, engine)
        program.run(program.rng.randint(6, 12))
        acts += len(program.trace)
        compiled += program.count()
    assert acts > 4 * count and compiled, (acts, compiled)


def test_a_wrong_number_would_be_found(still, monkeypatch):
    """What the programs compare: a joined output that is off by one bit."""
    from fastdp import trees

    join = trees.gather_tensors

    def wrong(tensors, *rest):
        result = join(tensors, *rest)
        if result.dtype == torch.float64 and result.numel() and len(tensors) > 1:
            with torch.no_grad():
                first = result.view(-1)[:1]
                first.copy_(torch.nextafter(first, torch.full_like(first, 1e300)))
        return result

    monkeypatch.setattr(trees, "gather_tensors", wrong)
    found = failing(replayed, range(10))
    assert found > 7, found
