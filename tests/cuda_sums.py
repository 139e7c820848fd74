"""Gradients whose sum depends on the order of its terms, and training that is exact.

`wrong_sums` compares what a wrapper sums on GPUs with the same sum made on the host: in rank order;
fp16 and bf16 added in fp32 and rounded once. Equality is to the last bit, so it also says that
runs, bucket sizes and transports agree. `wrong_training` compares with one module on the host.
"""

import itertools

import torch
from nets import Net, ints
from torch import nn

import fastdp

SHAPES = [(1,), (3,), (17, 5), (24, 3, 5, 5), (1000,), (257, 129), (), (64, 64), (4099,)]
# Between three or more GPUs a bucket as large as this one goes in shards, in any dtype.
LARGE = (300_007,)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TRAINING_STEPS = 3


class Weighted(nn.Module):
    """The gradient of its parameters, laid end to end, is its input."""

    def __init__(self, dtype, shapes=SHAPES):
        super().__init__()
        tensors = [torch.ones(shape, dtype=dtype) for shape in shapes]
        tensors[3] = tensors[3].contiguous(memory_format=torch.channels_last)
        self.weights = nn.ParameterList(tensors)

    def forward(self, x):
        (row,) = x
        return (row * torch.cat([weight.flatten() for weight in self.weights]))[None]


def total_of(shapes):
    return sum(torch.Size(shape).numel() for shape in shapes)


def shapes_for(ids):
    return [*SHAPES, LARGE] if len(set(ids)) > 2 else SHAPES


def terms(ranks, dtype, seed, total=total_of(SHAPES)):
    """One row per rank, of very different sizes; half of the second takes back the first, so that
    what was rounded off is seen."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ranks, total, dtype=torch.float64, generator=generator)
    exponents = torch.randint(-10, 11, (ranks, total), generator=generator)
    rows = (values * torch.exp2(exponents)).to(dtype)
    if ranks > 2:
        rows[1, ::2] = -rows[0, ::2]
    return rows


def summed(rows):
    """In the order given."""
    is_short = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if is_short else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def wrong_sums(ids, dtype, bucket_bytes, seed):
    """The parameters whose gradients differ from the host's; none is right."""
    shapes = shapes_for(ids)
    rows = terms(len(ids), dtype, seed, total_of(shapes))
    home = torch.device("cuda", ids[0]) if isinstance(ids[0], int) else torch.device(ids[0])
    module = Weighted(dtype, shapes).to(home)
    dp = fastdp.DataParallel(module, device_ids=ids, bucket_bytes=bucket_bytes)
    out = dp(rows.to(home))
    out.backward(torch.ones_like(out))
    wanted = summed(rows).split([weight.numel() for weight in module.weights])
    return [
        k
        for k, (weight, want) in enumerate(zip(module.weights, wanted, strict=True))
        if not torch.equal(weight.grad.flatten().cpu(), want)
    ]


def all_wrong_sums(ids, sizes=(1, 4096, 25 * 2**20), seeds=(1,)):
    """{dtype and bucket size: wrong parameters}, where there are any."""
    found = {}
    for dtype, bucket_bytes, seed in itertools.product(DTYPES, sizes, seeds):
        wrong = wrong_sums(ids, dtype, bucket_bytes, seed)
        if wrong:
            found[f"{dtype}, buckets of {bucket_bytes} bytes, seed {seed}"] = wrong
    return found


def trained(module, call, place=lambda x: x, rows=6):
    """Steps of whole numbers: all that they give, on the host. `call` is the module, maybe
    wrapped."""
    kept = []
    for step in range(TRAINING_STEPS):
        module.zero_grad(set_to_none=True)
        out = call(place(ints(rows, 3, seed=step)))
        out.sum().backward()
        kept += [out.detach().cpu(), *(p.grad.cpu() for p in module.parameters())]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= parameter.grad.sign()
            kept.append(call(place(ints(rows - 1, 3, seed=step + 10))).cpu())
    return kept


def wrong_training(ids, place=None, **options):
    """Places in the results of `trained` that differ from those of one module on the host."""
    home = torch.device("cuda", ids[0]) if isinstance(ids[0], int) else torch.device(ids[0])
    reference, module = Net(), Net().to(home)
    dp = fastdp.DataParallel(module, device_ids=ids, **options)
    rows = max(6, 2 * len(ids))  # so that all replicas run, one of them with fewer
    got = trained(module, dp, place or (lambda x: x.to(home)), rows)
    want = trained(reference, reference, rows=rows)
    assert len(got) == len(want)
    return [k for k, (x, y) in enumerate(zip(got, want)) if not torch.equal(x, y)]
