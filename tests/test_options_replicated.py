"""The mark `Replicated`, against the arithmetic of the plain module on pieces cut by hand, with
equality."""

import pickle

import pytest
import torch
from nets import Apply, Pair, Recorder, calls_of, grads, ints, same
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import fastdp
from fastdp import Replicated

row = pytest.mark.row


@row("B14")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_is_marked_goes_whole_to_every_replica(fast, n):
    table, x = ints(7, 2), ints(6, 3)
    calls = calls_of(fast, n, (x, Replicated(table)), {"k": [Replicated({"t": (table, "s")})]})
    assert len(calls) == n
    for rank, (args, kwargs) in enumerate(calls):
        same(args[0], x.chunk(n)[rank])
        same(args[1], table)
        same(kwargs, {"k": [{"t": (table, "s")}]})
        assert args[1].device == fast.device(rank)


@row("B14")
def test_each_replica_has_its_own_memory(fast):
    table = ints(7, 2).to(fast.home)
    calls = calls_of(fast, 2, (ints(4, 3), Replicated(table)))
    pointers = {args[1].data_ptr() for args, _ in calls} | {table.data_ptr()}
    assert len(pointers) == 3


@row("B1", "B14")
@pytest.mark.parametrize("batch, used", [(1, 1), (5, 3), (0, 1)])
def test_a_mark_adds_no_replica(fast, batch, used):
    calls = calls_of(fast, 4, (ints(batch, 3),), {"t": Replicated(ints(9, 2))})
    assert [kwargs["t"].shape for _, kwargs in calls] == [(9, 2)] * used


@row("B5", "B14")
def test_marks_alone_go_to_every_replica(fast):
    assert len(calls_of(fast, 3, (Replicated(ints(2, 2)),))) == 3


@row("B14", "D3")
def test_gradients_of_a_marked_tensor_are_summed(fast):
    """First and second ones, to host and device tensors alike."""

    def forward(s, x, table):
        return s.lin(x) * (table**2).sum()

    for home in {torch.device("cpu"), fast.home}:
        results = []
        for n in (None, 2, 3):
            module = Apply(forward)
            table = ints(2, 3).to(home).requires_grad_()
            x = ints(5, 3)
            if n is None:
                module.to(home)
                out = module(x.to(home), table)
            else:
                out = fast.wrap(module, n)(x, Replicated(table))
            (slope,) = torch.autograd.grad(out.sum(), table, create_graph=True)
            slope.square().sum().backward()
            results.append((slope.detach().clone(), table.grad, *grads(module).values()))
            assert table.grad.device == home
        same(results[1], results[0])
        same(results[2], results[0])


ODD = {
    "0-dim": torch.tensor(3),
    "bool": torch.tensor([True, False]),
    "half": torch.ones(2, dtype=torch.half),
    "complex": torch.tensor([1 + 2j]),
    "empty": torch.zeros(0, 3),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
}


@row("B14", "B19")
@pytest.mark.parametrize("kind", ODD)
def test_any_tensor_can_be_marked(fast, kind):
    for args, _ in calls_of(fast, 2, (ints(4, 3), Replicated(ODD[kind]))):
        assert args[1].dtype == ODD[kind].dtype
        assert torch.equal(args[1].cpu(), ODD[kind])


@row("B14")
def test_sparse_and_packed_can_be_marked(fast):
    sparse = torch.eye(3).to_sparse()
    packed = pack_sequence([ints(3, 2), ints(1, 2)])
    for args, _ in calls_of(fast, 2, (ints(4, 3), Replicated((sparse, packed)))):
        assert torch.equal(args[1][0].to_dense().cpu(), torch.eye(3))
        same(pad_packed_sequence(args[1][1])[0], pad_packed_sequence(packed)[0])


@row("B14", "F9")
def test_a_wrapper_without_replicas_unwraps_marks(fast):
    module = Recorder()
    dp = fastdp.DataParallel(module, device_ids=["cpu"])
    dp.device_ids = []  # as on a machine without GPUs
    data, plain = [1, 2], {"p": (3,)}
    dp(Replicated(data), plain, k=[Replicated(4), 5], m={"d": Pair(Replicated(6), 7)})
    ((args, kwargs),) = module.calls
    assert args[0] is data and args[1] is plain
    assert kwargs == {"k": [4, 5], "m": {"d": Pair(6, 7)}}
    assert type(kwargs["m"]["d"]) is Pair


@row("B14")
def test_a_mark_can_be_printed_and_pickled():
    mark = pickle.loads(pickle.dumps(Replicated([1])))
    assert mark.value == [1] and repr(mark) == "Replicated([1])"


@row("B14", "L11")
def test_the_functional_form_knows_marks(fast):
    module = Recorder().to(fast.home)
    x, table = ints(4, 3), ints(5, 2)
    fastdp.data_parallel(module, (x, Replicated(table)), fast.ids(2))
    assert [args[1].shape for args, _ in module.calls] == [(5, 2)] * 2
