"""BEHAVIOUR I and H where a process of its own is needed: Ctrl-C, exit, fork, DataLoader workers.

Each script runs with one OpenMP thread: after a fork a second one would hang in libgomp, wrapper
or not. A forked child has no CUDA, so the tests of children of our own are for host replicas.
"""

import signal
import time

import gloo
import pytest
from child_interpreter import ENDS_S, HANGS_S, check, finish, start

row = pytest.mark.row


@pytest.fixture
def device(devices):
    """The host, and a GPU where that can run."""
    return "cuda" if devices(1) == [0] else "cpu"


@row("I3")
@pytest.mark.parametrize("naps", ["{0: 600}", "{1: 600}", "{0: 600, 1: 600}"])
def test_sigint_during_forward_ends_the_process(device, naps):
    process = start(f"dp = wrap({naps}); dp(x)", device)
    assert process.stdout.readline() == "naps\n"
    time.sleep(0.1)  # both replicas are in their forwards, or else are interrupted before
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, HANGS_S)
    assert "KeyboardInterrupt" in err and code in (1, -signal.SIGINT, 130)


@row("I3")
def test_the_wrapper_is_usable_after_an_interrupt(device):
    """As in a notebook: the interrupted call's straggler must not answer the next call."""
    check(
        """
        inside, gate, ends = threading.Event(), threading.Event(), []

        class Late(Timed):
            def forward(self, x):
                if x[0, 0] == 1:
                    inside.set()
                    gate.wait(60)
                    ends.append(True)
                return self.lin(x)

        def press():
            inside.wait(60)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        dp = fastdp.DataParallel(Late().to(HOME), device_ids=IDS)
        threading.Thread(target=press).start()
        try:
            dp(x)
            sys.exit("not interrupted")
        except KeyboardInterrupt:
            pass
        assert not ends, "the caller was not woken"
        for k in range(3):
            y = x + 10 * (k + 1)
            assert torch.equal(dp(y), dp.module.lin(y))
        assert not ends
        gate.set()
        while not ends:
            time.sleep(0.001)
        for _ in range(3):
            assert torch.equal(dp(x), dp.module.lin(x))
        """,
        device,
    )


@row("I3", why="Ctrl-C: no stuck worker threads at exit")
@pytest.mark.parametrize("last", ["", "out = dp(x).sum()", "sys.exit(0)", "del dp"])
def test_a_process_with_idle_workers_ends(device, last):
    script = f"dp = wrap(); dp(x).sum().backward(); print(time.monotonic()); {last}"
    out = check(script, device)
    assert time.monotonic() - float(out) < HANGS_S


@row("I3", why="Ctrl-C: no stuck worker threads at exit")
def test_a_process_ends_while_a_thread_is_inside_a_forward(device):
    out = check(
        """
        dp, inside = wrap(), threading.Event()
        dp.module.lin.register_forward_pre_hook(lambda *_: inside.set() or time.sleep(600))
        threading.Thread(target=lambda: dp(x), daemon=True).start()
        assert inside.wait(60)
        print(time.monotonic())
        """,
        device,
    )
    assert time.monotonic() - float(out) < HANGS_S


@row("H7", why="mutant: fork")
@pytest.mark.parametrize("used", [True, False])
def test_wrapper_works_in_a_forked_child(used):
    """The child has no worker thread any more; it must start its own, and the parent goes on."""
    check(
        f"""
        warnings.simplefilter("ignore", DeprecationWarning)
        dp = wrap()
        want = dp.module(x).detach()
        if {used}:
            dp(x).sum()
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                ok = all(torch.equal(dp(x), want) for _ in range(3))
            os._exit(0 if ok else 3)
        deadline = time.monotonic() + 60
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(child, 9)
                sys.exit("the child hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert torch.equal(dp(x), want)
        dp(x).sum().backward()
        """
    )


@row("H7", why="loader workers are forked children; a CUDA event destroyed there aborts them")
def test_nothing_that_holds_a_gpu_is_destroyed_in_a_forked_child():
    """What stands in for an event is put where events are: in plans, and with a thread's own."""
    check(
        """
        warnings.simplefilter("ignore", DeprecationWarning)
        from fastdp import streams

        class Event:
            def __init__(self):
                self.pid = os.getpid()

            def __del__(self):
                if os.getpid() != self.pid:
                    os._exit(9)

        dp = wrap()
        dp(x)
        replicator = dp._fastdp_get_runtime().replicator
        replicator._plans["event"] = Event()
        replicator._idle.append(Event())
        kept = threading.Event()
        started = threading.Event()

        def other():
            streams._events[threading.get_ident(), "device"] = Event()
            started.set()
            kept.wait(100)

        threading.Thread(target=other, daemon=True).start()
        assert started.wait(60)
        child = os.fork()
        if child == 0:
            dp(x)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        kept.set()
        assert os.waitstatus_to_exitcode(status) == 0, status
        replicator._idle.pop()
        """
    )


