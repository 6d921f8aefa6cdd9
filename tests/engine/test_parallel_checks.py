"""What does not fit is refused: named, at once, and on every rank that is still there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.kernels import _C
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"bucket_mb": 0.0025, "first_bucket_mb": 0.001}
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def stack():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def on_ranks(fn, world_size=2, **options):
    """The error of each rank; none of them ends the others."""

    def outcome():
        try:
            fn()
        except Exception as error:
            return error

    return run_ranks(outcome, world_size, **options)


def assert_all_raise(outcomes, kind, message):
    for outcome in outcomes:
        with pytest.raises(kind, match=message):
            raise outcome


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_models_and_meshes_of_others(one_process):
    """Modules that were wrapped, split or never filled, and other things than a Mesh."""

    def lazy():
        parallelize(nn.Sequential(nn.LazyLinear(4)), Mesh())

    def no_mesh():
        parallelize(stack(), None)

    def no_model():
        parallelize(stack().parameters(), Mesh())

    def split():
        model = stack()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        parallelize(model, Mesh())

    def flat():
        parallelize(FullyShardedDataParallel(stack(), device_id=torch.device("cpu")), Mesh())

    def inside():
        parallelize(DistributedDataParallel(stack()), Mesh())

    def around():
        DistributedDataParallel(parallelize(stack(), Mesh()))

    for build, message in (
        (lazy, r"parameters with values, got an uninitialized '0.weight'; call the model once"),
        (no_mesh, r"expected a fastpar.Mesh, got mesh=NoneType; pass fastpar.Mesh\(\)"),
        (no_model, r"expected a torch.nn.Module, got model=generator; pass the model"),
        (split, r"plain parameters, got DTensor '0.weight'; leave FSDP and fully_sh"),
        (flat, r"plain parameters, got Parameter '_fsdp_wrapped_module._flat_param'"),
        (inside, r"without DistributedDataParallel, which averages gradients too, got 'model'"),
        (around, r"DistributedDataParallel: expected a model without an engine, got one of fastp"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 4}, r"expected one of 0, 1, 2, 3 for zero_stage, got zero_stage=4"),
        ({"zero_stage": True}, r"of 0, 1, 2, 3 for zero_stage, got zero_stage=True"),
        ({"shard_size": 3}, r"expected shard_size to divide the 2 data-.*, got shard_size=3"),
        ({"grad_dtype": torch.int32}, r"one of fp32, bf16, fp16 for grad_dtype, got .*int32"),
        ({"reduce_dtype": torch.bool}, r"one of fp32, bf16, fp16 for reduce_dtype, got .*bool"),
        ({"accumulate": "half"}, r"expected one of shard, full for accumulate, got .*'half'"),
        ({"grad_accum_steps": 0}, r"parallelize: expected grad_accum_steps >= 1, got .*=0"),
        ({"units": [nn.Linear(1, 1)]}, r"expected units inside the model, got units with a Linear"),
        ({"bucket_mb": 0.0}, r"expected bucket_mb > 0, got bucket_mb=0\.0"),
    ],
)
def test_arguments(options, message):
    def ranks():
        given = dict(options)
        units = given.pop("units", None)
        parallelize(stack(), Mesh(), Parallel.of(**{"zero_stage": 1, **given}), units=units)

    assert_all_raise(on_ranks(ranks), ValueError, message)


@pytest.mark.parametrize(
    "options", [{}, {"grad_dtype": torch.float32, "reduce_dtype": torch.bfloat16}]
)
def test_deterministic_refuses_sums_in_16_bits(options):
    def ranks():
        parallelize(stack().bfloat16(), Mesh(), Parallel.of(deterministic=True, **options))

    message = r"in fp32 with deterministic=True, got .* for '0\.|^deterministic does not run"
    assert_all_raise(on_ranks(ranks), ValueError, message)


def test_a_mesh_must_have_as_many_ranks_as_there_are():
    assert_all_raise(on_ranks(lambda: Mesh(dp=3)), ValueError, r"expected .*got .*dp=3")


@stages
def test_dtypes_that_do_not_fit(stage):
    def ranks():
        model = stack()
        model[1].weight = nn.Parameter(model[1].weight.to(torch.complex64))
        parallelize(model, Mesh(), zero_stage=stage)

    message = r"expected fp32, bf16, fp16 or fp64 parameters, got dtype=torch\.complex64 for '1\.w"
    assert_all_raise(on_ranks(ranks), ValueError, message)


def test_embeddings_that_write_their_rows():
    """Each rank would write others."""

    def ranks(stage):
        for kind in (nn.Embedding, nn.EmbeddingBag):
            model = nn.Sequential(kind(5, 4, max_norm=0.5))
            with pytest.raises(ValueError, match=r"that write no parameters .*max_norm=0.5 of emb"):
                parallelize(model, Mesh(), zero_stage=stage)
            model.requires_grad_(False)
            parallelize(model.append(nn.Linear(4, 4)), Mesh(), zero_stage=stage)

    for stage in (0, 3):
        run_ranks(ranks, 2, stage)


@stages
def test_parallelize_twice(stage):
    def ranks():
        mesh = Mesh()
        parallelize(parallelize(stack(), mesh, zero_stage=stage), mesh)

    message = r"expected a model without an engine, got parameter '0\.weight'"
    assert_all_raise(on_ranks(ranks), ValueError, message)


@stages
def test_a_parameter_put_in_the_place_of_another(stage):
    def ranks():
        model = parallelize(stack(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        model[1].weight = nn.Parameter(torch.ones(16, 16))
        model(torch.ones(2, 16)).sum().backward()

    message = r"expected the model to keep its parameter '1\.weight', got another object"
    assert_all_raise(on_ranks(ranks), RuntimeError, message)


@stages
def test_a_parameter_beside_the_others(stage):
    def ranks():
        model = parallelize(stack(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        model[1].scale = nn.Parameter(torch.ones(16))
        (model(torch.ones(2, 16)) * model[1].scale).sum().backward()

    message = r"expected the model's parameters of fastpar.parallelize, got '1\.scale' beside them"
    assert_all_raise(on_ranks(ranks), RuntimeError, message)


@stages
def test_a_part_that_comes_after_some_steps(stage):
    """Wherever it is put, and though check() has found the others right."""

    def ranks(change):
        model = parallelize(stack(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
        change(model)
        engine_of(model).shards.check()

    def parameter(model):
        model[1].scale = nn.Parameter(torch.ones(16))

    def module(model):
        model[1].more = nn.Linear(2, 2)

    def in_place_of(model):
        model[1] = nn.Linear(16, 16)

    def at_the_same_address(model):
        del model[1]
        model.append(nn.Linear(16, 16))

    def frozen_at_first(model):
        model[1].scale = nn.Parameter(torch.ones(16), requires_grad=False)
        engine_of(model).shards.check()
        model[1].scale.requires_grad_(True)

    for change in (parameter, module, in_place_of, at_the_same_address, frozen_at_first):
        message = "expected the model's parameters of fastpar.parallelize, got '.*' beside them"
        assert_all_raise(on_ranks(lambda change=change: ranks(change)), RuntimeError, message)


@stages
def test_backward_twice_without_need(stage):
    """torch's own error, and the ranks go on."""

    def ranks():
        model = parallelize(stack(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        optimizer = AdamW(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 16)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
            loss.backward()
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        return model.state_dict()["0.weight"]

    first, second = run_ranks(ranks, 2)
    assert torch.equal(first, second)


class Wrong(torch.autograd.Function):
    """A gradient of the weight that is not like the weight."""

    @staticmethod
    def forward(ctx, x, weight, change):
        ctx.save_for_backward(weight)
        ctx.change = change
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight, ctx.change(torch.ones_like(weight)), None


class WithWrong(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(16, 16)), change

    def forward(self, x):
        return Wrong.apply(x, self.weight, self.change)


@stages
def test_a_gradient_of_the_wrong_shape(stage):
    def ranks():
        model = nn.Sequential(nn.Linear(16, 16), WithWrong(lambda g: g[:3]))
        parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        model(torch.ones(2, 16)).sum().backward()

    assert_all_raise(on_ranks(ranks), RuntimeError, r"invalid gradient .* got \[3, 16\]")


@stages
def test_a_gradient_of_another_dtype_is_cast_by_autograd(stage):
    def ranks():
        model = nn.Sequential(WithWrong(lambda g: g.double()))
        parallelize(model, Mesh(), zero_stage=stage)
        model(torch.ones(2, 16)).sum().backward()
        ((_, grad),) = engine_of(model).grads()
        return grad

    for grad in run_ranks(ranks, 2):
        assert grad.dtype == torch.float32
        assert (grad == 1.0).all()


def train(case, stage, transport, timeout_s=4.0):
    """Rank 1 does something else in step 1."""
    mesh = Mesh(timeout_s=timeout_s, device="cpu")
    model = parallelize(stack(), mesh, Parallel.of(zero_stage=stage, transport=transport, **SMALL))
    optimizer = AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        odd = mesh.rank == 1 and step == 1
        for _ in range(2 if odd and case == "another backward" else 1):
            model(torch.ones(2, 16)).square().sum().backward()
        if odd and case == "no step":
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", ["another backward", "no step"])
@stages
def test_ranks_that_do_different_things(case, stage):
    outcomes = on_ranks(lambda: train(case, stage, "auto"), timeout_s=30)
    message = r"(on rank|of rank|from rank) \d.* (bucket \d+ of step \d|backward passes)"
    message += r"|expected as many backward passes on every rank|every rank to begin the same, got"
    assert_all_raise(outcomes, RuntimeError, message)


@pytest.mark.parametrize(
    ("case", "stage", "transport"), [("no step", 3, "shm"), ("another backward", 2, "torch")]
)
def test_processes_that_do_different_things(case, stage, transport):
    outcomes = run_ranks(
        train,
        2,
        case,
        stage,
        transport,
        10.0,
        backend="gloo",
        timeout_s=60,
        init=False,
        return_exceptions=True,
    )
    assert_all_raise(outcomes, RuntimeError, r"rank \d")


THREADS = """
import sys, warnings
import torch
first, dtype = sys.argv[1:]
if first == "product":
    torch.ones(64, 64) @ torch.ones(64, 64)
import fastpar
from fastpar.kernels.linear import depends_on_threads
model = torch.nn.Linear(4, 4).to(getattr(torch, dtype))
with warnings.catch_warnings(record=True) as caught:
    fastpar.parallelize(model, fastpar.Mesh(), grad_dtype=torch.float32, deterministic=True)
print(depends_on_threads(torch.float32), depends_on_threads(torch.bfloat16))
print(*(w.message for w in caught))
"""


@pytest.mark.parametrize(
    ("first", "dtype", "setting"),
    [
        ("import", "float32", {}),
        ("product", "float32", {}),
        ("import", "float32", {"MKL_CBWR": "COMPATIBLE"}),
        slow("import", "bfloat16", {}),
        slow("import", "bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
    ],
)
def test_products_that_depend_on_threads_are_said(first, dtype, setting):
    """fastpar asks MKL for the same bits with any number of threads: before the first product."""
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("MKL_", "ONEDNN_"))}
    command = [sys.executable, "-c", THREADS, first, dtype]
    env = {**unset, "PYTHONPATH": str(ROOT), **setting}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    products, warned = done.stdout.split("\n", 1)
    depends = dict(zip(("float32", "bfloat16"), products.split()))[dtype] == "True"
    assert ("have other bits with other numbers of threads here" in warned) == depends
    if _C is not None and _C.cpu_is_intel() and torch.backends.mkl.is_available():
        assert depends or first == "import"
        if dtype == "float32":
            assert depends == (first == "product" or bool(setting))
            assert ("set MKL_CBWR=AUTO,STRICT before" in warned) == depends
        elif depends:
            assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before the process starts" in warned
            assert not setting


SNIPPET = """
import torch, fastpar
from torch import nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
x, y = torch.randn(4, 8), torch.randn(4, 1)
loader = [(x[:2], y[:2]), (x[2:], y[2:])]
forward = model.forward
model.forward = lambda x, y: (forward(x) - y).square().mean()

mesh = fastpar.Mesh(dp=2)
model = fastpar.parallelize(model, mesh, zero_stage=2)
opt = fastpar.AdamW(model.parameters(), lr=6e-4)
for x, y in loader:
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
total = sum(v.double().sum() for v in model.state_dict().values())
print(f"rank {mesh.rank}: {total.item()!r}\\n", end="", flush=True)  # one write: ranks share a pipe
"""


@pytest.mark.slow
def test_the_loop_of_the_readme_under_torchrun(tmp_path):
    """Mesh(dp=2) alone initializes torch.distributed; equal batches: as one process."""
    script = tmp_path / "loop.py"
    script.write_text(SNIPPET)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    assert len({line.split(":")[1] for line in lines}) == 1
