"""What does not fit is refused: named, at once, and on every rank that is still there.

tests/settings/test_rules.py has every rule of fastpar/settings/rules.py; here some of each kind.
"""

import functools
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import slow, sweep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastpar import GPT, AdamW, GPTConfig, Mesh, Saver, engine_of, parallelize
from fastpar.kernels import _C
from fastpar.optim import adamw as optim
from fastpar.optim.adafactor import Adafactor
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


def with_units(chosen):
    model = nn.Sequential(stack(), nn.ReLU())
    parallelize(model, Mesh(), zero_stage=3, units=chosen(model))


OTHERS = [
    (lambda: parallelize(nn.Sequential(nn.LazyLinear(4)), Mesh()),
     r"parameter '0.weight' is not initialized .*; call the model once"),
    (lambda: parallelize(stack(), None),
     r"expected a fastpar.Mesh, got mesh=NoneType; pass fastpar.Mesh\(\)"),
    (lambda: parallelize(stack().parameters(), Mesh()),
     r"expected a torch.nn.Module, got model=generator; pass the model"),
    (lambda: parallelize(fully_shard(stack(), mesh=init_device_mesh("cpu", (1,))), Mesh()),
     r"plain parameters, got DTensor '0.weight'; drop FSDP and fully_shar"),
    (lambda: parallelize(FullyShardedDataParallel(stack(), device_id=torch.device("cpu")), Mesh()),
     r"plain parameters, got Parameter '_fsdp_wrapped_module._flat_param'"),
    (lambda: parallelize(DistributedDataParallel(stack()), Mesh()),
     r"without DistributedDataParallel, which averages gradients too, got 'model'"),
    (lambda: with_units(lambda model: [nn.Linear(2, 2)]),
     r"units contains a Linear that is not inside the model; pass"),
    (lambda: with_units(lambda model: [model[0], model[0][1]]),
     r"units contains a Linear inside another unit; leave"),
    (lambda: DistributedDataParallel(parallelize(stack(), Mesh())),
     r"DistributedDataParallel: the model went through fastpar.parallelize, .*; do not wrap"),
]  # fmt: skip


def test_models_and_meshes_of_others(one_process):
    """Modules that were wrapped, split or never filled, units of none, other things than a Mesh."""
    for build, message in OTHERS:
        with pytest.raises(ValueError, match=message):
            build()


def gpt(**changes):
    return GPT(GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 40, "vocab_size": 64, **changes}))


def some_complex():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.complex64))


EXPERTS = {"block_size": 16, "n_expert": 4, "top_k": 2}
INT8 = {"wire_gradients": "int8", "zero_stage": 1}
SUMS = {"deterministic": True}
REFUSED = [  # ranks, model, axes of the mesh, settings, words
    # By rules of settings, which know the ranks, or the model
    (2, stack, {}, {"zero_stage": 4}, r"one of 0, 1, 2, 3 for zero_stage, got zero_sta.*4"),
    (2, stack, {}, {"shard_size": 3}, r"shard_size to divide the 2 data-.*, got shard_size=3"),
    (2, gpt, {}, {"deterministic": 2}, "expected bool for deterministic, got"),
    (3, lambda: gpt(**EXPERTS), {"ep": 3}, {}, "ep to divide n_expert=4, got ep=3; change n"),
    (2, lambda: gpt(**EXPERTS, expert_capacity=1.0), {"cp": 2}, {},
     "^expert_capacity does not support cp: each rank"),
    # By parameters
    (2, stack, {}, {"grad_dtype": torch.int32}, r"of fp32, bf16, fp16 for grad_dtype, got .*int32"),
    (2, some_complex, {}, {}, r"fp16 or fp64 parameters, got dtype=torch\.complex64 for '1\.w"),
    (2, lambda: stack().bfloat16(), {}, SUMS, r"deterministic=True needs .* fp32, got .* for '0\."),
    (2, lambda: stack().double(), {}, INT8, "formats do not support gradients in torch.float64"),
    (2, lambda: stack().to("meta"), {}, {}, "parameter '0.weight' is on the meta device; pass mat"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "model", "axes", "settings", "words"), REFUSED)
