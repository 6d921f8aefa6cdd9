"""The settings of a run by group: names, types, defaults, and under each field its help.

Each class is a group of `fastpar train --help-all`. The defaults are a run of minutes on two CPU
cores; `make train` adds a recipe of its own. What the values must be is in config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from fastpar.settings.fields import changed, flat, for_tyro
from fastpar.settings.parallel import MeshSettings, Parallel

FlagsT = TypeVar("FlagsT", bound="TrainFlags")
Logger = Literal["auto", "none", "tensorboard", "wandb"]


@dataclass(frozen=True)
class ModelSize:
    """The model's size."""

    model: str = "mini"
    """Size: gpt2, gpt2-medium, gpt2-large, gpt2-xl; for CPUs micro, mini, small-cpu."""
    n_layer: int | None = None
    """Layers, instead of the size's own."""
    n_head: int | None = None
    """Attention heads, instead of the size's own."""
    n_embd: int | None = None
    """Width, instead of the size's own."""
    block_size: int | None = None
    """Context in tokens, instead of the size's own."""

    def sizes(self) -> dict[str, int]:
        """Those given instead of the size's own, as GPTConfig has them."""
        found = {n: getattr(self, n) for n in ("n_layer", "n_head", "n_embd", "block_size")}
        return {name: size for name, size in found.items() if size is not None}


@dataclass(frozen=True)
class ModelSettings(ModelSize):
    """The model."""

    dropout: float | None = None
    """Dropout probability, instead of the size's own."""
    init_from: str | None = None
    """Start from these weights (transformers folder, checkpoint, nanoGPT's ckpt.pt); no --model.
    With --n-expert each MLP becomes so many equal experts."""
    n_expert: int = 0
    """Experts in the place of a layer's MLP; 0: none."""
    expert_top_k: int = 2
    """Experts that each token goes through."""
    expert_every: int = 1
    """Every so many layers have experts."""
    expert_hidden: int | None = None
    """Features of an expert; unset: as many as an MLP's, 4 * n-embd."""
    expert_capacity: float | None = None
    """Choices that an expert takes at most, times the mean; unset: all."""
    balance_loss: float = 0.01
    """Factor of the loss that balances experts."""
    router_z_loss: float = 0.0
    """Factor of the squared logsumexp of their logits."""
    balance_rate: float = 0.0
    """Step of a bias that balances them without a loss (then --balance-loss 0)."""


@dataclass(frozen=True)
class TextSettings:
    """Text, and how much of it is a step."""

    data: str = "bible"
    """bible, stdlib, path of text, .jsonl or .bin, hf:NAME."""
    tokenizer: str = "auto"
    """bytes, chars, bpe-N (N tokens, learned from the text), gpt2, or a folder; auto: bpe-4096."""
    batch_size: int = 8
    """Sequences a step, over all ranks and micro-batches."""


@dataclass(frozen=True)
class DataSettings(TextSettings):
    """Text and batches."""

    data_field: str = "text"
    """Where .jsonl, parquet and datasets have the text."""
    token_bits: Literal[16, 32, 64] = 16
    """Of an id in nanoGPT's train.bin and val.bin."""
    micro_batch_size: int | None = None
    """Sequences computed at once; unset: up to 16384 tokens."""
    pack: Literal["stream", "documents"] = "stream"
    """documents: from their beginnings, best fit, blind to each other."""


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer and its schedule: linear warm-up to lr, then down to min-lr."""

    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    """adafactor: no first moments; muon: for the blocks' matrices, adamw for all else."""
    master_weights: Literal["auto", "full", "remainder"] = "auto"
    """What 16-bit weights keep beside them: fp32 copies, or (bf16) just the 16 bits they lack."""
    moment_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Of adamw's moments; bf16 and int8 are rounded at random."""
    stochastic_rounding: bool = False
    """Train bf16 weights by adamw alone, rounding at random."""
    lr: float = 2.5e-3
    """Peak learning rate; of adafactor relative, near 0.03."""
    muon_lr: float = 0.02
    """Peak learning rate of muon's matrices."""
    min_lr: float | None = None
    """At the end; unset: lr / 10 of a cosine, else 0."""
    lr_schedule: Literal["cosine", "wsd", "linear"] = "cosine"
    """Down by half a cosine; late by a line (wsd); by a line."""
    lr_decay_fraction: float = 0.4
    """Part of max-steps in which wsd's learning rate falls."""
    warmup_steps: int | None = None
    """Steps of warm-up; unset: max-steps / 10, at most 1000."""
    weight_decay: float = 0.1
    """Decay of matrices; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of adamw's two moments."""
    ema: float | None = None
    """Average the weights, keeping so much a step, such as 0.999."""
    outer_every: int | None = None
    """Steps between two steps of an outer optimizer, for which replicas meet: 30 to 500."""
    outer_lr: float = 0.7
    """Its learning rate; 1 with outer-momentum 0 averages weights: local SGD."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum."""
    outer_wire: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """Exchange differences so, with what they lose added to the next; fp32: weights."""
    max_grad_norm: float = 1.0
    """Clip the gradient's global norm to this; 0: no clipping."""


