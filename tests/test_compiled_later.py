"""`module.compile()` that is called, called again or taken back while a wrapper is at work: its
replicas follow the module, as they do where other attributes change."""

import copy

import pytest
import torch
from compiled_cases import Net, Twins, count_for, refuses
from engine_cases import SETTLED, Pair, noise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


class Counting:
    """A compiler that counts how often what it compiled has run, on whichever thread."""

    def __init__(self):
        self._ran, self.compilations = [], 0

    @property
    def runs(self):
        return len(self._ran)

    def __call__(self, graph, inputs):
        self.compilations += 1

        def run(*args):
            self._ran.append(None)
            return graph.forward(*args)

        return run


class Steps(Twins):
    """A wrapper that is asked for nothing, and its twin, whose module nobody compiles."""

    def __init__(self, fast, n=2, **options):
        module = Net()
        super().__init__(fast, module, n=n)
        self.compiled = fast.wrap(module, n, **options)
        self.both = self.compiled, self.plain
        self.module = module
        self.optimizers[0] = torch.optim.SGD(module.parameters(), 1e-2, momentum=0.9)
        self.seed = 0

    def runs_in_a_step(self, *compilers):
        """How often what each has compiled runs in the next step."""
        before = [compiler.runs for compiler in compilers]
        self.seed += 1
        self.step(self.rows(seed=self.seed))
        return [compiler.runs - runs for compiler, runs in zip(compilers, before)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_replicas_follow_when_it_comes_and_when_it_goes(fast, n):
    twins, first, second = Steps(fast, n), Counting(), Counting()
    assert twins.runs_in_a_step(first) == [0]
    assert twins.compiled.report()["compiled"] is None
    twins.module.compile(backend=first)
    assert twins.runs_in_a_step(first) == [n]
    assert twins.runs_in_a_step(first) == [n]
    assert twins.count == count_for(fast, n)
    assert twins.compiled.report()["compiled"]["forms"]
    twins.module._compiled_call_impl = None
    assert twins.runs_in_a_step(first) == [0]
    assert twins.compiled.report()["compiled"] is None
    twins.module.compile(backend=second)
    assert twins.runs_in_a_step(first, second) == [0, n]


def test_a_call_that_is_put_back_is_not_compiled_again(fast):
    twins, compiler = Steps(fast), Counting()
    twins.module.compile(backend=compiler)
    assert twins.runs_in_a_step(compiler) == [2]
    compilations, call = compiler.compilations, twins.module._compiled_call_impl
    for _ in range(2):
        twins.module._compiled_call_impl = None
        assert twins.runs_in_a_step(compiler) == [0]
        twins.module._compiled_call_impl = call
        assert twins.runs_in_a_step(compiler) == [2]
    assert compiler.compilations == compilations


def test_what_the_wrapper_was_told_goes_before(fast):
    asked = Counting()
    twins = Steps(fast, compile={"backend": asked})
    assert twins.runs_in_a_step(asked) == [2]
    twins.module.compile(backend=refuses)
    assert twins.runs_in_a_step(asked) == [2]
    assert asked.compilations == twins.count == count_for(fast, 2) and twins.reasons == []
    never = Steps(fast, compile=False)
    never.step(never.rows())
    never.module.compile(backend=refuses)
    never.step(never.rows())
    assert never.compiled.report()["compiled"] is None


def test_replicas_that_are_made_by_hand_follow(fast):
    twins, compiler = Steps(fast), Counting()
    dp, x = twins.compiled, twins.rows()

    def by_hand():
        replicas = dp.replicate(dp.module, dp.device_ids)
        rows, named = dp.scatter((x,), {}, dp.device_ids)
        return dp.gather(dp.parallel_apply(replicas, rows, named), dp.output_device)

    by_hand()
    twins.module.compile(backend=compiler)
    by_hand()
    assert compiler.runs == 2
    twins.module._compiled_call_impl = None
    by_hand()
    assert compiler.runs == 2


def test_a_forward_that_is_under_way_ends_as_it_began(fast):
    """Its backward comes when the module is compiled, and its replicas serve no compiled step."""
    twins, compiler = Steps(fast), Counting()
    for dp in twins.both:
        outputs = dp(twins.rows())
        if dp is twins.compiled:
            twins.module.compile(backend=compiler)
            assert len({id(r) for r in dp.replicate(dp.module, dp.device_ids)}) == 2
        outputs.square().sum().backward()
    twins.check_gradients()
    assert twins.runs_in_a_step(compiler) == [2]


def test_copies_are_of_the_module_alone(fast):
    twins, compiler = Steps(fast), Counting()
    twins.module.compile(backend=compiler)
    twins.runs_in_a_step(compiler)
    runs, again = compiler.runs, copy.deepcopy(twins.compiled)
    again(twins.rows())
    assert compiler.runs == runs and again.report()["compiled"] is None


def test_recorded_steps_follow(means):
    compiled, plain = Net().double(), Net().double()
    twins = Pair((means.wrap(compiled, "auto"), means.wrap(plain, "eager")), lr=1e-2, atol=1e-10)
    recorded, compiler = twins.both[0], Counting()

    def settle():
        for seed in range(SETTLED + 2):
            twins.step(noise(means, 6, 4, seed=seed))
        (forward,) = recorded.report()["forwards"]
        assert forward["engine"] == "graph", str(recorded.report())
        return compiler.runs

    assert settle() == 0
    compiled.compile(backend=compiler)
    runs = settle()
    assert runs > 0 and recorded.report()["compiled"]["forms"]
    compiled._compiled_call_impl = None
    assert settle() == runs


def test_a_part_that_is_compiled_later_runs_uncompiled_and_is_named(fast):
    twins, compiler = Steps(fast), Counting()
    twins.step(twins.rows())
    twins.module.first.compile(backend=compiler)
    assert twins.runs_in_a_step(compiler) == [0]
    assert twins.reasons[0].endswith("unless compile=True: first")
