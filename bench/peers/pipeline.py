"""Pipeline stages of stock.py's model by torch and by DeepSpeed. A sequence is a micro-batch.

torch: PipelineStage with Schedule1F1B and its fused AdamW, layers cut as fastpar cuts them, by
their flops. It has no tied tables: the first and the last stage have a copy each, whose gradients
are added up after the schedule, by hand. DeepSpeed: PipelineModule with a TiedLayerSpec, which cuts
by parameters.
"""

import importlib
import warnings
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers import stock
from bench.peers.stock import stock_model
from fastpar.axes.pipeline.schedules import cut
from fastpar.comm.mesh import gather_tensors
from fastpar.observe.strategies import Contender, Settings, adamw_of, import_deepspeed
from fastpar.settings.model import GPTConfig, part_flops

TORCH, DEEPSPEED = "torch Schedule1F1B", "DeepSpeed pipeline"


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """Some layers of a stock.GPT under its names, and what the first and the last stage add."""

    def __init__(self, model: stock.GPT, layers: range) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == len(model.h)
        self.h = nn.ModuleDict({str(layer): model.h[layer] for layer in layers})
        if self.first or self.last:
            self.wte = model.wte
        if self.first:
            self.wpe = model.wpe
        if self.last:
            self.ln_f = model.ln_f

    def forward(self, x: Tensor) -> Tensor:
        """idx [B, T] or the stream [B, T, C] -> the stream or logits."""
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h.values():
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight) if self.last else x


class _Pipeline(Contender):
    """Every rank is a stage and is given all rows."""

    def __init__(self, name: str, model: nn.Module, optimizer: Any, settings: Settings) -> None:
        super().__init__(name, model, optimizer, settings)
        self.dp_rank, self.dp_size = 0, 1

    def own_weights(self) -> dict[str, Tensor]:
        """Of this stage, by stock.py's names."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for theirs in reversed(gather_tensors(self.own_weights())):
            yield from theirs.items()


class _Torch(_Pipeline):
    def __init__(self, name: str, config: GPTConfig, settings: Settings) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # slow to import

        rank, size = dist.get_rank(), dist.get_world_size()
        ends = [0, *accumulate(cut(part_flops(config), size))]
        model = Stage(stock_model(config), range(ends[rank], ends[rank + 1]))
        super().__init__(name, model, adamw_of(model, settings), settings)
        groups = [[0, size - 1], *([r] for r in range(1, size - 1))]
        self.ends, _ = dist.new_subgroups_by_enumeration(groups)
        stage = PipelineStage(model, rank, size, torch.device(settings.device))
        many = settings.parallel.grad_accum_steps or 1
        self.schedule = Schedule1F1B(stage, many, loss_fn=loss_of)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        model: Any = self.model
        losses: list[Tensor] = []
        if model.first:
            self.schedule.step(x)
        elif model.last:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step()
        if model.first or model.last:
            dist.all_reduce(model.wte.weight.grad, group=self.ends)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        if losses:
            loss = torch.stack(losses).double().mean().detach()
        dist.broadcast(loss, dist.get_world_size() - 1)
        return loss


class _Table(nn.Embedding):
    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Positions(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(x.shape[1]))


class _DeepSpeed(_Pipeline):
    def __init__(self, name: str, config: GPTConfig, settings: Settings) -> None:
        deepspeed = import_deepspeed(settings.device)
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        pipe = importlib.import_module("deepspeed.pipe")
        table = config.vocab_size, config.n_embd
        layers = [
            pipe.TiedLayerSpec("table", _Table, *table),
            pipe.LayerSpec(_Positions, config.block_size, config.n_embd),
            *(pipe.LayerSpec(stock.Block, config) for _ in range(config.n_layer)),
            pipe.LayerSpec(nn.LayerNorm, config.n_embd, eps=config.layer_norm_eps),
            pipe.TiedLayerSpec("table", _Table, *table, forward_fn=_Table.logits),
        ]
        net = pipe.PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=loss_of)
        self.names = {"1": "wpe", str(config.n_layer + 2): "ln_f", "tied_modules.table": "wte"}
        self.names |= {str(i + 2): f"h.{i}" for i in range(config.n_layer)}
        start = stock_model(config).state_dict()
        with torch.no_grad():
            for own, p in net.named_parameters():
                p.copy_(start[self.stock_name(own)])
        options: Any = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9}
        options["gradient_accumulation_steps"] = settings.parallel.grad_accum_steps
        options["zero_allow_untested_optimizer"] = True
        options["gradient_clipping"] = 0.0  # its default is 1.0
        how = {"model": net, "optimizer": adamw_of(net, settings), "config": options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = deepspeed.initialize(**how)
        super().__init__(name, engine, None, settings)

    def stock_name(self, own: str) -> str:
        """The name that stock.py has for a parameter."""
        found = next(layer for layer in self.names if own.startswith(f"{layer}."))
        return self.names[found] + own.removeprefix(found)

    def own_weights(self) -> dict[str, Tensor]:
        engine: Any = self.model
        named = engine.module.named_parameters()
        return {self.stock_name(name): p.detach() for name, p in named}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        engine: Any = self.model
        return engine.train_batch(iter(zip(x.split(1), y.split(1)))).detach()


WAYS = {TORCH: _Torch, DEEPSPEED: _DeepSpeed}


def build(title: str, config: GPTConfig, settings: Settings) -> Contender:
    """The contender, on this rank. Ranks: all."""
    return WAYS[title](title, config, settings)
