"""What the tests of the wrapper share: the two implementations, and the devices they run on.

A test that asks for `impl` runs on torch's own nn.DataParallel (oracle.py) and on fastdp, so it
states what both do. A test that asks for `fast` runs on fastdp alone: there fastdp betters torch on
purpose, or the oracle cannot show it. Host replicas always; with a GPU and a CUDA build also
several replicas on one GPU, and with several GPUs replicas spread over all of them.
"""

import dataclasses
import functools
import types

import pytest
import torch


@functools.cache
def no_cuda_reason():
    """Why the GPU cases do not run; None where they do."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    import fastdp

    if not fastdp.build_info()["cuda"]:
        return "this build of fastdp has no CUDA"
    return None


def pytest_configure(config):
    for line in (
        "row(*ids, why=None): the rows of tests/rows.py that a test covers, and what of them",
        "seam: tests of the border between Python and the core; also run under the sanitizers",
        "slow: takes more than a few seconds",
    ):
        config.addinivalue_line("markers", line)
    # For the GPU cases: TF32 rounds what the tests take for exact, and two runs of one convolution
    # are compared.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def pytest_report_header(config):
    reason = no_cuda_reason()
    return f"GPU cases: {'run on cuda:0' if reason is None else 'skipped, ' + reason}"


@dataclasses.dataclass(frozen=True)
class Impl:
    """One implementation on one kind of device."""

    name: str
    api: types.ModuleType
    home: torch.device
    gpus: int = 1  # over which the replicas are spread

    @property
    def is_oracle(self):
        return self.name == "oracle"

    def ids(self, n):
        """n replicas, as this implementation names them."""
        if self.is_oracle:
            return list(range(n))
        if self.home.type == "cpu":
            return ["cpu"] * n
        return [rank % self.gpus for rank in range(n)]

    def device(self, rank):
        """Where replica `rank` is; the oracle's are all on the host."""
        if self.home.type == "cpu":
            return self.home
        return torch.device("cuda", rank % self.gpus)

    @property
    def home_id(self):
        return self.ids(1)[0]

    def wrap(self, module, n=2, **options):
        """The module, moved home in place, under DataParallel with n replicas."""
        return self.wrap_as(self.api.DataParallel, module, n, **options)

    def wrap_as(self, cls, module, n=2, **options):
        return cls(module.to(self.home), device_ids=self.ids(n), **options)


def _impl(kind):
    if kind == "oracle":
        import oracle

        return Impl("oracle", oracle, torch.device("cpu"))
    import fastdp

    if kind == "fastdp":
        return Impl("fastdp", fastdp, torch.device("cpu"))
    gpus = torch.cuda.device_count() if kind == "fastdp-gpus" else 1
    return Impl("fastdp", fastdp, torch.device("cuda:0"), gpus)


def pytest_generate_tests(metafunc):
    kinds = ["fastdp"]
    if not no_cuda_reason():
        kinds.append("fastdp-cuda")
        if torch.cuda.device_count() > 1:
            kinds.append("fastdp-gpus")
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", ["oracle", *kinds], indirect=True)
    if "fast" in metafunc.fixturenames:
        metafunc.parametrize("fast", kinds, indirect=True)


@pytest.fixture
def impl(request):
    return _impl(request.param)


@pytest.fixture
def fast(request):
    return _impl(request.param)


@pytest.fixture(params=["cpu", "cuda"])
def devices(request):
    """devices(n): n replicas, on the host and, where that can run, on one GPU."""
    if request.param == "cuda" and no_cuda_reason():
        pytest.skip(no_cuda_reason())
    return lambda n: [0 if request.param == "cuda" else "cpu"] * n


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
