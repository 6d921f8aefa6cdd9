"""The same training run, however it is cut into ranks and micro-batches.

[Note: the bound] Where the order of a sum differs, parameters can only agree within rounding, and
the bound has to say how far rounding reaches after 10 AdamW steps. Backward error analysis gives
the first half: a sum of n terms computed in any order is the exact sum of terms that were each
changed by at most a factor 1 +- (n - 1) u, u = 2^-24 (Higham, Accuracy and Stability, section 4.2).
With n = 4 micro-batches, another order is thus a change of every micro-batch gradient, element
by element, by at most 3 u in either run, 6 u together. The run itself gives the second half: it is
repeated with every element of every micro-batch gradient multiplied by 1 +- 2^-21 (8 u) at random,
and the largest change that this makes to any parameter, over several draws, is the bound. Dividing
by 2 or 4 is exact, and everything after the sum (norm, clipping, AdamW) is the same code.
AdamW's eps is 1e-5 here: the exact gradient of a key bias is 0, and with 1e-8 the step would turn
the 1e-9 that rounding leaves of it into movement of its own, which hides the rest.
"""

import contextlib
import functools

import pytest
import torch
from cells import covering, slow

from fastpar.comm.mesh import Mesh
from fastpar.engine import bucket
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.kernels import make_key
from fastpar.kernels import make_key as make_key_of
from fastpar.models.gpt import GPT
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import cosine_lr, param_groups
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

STEPS, T, SEED = 10, 12, 5
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=61, dropout=0.1)
CASES = {  # dropout, clipping (the norms here are 0.9 to 1.3), tied weights in all of them
    "dropout and clipping": {"dropout": 0.1, "max_grad_norm": 0.5},
    "plain": {"dropout": 0.0, "max_grad_norm": None},
}


def tokens(first_sample, n):
    """Count up by 1, 2 or 3 from somewhere: samples are functions of their global index only."""
    rows = []
    for i in range(first_sample, first_sample + n):
        start, by = torch.randint(0, 61, (2,), generator=torch.Generator().manual_seed(i)).tolist()
        rows.append((start + (1 + by % 3) * torch.arange(T + 1)) % 61)
    rows = torch.stack(rows)
    return rows[:, :-1], rows[:, 1:]


def train(
    grad_accum_steps,
    micro_batch_size=2,
    *,
    dropout=0.1,
    max_grad_norm=0.5,
    noise_seed=None,
    lost=None,
    loss_scale=1.0,
    dtype=torch.float32,
    **options,
):
    """10 steps of this rank; every other rank starts from other weights, which rank 0 replaces."""
    mesh = Mesh(device="cpu")
    A, W, b = grad_accum_steps, mesh.dp_size, micro_batch_size
    config = GPTConfig(**{**CONFIG.__dict__, "dropout": dropout})
    model = parallelize(GPT(config, seed=mesh.rank).to(dtype), mesh, Parallel.of(**options))
    engine = engine_of(model)
    optimizer = AdamW(
        param_groups(model, 0.1),
        betas=(0.9, 0.95),
        eps=1e-5,
        max_grad_norm=max_grad_norm,
        master_weights=dtype != torch.float32,
    )
    if loss_scale != 1.0:
        optimizer.grad_scale = loss_scale
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        for p in model.parameters():
            p.register_hook(functools.partial(add_rounding_noise, generator=generator))
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(step, lr=1e-2, min_lr=1e-3, warmup_steps=3, max_steps=STEPS)
        losses.append(0.0)
        for micro in range(A):
            first = (step * A * W + mesh.dp_rank * A + micro) * b
            x, y = tokens(first, b)
            if lost == (step, micro):
                x, y = x[:1], y[:1]
            with engine.no_sync() if micro < A - 1 else contextlib.nullcontext():
                loss = model(x, y, rng_key=make_key(SEED, first)) / A
                (loss * loss_scale).backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    engine.check_replicas()
    with engine.gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}, losses


def add_rounding_noise(grad, generator):
    sign = torch.randint(0, 2, grad.shape, generator=generator) * 2 - 1
    return grad * (1 + sign * 2.0**-21)


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def assert_same_bits(a, b):
    for name in a:
        assert torch.equal(a[name], b[name]), name


@functools.lru_cache
def one_rank(case):
    """Parameters of 1 rank x 4 micro-batches, and how far rounding can carry them."""
    parameters, losses = train(4, **CASES[case])
    assert losses[-1] < losses[0]
    draws = [train(4, noise_seed=seed, **CASES[case])[0] for seed in range(3)]
    return parameters, max(distance(parameters, draw) for draw in draws)


def ranks(world_size, *args, backend="threads", **kwargs):
    results = run_ranks(functools.partial(train, *args, **kwargs), world_size, backend=backend)
    for parameters, _ in results[1:]:
        assert_same_bits(parameters, results[0][0])
    return results[0][0]


