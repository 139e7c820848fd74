"""`python -m fastdp doctor` and `fastdp.preflight`: each thing that can be wrong, provoked in what
the probes give, is told with what to do. The probes themselves: test_doctor_command.py."""

import copy
import pickle

import pytest
import torch

import fastdp
from fastdp import buses, doctor, facts
from fastdp.__main__ import main

GIB = 2**30
HOST = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]
UUIDS = ["GPU-aaaa-0", "GPU-bbbb-1"]


def good():
    """The facts of a machine with two GPUs on which nothing is wrong."""
    return {
        "driver": {
            "version": "580.65",
            "count": 2,
            "gpus": [
                {"index": k, "uuid": uuid, "name": "H200", "total_bytes": 139 * GIB}
                | {"used_bytes": 2**20}
                for k, uuid in enumerate(UUIDS)
            ],
        },
        "processes": [],
        "links": {"0-1": "NV18", "1-0": "NV18"},
        "visible": {"variable": None, "order": None, "started": False, "count": 2}
        | {"uuids": None, "error": None},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "fastdp": "0.1.0"}
        | {"fastdp_cuda": "13.0", "driver_cuda": "13.0", "system": "Linux 6"},
        "gpus": [
            {"index": k, "name": "H200", "uuid": uuid, "capability": "9.0"}
            | {"total_bytes": 139 * GIB, "free_bytes": 138 * GIB}
            | {"ours_bytes": 0, "cached_bytes": 0}
            for k, uuid in enumerate(UUIDS)
        ],
        "peers": [
            {"gpus": [0, 1], "check": "passed", "reason": "", "transport": "peer"}
            | {"gb_per_s": [381.0, 380.0], "error": None}
        ],
        "transport": ("peer", "local: the devices differ"),
        "nccl": {"torch": "2.28.9", "loaded": {"/lib/libnccl.so.2": "2.28.9"}, "installed": None},
        "buses": {"iommu": False, "acs": []},
        "limits": {"shm_bytes": 8 * GIB, "shm_free_bytes": 8 * GIB, "memlock_bytes": None}
        | {"open_files": 1024},
        "pinned": 2**26,
        "variables": [
            {"name": name, "value": None, "kind": kind, "default": default}
            for name, kind, default, _ in fastdp._C.env_table()
        ],
    }


class Machine:
    """Probes that give what `facts` has; an exception in it is raised."""

    def __init__(self, monkeypatch):
        self.facts = good()
        self.step_error = ""
        for name in self.facts:
            if name not in ("gpus", "buses"):
                monkeypatch.setattr(facts, name, self.probe(name))
        monkeypatch.setattr(facts, "gpu", lambda device: self.probe("gpus")()[device.index])
        monkeypatch.setattr(buses, "look", self.probe("buses"))
        monkeypatch.setattr(doctor, "_all_gpus", lambda: tuple(GPUS[: self.seen()]))
        monkeypatch.setattr(doctor, "parse_devices", lambda devices, name: tuple(devices))
        monkeypatch.setattr(doctor, "train_once", self.train_once)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def probe(self, name):
        def give(*arguments):
            if isinstance(self.facts[name], Exception):
                raise self.facts[name]
            return copy.deepcopy(self.facts[name])

        return give

    def seen(self):
        seen = self.facts["visible"]
        return 2 if isinstance(seen, Exception) else seen["count"]

    def train_once(self, devices):
        if isinstance(self.step_error, dict):
            return self.step_error.get(tuple(device.index for device in devices), "")
        return self.step_error

    def set(self, name, **changes):
        for each in self.facts[name] if isinstance(self.facts[name], list) else [self.facts[name]]:
            each.update(changes)

    def variable(self, name, value, kind=None):
        self.facts["variables"] = [r for r in self.facts["variables"] if r["name"] != name] + [
            next((r for r in self.facts["variables"] if r["name"] == name), {"kind": kind})
            | {"name": name, "value": value, "default": None}
        ]

    def without_gpus(self):
        self.facts.update(gpus=[], peers=[], transport=None)
        self.set("visible", count=0)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def findings(devices=None, **options):
    return doctor.diagnose(devices, **options)["findings"]


def test_a_good_machine(machine, capsys):
    assert findings() == []
    found = fastdp.preflight()
    assert found.is_good and found["step"]["devices"] == ["cuda:0", "cuda:1"]
    assert found.verdict() == "Good: a step ran on cuda:0, cuda:1, and its numbers are right"
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Python 3.12.3", "torch 2.11.0, for CUDA: 13.0", "driver 580.65, its GPUs: 2",
        "NCCL 2.28.9; 2.28.9 from /lib/libnccl.so.2", "cuda:1 H200 (sm 9.0), free 138.0 GiB of",
        "check of copies: passed, 381 GB/s there, 380 back by peer", "0-1 NV18", "IOMMU off, ACS",
        "/dev/shm 8.0 GiB; locked memory: no limit", "FASTDP_TRANSPORT (auto)", "torch sees 2 GPU",
        "peer: local: the devices differ", "on cuda:0, cuda:1: right", "Good: a step ran",
    ):  # fmt: skip
        assert words in out, words


