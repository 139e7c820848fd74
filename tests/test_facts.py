"""What the doctor reads of nvidia-smi and of the PCIe bus, from samples."""

import os
import struct
import types

import pytest
import torch

from fastdp import buses, facts


def smi(monkeypatch, tmp_path, code):
    """An nvidia-smi that is this shell script."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_what_nvidia_smi_says(monkeypatch, tmp_path):
    rows = (
        "0, GPU-aa, NVIDIA H200, 580.65, 143771, 1\n1, GPU-bb, NVIDIA H200, 580.65, 143771, [N/A]"
    )
    used = f"GPU-aa, 7, python, 512\nGPU-aa, {os.getpid()}, python, 9\nGPU-bb, [Not Found], x, 1"
    topo = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-47\n"
        "GPU1\tNV18\t X \tPIX\t0-47\nNIC0\tSYS\tPIX\t X \n\nLegend:\n  X = Self"
    )
    for name, text in (("gpu", rows), ("apps", used), ("topo", topo)):
        (tmp_path / name).write_text(text)
    smi(
        monkeypatch, tmp_path,
        f"case $1 in --query-gpu*) cat {tmp_path}/gpu;; --query-c*) cat {tmp_path}/apps;; "
        f"topo) cat {tmp_path}/topo;; esac",
    )  # fmt: skip
    driver = facts.driver()
    assert (driver["version"], driver["count"]) == ("580.65", 2)
    assert [g["used_bytes"] for g in driver["gpus"]] == [2**20, None]
    assert driver["gpus"][0]["total_bytes"] == 143771 * 2**20
    assert facts.processes() == [
        {"uuid": "GPU-aa", "pid": 7, "name": "python", "bytes": 512 * 2**20}
    ]
    assert facts.links() == {"0-1": "NV18", "1-0": "NV18"}


def test_an_nvidia_smi_that_fails(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, "echo 'Driver/library version mismatch'; exit 18")
    found = facts.gather([])
    assert found["driver"] is None and set(found["failed"]) == {"driver", "processes", "links"}
    assert "nvidia-smi ended with 18: Driver/library version mismatch" in found["failed"]["driver"]


def config(control):
    """A configuration space with another capability, then ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
    struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0xFF, control)
    return bytes(space)


@pytest.mark.parametrize("control, on", [(0, False), (0b11101, True), (0b00100, True), (1, False)])
def test_acs_is_read_from_the_configuration(control, on):
    assert buses.acs_redirects(config(control)) is on


def test_a_configuration_that_ends_early_or_goes_round():
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)
    for each in (bytes(space), bytes(64), b"", bytes(4096), config(0)[:0x141]):
        assert buses.acs_redirects(each) is False


def test_the_bridges_of_a_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(buses, "SYSTEM", tmp_path)
    assert buses.look() == {"iommu": False, "acs": []}
    for name, kind, space in (
        ("0000:00:01.0", "0x060400", config(0b11100)),
        ("0000:00:02.0", "0x060400", config(0)),
        ("0000:00:03.0", "0x030200", config(0b11100)),  # a GPU
    ):
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind)
        (folder / "config").write_bytes(space)
    (tmp_path / "class/iommu/dmar0").mkdir(parents=True)
    assert buses.look() == {"iommu": True, "acs": ["0000:00:01.0"]}
    for config_file in tmp_path.glob("bus/pci/devices/*/config"):
        config_file.write_bytes(bytes(64))  # what others than root may read
    assert buses.look() == {"iommu": True, "acs": None}


# What is asked of the core and of torch, with answers that are pretended.

GPUS = [torch.device("cuda", index) for index in range(3)]


