"""What the doctor reads of nvidia-smi and of the PCIe bus, from samples."""

import os
import struct

import pytest

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