def test_settings_that_do_not_fit(ranks, model, axes, settings, words):
    def rank():
        parallelize(model(), Mesh(**axes), Parallel.of(**settings))

    assert_all_raise(on_ranks(rank, ranks), ValueError, words)


def test_models_that_do_not_fit():
    def ranks(stage):
        for kind in (nn.Embedding, nn.EmbeddingBag):  # each rank would write others of its rows
            model = nn.Sequential(kind(5, 4, max_norm=0.5))
            with pytest.raises(ValueError, match=r"embedding '0' has max_norm=0.5, .*; set max_n"):
                parallelize(model, Mesh(), zero_stage=stage)
            model.requires_grad_(False)
            parallelize(model.append(nn.Linear(4, 4)), Mesh(), zero_stage=stage)
        with pytest.raises(ValueError, match=r"parameter on meta, got device=cpu for '0\.weight"):
            parallelize(stack(), Mesh(), zero_stage=stage, materialize=lambda name, tensor: None)
        with pytest.raises(ValueError, match=r"was parallelized before \(parameter '1\.weight'\)"):
            parallelize(model, Mesh())
        with pytest.raises(ValueError, match=r"Sequential has no engine; pass the module that"):
            engine_of(stack())

    for stage in (0, 3):
        run_ranks(ranks, 2, stage)
    parallelize(nn.Sequential(nn.Embedding(5, 4, max_norm=0.5)), Mesh(device="cpu"))  # no replicas


