"""The settings of a run by group: names, types, defaults and help texts (under each field).

Each class is a group of `fastpar train --help-all`. The defaults train for minutes on two CPU
cores; `make train` uses another recipe. rules.py says which values are allowed.
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
    """Model size."""

    model: str = "mini"
    """Preset: gpt2, gpt2-medium, gpt2-large, gpt2-xl; nanochat-d12, llama-1b, qwen3-0.6b; for CPUs
    micro, mini, small-cpu, nanochat-tiny, llama-tiny, qwen3-tiny."""
    n_layer: int | None = None
    """Number of layers; unset: the preset's."""
    n_head: int | None = None
    """Number of attention heads; unset: the preset's."""
    n_embd: int | None = None
    """Embedding width; unset: the preset's."""
    block_size: int | None = None
    """Context length in tokens; unset: the preset's."""

    def sizes(self) -> dict[str, int]:
        """The sizes that override the preset, by their names in GPTConfig."""
        sizes = {n: getattr(self, n) for n in ("n_layer", "n_head", "n_embd", "block_size")}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class ModelSettings(ModelSize):
    """Model."""

    dropout: float | None = None
    """Dropout probability; unset: the preset's."""
    init_from: str | None = None
    """Start from these weights: a transformers folder, a checkpoint, or nanoGPT's ckpt.pt.
    Replaces --model. With --n-expert, each expert starts as a copy of the layer's MLP."""
    n_expert: int = 0
    """Number of experts that replace an MLP (mixture of experts); 0: no experts."""
    expert_top_k: int = 2
    """Number of experts that process each token."""
    expert_every: int = 1
    """Use experts in every N-th layer; 1: in all layers."""
    expert_hidden: int | None = None
    """Hidden width of an expert; unset: that of an MLP."""
    expert_capacity: float | None = None
    """Capacity factor: most tokens per expert, as a multiple of the average; unset: no limit."""
    balance_loss: float = 0.01
    """Weight of the auxiliary loss that balances the load of the experts."""
    router_z_loss: float = 0.0
    """Weight of the router z-loss (squared logsumexp of the router's logits)."""
    balance_rate: float = 0.0
    """Step size of a router bias that balances the load without balance-loss (set that to 0)."""


@dataclass(frozen=True)
class TextSettings:
    """Training text and batch size."""

    data: str = "bible"
    """Training text: bible, stdlib (Python's source), or a path of text, .jsonl, parquet or .bin.
    hf:NAME loads a Hugging Face dataset."""
    tokenizer: str = "auto"
    """bytes, chars, bpe-N (a BPE of N tokens trained on the text), gpt2, or a saved one's folder.
    auto: bpe-4096."""
    batch_size: int = 8
    """Sequences per step: the global batch over all ranks and micro-batches."""


@dataclass(frozen=True)
class DataSettings(TextSettings):
    """Data and batches."""

    data_field: str = "text"
    """Field that holds the text in .jsonl, parquet and Hugging Face datasets."""
    token_bits: Literal[16, 32, 64] = 16
    """Bits per token id in nanoGPT's train.bin and val.bin."""
    micro_batch_size: int | None = None
    """Sequences per forward pass on each rank; unset: up to 16384 tokens."""
    pack: Literal["stream", "documents"] = "stream"
    """stream: cut the text into windows, across documents.
    documents: pack whole documents into rows, and mask attention between them."""


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer and learning rate schedule: linear warm-up to lr, then decay to min-lr."""

    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    """adafactor: no first moments. muon: for the matrices of blocks, and adamw for the rest."""
    master_weights: Literal["auto", "full", "remainder"] = "auto"
    """Master copies of 16-bit weights. full: fp32; auto: full.
    remainder (bf16 only): only the missing 16 bits, with the same result."""
    moment_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of adamw's moments; bf16 and int8 use stochastic rounding."""
    stochastic_rounding: bool = False
    """Train bf16 weights without master copies, with stochastic rounding (adamw only)."""
    lr: float | None = None
    """Peak learning rate; unset: 2.5e-3, with init-from 3e-4.
    adafactor reads it as a relative step size: about 0.03."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices that muon updates."""
    min_lr: float | None = None
    """Learning rate at the end; unset: lr / 10 with cosine, 0 with wsd and linear."""
    lr_schedule: Literal["cosine", "wsd", "linear"] = "cosine"
    """Decay after warm-up. cosine: half a cosine; linear: a straight line.
    wsd: constant, then linear at the end (warmup-stable-decay)."""
    lr_decay_fraction: float = 0.4
    """With lr-schedule wsd: fraction of max-steps that the final decay takes."""
    warmup_steps: int | None = None
    """Warm-up steps; unset: max-steps / 10, at least 20 or half of them, at most 1000."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of adamw's two moments."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999; unset: no average."""
    outer_every: int | None = None
    """Synchronize replicas every N steps by an outer optimizer (DiLoCo); 30 to 500 are usual."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. With 1 and outer-momentum 0, weights are averaged."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer optimizer."""
    outer_wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format that replicas exchange. fp32: the weights; others: compressed weight differences.
    The compression error is added to the next exchange."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""