@row("H7", why="mutant: fork while another thread is inside replicate")
def test_fork_while_another_thread_replicates():
    """Whatever that thread held, it will never give back in the child."""
    check(
        """
        warnings.simplefilter("ignore", DeprecationWarning)
        entered, gate = threading.Event(), threading.Event()
        class Slow(nn.Linear):
            waits = True
            def _replicate_for_data_parallel(self):
                if Slow.waits:
                    entered.set()
                    gate.wait(100)
                return super()._replicate_for_data_parallel()
        dp = fastdp.DataParallel(Slow(2, 2), device_ids=IDS)
        want = dp.module(x).detach()
        thread = threading.Thread(target=lambda: dp(x))
        thread.start()
        assert entered.wait(60)
        child = os.fork()
        if child == 0:
            Slow.waits = False
            with torch.no_grad():
                os._exit(0 if torch.equal(dp(x), want) else 3)
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()
        thread.join(60)
        if not ended[0]:
            os.kill(child, 9)
            sys.exit("the child hangs")
        assert os.waitstatus_to_exitcode(ended[1]) == 0, ended
        """
    )


@row("H7")
def test_data_loader_workers_between_steps(device):
    check(
        """
        warnings.simplefilter("ignore", DeprecationWarning)
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 12
            def __getitem__(self, i): return torch.full((2,), float(i))
        dp = wrap()
        dp(x).sum().backward()
        for epoch in range(2):
            seen = 0
            for batch in torch.utils.data.DataLoader(
                Data(), batch_size=4, num_workers=2, multiprocessing_context="fork"
            ):
                dp(batch).sum().backward()
                seen += len(batch)
            assert seen == 12
        plain = Timed().to(HOME)
        plain.load_state_dict(dp.module.state_dict())
        plain(x).sum().backward()
        for _ in range(2):
            plain(torch.arange(12.0)[:, None].expand(12, 2).to(HOME)).sum().backward()
        for p, q in zip(dp.module.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        """,
        device,
    )


@row("F4", why="pickle of the wrapper: spawned processes")
def test_wrapper_travels_to_another_process(device, tmp_path):
    check(
        f"""
        dp = fastdp.DataParallel(nn.Linear(2, 2).to(HOME), device_ids=IDS)
        dp(x).sum().backward()
        torch.save((dp, dp(x).detach()), {str(tmp_path / "dp.pt")!r})
        """,
        device,
    )
    check(
        f"""
        dp, want = torch.load({str(tmp_path / "dp.pt")!r}, weights_only=False)
        assert torch.equal(dp(x), want)
        """,
        device,
    )


@row("J5", why="script without a main guard, no output of ours")
def test_a_training_script_prints_nothing_of_ours(device):
    process = start(
        """
        warnings.simplefilter("error")
        # torch 2.6 leaves a folder of its own behind.
        warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
        dp = wrap()
        opt = torch.optim.SGD(dp.parameters(), 0.1)
        for _ in range(3):
            opt.zero_grad(); dp(x).sum().backward(); opt.step()
        print("end")
        """,
        device,
    )
    assert finish(process, ENDS_S) == (0, "end\n", "")


@row("G2", why="import: no thread, no device, no NumPy needed")
def test_import_starts_no_thread():
    check(
        """
        assert threading.active_count() == 1
        names = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
        import importlib
        importlib.reload(fastdp)
        now = os.listdir("/proc/self/task") if names else []
        assert len(now) == len(names)
        """
    )


RANK_SCRIPT = """
import torch.distributed as dist
rank = {rank}
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
module, plain = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
plain.load_state_dict(module.state_dict())
dp = fastdp.DataParallel(module, device_ids=["cpu"] * 2)
batch = torch.arange(16.0).double().view(8, 2)
mine = batch[rank::2]
opt = torch.optim.SGD(dp.parameters(), 2.0**-10)
for _ in range(3):
    opt.zero_grad()
    dp(mine).sum().backward()
    for parameter in dp.parameters():
        dist.all_reduce(parameter.grad)
    opt.step()
check = torch.optim.SGD(plain.parameters(), 2.0**-10)
for _ in range(3):
    check.zero_grad()
    plain(batch).sum().backward()
    check.step()
for p, q in zip(module.parameters(), plain.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-15, atol=0)

# Inside torch's DDP, each process with its replicas.
ddp = nn.parallel.DistributedDataParallel(dp)
ddp.zero_grad()
ddp(mine).sum().backward()
got = module.weight.grad.clone()
want = torch.full_like(got, 0) + batch.sum(0) / 2
torch.testing.assert_close(got, want.expand(2, 2), rtol=1e-15, atol=0)
dist.destroy_process_group()
print("done")
"""


@row("F11")
def test_a_wrapper_in_each_process_of_a_group(tmp_path):
    """Gradients averaged by hand, and by torch's DDP around the wrapper."""
    ranks = [start(RANK_SCRIPT.format(rank=rank, store=tmp_path / "store")) for rank in (0, 1)]
    for process in ranks:
        code, out, err = finish(process, ENDS_S)
        assert code == 0 or gloo.AT_EXIT in err, f"{out}\n{err}"
        assert out.splitlines()[-1:] == ["done"], f"{out}\n{err}"  # gloo may say what it does
