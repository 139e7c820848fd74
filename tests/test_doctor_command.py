"""The doctor's options, probes that fail, and what it finds on the machine that is there."""

import json
import os
import subprocess
import sys

import pytest
import torch
from test_doctor import GIB, HOST, UUIDS, Machine, findings, good

import fastdp
from fastdp import diagnosis, doctor
from fastdp.__main__ import main


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_only_the_devices_that_are_asked_for_count(machine):
    machine.without_gpus()
    machine.set("visible", variable="")
    machine.set("versions", cuda=None, fastdp_cuda=None)
    found = fastdp.preflight([HOST, HOST])
    assert found["step"]["devices"] == ["cpu", "cpu"]
    assert [f["about"] for f in found["findings"]] == ["CUDA_VISIBLE_DEVICES"]
    assert "fastdp runs replicas on the CPU" in found.verdict()


def test_min_free_bytes(machine):
    machine.set("gpus", free_bytes=7 * GIB)
    assert not [f for f in findings() if "asked for" in f["text"]]
    with pytest.raises(fastdp.PreflightError, match="cuda:1 has 7.0 GiB free .* the 8.0 GiB asked"):
        fastdp.preflight(min_free_bytes=8 * GIB)


@pytest.mark.parametrize("name", good())
def test_a_probe_that_fails_hides_no_other(machine, name, capsys):
    machine.variable("FASTDP_ENGINE" if name != "variables" else "x", "fast")
    machine.step_error = "bad numbers"
    machine.facts[name] = OSError(5, "it broke")
    found = doctor.diagnose(None)
    assert [fact for fact in found["failed"]] == [name]
    texts = " ".join(f["text"] for f in found["findings"])
    assert "OSError: [Errno 5] it broke" in texts and "bad numbers" in texts
    assert ("FASTDP_ENGINE is 'fast'" in texts) is (name != "variables")
    assert main(["doctor"]) == 1 and "it broke" in capsys.readouterr().out
    assert "could not be judged" not in texts


def test_a_fact_of_an_unforeseen_shape_hides_no_finding(machine):
    machine.facts["limits"] = 7
    machine.step_error = "bad numbers"
    found = findings([HOST])
    assert ["bad numbers" in f["text"] for f in found] == [True, False]
    assert "what limits looks at could not be judged" in found[1]["text"]
    assert not found[1]["wrong"]
    assert "\nlimits        TypeError: " in str(doctor.diagnose([HOST]))


def test_json(machine, capsys):
    machine.set("limits", shm_bytes=2**20)
    assert main(["doctor", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["gpus"][1]["uuid"] == UUIDS[1] and out["peers"][0]["gb_per_s"] == [381.0, 380.0]
    assert [f["about"] for f in out["findings"]] == ["/dev/shm"] and out["failed"] == {}


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"min_free_bytes": -1}, ValueError, "min_free_bytes is -1: it must be 0 or more"),
        ({"min_free_bytes": 1.5}, TypeError, "min_free_bytes is 1.5"),
        ({"min_free_bytes": True}, TypeError, "min_free_bytes is True"),
        ({"devices": ["cuda:99"]}, ValueError, r"devices\[0\] is cuda:99, but"),
        ({"devices": "cpu"}, TypeError, "devices"),
    ],
)
def test_mistakes_in_arguments(options, error, words):
    with pytest.raises(error, match=words):
        fastdp.preflight(**options)


def test_the_number_of_others_bytes(machine):
    gpu = machine.facts["gpus"][0]
    assert diagnosis.others_bytes(gpu, machine.facts)[0] == 2**20  # before it was opened
    machine.set("visible", started=True)
    assert diagnosis.others_bytes(gpu | {"ours_bytes": GIB // 4}, machine.facts)[0] == 3 * GIB // 4


# On the machine that is there.

# In some containers it is there, but cannot tell all.
OF_NVIDIA_SMI = {"driver", "processes", "links"}


def test_the_command_where_it_is_run():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("FASTDP_TEST_BAD_PEER", None)
    words = [sys.executable, "-m", "fastdp", "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    found = json.loads(done.stdout)
    assert not set(found["failed"]) - OF_NVIDIA_SMI
    assert found["versions"]["torch"] == torch.__version__
    assert found["step"] == found["step"] | {"devices": ["cpu", "cpu"], "error": ""}
    assert done.returncode == int(any(f["wrong"] for f in found["findings"]))


@pytest.mark.filterwarnings("ignore::fastdp.DataParallelWarning")
def test_real_probes(devices):
    """No fact of this machine makes a probe fail, and its step is right."""
    found = doctor.diagnose(doctor.parse_devices(devices(2), "devices"), 0)
    assert not set(found["failed"]) - OF_NVIDIA_SMI and found["step"]["error"] == ""
    assert not [f for f in found["findings"] if f["about"] in ("step", "doctor")]
    json.dumps(found)


def test_the_callers_modes_and_random_numbers_do_not_matter():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            assert doctor.step([HOST, HOST])["error"] == ""
        with torch.inference_mode():
            assert doctor.step([HOST])["error"] == ""
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("where", ["output", "gradient", "weight"])
def test_wrong_numbers_are_seen(monkeypatch, where):
    """One bit of a single element."""

    def spoil(weight):
        weight.data[0, 0].add_(2.0**-8)

    class Wrong(fastdp.DataParallel):
        def forward(self, x):
            output = super().forward(x)
            bump = torch.zeros_like(output)
            bump[3, 1] = 1.0
            if where == "output":
                return output + bump
            if where == "gradient":
                output.register_hook(lambda gradient: gradient + bump)
            elif where == "weight":
                self.module[0].weight.register_post_accumulate_grad_hook(spoil)
            return output

    monkeypatch.setattr(doctor, "DataParallel", Wrong)
    error = doctor.step([HOST, HOST])["error"]
    first = {
        "output": "the output",
        "gradient": "the gradient of 0.weight",
        "weight": "0.weight after the step",
    }[where]
    assert error.startswith(f"the numbers are not those of the CPU: {first}")


def test_a_step_that_raises_is_told(monkeypatch):
    monkeypatch.setenv("FASTDP_BUCKET_BYTES", "many")
    found = doctor.diagnose([HOST, HOST])
    assert "FASTDP_BUCKET_BYTES is 'many'" in found["step"]["error"]
    assert {f["about"] for f in found["findings"] if f["wrong"]} == {"step", "FASTDP_BUCKET_BYTES"}
