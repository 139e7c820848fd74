"""benchmarks/compiled.py says what it promises to say; with a compiler that takes no time."""

import importlib.util
import json
import sys
from pathlib import Path

import fastdp
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

pytestmark = pytest.mark.slow


@pytest.fixture
def benchmark(monkeypatch):
    place = importlib.util.spec_from_file_location("bench_compiled", BENCHMARKS / "compiled.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    backend = {"backend": "aot_eager"}

    def wrap(devices):
        ids = [str(device) for device in devices]
        return lambda net: fastdp.DataParallel(net, ids, compile=backend)

    compile = torch.compile
    monkeypatch.setattr(module, "compiled_wrap", wrap)
    monkeypatch.setattr(module, "WARM_UP", 2)
    monkeypatch.setattr(module, "LOSSES", 5)
    monkeypatch.setattr(torch, "compile", lambda net, mode=None: compile(net, **backend))
    yield module
    torch._dynamo.reset()


GIVEN = ["--devices", "cpu,cpu", "--models", "tiny", "--rounds", "2", "--seconds", "0.05"]


def test_losses_and_steps_are_told(benchmark, tmp_path, capsys):
    kept = tmp_path / "kept.json"
    for part in ("losses", "steps"):
        benchmark.main([*GIVEN, "--part", part, "--json", str(kept)])
        found = json.loads(kept.read_text())["models"]["tiny:4"][part]
        if part == "losses":
            assert found["holds"] and len(found["losses"]) == 4
            assert all(len(each) == benchmark.LOSSES for each in found["losses"])
        else:
            rows = {row["rival"]: row for row in found["rows"]}
            assert list(rows) == [
                *("one GPU, compiled", "one GPU, reduce-overhead", "fastdp compiled, one"),
                *("fastdp compiled", "fastdp compiled, whole"),
            ]
            assert all(row["step_ms"] > 0 for row in rows.values())
            assert rows["fastdp compiled"]["compiled"]["forms"]
    assert "holds: tiny" in capsys.readouterr().out


def test_a_process_of_its_own_tells_the_time_to_compile(benchmark, capsys):
    benchmark.main([*GIVEN, "--part", "child"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < found["compile_s"] <= found["first_steps_s"]
    assert found["forms"][0]["kind"] == "one size"
