"""What the facts about a machine mean for training on it: each thing that is wrong, in plain words,
with what to do. Nothing is asked of the machine here (facts.py)."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

Facts = Dict[str, Any]

GIB = 2**30
_SMALL_SHM_BYTES = GIB  # containers get 64 MiB unless they ask for more
_SLOW_GB_PER_S = 3.0  # below what four lanes of PCIe 3 carry
_LOPSIDED = 2.0
_OTHERS_SHARE = 0.1


class Finding(NamedTuple):
    """`wrong`: training would fail, or give wrong numbers; else it may be slow, or fail later."""

    wrong: bool
    about: str
    text: str
    advice: str


def examine(facts: Facts, min_free_bytes: int) -> List[Finding]:
    """All findings, what is wrong first."""
    findings: List[Finding] = []
    for look in _LOOKS:
        try:
            findings += look(facts, min_free_bytes)
        except Exception as error:
            # A fact of an unforeseen shape hides no other finding either.
            text = f"what {look.__name__.strip('_')} looks at could not be judged: {error!r}"
            findings.append(Finding(False, "doctor", text, "Please report this."))
    return sorted(findings, key=lambda finding: not finding.wrong)


def size_text(size_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (1024, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} bytes"


def _uses_gpus(facts: Facts) -> bool:
    return any(name.startswith("cuda") for name in facts["devices"])


def _wants_gpus(facts: Facts) -> bool:
    """Whether GPUs are meant: they are asked for, or nothing is and the driver has some."""
    driver = facts["driver"] or {}
    return _uses_gpus(facts) or (not facts["devices"] and bool(driver.get("count")))


def _probes(facts: Facts, min_free_bytes: int) -> List[Finding]:
    return [
        Finding(
            False,
            name,
            f"{name} could not be found out: {error}",
            "What depends on it was not looked at.",
        )
        for name, error in facts["failed"].items()
        if name != "pinned"  # told below
    ]


def _builds(facts: Facts, min_free_bytes: int) -> List[Finding]:
    """Whether driver, torch and fastdp come together."""
    versions, seen = facts["versions"], facts["visible"]
    if versions is None or seen is None or not _wants_gpus(facts):
        return []
    found = []
    count = (facts["driver"] or {}).get("count")
    if versions["cuda"] is None:
        text = f"the driver has {count} GPU(s), but torch {versions['torch']} is built without CUDA"
        found.append(Finding(True, "torch", text, "Install a CUDA build of torch."))
    elif seen["count"] == 0 and (seen["variable"] is None or _chosen(seen["variable"], count)[0]):
        why = f" ({seen['error']})" if seen["error"] else ""
        text = f"the driver has {count} GPU(s), but torch sees none{why}"
        advice = (
            f"torch was built for CUDA {versions['cuda']} and the driver runs up to "
            f"{versions['driver_cuda'] or 'an unknown version'}: update the driver, or install a "
            "torch built for an older CUDA. In a container, start it with --gpus all."
        )
        found.append(Finding(True, "torch", text, advice))
    if versions["cuda"] is not None and versions["fastdp_cuda"] is None:
        text = "this build of fastdp has no CUDA backend: it can run replicas on the CPU only"
        advice = "Put nvcc of a CUDA toolkit on PATH and install again with FASTDP_CUDA=1."
        found.append(Finding(True, "fastdp", text, advice))
    return found


# CUDA_VISIBLE_DEVICES


def _visibility(facts: Facts, min_free_bytes: int) -> List[Finding]:
    seen, driver = facts["visible"], facts["driver"] or {}
    if seen is None or seen["variable"] is None:
        return []
    value, count = seen["variable"], driver.get("count")
    name = f"CUDA_VISIBLE_DEVICES={value!r}"
    chosen, unknown = _chosen(value, count)
    if seen["started"]:
        return _after_start(seen, driver, name, chosen)
    if unknown is not None and count:
        text = f"{name}: the driver has GPUs 0 to {count - 1}, so CUDA ignores {unknown!r} and "
        text += "whatever stands behind it"
        return [Finding(True, "CUDA_VISIBLE_DEVICES", text, "Name GPUs that are there.")]
    if count and not chosen:
        text = f"{name} hides all {count} GPU(s) of the driver"
        advice = "Unset it, or set it to the numbers of the GPUs to use, before Python starts."
        return [Finding(not facts["devices"], "CUDA_VISIBLE_DEVICES", text, advice)]
    return []


def _chosen(value: str, count: Optional[int]) -> Tuple[List[str], Optional[str]]:
    """The entries that CUDA takes, and the first that it does not know."""
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    for k, entry in enumerate(entries):
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        is_known = entry.isdigit() and (count is None or int(entry) < count)
        if not is_uuid and not is_known:
            return entries[:k], None if entry == "-1" else entry
    return entries, None


def _after_start(seen: Facts, driver: Facts, name: str, chosen: Sequence[str]) -> List[Finding]:
    """CUDA reads the variable once, when it starts."""
    wanted = _uuids_of(chosen, driver, seen["order"])
    found = seen["uuids"] or []
    changed = len(chosen) != seen["count"]
    if not changed and wanted is not None and None not in found:
        # An UUID may be shortened in the variable.
        changed = not all(have.startswith(want) for have, want in zip(found, wanted))
    if not changed:
        return []
    text = (
        f"{name} was set after CUDA had started: it names {len(chosen)} GPU(s), and this process "
        f"goes on with the {seen['count']} that it started with"
        if len(chosen) != seen["count"]
        else f"{name} was set after CUDA had started: this process goes on with other GPUs "
        f"({', '.join(found)})"
    )
    advice = "Set it before Python starts, or at least before anything touches a GPU."
    return [Finding(True, "CUDA_VISIBLE_DEVICES", text, advice)]


def _uuids_of(chosen: Sequence[str], driver: Facts, order: Optional[str]) -> Optional[List[str]]:
    """None where numbers cannot be told: CUDA's own order is not nvidia-smi's if GPUs differ."""
    gpus = driver.get("gpus")
    if gpus is None:
        return None
    if len({gpu["name"] for gpu in gpus}) > 1 and order != "PCI_BUS_ID":
        return None
    return [gpus[int(entry)]["uuid"] if entry.isdigit() else entry for entry in chosen]


# Memory


def others_bytes(gpu: Facts, facts: Facts) -> Tuple[int, List[Facts]]:
    """What other processes hold of a GPU, and those of them that are known."""
    listed = [each for each in facts["processes"] or [] if each["uuid"] == gpu["uuid"]]
    told = sum(each["bytes"] or 0 for each in listed)
    before = 0
    for each in (facts["driver"] or {}).get("gpus") or []:
        started = (facts["visible"] or {}).get("started")
        if each["uuid"] == gpu["uuid"] and not started:
            before = each["used_bytes"] or 0  # as it was before this process opened it
    if told or before:
        return max(told, before), listed
    # What CUDA itself takes for this process is in it.
    return max(0, gpu["total_bytes"] - gpu["free_bytes"] - gpu["ours_bytes"]), listed


def _memory(facts: Facts, min_free_bytes: int) -> List[Finding]:
    found = []
    for gpu in facts["gpus"] or []:
        others, listed = others_bytes(gpu, facts)
        who = ", ".join(f"process {each['pid']} ({each['name']})" for each in listed)
        held = f"other processes hold {size_text(others)}{': ' + who if who else ''}"
        free = gpu["free_bytes"] + gpu["cached_bytes"]
        name = f"cuda:{gpu['index']}"
        if free < min_free_bytes:
            text = (
                f"{name} has {size_text(free)} free of {size_text(gpu['total_bytes'])}, less than "
                f"the {size_text(min_free_bytes)} asked for; {held}"
            )
            advice = "End what holds the memory (nvidia-smi shows it), or leave this GPU out."
            found.append(Finding(True, name, text, advice))
        elif others > _OTHERS_SHARE * gpu["total_bytes"]:
            advice = "A GPU that is shared is slower, and every step waits for the slowest."
            found.append(Finding(False, name, f"{name}: {held}", advice))
    return found


def _likeness(facts: Facts, min_free_bytes: int) -> List[Finding]:
    kinds = {(gpu["name"], gpu["total_bytes"] // GIB) for gpu in facts["gpus"] or []}
    if len(kinds) < 2:
        return []
    text = "the GPUs differ: " + ", ".join(
        f"cuda:{gpu['index']} is a {gpu['name']} with {size_text(gpu['total_bytes'])}"
        for gpu in facts["gpus"]
    )
    advice = "Every step waits for the slowest: give it less with chunk_sizes, or leave it out."
    return [Finding(False, "GPUs", text, advice)]


# Between GPUs


def _pairs(facts: Facts, min_free_bytes: int) -> List[Finding]:
    found = []
    for pair in facts["peers"] or []:
        first, second = pair["gpus"]
        name = f"cuda:{first} and cuda:{second}"
        if pair["check"] == "failed":
            found.append(_bad_peers(pair["reason"], facts))
        elif pair["check"] == "no access":
            text = f"{name} do not reach each other's memory ({pair['reason']})"
            advice = f"Steps go through {pair['transport'] or 'another way'}: right, but slower."
            found.append(Finding(False, name, text, advice))
        elif pair["check"] == "unknown":
            text = f"whether {name} reach each other could not be found out: {pair['reason']}"
            found.append(Finding(True, name, text, "See whether the GPUs work one by one."))
        if pair["error"]:
            text = f"nothing could be sent between {name}: {pair['error']}"
            found.append(Finding(True, name, text, "See whether the GPUs work one by one."))
        elif pair["gb_per_s"]:
            found += _rates(name, pair)
    return found


def _bad_peers(reason: str, facts: Facts) -> Finding:
    asked = {row["name"]: row["value"] for row in facts["variables"] or []}
    avoided = asked.get("FASTDP_TRANSPORT") in ("host", "nccl")
    advice = (
        "fastdp does not use such copies, other programs do. Turn off the IOMMU and ACS (firmware, "
        "or iommu=pt on the kernel's command line); set NCCL_P2P_DISABLE=1 until then."
    )
    if not avoided:
        advice += " FASTDP_TRANSPORT=host says that you know of it."
    return Finding(not avoided, "peers", reason, advice)


def _rates(name: str, pair: Facts) -> List[Finding]:
    there, back = pair["gb_per_s"]
    advice = "See nvidia-smi topo -m: a narrow or shared PCIe link, or an IOMMU in the way."
    if min(there, back) < _SLOW_GB_PER_S:
        text = f"{name}: only {there:.2f} GB/s there and {back:.2f} back by {pair['transport']}"
        return [Finding(False, name, text, advice)]
    if max(there, back) > _LOPSIDED * min(there, back):
        text = f"{name}: {there:.1f} GB/s there, but {back:.1f} back by {pair['transport']}"
        return [Finding(False, name, text, advice)]
    return []


def _transport(facts: Facts, min_free_bytes: int) -> List[Finding]:
    chosen = facts["transport"]
    if chosen is None or chosen[0] is not None:
        return []
    advice = "Unset FASTDP_TRANSPORT: what fits is then chosen."
    return [Finding(True, "transport", chosen[1], advice)]


def _buses(facts: Facts, min_free_bytes: int) -> List[Finding]:
    """They matter only where a pair of GPUs is joined through PCIe."""
    buses, pairs = facts["buses"] or {}, facts["peers"] or []
    links = facts["links"] or {}
    if not pairs or (links and all(link.startswith("NV") for link in links.values())):
        return []
    advice = "If GPUs copy slowly or hang, turn it off in the firmware, or boot with iommu=pt."
    found = []
    if buses.get("iommu"):
        found.append(Finding(False, "IOMMU", "an IOMMU is on, between GPUs on PCIe", advice))
    if buses.get("acs"):
        text = f"ACS sends what goes between GPUs through the CPU ({', '.join(buses['acs'][:4])})"
        found.append(Finding(False, "ACS", text, advice))
    return found


# Limits and variables


def _limits(facts: Facts, min_free_bytes: int) -> List[Finding]:
    found = []
    shared = (facts["limits"] or {}).get("shm_bytes")
    if shared is not None and shared < _SMALL_SHM_BYTES:
        text = f"/dev/shm has {size_text(shared)}: workers of a DataLoader pass batches through "
        text += "it, and die of a bus error where it is full"
        advice = "Start the container with --shm-size=8g or --ipc=host."
        found.append(Finding(False, "/dev/shm", text, advice))
    if "pinned" in facts["failed"]:
        text = f"no pinned memory can be taken: {facts['failed']['pinned']}"
        advice = "Raise the memory limit of the container; check ulimit -l."
        found.append(Finding(True, "pinned memory", text, advice))
    return found


def _variables(facts: Facts, min_free_bytes: int) -> List[Finding]:
    found = []
    for row in facts["variables"] or []:
        name, value, kind = row["name"], row["value"], row["kind"]
        if not value:
            continue
        if name == "CUDA_LAUNCH_BLOCKING" and value != "0":
            text = "CUDA_LAUNCH_BLOCKING is set: every launch waits, and nothing runs side by side"
            found.append(Finding(False, name, text, "Unset it but to find a failing kernel."))
        elif name == "FASTDP_TEST_BAD_PEER" and value != "none":
            text = f"FASTDP_TEST_BAD_PEER is {value!r}: it is for tests of fastdp"
            found.append(Finding(True, name, text, "Unset it."))
        elif kind is not None and not _fits(value, kind):
            text = f"{name} is {value!r}: it must be {_allowed(kind)}"
            found.append(Finding(True, name, text, "Correct it, or unset it."))
        elif kind is None and name.startswith("FASTDP_"):
            text = f"{name} is set, but fastdp knows no such variable"
            advice = "Check its spelling: README.md lists those that it knows."
            found.append(Finding(False, name, text, advice))
    return found


def _fits(value: str, kind: str) -> bool:
    if kind.startswith("integer"):
        return value.isdecimal() and int(value) > 0
    return "|" not in kind or " " in kind or value in kind.split("|")


def _allowed(kind: str) -> str:
    return "a positive integer" if kind.startswith("integer") else f"one of {kind}"


def _step(facts: Facts, min_free_bytes: int) -> List[Finding]:
    step = facts.get("step")
    if step is None or not step["error"]:
        return []
    text = f"a training step on {', '.join(step['devices'])} failed: {step['error']}"
    alone = step["alone"]
    if alone:
        text += f" Alone they do this: {alone}"
    advice = "See docs/troubleshooting.md, by what the error says."
    return [Finding(True, "step", text, advice)]


_LOOKS: Tuple[Callable[[Facts, int], List[Finding]], ...] = (
    _step,
    _builds,
    _visibility,
    _memory,
    _pairs,
    _transport,
    _variables,
    _limits,
    _likeness,
    _buses,
    _probes,
)
