"""Odd things that reach the seam: impostors, numbers out of bounds, messages cut in a character."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from fastdp import _C

pytestmark = pytest.mark.seam


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_a_class_named_ndarray_is_no_array():
    pytest.importorskip("numpy")

    class ndarray:
        __module__ = "numpy"

    with pytest.raises(TypeError, match="is no numpy.ndarray"):
        _C.layout(ndarray())


def test_a_message_that_is_cut_inside_a_character_is_still_said():
    done = run(
        """
        import fastdp, torch
        from fastdp import _C
        try:
            _C.broadcast(torch.ones(2), (torch.zeros(2),))
        except ValueError as error:
            print(type(error).__name__, "FASTDP_TRANSPORT" in str(error))
        """,
        FASTDP_TRANSPORT="a" + "é" * 60,
    )
    assert done.stdout.split() == ["ValueError", "True"], done.stderr


def test_memory_of_the_core_is_never_called_pinned():
    array = _C.Array((3,), (2, 32, 1), (3, 0))
    assert array.__dlpack_device__() == (1, 0)
    assert torch.from_dlpack(array).shape == (3,)


def test_counts_that_overflow_are_refused():
    huge = torch.empty(1, dtype=torch.int8).expand(2**63 - 1)
    with pytest.raises(OverflowError, match="9223372036854775807"):
        _C.borrow((huge, huge))
    assert _C.borrow((huge,)) == 2**63 - 1


def test_the_length_of_a_bucket_of_the_largest_tensor_does_not_overflow():
    huge = torch.empty(1, dtype=torch.int8).expand(2**63 - 1)
    try:
        assert _C.Bucket((huge,)).size_elems >= 2**63 - 1
    except (ValueError, OverflowError) as error:
        assert str(error)


@pytest.mark.parametrize("pair", [(1, 2**40), (-1, 0), ("host", 0), (1, None)])
def test_device_pairs_out_of_bounds_are_named(pair):
    class Producer:
        def __dlpack__(self, **options):
            raise AssertionError("asked for memory on no device")

        def __dlpack_device__(self):
            return pair

    with pytest.raises(ValueError, match=r"source: .*__dlpack_device__\(\) gave"):
        _C.broadcast(Producer(), (torch.zeros(2),))


def test_ctrl_c_inside_a_log_handler_is_not_lost():
    done = run(
        """
        import logging, signal
        import torch
        from fastdp import _C

        class Handler(logging.Handler):
            def emit(self, record):
                raise KeyboardInterrupt

        logging.getLogger("fastdp").addHandler(Handler())
        logging.getLogger("fastdp").setLevel(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for _ in range(100):
                _C.broadcast(torch.ones(2), (torch.zeros(2),))
            print("lost")
        except KeyboardInterrupt:
            print("raised")
        """,
        FASTDP_LOG="debug",
    )
    assert done.stdout.split() == ["raised"], done.stderr
