"""Random states that are put back in a capture, with a generator that stands for a GPU's."""

import pytest
import torch

from fastdp.random_states import guarded_states
from fastdp.signatures import NotRecordable


class Generator:
    """As a GPU's under capture: eight bytes of seed, eight of the position."""

    def __init__(self):
        self.position = 0

    def get_state(self):
        return torch.tensor([7, self.position]).view(torch.uint8)

    def draw(self):
        self.position += 4


@pytest.fixture
def generator(monkeypatch):
    made = Generator()

    def put(state, device="cuda"):
        made.position = int(state.view(torch.int64)[1])

    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": made.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    return made


def saved_elsewhere(generator):
    generator.draw()
    with guarded_states():
        state = torch.cuda.get_rng_state()
        generator.draw()
    generator.position = 0
    return state


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)])
def test_drawing_from_a_state_of_another_capture_is_refused(generator, device):
    state = saved_elsewhere(generator)
    with pytest.raises(NotRecordable, match="random numbers"), guarded_states():
        before = torch.cuda.get_rng_state(device)
        torch.cuda.set_rng_state(state, device)
        generator.draw()
        torch.cuda.set_rng_state(before, device)
    assert generator.position == 0


def test_drawing_from_it_at_the_end_is_refused_too(generator):
    state = saved_elsewhere(generator)
    with pytest.raises(NotRecordable), guarded_states():
        torch.cuda.set_rng_state(state)
        generator.draw()


def test_a_draw_is_remembered_whatever_is_set_after_it(generator):
    state = saved_elsewhere(generator)
    with pytest.raises(NotRecordable), guarded_states():
        torch.cuda.set_rng_state(state)
        generator.draw()
        torch.cuda.set_rng_state(state)


def test_putting_it_back_without_a_draw_is_fine(generator):
    """Checkpointing without dropout, twice, with draws of its own around it."""
    state = saved_elsewhere(generator)
    with guarded_states():
        for _ in range(2):
            before = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            torch.cuda.set_rng_state(before)
            generator.draw()
    assert generator.position == 8


def test_within_one_capture_it_is_fine(generator):
    with guarded_states():
        state = torch.cuda.get_rng_state()
        for _ in range(2):
            generator.draw()
            torch.cuda.set_rng_state(state)
    assert generator.position == 0


def test_other_threads_and_errors_pass(generator, monkeypatch):
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    state = saved_elsewhere(generator)
    with pytest.raises(KeyError), guarded_states():
        torch.cuda.set_rng_state(state)
        raise KeyError
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with guarded_states():
        torch.cuda.set_rng_state(state)
        generator.draw()
    assert (torch.cuda.get_rng_state, torch.cuda.set_rng_state) == before