def test_ranks_that_begin_differently_are_told():
    def ranks(widths, bucket_mb):
        here = dist.get_rank()
        parallelize(nn.Linear(3, widths[here]), Mesh(), Parallel.of(bucket_mb=bucket_mb[here]))

    for widths, bucket_mb, message in (
        ((2, 3), (1.0, 1.0), r"'parameter weight \[3, 3\] .* on rank 1, '.* \[2, 3\] .* on rank 0"),
        ((2, 2), (1.0, 2.0), r"differ: 'bucket_mb=2\.0' on rank 1, 'bucket_mb=1\.0' on rank 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run_ranks(ranks, 2, widths, bucket_mb)


@sweep(
    ("ranks", "axes", "shape", "options", "rule"),
    [
        (2, {"tp": 2}, (1, 15), {"sequence_parallel": True}, r"B \* T divisible by 2 with"),
        (4, {"tp": 2, "cp": 2}, (2, 10), {"cp_method": "keys"}, "T divisible by 4 with"),
        (4, {"cp": 4}, (2, 12), {"cp_method": "keys"}, "T divisible by 8 with"),
    ],
)
def test_tokens_that_sequence_parallelism_would_pad_are_refused(ranks, axes, shape, options, rule):
    def rank():
        model = parallelize(gpt(**EXPERTS), Mesh(**axes), Parallel.of(**options))
        model(torch.zeros(shape, dtype=torch.int64))

    with pytest.raises(ValueError, match=rf"{rule} experts .* got idx=\[{shape[0]}, "):
        run_ranks(rank, ranks)


ADDED = [
    lambda model: setattr(model[1], "scale", nn.Parameter(torch.ones(16))),
    lambda model: setattr(model[1], "more", nn.Linear(2, 2)),
    lambda model: model.__setitem__(1, nn.Linear(16, 16)),
    lambda model: model.__delitem__(1) or model.append(nn.Linear(16, 16)),  # at the same address
]


def frozen_at_first(model):
    model[1].scale = nn.Parameter(torch.ones(16), requires_grad=False)
    engine_of(model).shards.check()
    model[1].scale.requires_grad_(True)


@stages
def test_a_part_that_is_put_into_a_model(stage):
    """At once, or after some steps, when check() has found the others right."""

    def refused(change, steps, message):
        def ranks():
            model = parallelize(stack(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
            for _ in range(steps):
                model(torch.ones(2, 16)).sum().backward()
            change(model)
            model(torch.ones(2, 16)).sum().backward()
            engine_of(model).shards.check()

        assert_all_raise(on_ranks(ranks), RuntimeError, message)

    def replaces(model):
        model[1].weight = nn.Parameter(torch.ones(16, 16))

    refused(replaces, 0, r"parameter '1\.weight' of the model was replaced by another object")
    for change, steps in (*itertools.product(ADDED, (0, 2)), (frozen_at_first, 2)):
        added = "parameter '.*' was added to the model after fastpar.parallelize; add"
        refused(change, steps, added)


class Reentrant(nn.Linear):
    """A reentrant checkpoint inside of a model that goes on after it."""

    def forward(self, x):
        x = x.requires_grad_()
        return super().forward(checkpoint(super().forward, x, use_reentrant=True))


def rows():
    table = nn.Embedding(5, 16, sparse=True)
    table.forward = lambda x, of=table.forward: of(torch.arange(2))
    return table


@stages
def test_backwards_that_do_not_fit(stage):
    """Told by each rank, and torch's own errors are torch's; then the ranks go on."""

    def ranks(build, message, backward=torch.Tensor.backward):
        model = nn.Sequential(nn.Linear(16, 16), build())
        parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        loss = model(torch.ones(2, 16)).square().sum()
        with pytest.raises(RuntimeError, match=message):
            backward(loss)

    create = functools.partial(torch.Tensor.backward, create_graph=True)
    for case in (
        (rows, r"a dense gradient for parameter '1\.weight', got layout=torch.sparse"),
        (lambda: Reentrant(16, 16), r"a backward ran inside of another.*use_reentrant=False"),
        (lambda: nn.Linear(16, 16), r"create_graph=True", create),
    ):
        run_ranks(ranks, 2, *case)

    def goes_on():
        model = parallelize(stack(), Mesh(), zero_stage=stage)
        optimizer = AdamW(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 16)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
            loss.backward()
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        return model.state_dict()["0.weight"]

    first, second = run_ranks(goes_on, 2)
    assert torch.equal(first, second)


def train(case, stage):
    """Rank 1 does something else in step 1."""
    mesh = Mesh(timeout_s=4.0, device="cpu")
    model = parallelize(stack(), mesh, Parallel.of(zero_stage=stage, **SMALL))
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
    outcomes = on_ranks(lambda: train(case, stage), timeout_s=30)
    message = r"(on|of|from|Engine:) rank \d.* (bucket \d+ of step \d|backward passes)"
    message += r"|ranks differ: \d backward passes on rank|ranks differ: rank \d begins"
    assert_all_raise(outcomes, RuntimeError, message)


def test_a_micro_batch_more_on_one_rank_is_told():
    """One that sends nothing, so that all collectives are the same."""

    def ranks(stage):
        mesh = Mesh()
        model = parallelize(stack(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        if mesh.rank == 1:
            with engine_of(model).no_sync():
                model(torch.ones(2, 16)).sum().backward()
        model(torch.ones(2, 16)).sum().backward()
        AdamW(model.parameters()).step()

    for stage in (0, 2):
        outcomes = on_ranks(functools.partial(ranks, stage))
        assert_all_raise(outcomes, RuntimeError, "2 backward passes on rank 1, 1 on rank 0; give")


@pytest.mark.parametrize("kind", [0, 1])
def test_other_collectives_on_one_rank_are_told(kind):
    """A reduction or gather that only one rank has launched, as where ranks skip other units."""

    def ranks():
        mesh = Mesh()
        model = parallelize(stack(), mesh, Parallel.of(zero_stage=2, **SMALL))
        model(torch.ones(2, 16)).sum().backward()
        if mesh.rank == 1:
            engine_of(model).log.note(kind, 0)
        AdamW(model.parameters()).step()

    outcomes = on_ranks(ranks)
    assert_all_raise(outcomes, RuntimeError, "ranks 0 and 1 launched different collectives")


# Steps of optimizers over parameters of which a rank has only a part
def step(optimizer):
    optimizer.step()


def step_with(stage, build, drive=step):
    """A backward and a step on two ranks, with the optimizer that build(model) makes."""

    def ranks():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parallelize(model, Mesh(), zero_stage=stage)
        optimizer = build(model)
        model(torch.ones(2, 3)).sum().backward()
        drive(optimizer)
        return torch.cat([p.flatten() for p in model.state_dict().values()])

    return run_ranks(ranks, 2)


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


FACTORED = r"Adafactor: does not work with zero_stage={stage}, tp=1, as its .* whole matrices; use"
ZEROING = r"zero_grad_in_step does not work with zero_stage >= 1 or offload, got zero_stage={stage}"
CAPTURE = r"capturing a CUDA graph needs one rank or fastpar\.graphed, got zero_stage={stage}"
STEPS = [
    (Adafactor, {}, step, ValueError, FACTORED),
    (AdamW, {"zero_grad_in_step": True}, step, ValueError, ZEROING),
    (AdamW, {"capturable": True}, step, RuntimeError, CAPTURE),
]


@pytest.mark.parametrize(("cls", "options", "drive", "error", "message"), STEPS)
def test_what_no_rank_can_step_is_refused(monkeypatch, cls, options, drive, error, message):
    monkeypatch.setattr(optim, "capturing", lambda device: "capturable" in options)
    for stage in (1, 2, 3):
        with pytest.raises(error, match=message.format(stage=stage)):
            step_with(stage, lambda model: cls(model.parameters(), **options), drive)
    if "zero_grad_in_step" in options:  # whole gradients do
        a, b = step_with(0, lambda model: cls(model.parameters(), **options), drive)
        assert torch.equal(a, b)


def steps_without_an_engine(wrap, cls, tmp_path):
    mesh = Mesh()
    model = wrap(stack(), mesh)
    optimizer = cls(model.parameters(), lr=0.1)
    Saver(tmp_path, model=model)
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()


def test_a_model_that_was_not_parallelized_is_told_at_its_first_step(tmp_path):
    def forgotten(model, mesh):
        return model

    for cls in (AdamW, torch.optim.AdamW):
        with pytest.warns(UserWarning, match="has 2 ranks, but") as told:
            run_ranks(steps_without_an_engine, 2, forgotten, cls, tmp_path)
        texts = sorted(str(each.message) for each in told if "has 2 ranks" in str(each.message))
        name = f"{cls.__name__}.step: the Mesh has 2 ranks, but these parameters belong to no"
        assert texts[0].startswith(name)
        assert texts[0].endswith("of its own; call fastpar.parallelize(model, mesh) first")
        assert len(texts) == 3  # a step on each rank, and the Saver of the second
        assert texts[2].startswith(f"Saver of {tmp_path}: the Mesh has 2 ranks")
        assert "each rank writes into one folder" in texts[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(steps_without_an_engine, 2, parallelize, AdamW, tmp_path)
        run_ranks(steps_without_an_engine, 1, forgotten, AdamW, tmp_path)


def quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrap in (lambda model, mesh: DistributedDataParallel(model), fsdp):
            steps_without_an_engine(wrap, torch.optim.AdamW, tmp_path)


def fsdp(model, mesh):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.slow
def test_models_of_ddp_and_fsdp_are_not_told_so(tmp_path):
    run_ranks(quiet, 2, tmp_path, backend="gloo")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("added", r"Engine: parameter 'a' was added to the model after fastpar\.parallelize; add"),
        ("unfrozen", r"Engine: parameter '1\.bias' was frozen .* and now has requires_grad=True"),
    ],
)
def test_what_no_engine_reduces_is_refused_when_all_else_is_frozen(how, message):
    """An adapter on a base that was frozen after parallelize: each rank would train its own."""

    def ranks(stage, cls, mixed):
        mesh = Mesh()
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].bias.requires_grad_(False)
        parallelize(model, mesh, zero_stage=stage)
        base = list(model.parameters())[:3]
        model.requires_grad_(False)
        new = model[1].bias.requires_grad_(how == "unfrozen")
        if how == "added":
            new = model.a = nn.Parameter(torch.ones(3))
        optimizer = cls([new, *base] if mixed else [new], lr=0.1)
        (model(torch.ones(2, 3)) * (new + mesh.dp_rank)).sum().backward()
        optimizer.step()

    for world_size, stage, cls, mixed in (
        (1, 0, AdamW, False), (2, 0, AdamW, True), (2, 0, torch.optim.SGD, False),
        (2, 0, torch.optim.SGD, True), (2, 3, AdamW, False),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            run_ranks(ranks, world_size, stage, cls, mixed)


def test_what_is_unfrozen_after_good_steps_is_refused():
    """Also beside a parameter of another model, which was there in each step."""
    for cls in (AdamW, torch.optim.SGD):
        model, other = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        model.bias.requires_grad_(False)
        parallelize(model, Mesh(device="cpu"))
        optimizer = cls([other, model.bias, model.weight], lr=0.1)
        for _ in range(2):
            (model(torch.ones(2, 3)) * other).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.weight.requires_grad_(False)
        model.bias.requires_grad_(True)
        (model(torch.ones(2, 3)) * other).sum().backward()
        with pytest.raises(RuntimeError, match=r"'bias' was frozen .* and now has requires_grad=T"):
            optimizer.step()


def test_a_loss_scale_of_torch_sees_no_main_gradients():
    model = nn.Linear(3, 3).bfloat16()
    parallelize(model, Mesh(), grad_dtype=torch.float32)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"GradScaler does not see main gradients, .*; paral"):
        scaled(AdamW(model.parameters(), master_weights=True))


@pytest.mark.parametrize("cls", [AdamW, Adafactor])
def test_an_optimizer_older_than_the_engine_is_refused(cls):
    def ranks(stage):
        model = nn.Sequential(nn.Linear(3, 3))
        optimizer = cls(model.named_parameters())
        parallelize(model, Mesh(), zero_stage=stage)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    words = rf"{cls.__name__}\.step: parameter 0 of group 0 \('0\.weight'\) was parallelized after"
    for stage in (0, 3):
        with pytest.raises(RuntimeError, match=words):
            run_ranks(ranks, 2, stage)


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
print(bool(depends_on_threads(getattr(torch, dtype))))
print(*(w.message for w in caught))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "dtype", "setting"),
    [
        slow("import", "float32", {}),
        ("product", "float32", {}),
        slow("import", "float32", {"MKL_CBWR": "COMPATIBLE"}),
        slow("import", "bfloat16", {}),
        slow("import", "bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
    ],
)
def test_products_that_depend_on_threads_are_said(first, dtype, setting):
    """On Intel's CPUs fastpar asks MKL for the same bits with any number of threads: before the
    first product."""
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("MKL_", "ONEDNN_"))}
    command = [sys.executable, "-c", THREADS, first, dtype]
    env = {**unset, "PYTHONPATH": str(ROOT), **setting}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    products, warned = done.stdout.split("\n", 1)
    depends = products == "True"
    assert ("matrix products on this CPU depend on the number of threads" in warned) == depends
    if _C is not None and _C.cpu_is_intel() and torch.backends.mkl.is_available():
        if dtype == "float32":
            assert depends == (first == "product" or bool(setting))
            assert ("set MKL_CBWR=AUTO,STRICT before" in warned) == depends
        elif depends:
            assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before the process starts" in warned
            assert not setting
    else:
        assert "before the process starts" not in warned