@dataclass(frozen=True)
class RunSettings:
    """Run: length, output folder, validation, checkpoints."""

    max_steps: int = 2000
    """Total number of steps; the learning rate schedule ends there."""
    max_time: str | None = None
    """Save and stop after this time, counted from this start: 300s, 5m, 1h30m."""
    out: str | None = None
    """Output folder; unset: the first free one of runs/NAME, runs/NAME-2, ..."""
    name: str | None = None
    """Name of the run; unset: made from the model size and the data."""
    resume: bool = False
    """Resume the run in --out with its settings; flags override them."""
    auto_resume: bool = False
    """Resume the run in --out if it exists, otherwise start it. Restarts imply this."""
    seed: int = 1
    """Random seed of initial weights, batches and dropout."""
    eval_every: int = 200
    """Validate every N steps; 0: only at the end."""
    eval_batches: int = 16
    """Number of validation batches, each of batch-size sequences."""
    save_every: int = 1000
    """Save a checkpoint every N steps; 0: only at the end."""
    keep_last: int = 2
    """Keep the newest N checkpoints; 0: all."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of N; 0: none."""
    logger: Annotated[Logger, for_tyro(lambda conf: conf.arg(aliases=["--log"]))] = "auto"
    """Where to log, besides metrics.jsonl; auto: tensorboard if installed."""


@dataclass(frozen=True)
class SystemSettings:
    """Machine. What auto chooses is printed at the start."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if there is one, otherwise cpu."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of weights and activations; auto: bf16 on cuda, and on CPUs with AMX for models of
    n-embd 768 or more (not with --init-from), else fp32. 16-bit weights have fp32 master copies."""
    fp8: Literal["none", "mlp", "all"] = "none"
    """8-bit matrix products: in MLPs (mlp), or also in attention's linear layers (all).
    Needs bf16 and a GPU of sm_89 or later."""
    fp8_scaling: Literal["row", "block", "tensor"] = "row"
    """What shares a scale. row: each row; block: 128 features of a row (works with tp).
    tensor: the whole tensor; its scale comes from the last 16 steps."""
    fp8_weight_gradient: Literal["bf16", "fp8"] = "bf16"
    """Format of the products that compute weight gradients; fp8 needs fp8-scaling tensor."""
    fp8_emulate: bool = False
    """Emulate fp8 on any device: the same numbers, but slower than bf16. For experiments."""
    nproc: int = 1
    """Number of ranks (processes) to start on this machine."""
    threads: int | None = None
    """CPU threads per rank; unset: cores / ranks."""
    compile: bool = False
    """Compile the model by torch.compile: slower start, faster steps."""
    cuda_graphs: bool | None = None
    """Replay each step as one CUDA graph. Unset: on one rank, where that is possible. On several
    data-parallel ranks the graph has NCCL's collectives, which never ran here."""


@dataclass(frozen=True)
class RecomputeSettings:
    """Activation memory."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute blocks in backward. selective: all but matrix products and attention."""
    offload_activations: bool = False
    """Keep the inputs of recomputed blocks in host memory until backward."""


@dataclass(frozen=True)
class FaultSettings:
    """Faults and restarts."""

    async_save: bool = True
    """Write checkpoints in the background: training waits only for a copy of the state."""
    save_overlap: Literal["wait", "skip"] = "wait"
    """If a save is due while another is being written: wait for it, or skip the new one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if the loss or a gradient is NaN or inf: stop the run, or skip the update."""
    check_replicas_every: int = 0
    """Every N steps, compare the weights and states of all ranks bit for bit; 0: never."""
    timeout: str = "30m"
    """End the run and name the rank, if others wait for it for this long: 300s, 1h."""
    max_restarts: int = 0
    """How often to restart all --nproc ranks after one died."""


@dataclass(frozen=True)
class SampleSettings:
    """Text generation."""

    prompt: Annotated[tuple[str, ...], for_tyro(lambda c: c.UseAppendAction)] = ()
    """Prompt; repeat the flag for several. Unset: a newline."""
    num_samples: int = 2
    """Number of texts per prompt. In `fastpar train`, 0 generates none at the end."""
    max_new_tokens: int = 200
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the most likely token; 1: the model's probabilities."""
    top_k: int | None = 50
    """Sample from the k most likely tokens only; 0: from all."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):  # a file, or a run of an earlier version
            object.__setattr__(self, "prompt", (self.prompt,) if self.prompt else ())


@dataclass(frozen=True)
class TrainFlags:
    """Train a GPT-2 on text.

    --config FILE.toml reads settings, one per line: max-steps = 500. Flags override the file.

    --unset NAME ... resets settings of the file, or of the run to resume, to their defaults.
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
        """Every setting by name, without groups: the contents of config.json."""
        return flat(self)

    def replace(self: FlagsT, changes: Mapping[str, Any], source: str = "settings") -> FlagsT:
        """A copy with the named settings changed; errors name `source` as their origin."""
        return changed(self, changes, "train", source)


# Shown by `fastpar train --help`; --help-all shows every setting.
USUAL = (
    *("model", "n-layer", "n-head", "n-embd", "block-size", "dropout", "init-from"),
    *("data", "tokenizer", "batch-size", "micro-batch-size"),
    *("optimizer", "lr", "lr-schedule", "warmup-steps", "weight-decay"),
    *("max-steps", "max-time", "out", "resume", "seed", "eval-every", "save-every"),
    *("device", "dtype", "nproc", "compile", "deterministic", "max-restarts"),
    *("tp", "pp", "zero", "activation-checkpointing", "prompt", "num-samples"),
)
