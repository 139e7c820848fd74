"""`dp.trace` writes what ran; `python -m fastdp report` sums it up and draws it. Sums over GPUs are
tested on a trace that is written by hand, with numbers that can be added up in the head."""

import gzip
import json
import xml.dom.minidom

import pytest
import torch
from torch import nn

import fastdp
from fastdp import _torch_state, trace_picture, trace_summary
from fastdp.__main__ import main

PHASES = {"scatter", "replicate", "parallel_apply", "gather", "replica 0", "replica 1"}
PHASES |= {"broadcast of bucket 0", "reduce of bucket 0"}

needs_all_threads = pytest.mark.skipif(
    _torch_state.all_threads() is None, reason="needs torch 2.9: profiles of all threads"
)


@pytest.fixture
def traced(devices, tmp_path):
    """(path of a trace of three steps, the wrapper)"""
    ids = devices(2)
    home = torch.device("cpu" if ids[0] == "cpu" else "cuda")
    dp = fastdp.DataParallel(nn.Linear(4, 4).to(home), ids)
    x = torch.ones(6, 4)
    dp(x).sum().backward()
    path = tmp_path / "trace.json"
    with dp.trace(path):
        for _ in range(3):
            dp(x).sum().backward()
    return path, dp


@pytest.fixture
def plain():
    """A wrapper, and a batch for it."""
    return fastdp.DataParallel(nn.Linear(4, 4), ["cpu"] * 2), torch.ones(6, 4)


@pytest.mark.parametrize("outer", ["trace", "profile", "autograd's"])
def test_a_trace_while_a_profiler_is_on_is_refused(plain, tmp_path, outer):
    dp, x = plain
    outside = {
        "trace": lambda: dp.trace(tmp_path / "outer.json"),
        "profile": torch.profiler.profile,
        "autograd's": torch.autograd.profiler.profile,
    }[outer]
    with outside():
        with pytest.raises(RuntimeError, match="inner.json.*one at a time"):
            with dp.trace(tmp_path / "inner.json"):
                dp(x)
        dp(x)
    if outer == "trace":
        assert trace_summary.summarize(trace_summary.read(str(tmp_path / "outer.json")))


@needs_all_threads
def test_a_trace_that_another_profiler_has_ended_says_so(plain, tmp_path):
    dp, x = plain
    with pytest.raises(RuntimeError, match="trace.json.*started and ended meanwhile"):
        with dp.trace(tmp_path / "trace.json"), torch.profiler.profile():
            dp(x)
    assert not (tmp_path / "trace.json").exists()
    with dp.trace(tmp_path / "trace.json"):
        dp(x)
    assert (tmp_path / "trace.json").exists()


@needs_all_threads
def test_a_trace_of_real_steps(traced, capsys):
    path, dp = traced
    trace = trace_summary.read(str(path))
    summary = trace_summary.summarize(trace)
    assert summary["steps"] == 3 and summary["report"] == json.loads(json.dumps(dp.report()))
    names = set(summary["phases"]) - {"compute"}
    assert names == PHASES and all(summary["phases"][name]["count"] == 3 for name in names)
    assert all(summary["phases"][name]["host_ms"] > 0 for name in names)
    assert {name for name in names if name.startswith("replica ")} == set(summary["replicas"])
    if dp.device_ids[0] == 0:
        assert summary["devices"]["cuda:0"]["busy_ms"] > 0
    assert len({piece.row for piece in trace.host}) >= 2  # the replicas' threads
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 forward(s)" in out and "engine eager" in out and "reduce of bucket 0" in out
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(summary))


def test_a_compressed_trace(tmp_path):
    dp = fastdp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    with dp.trace(str(tmp_path / "t.json.gz")):
        dp(torch.ones(2, 2))
    assert trace_summary.read(str(tmp_path / "t.json.gz")).steps == 1
    assert "traceEvents" in json.load(gzip.open(tmp_path / "t.json.gz"))


