"""fastdp.patch() over time: undo, patches inside patches, threads, other people's patches, and what
the handle says was replaced."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from nets import Net, ints, same
from patch_cases import LIBRARY, Fast, check_is_fast, home, patch_and_undo
from torch import nn

import fastdp
from fastdp.patch import Replacement


@pytest.fixture
def patched():
    with patch_and_undo() as handle:
        yield handle


def test_undo_keeps_what_was_made_on_fastdp(fast):
    with fastdp.patch() as handle:
        wrapped = nn.DataParallel(Net().to(fast.home), fast.ids(2))
        explicit = fastdp.DataParallel(Net().to(fast.home), fast.ids(2))
        wrapped(ints(4, 3)).sum().backward()
        assert handle.active
    assert not handle.active and not hasattr(nn.DataParallel, "_fastdp_get_runtime")
    for kept in (wrapped, explicit, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(kept) is Fast
        kept.zero_grad()
        check_is_fast(kept, kept.module, fast)
    assert "unused_grad" not in vars(nn.DataParallel(Net().to(fast.home)))
    handle.undo()
    assert "undone" in repr(handle) and len(handle.replaced) == 2


def places(handle):
    """What was replaced in this file."""
    return [(p.name, p.line, p.times) for p in handle.replaced if p.file == __file__]


def line():
    return inspect.currentframe().f_back.f_lineno


def test_each_place_is_listed_once(patched, fast):
    module, ids, x = Net().to(fast.home), fast.ids(2), ints(4, 3)
    first = line() + 2
    for _ in range(3):
        wrapped = torch.nn.DataParallel(module, ids)
    LIBRARY.Grandchild(module, ids)
    LIBRARY.alias(module, ids[:1])
    LIBRARY.data_parallel(module, x, ids)
    copy.deepcopy(wrapped)
    pickle.loads(pickle.dumps(wrapped))
    with pytest.raises(TypeError):
        torch.nn.DataParallel(nothing_like_this=1)
    assert places(patched) == [
        ("DataParallel", first, 3),
        ("Grandchild", first + 1, 1),
        ("DataParallel", first + 2, 1),
        ("data_parallel", first + 3, 1),
        ("DataParallel (loaded or copied)", first + 4, 1),
        ("DataParallel (loaded or copied)", first + 5, 1),
    ]
    LIBRARY.default(module, ids)
    in_library = LIBRARY.default.__code__.co_firstlineno + 1
    assert patched.replaced[-1] == Replacement("DataParallel", "<string>", in_library, 1, 2)
    lines = patched.report().splitlines()
    assert lines[0] == "fastdp: nn.DataParallel was replaced in 7 places"
    assert lines[1] == f"  {__file__}:{first}: DataParallel, 2 replicas (3 times)"
    assert lines[3] == f"  {__file__}:{first + 2}: DataParallel, 1 replica"
    assert lines[4] == f"  {__file__}:{first + 3}: data_parallel"
    assert lines[7] == f"  <string>:{in_library}: DataParallel, 2 replicas"


def test_a_report_of_nothing_says_so(patched):
    assert patched.replaced == []
    assert patched.report() == "fastdp: no nn.DataParallel was made, so nothing was replaced"


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU only")
def test_the_report_says_where_there_was_no_gpu(patched):
    wrapped = nn.DataParallel(Net())
    assert wrapped.device_ids == []
    assert patched.report().endswith("DataParallel, called directly: no GPU")


def is_patched():
    return "_fastdp_get_runtime" in vars(nn.DataParallel) and fastdp.DataParallel is nn.DataParallel


def test_again_changes_nothing(patched):
    forward = nn.DataParallel.forward
    again = fastdp.patch()
    assert again is not patched and again.active and nn.DataParallel.forward is forward
    nn.DataParallel(Net())
    assert again.replaced == patched.replaced and len(again.replaced) == 1
    again.undo()
    assert not is_patched() and not patched.active and not again.active
    patched.undo()
    with fastdp.patch() as new:
        assert is_patched() and new.replaced == [] and len(again.replaced) == 1
        assert not again.active
        again.undo()
        assert is_patched()
    assert not is_patched()


def test_a_block_leaves_things_as_it_found_them():
    with fastdp.patch():
        with fastdp.patch() as inner:
            assert is_patched()
        assert is_patched() and inner.active
    assert not is_patched()
    fastdp.patch()
    try:
        with pytest.raises(KeyError), fastdp.patch():
            raise KeyError
        assert is_patched()
    finally:
        fastdp.patch().undo()
    assert not is_patched()


def test_blocks_of_two_threads_overlap():
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other():
        with fastdp.patch():
            entered.set()
            left.wait(20)
            seen.append(is_patched())
        seen.append(is_patched())

    thread = threading.Thread(target=other)
    with fastdp.patch():
        thread.start()
        assert entered.wait(20)
    assert is_patched()
    left.set()
    thread.join()
    assert seen == [True, False]


def test_threads_patch_and_construct_at_once():
    threads, rounds = 8, 25
    barrier = threading.Barrier(threads)
    handles, errors = [], []

    def work():
        try:
            barrier.wait()
            for _ in range(rounds):
                handles.append(fastdp.patch())
                wrapped = nn.DataParallel(Net())
                assert wrapped.bucket_bytes > 0
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    try:
        assert not errors and len({id(handle._surgery) for handle in handles}) == 1
        assert [place.times for place in handles[0].replaced] == [threads * rounds]
    finally:
        handles[0].undo()
    assert not is_patched()


def test_touches_no_gpu(monkeypatch):
    """A script may still choose its GPUs by CUDA_VISIBLE_DEVICES, and fork."""

    def refuse(*_):
        raise AssertionError("a GPU was asked for")

    for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with fastdp.patch() as handle:
        assert is_patched() and handle.report()
        with pytest.raises(AssertionError, match="a GPU was asked for"):
            nn.DataParallel(Net())
    assert not is_patched()


def test_somebody_elses_steps_stay(fast, monkeypatch):
    """A library that changed the class before us, or does after us, has its way."""
    theirs = []

    def scatter(self, inputs, kwargs, device_ids):
        theirs.append(len(inputs))
        return Fast.scatter(self, inputs, kwargs, device_ids)

    def gather(self, outputs, output_device):
        return Fast.gather(self, outputs, output_device) * 2

    def parallel_apply(self, *args):
        raise AssertionError("undone before anything ran")

    # What monkeypatch puts back in the end is torch's own: it is told before anything is patched.
    for name in ("scatter", "gather", "parallel_apply"):
        monkeypatch.setattr(nn.DataParallel, name, vars(nn.DataParallel)[name])
    nn.DataParallel.scatter = scatter
    with fastdp.patch():
        module = Net().to(fast.home)
        check_is_fast(nn.DataParallel(module, fast.ids(2)), module, fast)
        assert theirs == [1] and nn.DataParallel.scatter is scatter
        nn.DataParallel.gather = gather
        same(nn.DataParallel(module, fast.ids(2))(ints(4, 3)), Net()(ints(4, 3)) * 2)
        nn.DataParallel.parallel_apply = parallel_apply
    has = vars(nn.DataParallel)
    assert has["scatter"] is scatter and has["gather"] is gather
    assert has["parallel_apply"] is parallel_apply and has["forward"].__module__ == home.__name__


def test_a_function_that_somebody_replaced_stays(monkeypatch):
    theirs = lambda *args: "theirs"  # noqa: E731
    monkeypatch.setattr(home, "data_parallel", theirs)
    monkeypatch.setattr(torch.nn.parallel, "data_parallel", theirs)
    with fastdp.patch():
        assert torch.nn.parallel.data_parallel(Net(), None) == "theirs"
        assert theirs.__code__.co_name == "<lambda>"


def test_torchs_name_may_be_bound_to_fastdps_class(fast, monkeypatch):
    """As scripts do it by hand: nothing in fastdp then takes its own class for torch's."""
    for place in (nn, torch.nn.parallel, home):
        monkeypatch.setattr(place, "DataParallel", fastdp.DataParallel)
    module = Net().to(fast.home)
    dp = nn.DataParallel(module, fast.ids(2))
    same(dp(ints(5, 3)), Net()(ints(5, 3)))
    with pytest.raises(ValueError, match="^engine is 'nonsense'"):
        dp.engine = "nonsense"
    assert dp.engine == "eager"

    class Mine(nn.DataParallel):
        def memory(self):
            return "mine"

    mine = Mine(module, fast.ids(2))
    mine.engine = "nonsense"  # a subclass may have the name for itself
    assert (mine.memory(), mine.engine) == ("mine", "nonsense")
    same(mine(ints(5, 3)), Net()(ints(5, 3)))
    assert len(list(fastdp.prefetch([ints(4, 3)], dp))) == 1
