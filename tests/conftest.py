"""What the tests of the wrapper share: the two implementations, and the devices they run on.

A test that asks for `impl` runs on torch's own nn.DataParallel and on fastdp, so it states what
both do. A test that asks for `fast` runs on fastdp alone: there fastdp betters torch on purpose, or
torch's cannot show it. Host replicas always (torch's through oracle.py); with a GPU and a CUDA
build also several replicas on one GPU, and with several GPUs replicas spread over them.

A test that covers a row of row_titles.py may be skipped for want of GPUs or of a newer torch, no
more.
"""

import dataclasses
import functools
import re
import signal
import types

import gpu_lists
import pytest
import torch

try:
    import hypothesis
except ImportError:  # only those tests that have it need it
    hypothesis = None


@functools.cache
def no_cuda_reason():
    """Why the GPU cases do not run; None where they do."""
    if not torch.cuda.is_available():
        return "needs 1 GPU: torch sees none"
    import fastdp

    if not fastdp.build_info()["cuda"]:
        return "needs 1 GPU: this build of fastdp has no CUDA"
    return None


def pytest_addoption(parser):
    text = "reliability tests in their long form: every point, 10,000 steps, 1,000 wrappers"
    parser.addoption("--long", action="store_true", help=text)
    text = "GPUs of tests that take several, in the order of ranks, such as 3,2,1,0 (gpu_lists.py)"
    parser.addoption("--gpus", default="", help=text)


