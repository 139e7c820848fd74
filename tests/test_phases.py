"""benchmarks/phases.py runs, and its phases add up. How long they take is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "phases.py"


def run(*options):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_phases_as_json():
    done = run("--devices", "cpu,cpu", "--models", "tiny", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 1 and "torch" in found["machine"]
    ours, bare = (found["models"]["tiny"][side] for side in ("fastdp_us", "bare_us"))
    whole = {"zero_grad", "forward", "loss and backward", "optimizer", "whole step"}
    verbs = {"scatter", "replicate", "parallel_apply", "gather", "rest of forward"}
    nodes = {"node: Gather", "node: Broadcast"}
    replicas = {"replica 0", "replica 1"}
    assert set(bare) == whole and set(ours) == whole | verbs | nodes | replicas
    assert min(*ours.values(), *bare.values()) > 0
    # One step: the parts of a forward are the forward.
    assert sum(ours[verb] for verb in verbs) == pytest.approx(ours["forward"])
    assert max(ours[replica] for replica in replicas) < ours["parallel_apply"]
    assert sum(ours[node] for node in nodes) < ours["loss and backward"]
    for side in (ours, bare):
        assert sum(side[part] for part in whole - {"whole step"}) <= side["whole step"]


def test_phases_as_a_table_with_a_profile():
    done = run("--devices", "cpu,cpu", "--models", "tiny", "--steps", "2", "--profile")
    assert done.returncode == 0, done.stderr
    assert "| tiny | fastdp, us | bare module, us |" in done.stdout
    assert "| - replicate | " in done.stdout and "Ordered by: internal time" in done.stdout


@pytest.mark.parametrize(
    "options, words",
    [
        (("--models", "none"), "argument --models: 'none' is none of mlp, "),
        (("--steps", "0"), "argument --steps: 0, must be at least 1"),
        (("--batch", "-1"), "argument --batch: -1, must be at least 0"),
    ],
)
def test_refusals(options, words):
    done = run(*options)
    assert done.returncode == 2 and words in done.stderr
