"""Training steps as `fastpar train` does them, with their memory measured, of a workload and a setup."""

import gc

import torch

from fastpar.comm.mesh import Mesh
from fastpar.config.config import GPTConfig
from fastpar.config.options import OptimSettings
from fastpar.cost.step_memory import StepMemory
from fastpar.cost.workload import Workload, Setup
from fastpar.kernels import make_key
from fastpar.kernels.linear_cross_entropy import _local as workspaces
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.optim.schedule import make_optimizer
from fastpar.parallel.engine import engine_of
from fastpar.parallel.parallelize import parallelize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2  # the first makes the optimizer's state and learns the order of gathers


def workload(n_layer=4, width=128, heads=4, tokens=128, batch=4, vocab=512, dropout=0.0):
    shape = GPTConfig(
        n_layer=n_layer,
        n_head=heads,
        n_embd=width,
        block_size=tokens,
        vocab_size=vocab,
        dropout=dropout,
    )
    return Workload(shape, batch)


def setup(**settings):
    """As Setup.of has it, of these settings of a run on the CPU."""
    half = settings.get("dtype", "fp32") != "fp32"
    usual = {
        "dtype": "fp32",
        "device_type": "cpu",
        "transport": "shm",
        "accumulate": "shard" if settings.get("zero_stage", 0) >= 2 else "full",
        "master_weights": "full" if half else "none",
    }
    return Setup(**{**usual, **settings})


def optim_of(setup):
    masters = "remainder" if setup.master_weights == "remainder" else "auto"
    return OptimSettings(
        optimizer=setup.optimizer, moment_dtype=setup.moment_dtype, master_weights=masters
    )


def build(workload, setup, mesh):
    """(model, optimizer), as the trainer makes them."""
    torch.manual_seed(0)
    model = GPT(workload.shape).to(mesh.device, DTYPES[setup.dtype])
    half = setup.weight_bytes == 2
    parallelize(
        model,
        mesh,
        zero_stage=setup.zero_stage,
        shard_size=setup.shard_size,
        bucket_mb=setup.bucket_mb,
        grad_dtype=DTYPES[setup.grad_dtype] if half else None,
        reduce_dtype=DTYPES[setup.reduce_dtype] if setup.reduce_dtype != setup.grad_dtype else None,
        accumulate=setup.accumulate,
        grad_accum_steps=setup.grad_accum_steps,
        sequence_parallel=setup.sequence_parallel,
    )
    recompute(model, setup.activation_checkpointing)
    optimizer = make_optimizer(model, optim_of(setup), dtype=DTYPES[setup.dtype], seed=0)
    return model, optimizer


def step(model, optimizer, workload, setup, mesh):
    engine = engine_of(model)
    rows, tokens = setup.micro_batch_size, workload.seq_len
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for j in range(setup.grad_accum_steps):
        generator = torch.Generator().manual_seed(7 * j + mesh.dp_rank)
        ids = torch.randint(workload.shape.vocab_size, (rows, tokens + 1), generator=generator)
        x, y = ids[:, :-1].to(mesh.device), ids[:, 1:].to(mesh.device)
        part = model(x, y, rng_key=make_key(0, j).to(mesh.device)) / setup.grad_accum_steps
        part.backward()
        loss += part.detach()
    engine.contribute(loss.reshape(1))
    optimizer.step()
    optimizer.zero_grad()


def measure(workload, setup, mesh):
    """The peak of the last of STEPS steps."""
    workspaces.__dict__.clear()
    while gc.collect():  # models of earlier cells
        pass
    model, optimizer = build(workload, setup, mesh)
    for _ in range(STEPS - 1):
        step(model, optimizer, workload, setup, mesh)
    with StepMemory(mesh.device) as memory:
        step(model, optimizer, workload, setup, mesh)
    return memory.peak_bytes


def measure_all(cells):
    """Of every cell, on this rank of a process group that fits them all."""
    torch.set_num_threads(1)
    found = []
    for one, setup in cells:
        mesh = Mesh(tp=setup.tp, device="cpu")
        found.append(measure(one, setup, mesh))
    return found
