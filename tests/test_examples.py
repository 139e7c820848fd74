"""Each script of examples/, run as its user runs it, on replicas on the CPU: what it computes is
what the plain module computes, or what the script that it replaces does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gloo
import pytest
import torch
from conftest import no_cuda_reason

pytest.importorskip("sklearn")
pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

EPOCH = re.compile(r"^epoch \d+/\d+  loss ([\d.]+)  test accuracy ([\d.]+)%$", re.MULTILINE)


# The same script with nothing of fastdp in its steps: without a GPU torch's class calls the module.
PLAIN = """
import os, runpy, sys, fastdp, torch
fastdp.DataParallel = lambda module, device_ids: torch.nn.DataParallel(module)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(script, *arguments, environment=NO_GPU, plain=False):
    before = ["-c", PLAIN] if plain else []
    command = [sys.executable, *before, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process, code=0):
    """The standard output of a script, which must end with this exit code."""
    out, err = wait_for(process)
    assert process.returncode == code, f"{process.args}\n{out}\n{err}"
    return out


def wait_for(process):
    try:
        return process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{process.args}: no end\n{out}\n{err}")


def run(*command, **options):
    return finish(start(*command, **options))


def run_both(first, second, plain=False, code=0):
    """Two scripts at the same time, the second one on plain modules if asked for."""
    processes = start(*first), start(*second, plain=plain)
    return [finish(process, code) for process in processes]


def run_processes(*command):
    """A script of torch's own process groups: once more where gloo alone broke it at its end."""
    for _ in range(5):
        process = start(*command)
        out, err = wait_for(process)
        if process.returncode == 0:
            return out
        assert gloo.AT_EXIT in err, f"{process.args}\n{out}\n{err}"
    pytest.fail(f"five times in a row: {err}")


def losses(text):
    return [float(loss) for loss, _ in EPOCH.findall(text)]


def accuracies(text):
    return [float(accuracy) for _, accuracy in EPOCH.findall(text)]


def weights(path):
    return torch.load(path, weights_only=True)


def largest_difference(first, second):
    first, second = weights(first), weights(second)
    assert list(first) == list(second) and len(first) > 0
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_the_one_line_keeps_the_classifier_as_it_was(tmp_path):
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    old, new = run_both(
        ("classifier.py", "--before", "--save", before), ("classifier.py", "--save", after)
    )
    assert old.startswith("torch.nn.parallel.data_parallel.DataParallel on no devices")
    assert new.startswith("fastdp.wrapper.DataParallel on [device(type='cpu'), device(type='cpu')]")
    assert len(losses(new)) == 5 and accuracies(new)[-1] > 80
    assert losses(new) == pytest.approx(losses(old), abs=2e-4)
    assert largest_difference(before, after) < 1e-4  # seen: 3e-7, in float32


def test_the_line_that_the_classifier_shows_is_the_line_in_it():
    text = (EXAMPLES / "classifier.py").read_text()
    page, code = text.split('"""', 2)[1:]
    shown = re.findall(r"^    ([-+]) +(model = .*)$", page, re.MULTILINE)
    assert [sign for sign, _ in shown] == ["-", "+"]
    assert all(line in code for _, line in shown)


def test_ddp_reduced_to_fastdp_ends_with_the_same_weights(tmp_path):
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    old = run_processes("ddp_before.py", "--save", before, "--epochs", 3)
    new = run("ddp_after.py", "--save", after, "--epochs", 3)
    assert len(losses(old)) == 3  # printed by one process only
    assert accuracies(new)[-1] > 80
    assert losses(new) == pytest.approx(losses(old), abs=2e-4)
    assert accuracies(new) == pytest.approx(accuracies(old), abs=0.6)  # two images of 360
    assert largest_difference(before, after) < 1e-4  # seen: 2e-7


def test_ddp_before_under_torchrun_says_so_at_once():
    process = start("ddp_before.py", environment={**NO_GPU, "TORCHELASTIC_RUN_ID": "none"})
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "run it by python, without torchrun" in err


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_each_tells_its_options(script):
    assert f"usage: {script}" in run(script, "--help")


