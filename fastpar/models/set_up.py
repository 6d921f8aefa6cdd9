"""Makes engine, recomputation and optimizer of a model from the settings of a run."""

from __future__ import annotations

import dataclasses

import torch

from fastpar.comm.host import bus_of
from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.models.gpt import GPT, use_fp8
from fastpar.nn.recompute import recompute
from fastpar.optim.adafactor import Adafactor
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import make_optimizer
from fastpar.settings.config import TrainConfig
from fastpar.settings.parallel import Offload


def set_up(
    model: GPT, mesh: Mesh, config: TrainConfig, *, dtype: torch.dtype, grad_accum_steps: int
) -> AdamW | Adafactor:
    """Splits the model over the ranks of the mesh; returns the optimizer.

    Args:
        dtype: of its weights: gradients of 16-bit weights are summed in fp32 by default.
    Ranks: all.
    """
    system, kept, parallel = config.system, config.recompute, config.parallel
    use_fp8(
        model,
        system.fp8,
        scaling=system.fp8_scaling,
        weight_gradient=system.fp8_weight_gradient,
        emulate=system.fp8_emulate,
    )
    wide = "fp32" if dtype != torch.float32 else None
    parallelize(
        model,
        mesh,
        dataclasses.replace(parallel, accumulate=config.accumulate),
        grad_accum_steps=grad_accum_steps,
        grad_dtype=parallel.precision.grad_dtype or wide,
        # Its other settings are also of activations, which parallelize() does not know.
        offload=parallel.offload if parallel.offload.what else Offload(),
    )
    bus = bus_of(mesh.device, pinned=parallel.offload.pinned) if kept.offload_activations else None
    recompute(model, kept.activation_checkpointing, offload=bus)
    settings = dataclasses.replace(config.optim, lr=config.lr)
    return make_optimizer(model, settings, dtype=dtype, seed=config.run.seed)