def test_steps_that_raise_leave_no_file_and_no_profiler(tmp_path):
    dp = fastdp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    trace = dp.trace(tmp_path / "t.json")
    with pytest.raises(ZeroDivisionError), trace:
        1 / 0
    assert not list(tmp_path.iterdir()) and not _torch_state.profiler_listens()
    with pytest.raises(RuntimeError, match="entered before"), trace:
        pass


@pytest.mark.parametrize(
    "path, error, words",
    [
        ("trace.txt", ValueError, "path is 'trace.txt': it must end with .json or .json.gz"),
        ("no/where/t.json", FileNotFoundError, "there is no folder 'no/where'"),
        (3, TypeError, "int"),
    ],
)
def test_mistakes_are_told_before_the_steps(path, error, words):
    with pytest.raises(error, match=words):
        fastdp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"]).trace(path)


@needs_all_threads
def test_a_torch_without_the_option_for_threads(monkeypatch):
    assert _torch_state.all_threads() is not None

    def config(**options):
        raise TypeError(options)

    monkeypatch.setattr(torch.profiler, "_ExperimentalConfig", config)
    assert _torch_state.all_threads() is None
    monkeypatch.delattr(torch.profiler, "_ExperimentalConfig")
    assert _torch_state.all_threads() is None


# Written by hand: us, on host threads 1 (the caller), 2 (replica 1), 3 (the engine's).


def ran(cat, name, tid, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur} | {
        "args": args
    }


def phase(name, tid, ts, dur):
    return ran("user_annotation", f"fastdp: {name}", tid, ts, dur)


def launched(number, tid, ts, kernel_ts, dur, device, stream=7, cat="kernel"):
    """A call on the host and what it runs on a GPU."""
    return [
        ran("cuda_runtime", "cudaLaunchKernel", tid, ts, 1, correlation=number),
        ran(cat, "k", 0, kernel_ts, dur, device=device, stream=stream, correlation=number),
    ]


EVENTS = [
    ran("user_annotation", "DataParallel.forward", 1, 0, 500),
    phase("replicate", 1, 0, 100),
    phase("broadcast of bucket 0", 1, 20, 50),
    phase("parallel_apply", 1, 100, 300),
    phase("replica 0", 1, 110, 90),
    phase("replica 1", 2, 120, 280),
    phase("reduce of bucket 0", 3, 600, 100),
    *launched(1, 1, 30, 100, 200, device=1, stream=20, cat="gpu_memcpy"),  # a broadcast
    *launched(2, 1, 80, 100, 10, device=0),  # in replicate, but in no bucket
    *launched(3, 2, 150, 250, 150, device=1),  # compute, 50 us of it beside the broadcast
    *launched(4, 1, 120, 300, 100, device=0),
    *launched(5, 3, 650, 900, 100, device=0, stream=20),  # the sum
    *launched(6, 3, 590, 850, 100, device=0),  # backward, half of it beside the sum
    ran("kernel", "k", 0, 1000, 0, device=0, stream=7, correlation=99),  # launched before
    {"ph": "M", "name": "process_name"},
    {"ph": "i", "name": "an instant", "ts": 4},
]


@pytest.fixture
def by_hand(tmp_path):
    path = tmp_path / "hand.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}))
    return str(path)