BAD_PEER = "cuda:0 and cuda:1 failed the check of peer copies: 4 bytes copied are wrong"


def change(name, **changes):
    return lambda machine: machine.set(name, **changes)


def fact(name, value):
    return lambda machine: machine.facts.update({name: value})


def all_of(*acts):
    def act(machine):
        for each in acts:
            each(machine)

    return act


def variable(name, value):
    return lambda machine: machine.variable(name, value)


def started(value, count=1, uuids=UUIDS[:1]):
    return change("visible", variable=value, started=True, count=count, uuids=uuids)


def step_error(error):
    return lambda machine: setattr(machine, "step_error", error)


NO_GPUS = Machine.without_gpus

# name: (what is done to the machine, whether it is wrong, words of the text, words of the advice)
VERDICTS = {
    "torch without CUDA": (
        all_of(NO_GPUS, change("versions", cuda=None, torch="2.13.0+cpu")),
        True, "has 2 GPU(s), but torch 2.13.0+cpu is built without CUDA", "Install a CUDA build",
    ),
    "driver too old": (
        all_of(NO_GPUS, change("visible", error="RuntimeError: driver too old")),
        True, "has 2 GPU(s), but torch sees none (RuntimeError: driver too old)", "update the driv",
    ),
    "core without CUDA": (
        change("versions", fastdp_cuda=None),
        True, "this build of fastdp has no CUDA backend", "FASTDP_CUDA=1",
    ),
    "unknown GPU": (
        change("visible", variable="0,5,1", count=1),
        True, "CUDA_VISIBLE_DEVICES='0,5,1': the driver has GPUs 0 to 1, so CUDA ignores '5'", "Na",
    ),
    "all hidden": (
        all_of(NO_GPUS, change("visible", variable="")),
        True, "CUDA_VISIBLE_DEVICES='' hides all 2 GPU(s)", "before Python starts",
    ),
    "all hidden by -1": (
        all_of(NO_GPUS, change("visible", variable="-1")),
        True, "CUDA_VISIBLE_DEVICES='-1' hides all 2 GPU(s)", "before Python starts",
    ),
    "changed late, other count": (
        started("0,1"),
        True, "'0,1' was set after CUDA had started: it names 2 GPU(s), and this process goes on "
        "with the 1 that", "before Python starts",
    ),
    "changed late, other GPU": (
        started("1"),
        True, "'1' was set after CUDA had started: this process goes on with other GPUs (GPU-aaaa",
        "before Python starts",
    ),
    "little memory": (
        all_of(
            change("gpus", free_bytes=3 * GIB, cached_bytes=GIB, ours_bytes=2 * GIB),
            fact("processes", [{"uuid": UUIDS[0], "pid": 7, "name": "train.py", "bytes": 9 * GIB}]),
        ),
        True, "cuda:0 has 4.0 GiB free of 139.0 GiB, less than the 5.0 GiB asked for; other "
        "processes hold 9.0 GiB: process 7 (train.py)", "nvidia-smi",
    ),
    "a neighbour": (
        all_of(fact("driver", {"version": None, "count": 2, "gpus": None}),
               change("gpus", free_bytes=100 * GIB)),
        False, "cuda:0: other processes hold 39.0 GiB", "slower",
    ),
    "unlike GPUs": (
        lambda machine: machine.facts["gpus"][1].update(name="A100", total_bytes=80 * GIB,
                                                        free_bytes=79 * GIB),
        False, "cuda:0 is a H200 with 139.0 GiB, cuda:1 is a A100 with 80.0 GiB", "chunk_sizes",
    ),
    "copies change bytes": (
        change("peers", check="failed", reason=BAD_PEER, transport="host"),
        True, BAD_PEER, "Turn off the IOMMU and ACS",
    ),
    "copies change bytes, and it is known": (
        all_of(change("peers", check="failed", reason=BAD_PEER),
               variable("FASTDP_TRANSPORT", "host")),
        False, BAD_PEER, "NCCL_P2P_DISABLE=1",
    ),
    "no peers": (
        change("peers", check="no access", reason="no access", transport="host"),
        False, "cuda:0 and cuda:1 do not reach each other's memory", "go through host",
    ),
    "peers unknown": (
        change("peers", check="unknown", reason="DeviceError: lost"),
        True, "could not be found out: DeviceError: lost", "one by one",
    ),
    "nothing sent": (
        change("peers", error="DeviceError: lost"),
        True, "nothing could be sent between cuda:0 and cuda:1: DeviceError: lost", "one by one",
    ),
    "slow": (
        change("peers", gb_per_s=[0.5, 40.0]),
        False, "only 0.50 GB/s there and 40.00 back by peer", "topo -m",
    ),
    "lopsided": (
        change("peers", gb_per_s=[20.0, 9.0]),
        False, "cuda:0 and cuda:1: 20.0 GB/s there, but 9.0 back", "topo -m",
    ),
    "impossible transport": (
        fact("transport", (None, "FASTDP_TRANSPORT=nccl does not join the devices: no NCCL")),
        True, "FASTDP_TRANSPORT=nccl does not join the devices: no NCCL", "Unset FASTDP_TRANSPORT",
    ),
    "IOMMU": (
        all_of(fact("links", {"0-1": "SYS"}), change("buses", iommu=True)),
        False, "an IOMMU is on", "iommu=pt",
    ),
    "ACS": (
        all_of(fact("links", None), change("buses", acs=["0000:00:01.0"])),
        False, "ACS sends what goes between GPUs through the CPU (0000:00:01.0)", "firmware",
    ),
    "little shared memory": (
        change("limits", shm_bytes=64 * 2**20),
        False, "/dev/shm has 64.0 MiB", "--shm-size",
    ),
    "no pinned memory": (
        fact("pinned", RuntimeError("out of memory")),
        True, "no pinned memory can be taken: RuntimeError: out of memory", "ulimit -l",
    ),
    "a choice that is none": (
        variable("FASTDP_ENGINE", "fast"),
        True, "FASTDP_ENGINE is 'fast': it must be one of eager|auto|graph", "unset it",
    ),
    "a number that is none": (
        variable("FASTDP_TIMEOUT_MS", "1m"),
        True, "FASTDP_TIMEOUT_MS is '1m': it must be a positive integer", "unset it",
    ),
    "a variable for tests": (
        variable("FASTDP_TEST_BAD_PEER", "0-1"),
        True, "FASTDP_TEST_BAD_PEER is '0-1'", "Unset it",
    ),
    "a variable that is none": (
        lambda m: m.variable("FASTDP_TRANPORT", "host", None),
        False, "FASTDP_TRANPORT is set, but fastdp knows no such variable", "spelling",
    ),
    "launches that block": (
        variable("CUDA_LAUNCH_BLOCKING", "1"),
        False, "CUDA_LAUNCH_BLOCKING is set", "Unset it",
    ),
    "the step": (
        step_error("the numbers are not those of the CPU: the output"),
        True, "a training step on cuda:0, cuda:1 failed: the numbers are not those of the CPU: "
        "the output Alone they do this: cuda:0: the numbers", "docs/troubleshooting.md",
    ),
    "one GPU of two": (
        step_error({(0, 1): "bad", (1, 1): "bad too"}),
        True, "Alone they do this: cuda:0: right; cuda:1: bad too", "docs/troubleshooting.md",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_each_verdict(machine, name, capsys):
    act, wrong, words, advice = VERDICTS[name]
    act(machine)
    found = [f for f in findings() if words in f["text"]]
    assert len(found) == 1, findings()
    assert found[0]["wrong"] is wrong and advice in found[0]["advice"]
    assert main(["doctor"]) == int(wrong)
    out = capsys.readouterr().out
    assert words in out and ("WRONG: " if wrong else "note: ") in out
    if wrong:
        with pytest.raises(fastdp.PreflightError) as error:
            fastdp.preflight()
        assert words in str(error.value) and found[0] in error.value.diagnosis["findings"]
        other = pickle.loads(pickle.dumps(error.value))
        assert (str(other), other.diagnosis) == (str(error.value), error.value.diagnosis)
    else:
        assert found[0] in fastdp.preflight()["findings"]


@pytest.mark.parametrize(
    "act",
    [
        started("0"),
        started("GPU-aaaa"),  # an UUID may be shortened
        started("0,1", 2, UUIDS),
        started("0,1", 2, [None, None]),  # a torch that tells none
        all_of(started("1"), lambda m: m.facts["driver"]["gpus"][0].update(name="A100")),
        change("visible", variable="1,0"),
        change("buses", iommu=True),  # between GPUs that NVLink joins
        variable("FASTDP_TIMEOUT_MS", "1000"),
        variable("FASTDP_CUDA_ARCHS", "90 100"),
        variable("CUDA_LAUNCH_BLOCKING", "0"),
        change("peers", gb_per_s=[20.0, 11.0]),
    ],
)
def test_what_is_well_is_not_told(machine, act):
    act(machine)
    assert findings() == []