def test_mixed_precision_computes_in_float16_on_every_replica():
    replicas, plain = run_both(("mixed_precision.py",), ("mixed_precision.py",), plain=True)
    for text in (replicas, plain):
        assert "outputs of the replicas: torch.float16\n" in text
        (skipped,) = re.findall(r"skipped steps: (\d+)", text)
        (scale,) = re.findall(r"scale at the end: (\d+)", text)
        # Each skipped step halves the scale; the run is too short for it to grow again.
        assert int(skipped) >= 1 and int(scale) == 2**24 // 2 ** int(skipped)
        assert accuracies(text)[-1] > 80
    assert losses(replicas) == pytest.approx(losses(plain), abs=0.02)


def test_the_old_spelling_of_mixed_precision(tmp_path):
    """Without a GPU it switches itself off, so that the numbers are those of float32."""
    replicas, plain = tmp_path / "replicas.pt", tmp_path / "plain.pt"
    text, _ = run_both(
        ("mixed_precision.py", "--old", "--save", replicas),
        ("mixed_precision.py", "--old", "--save", plain),
        plain=True,
    )
    assert "outputs of the replicas: torch.float32\nskipped steps: 0, scale at the end: 1" in text
    assert largest_difference(replicas, plain) < 1e-4


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    text, _ = run_both(
        ("resume.py", "--checkpoint", whole),
        ("resume.py", "--checkpoint", parts, "--stop-after", 130),
    )
    assert re.findall(r"^batch (\d+)/300 ", text, re.MULTILINE) == ["100", "200", "300"]
    assert weights(parts)["batch"] == 100
    resumed = run("resume.py", "--checkpoint", parts)
    assert resumed.startswith("resumed after batch 100\nbatch 200/300 ")
    assert text.endswith(resumed.split("\n", 1)[1])  # losses and accuracies, too

    first, second = weights(whole), weights(parts)
    assert first["batch"] == second["batch"] == 300
    assert list(first["model"]) == list(second["model"])
    assert "2.running_mean" in first["model"]
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name]), name
    assert float(re.findall(r"test accuracy ([\d.]+)%", text)[-1]) > 80


def test_resume_alone_compares_its_runs():
    text = run("resume.py", "--batches", 200)
    assert "stopped after batch 150\n3. resumed\nresumed after batch 100\n" in text
    assert text.endswith("weights and buffers of 1 and 3: the same bits\n")


def test_the_gan_reaches_every_spot():
    text = run("gan.py")
    assert "untrained: 0.0% of the points near a spot, 0 of 8 reached" in text
    assert ", 8 of 8 reached" in text.splitlines()[-1]


def test_the_gan_trains_as_the_plain_modules_do():
    """Second derivatives through replicas, step after step, in float64."""
    distance = re.compile(r"^step 30/30  distance (\S+)$", re.MULTILINE)
    command = ("gan.py", "--steps", 30)
    texts = run_both(command, command, plain=True, code=1)
    replicas, plain = (distance.search(text)[1] for text in texts)
    assert float(replicas) == pytest.approx(float(plain), abs=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(no_cuda_reason() is not None, reason=str(no_cuda_reason()))
@pytest.mark.parametrize(
    "command",
    [
        ("classifier.py",),
        ("classifier.py", "--before"),
        ("ddp_before.py",),
        ("ddp_after.py",),
        ("mixed_precision.py",),
        ("mixed_precision.py", "--old"),
        ("mixed_precision.py", "--devices", "cuda:0,cuda:0"),
        ("resume.py",),
        ("resume.py", "--devices", "cuda:0,cuda:0"),
        ("gan.py",),
        ("gan.py", "--devices", "cuda:0,cuda:0"),
    ],
    ids=" ".join,
)
def test_on_gpus(command):
    text = run(*command, environment={})
    if EPOCH.search(text):
        assert accuracies(text)[-1] > 80
    if "mixed_precision.py" in command:
        assert "outputs of the replicas: torch.float16\n" in text
