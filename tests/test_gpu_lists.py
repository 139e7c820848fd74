"""Which lists of GPUs the tests would run on, on machines that are pretended."""

import gpu_lists
import pytest
import torch
from conftest import Impl
from gpu_lists import EIGHT, FOUR, MANY, PAIRS


@pytest.fixture
def machine(monkeypatch, request):
    """A machine of some GPUs on which none were chosen."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(gpu_lists, "_chosen", [])
    return request.param


def several(*counts):
    return pytest.mark.parametrize("machine", counts, indirect=True)


@several(1, 2, 3, 4, 7, 8)
def test_lists_that_a_machine_has_gpus_for(machine):
    found = gpu_lists.here(MANY)
    wanted = {1: 0, 2: 0, 3: 0, 4: len(PAIRS + FOUR), 7: len(PAIRS + FOUR), 8: len(MANY)}
    assert len(found) == wanted[machine]
    for ids in MANY:
        if list(ids) in found:
            assert gpu_lists.need(ids) == list(ids)
        else:
            with pytest.raises(pytest.skip.Exception, match=f"needs {max(ids) + 1} GPUs"):
                gpu_lists.need(ids)


@pytest.mark.parametrize("lists, count", [(FOUR, 4), (EIGHT[:3], 8)])
def test_all_gpus_come_in_three_orders(lists, count):
    whole = list(range(count))
    assert [sorted(ids) for ids in lists] == [whole] * 3 and len(set(lists)) == 3
    assert {ids[0] for ids in lists} > {0}  # another home


def test_parts_leave_the_first_gpu_out():
    for ids in (*PAIRS, EIGHT[3]):
        assert 0 not in ids and list(ids) != list(range(len(ids)))
    assert any(list(ids) == sorted(ids) for ids in PAIRS)
    assert any(list(ids) != sorted(ids) for ids in PAIRS)


@several(4)
def test_replicas_are_spread_over_the_chosen_gpus(machine):
    assert gpu_lists.several() == [0, 1, 2, 3] and gpu_lists.are_several()
    gpu_lists.choose("3,1")
    assert gpu_lists.several() == [3, 1]
    order = tuple(gpu_lists.several())
    impl = Impl("fastdp", None, torch.device("cuda", order[0]), order)
    assert impl.ids(3) == [3, 1, 3] and impl.home_id == 3 and impl.gpus == 2
    assert [impl.device(rank).index for rank in range(3)] == [3, 1, 3]
    for text, words in (("4", "torch sees 4 GPUs"), ("", "must be numbers"), ("0,x", "must be")):
        with pytest.raises(ValueError, match=words):
            gpu_lists.choose(text)


@several(1)
def test_one_gpu_may_be_chosen_again_and_again(machine):
    assert not gpu_lists.are_several()
    gpu_lists.choose("0,0,0,0,0,0,0,0")
    assert gpu_lists.are_several()
    impl = Impl("fastdp", None, torch.device("cuda", 0), tuple(gpu_lists.several()))
    assert impl.ids(8) == [0] * 8 and impl.gpus == 1


@several(2, 4, 8)
def test_engines_take_three_gpus_where_there_are_so_many(machine):
    from engine_cases import ids_of

    assert ids_of("gpus") == list(range(min(3, machine)))
    assert ids_of("gpu-twice") == [0, 0]
    gpu_lists.choose(",".join(map(str, reversed(range(machine)))))
    assert ids_of("gpus") == list(reversed(range(machine)))[:3]