@dataclass(frozen=True)
class RunSettings:
    """The run: how long, where to, what is kept."""

    max_steps: int = 2000
    """Steps in all; the schedule ends there."""
    max_time: str | None = None
    """Stop after this time in this process: 300s, 5m, 1h30m."""
    out: str | None = None
    """Folder of the run; unset: the first free one of runs/NAME, runs/NAME-2, ..."""
    name: str | None = None
    """Name of the run; unset: size and text."""
    resume: bool = False
    """Go on with the run in --out; flags change its settings."""
    auto_resume: bool = False
    """Go on with the run in --out if there is one, else start it; so is a start by a restart."""
    seed: int = 1
    """Fixes weights, batches and dropout."""
    eval_every: int = 200
    """Steps between two validations; 0: only at the end."""
    eval_batches: int = 16
    """Validation batches, of batch-size sequences each."""
    save_every: int = 1000
    """Steps between two checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Checkpoints that are kept; 0: all."""
    keep_every: int = 0
    """Steps between checkpoints that stay for good; 0: none."""
    logger: Annotated[Logger, for_tyro(lambda conf: conf.arg(aliases=["--log"]))] = "auto"
    """Curves beside metrics.jsonl; auto: tensorboard if installed."""


@dataclass(frozen=True)
class SystemSettings:
    """The machine. auto is decided at the start and printed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda where there is one."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of weights and activations (fp32 main copies); auto: fp32 on cpu, bf16 on cuda."""
    fp8: Literal["none", "mlp", "all"] = "none"
    """Products in 8-bit floats, of MLPs or of all layers of blocks: bf16, GPUs from sm_89 on."""
    fp8_scaling: Literal["row", "block", "tensor"] = "row"
    """What shares a scale: rows; 128 features (with tp); tensors, by their last 16 steps."""
    fp8_weight_gradient: Literal["bf16", "fp8"] = "bf16"
    """With fp8-scaling tensor: weights' gradients by such products, too."""
    fp8_emulate: bool = False
    """Compute fp8's numbers on any device, slower than without."""
    nproc: int = 1
    """Ranks to start on this machine."""
    threads: int | None = None
    """CPU threads a rank; unset: cores / ranks."""
    compile: bool = False
    """torch.compile the model: a slow start, then faster."""
    cuda_graphs: bool | None = None
    """CUDA graphs of the whole step, or of micro-batches; unset: of whole steps where they can be.
    """


@dataclass(frozen=True)
class RecomputeSettings:
    """What blocks keep for backward."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Compute blocks again in backward; selective: all but matrix products and attention."""
    offload_activations: bool = False
    """Inputs of recomputed blocks wait for backward on the host."""


@dataclass(frozen=True)
class FaultSettings:
    """What a run survives, and how."""

    async_save: bool = True
    """Copy the state aside and train on while it is written."""
    save_overlap: Literal["wait", "skip"] = "wait"
    """A save due while one is written waits, or is left out."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or inf as loss or gradient: stop, or leave the update out."""
    check_replicas_every: int = 0
    """Steps between bitwise comparisons of ranks; 0: never."""
    timeout: str = "30m"
    """Report a rank that another waits longer for: 300s, 1h."""
    max_restarts: int = 0
    """Times to start all --nproc ranks again after one died."""


@dataclass(frozen=True)
class SampleSettings:
    """Texts drawn from the model."""

    prompt: Annotated[tuple[str, ...], for_tyro(lambda c: c.UseAppendAction)] = ()
    """Text to go on from, again for several; unset: a new line."""
    num_samples: int = 2
    """Texts of each prompt; of train 0: none."""
    max_new_tokens: int = 200
    """Tokens of each text."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: as the model says."""
    top_k: int | None = 50
    """Only among the k likeliest tokens; 0: among all."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):  # of a file, or of a run before there were several
            object.__setattr__(self, "prompt", (self.prompt,) if self.prompt else ())


@dataclass(frozen=True)
class TrainFlags:
    """Train a GPT-2 on text; every setting can stand in --config FILE.toml too.

    A line of FILE.toml: max-steps = 500. Headings as [model] may stand between; flags win.
    --unset NAME ... takes the defaults of settings that a file, or the run to go on with, has set.
    """

    shape: ModelSettings = field(default_factory=ModelSettings)
    text: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    system: SystemSettings = field(default_factory=SystemSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    parallel: Parallel = field(default_factory=Parallel)
    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)

    def settings(self) -> dict[str, Any]:
        """Every setting by its own name, without the groups: what config.json holds."""
        return flat(self)

    def replace(self: FlagsT, changes: Mapping[str, Any], source: str = "settings") -> FlagsT:
        """A copy with the named settings changed; `source` is where errors say they stand."""
        return changed(self, changes, "train", source)


# What `fastpar train --help` shows; --help-all shows every setting.
USUAL = (
    *("model", "n-layer", "n-head", "n-embd", "block-size", "dropout", "init-from"),
    *("data", "tokenizer", "batch-size", "micro-batch-size"),
    *("optimizer", "lr", "lr-schedule", "warmup-steps", "weight-decay"),
    *("max-steps", "max-time", "out", "resume", "seed", "eval-every", "save-every"),
    *("device", "dtype", "nproc", "compile", "deterministic", "max-restarts"),
    *("tp", "pp", "zero", "activation-checkpointing", "prompt", "num-samples"),
)