def test_each_pair_is_checked_and_measured(monkeypatch):
    """0 and 1 are peers, 0 and 2 corrupt bytes, 1 and 2 do not reach each other."""
    checks = {
        (0, 2): "transport=peer does not join the devices: cuda:0 and cuda:2 failed the check of "
        "peer copies: 4 bytes copied are wrong",
        (1, 2): "transport=peer does not join the devices: cuda:1 cannot reach cuda:2",
    }

    def find_transport(pair, wanted):
        key = tuple(device.index for device in pair)
        if wanted == "peer" and key in checks:
            raise NotImplementedError(checks[key])
        return ("host" if key in checks else "peer", "it fits")

    def rate(pair, transport):
        assert transport is None
        if pair == (GPUS[2], GPUS[1]):
            raise RuntimeError("it broke")
        return 1e9 * (10 * pair[0].index + pair[1].index)

    monkeypatch.setattr(facts, "find_transport", find_transport)
    monkeypatch.setattr(facts.overlap, "measured_bytes_per_s", rate)
    good, bad, apart = facts.peers(GPUS)
    assert good == {"gpus": [0, 1], "check": "passed", "reason": "", "transport": "peer"} | {
        "gb_per_s": [1.0, 10.0],
        "error": None,
    }
    assert (bad["gpus"], bad["check"], bad["transport"]) == ([0, 2], "failed", "host")
    assert bad["reason"].startswith("cuda:0 and cuda:2 failed the check of peer copies")
    assert bad["gb_per_s"] == [2.0, 20.0]
    assert (apart["check"], apart["reason"]) == ("no access", "cuda:1 cannot reach cuda:2")
    assert (apart["gb_per_s"], apart["error"]) == (None, "RuntimeError: it broke")


def test_a_pair_that_breaks_the_check_itself(monkeypatch):
    def find_transport(pair, wanted):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(facts, "find_transport", find_transport)
    (row,) = facts.peers(GPUS[:2])
    assert (row["check"], row["reason"]) == ("unknown", "RuntimeError: the device is lost")
    assert row["error"] == row["reason"]


def test_a_gpu_as_torch_tells_it(monkeypatch):
    properties = types.SimpleNamespace(name="H200", uuid="aa-bb", major=9, minor=0)
    for name, value in {
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda index: (700, 1000),
        "memory_reserved": lambda index: 200,
        "memory_allocated": lambda index: 150,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert facts.gpu(GPUS[1]) == {
        "index": 1,
        "name": "H200",
        "uuid": "GPU-aa-bb",
        "capability": "9.0",
        "total_bytes": 1000,
        "free_bytes": 700,
        "ours_bytes": 200,
        "cached_bytes": 50,
    }
    del properties.uuid  # an older torch
    assert facts.gpu(GPUS[1])["uuid"] is None


def test_what_torch_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def fail():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", fail)
    want = {"variable": "1", "order": None, "started": False, "count": 0, "uuids": None}
    assert facts.visible() == want | {"error": "RuntimeError: the driver is too old"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    uuid = types.SimpleNamespace(uuid="GPU-cc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: uuid)
    want |= {"started": True, "count": 1, "uuids": ["GPU-cc"], "error": None}
    assert facts.visible() == want


def test_libraries_that_are_loaded():
    """By the name of one that every Python has loaded: the C library."""
    (path,) = facts._loaded("libc")[:1]
    assert path.startswith("/") and "libc" in path
    assert facts._loaded("libnothing") == []


def test_others_variables_stand_there_if_they_are_set(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setenv("FASTDP_ENGINE", "")
    monkeypatch.setenv("FASTDP_TRANPORT", "host")
    rows = {row["name"]: row for row in facts.variables()}
    assert rows["NCCL_P2P_DISABLE"]["value"] == "1" and "NCCL_DEBUG" not in rows
    assert rows["FASTDP_TRANPORT"] | {"value": "host", "kind": None} == rows["FASTDP_TRANPORT"]
    assert rows["FASTDP_ENGINE"]["value"] is None  # empty counts as not set
    assert rows["FASTDP_ENGINE"]["kind"] == "eager|auto|graph"


def test_limits(monkeypatch):
    limits = facts.limits()
    assert limits["open_files"] > 0 and limits["shm_bytes"] >= limits["shm_free_bytes"]
    infinity = facts.resource.RLIM_INFINITY
    monkeypatch.setattr(facts.resource, "getrlimit", lambda which: (infinity, infinity))
    assert facts.limits()["memlock_bytes"] is None