def pytest_configure(config):
    if config.getoption("--gpus"):
        try:
            gpu_lists.choose(config.getoption("--gpus"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    for line in (
        "row(*ids, why=None): the rows of tests/row_titles.py that a test covers, and what of them",
        "distinct: torch's own shares one copy among replicas of one GPU; its side needs several",
        "seam: tests of the border between Python and the core; also run under the sanitizers",
        "slow: takes more than a few seconds",
    ):
        config.addinivalue_line("markers", line)
    # A shell gives its background jobs an ignored SIGINT, and so to all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hypothesis is not None:
        # The short form has the same examples each time, and as long for them as it takes.
        hypothesis.settings.register_profile(
            "fastdp",
            derandomize=not config.getoption("--long"),
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
        hypothesis.settings.load_profile("fastdp")
    # For the GPU cases: TF32 rounds what the tests take for exact, and two runs of one convolution
    # are compared.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def pytest_report_header(config):
    reason = no_cuda_reason()
    return f"GPU cases: {'run on cuda:0' if reason is None else 'skipped, ' + reason}"


MAY_SKIP = re.compile(r"needs (\d+|one|two) GPUs?\b|needs torch\b")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that covers a row fails where it is skipped for another reason than these. The cases
    that want a GPU are told of in one line, not in one for each test."""
    outcome = yield
    report = outcome.get_result()
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    text = report.longrepr[2]
    reason = text.removeprefix("Skipped: ")
    if item.get_closest_marker("row") and not MAY_SKIP.match(reason):
        report.outcome = "failed"
        report.longrepr = f"the test of a row may not be skipped because: {reason}"
    elif reason == no_cuda_reason():
        report.longrepr = (__file__, 1, text)


@dataclasses.dataclass(frozen=True)
class Impl:
    """One implementation on one kind of device. The oracle is torch's own, on the host or not."""

    name: str
    api: types.ModuleType
    home: torch.device
    order: tuple = (0,)  # GPUs, over which the replicas are spread

    @property
    def gpus(self):
        return len(set(self.order))

    @property
    def is_oracle(self):
        return self.name == "oracle"

    def ids(self, n):
        """n replicas, as this implementation names them."""
        if self.home.type == "cpu":
            return list(range(n)) if self.is_oracle else ["cpu"] * n
        if self.is_oracle and 1 < self.gpus < n:
            pytest.skip(f"needs {n} GPUs: torch's own, on distinct ones")
        return [self.order[rank % len(self.order)] for rank in range(n)]

    def device(self, rank):
        """Where replica `rank` is; the oracle's are all on the host."""
        if self.home.type == "cpu":
            return self.home
        return torch.device("cuda", self.order[rank % len(self.order)])

    @property
    def home_id(self):
        return self.ids(1)[0]

    def wrap(self, module, n=2, **options):
        """The module, moved home in place, under DataParallel with n replicas."""
        return self.wrap_as(self.api.DataParallel, module, n, **options)

    def wrap_as(self, cls, module, n=2, **options):
        return cls(module.to(self.home), device_ids=self.ids(n), **options)


def _torchs():
    """torch's own functions, under the names that oracle.py has too."""
    own = torch.nn.parallel.scatter_gather
    return types.SimpleNamespace(
        DataParallel=torch.nn.DataParallel,
        data_parallel=torch.nn.parallel.data_parallel,
        replicate=torch.nn.parallel.replicate,
        parallel_apply=torch.nn.parallel.parallel_apply,
        scatter=own.scatter,
        scatter_kwargs=own.scatter_kwargs,
        gather=own.gather,
    )


def _impl(request):
    kind = request.param
    if kind == "oracle":
        import oracle

        return Impl("oracle", oracle, torch.device("cpu"))
    import fastdp

    if kind == "fastdp":
        return Impl("fastdp", fastdp, torch.device("cpu"))
    if no_cuda_reason():
        pytest.skip(no_cuda_reason())
    name, api = ("oracle", _torchs()) if kind.startswith("torch") else ("fastdp", fastdp)
    order = tuple(gpu_lists.several()) if kind.endswith("-gpus") else (0,)
    impl = Impl(name, api, torch.device("cuda", order[0]), order)
    if impl.is_oracle and impl.gpus == 1 and request.node.get_closest_marker("distinct"):
        pytest.skip("needs 2 GPUs: torch's own shares one copy among replicas of one GPU")
    return impl


def pytest_generate_tests(metafunc):
    ours, theirs = ["fastdp", "fastdp-cuda"], ["oracle"]
    if not no_cuda_reason():
        theirs.append("torch-cuda")
        if gpu_lists.are_several():
            ours.append("fastdp-gpus")
            theirs.append("torch-gpus")
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", [*theirs, *ours], indirect=True)
    if "fast" in metafunc.fixturenames:
        metafunc.parametrize("fast", ours, indirect=True)


@pytest.fixture
def impl(request):
    return _impl(request)


@pytest.fixture
def fast(request):
    return _impl(request)


@pytest.fixture(params=["cpu", "cuda"])
def devices(request):
    """devices(n): n replicas, on the host and, where that can run, on one GPU."""
    if request.param == "cuda" and no_cuda_reason():
        pytest.skip(no_cuda_reason())
    return lambda n: [0 if request.param == "cuda" else "cpu"] * n


@pytest.fixture(params=["cpu", "cpu-twice", "cpu-thrice", "gpu", "gpu-twice", "gpus"])
def means(request, monkeypatch):
    """Replicas for the tests of engines (engine_cases.py), on the host and on GPUs."""
    import engine_cases

    reason = engine_cases.reason_against(request.param)
    if reason:
        pytest.skip(reason)
    with engine_cases.settings(monkeypatch):
        yield engine_cases.Means(tuple(engine_cases.ids_of(request.param)))


@pytest.fixture(params=["table", "capsule"])
def way(request):
    """Both ways of torch's tensors into the core: with the exchange table, and as a torch without
    it."""
    from fastdp import _C

    former = _C._use_exchange_table(request.param == "table")
    yield request.param
    _C._use_exchange_table(former)


@pytest.fixture(params=[True, False], ids=["beside", "in line"])
def hidden(request):
    """Whether the moves of pretended GPUs run beside compute."""
    return request.param


@pytest.fixture
def gpus(monkeypatch, hidden):
    """GPUs that are pretended (pretended_gpus.py)."""
    import pretended_gpus

    return pretended_gpus.Gpus(monkeypatch, hidden)


@pytest.fixture
def same_kernels():
    """cuDNN chooses the same kernels every time."""
    kept = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept


@pytest.fixture
def fresh_compiler():
    """Nothing is compiled when the test begins, nor when it has ended."""
    from fastdp._torch_compiler import reason_against

    if reason_against():
        pytest.skip(f"needs torch 2.5: {reason_against()}")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