def test_the_sums(by_hand):
    summary = trace_summary.summarize(trace_summary.read(by_hand))
    assert summary["steps"] == 1 and summary["report"] is None
    assert summary["phases"] == {
        "replicate": {"count": 1, "host_ms": 0.1, "gpu_ms": 0.01},
        "broadcast of bucket 0": {"count": 1, "host_ms": 0.05, "gpu_ms": 0.2},
        "parallel_apply": {"count": 1, "host_ms": 0.3, "gpu_ms": 0.0},
        "replica 0": {"count": 1, "host_ms": 0.09, "gpu_ms": 0.0},
        "replica 1": {"count": 1, "host_ms": 0.28, "gpu_ms": 0.0},
        "reduce of bucket 0": {"count": 1, "host_ms": 0.1, "gpu_ms": 0.1},
        "compute": {"count": 4, "host_ms": 0.0, "gpu_ms": 0.35},
    }
    assert summary["devices"] == {
        "cuda:0": {"busy_ms": 0.26, "span_ms": 1.0, "moves_ms": 0.1, "hidden_percent": 50.0},
        "cuda:1": {"busy_ms": 0.3, "span_ms": 1.0, "moves_ms": 0.2, "hidden_percent": 25.0},
    }
    assert summary["replicas"] == {
        "replica 0": {"forward_ms": 0.09, "waited_ms": 0.2},
        "replica 1": {"forward_ms": 0.28, "waited_ms": 0.0},
    }
    text = trace_summary.text_of(summary)
    assert "cuda:1: busy 0.30 of 1.00 ms (30 %), moves between replicas 0.20 ms, 25 % of" in text
    assert "replica 0: forward 0.090 ms of the host, then waited 0.200 (medians)" in text


def test_sets_of_time():
    assert trace_summary.union([(3, 4), (0, 2), (1, 2), (2, 3), (6, 7)]) == [(0, 4), (6, 7)]
    assert trace_summary.common([(0, 4), (6, 8)], [(3, 7), (3, 5)]) == 2
    assert trace_summary.length([]) == 0


def boxes_of(page):
    """{(row, phase): number of boxes}"""
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    root = xml.dom.minidom.parseString(svg)
    rows = {
        round(float(text.getAttribute("y"))) - 15: text.firstChild.data
        for text in root.getElementsByTagName("text")
        if text.getAttribute("x") == "0"
    }
    found = {}
    for box in root.getElementsByTagName("rect"):
        row = rows[max(y for y in rows if y <= float(box.getAttribute("y")))]
        name = box.getElementsByTagName("title")[0].firstChild.data.split(":")[0]
        found[row, name] = found.get((row, name), 0) + 1
        assert 150 <= float(box.getAttribute("x")) <= 1200
        assert box.getAttribute("fill") == trace_picture.colour_of(name) != "#888888"
    return found


def test_the_picture(by_hand, tmp_path, capsys):
    target = tmp_path / "out.html"
    assert main(["report", by_hand, "--html", str(target)]) == 0
    page = target.read_text()
    assert boxes_of(page) == {
        ("thread 0", "replicate"): 1,
        ("thread 0", "broadcast of bucket 0"): 1,
        ("thread 0", "parallel_apply"): 1,
        ("thread 0", "replica 0"): 1,
        ("thread 1", "replica 1"): 1,
        ("thread 2", "reduce of bucket 0"): 1,
        ("cuda:0, stream 7", "replicate"): 1,
        ("cuda:0, stream 7", "compute"): 3,
        ("cuda:0, stream 20", "reduce of bucket 0"): 1,
        ("cuda:1, stream 7", "compute"): 1,
        ("cuda:1, stream 20", "broadcast of bucket 0"): 1,
    }
    assert capsys.readouterr().out.strip() in page.replace("&#x27;", "'")
    assert "http" not in page  # needs nothing else


def test_many_short_boxes_are_one(by_hand):
    trace = trace_summary.read(by_hand)
    row = ("cuda:0", 7)
    many = [trace_summary.Piece(row, "compute", 2.0 * k, 2.0 * k + 1) for k in range(10_000)]
    page = trace_picture.draw(trace._replace(host=[], gpu=many), "<many>")
    assert page.count("<rect") == 1 and "10000 x" in page and "&lt;many&gt;" in page


def test_an_empty_trace(tmp_path):
    trace = trace_summary.Trace([], [], 0, None)
    assert "The trace has no phases" in trace_picture.draw(trace, "empty")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [3]}'])
def test_what_is_no_trace(tmp_path, content, capsys):
    path = tmp_path / "t.json"
    path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert f"{path} is no trace of torch's profiler" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["report", str(tmp_path / "t.json")]) == 2
    assert "No such file" in capsys.readouterr().err