@functools.lru_cache
def one_deterministic_rank(case):
    """The sum of the micro-batches is the tree that ranks have."""
    return train(4, deterministic=True, **CASES[case])[0]


@covering(
    1,
    (
        ("world_size", "stage", "shard_size"),
        [
            (2, 0, None),
            (4, 0, None),
            (2, 1, None),
            (4, 2, None),
            (4, 3, None),
            (2, 3, None),
            (4, 3, 2),
        ],
    ),
    ("case", CASES),
    ("deterministic", [False, True]),
)
def test_ranks_times_accumulation_is_one_run(case, world_size, stage, shard_size, deterministic):
    expected, bound = one_rank(case)
    assert 0 < bound < 1e-4
    options = {"deterministic": deterministic, "zero_stage": stage, "shard_size": shard_size}
    parameters = ranks(world_size, 4 // world_size, **CASES[case], **options)
    assert distance(parameters, expected) <= bound
    if deterministic:
        assert_same_bits(parameters, one_deterministic_rank(case))


@pytest.mark.parametrize("case", CASES)
def test_one_lost_sample_is_far_outside_of_the_bound(case):
    """One of 80, in the middle of the run."""
    expected, bound = one_rank(case)
    assert distance(train(4, lost=(5, 2), **CASES[case])[0], expected) > 100 * bound


def test_one_other_dropout_mask_is_far_outside_of_the_bound(monkeypatch):
    expected, bound = one_rank("dropout and clipping")
    swapped = {8: 9}  # the key of step 1's first micro-batch
    monkeypatch.setitem(globals(), "make_key", lambda seed, i: make_key_of(seed, swapped.get(i, i)))
    assert distance(train(4)[0], expected) > 100 * bound


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_two_micro_batches(case, deterministic):
    """A sum of two has one order."""
    expected, _ = train(2, **CASES[case])
    assert_same_bits(ranks(2, 1, deterministic=deterministic, **CASES[case]), expected)


@functools.lru_cache
def default_buckets(world_size):
    return ranks(world_size, 1, deterministic=world_size == 4)


@covering(1, ("bucket_mb", [1e-6, 0.01, 0.05]), ("world_size", [2, 4]))
def test_bucket_size_changes_no_bit(world_size, bucket_mb):
    same = {"deterministic": world_size == 4}
    options = {"bucket_mb": bucket_mb, "first_bucket_mb": bucket_mb / 3}
    assert_same_bits(ranks(world_size, 1, **options, **same), default_buckets(world_size))


def test_the_size_of_a_micro_batch_changes_rounding_only():
    """Masks and samples follow the global index: 4 x 2 samples are 2 x 4 are 1 x 8.

    The sums inside the GEMMs of backward differ as well; they too are sums of the same terms.
    """
    expected, _ = train(4, 2)
    _, bound = one_rank("dropout and clipping")
    for grad_accum_steps, micro_batch_size in ((2, 4), (1, 8), (8, 1)):
        other, _ = train(grad_accum_steps, micro_batch_size)
        # In n terms each changes by (n - 1) u: 8 samples x 12 positions against 4 micro-batches.
        assert distance(other, expected) <= bound * (8 * T - 1) / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_main_gradients_has_the_same_bits(dtype):
    """The loss scale makes up for the loss being divided by the accumulation: multiplying by 4 is
    not exact for the small numbers of fp16."""
    options = {"dtype": dtype, "grad_dtype": torch.float32}
    for n in (2, 4):
        alone = {**options, "deterministic": n == 4}
        expected, losses = train(n, loss_scale=2.0**12 * n, **alone)
        assert losses[-1] < losses[0]
        other = ranks(n, 1, loss_scale=2.0**12, deterministic=n == 4, **options)
        assert_same_bits(other, expected)


@pytest.mark.parametrize("zero_stage", [0, slow(1), 2, slow(3)])
def test_gradients_that_are_copied_together_have_the_same_bits(zero_stage, monkeypatch):
    """As on a GPU: 4096 bytes wait, so that some are copied before their bucket is complete."""
    options = {"dtype": torch.bfloat16, "grad_dtype": torch.float32, "zero_stage": zero_stage}
    expected = ranks(2, 2, **options)
    monkeypatch.setitem(bucket.WAIT_BYTES, "cpu", 4096)
    assert_same_bits(ranks(2, 2, **options), expected)


@pytest.mark.parametrize(
    ("world_size", "grad_accum_steps", "deterministic"), [slow(2, 2, False), (4, 1, True)]
)
def test_processes_are_the_same_run(world_size, grad_accum_steps, deterministic):
    case = "dropout and clipping"
    expected, bound = one_rank(case)
    options = {**CASES[case], "deterministic": deterministic}
    parameters = ranks(world_size, grad_accum_steps, backend="gloo", **options)
    assert_same_bits(parameters, ranks(world_size, grad_accum_steps, **options))
    assert distance(parameters, expected) <= bound
    if deterministic:
        assert_same_bits(parameters, one_deterministic_rank(case))
