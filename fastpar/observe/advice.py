"""Which setting of `fastpar train` to change, by rules on the numbers of a measured step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastpar.comm.recorder import COMPUTE, CONTROL, GATHER, HOST, INPUT, OPTIMIZER, PP, REDUCE, TP
from fastpar.kernels.backend import WITH_CPP
from fastpar.observe.trace import COMMUNICATION
from fastpar.observe.verdict import Measured, percent

HOST_SHARE = 0.25  # of a step: shares from which a rule speaks
EXPOSED_SHARE = 0.1
INPUT_SHARE = 0.05
UPDATE_SHARE = 0.2
POOR = 0.5  # of a ceiling
SMALL_ROWS = 2048  # of a product: below, a GPU's is launched in vain
SMALL_BUCKET_MB = 1.0


def advise(measured: Measured) -> list[str]:
    """What to change, the most promising first; each names a flag."""
    found = [text for rule in RULES for text in rule(measured)]
    if found:
        return found
    reached = percent(measured.of_matmul(measured.phases))
    products = f", products at {reached} of the ceiling" if reached else ""
    return [f"No rule applies: {measured.bound}-bound{products}."]


def _kernels(m: Measured) -> Iterator[str]:
    backend = m.situation.forced_backend
    if backend == "none":
        yield f"There is no compiled module, so torch computes everything: {WITH_CPP}."
    elif backend:
        yield (
            f"FASTPAR_BACKEND={backend} forces a backend: unset it, so that the fastest "
            "kernel of each op runs (`fastpar info` lists them)."
        )
    if m.setup.device_type == "cuda" and m.setup.dtype == "fp32":
        yield "Weights are fp32 on a GPU: --dtype bf16 is several times as fast in every product."


def _host(m: Measured) -> Iterator[str]:
    share = m.shares[INPUT]
    if share >= INPUT_SHARE:
        yield (
            f"Batches take {percent(share)} of the step: keep the token cache on a local disk "
            "(XDG_CACHE_HOME), and raise --micro-batch-size so that fewer batches are cut."
        )
    yield from _small_operations(m)
    waits = m.shares[HOST] >= HOST_SHARE and m.setup.device_type == "cuda"
    if waits and not m.situation.compiled:
        yield (
            "The GPU waits for the host, here without CUDA graphs: a run whose first lines name "
            "graphs does not; elsewhere --cuda-graphs replays micro-batches, or --compile joins "
            "small operations, after a slow start."
        )
    if m.situation.idle_cores and m.shares[COMPUTE] >= 0.5:
        yield (
            f"{m.situation.idle_cores} cores of this machine belong to no rank: leave --threads "
            "out, or raise --threads or --nproc."
        )


def _small_operations(m: Measured) -> Iterator[str]:
    setup, reached = m.setup, m.of_matmul(m.phases)
    rows = setup.micro_batch_size * m.workload.seq_len
    if m.shares[HOST] >= HOST_SHARE:
        why = f"The host takes {percent(m.shares[HOST])} of the step"
    elif m.bound == COMPUTE and rows < SMALL_ROWS and reached is not None and reached < POOR:
        why = f"Products of {rows} rows reach {percent(reached)} of the ceiling"
    else:
        return
    if setup.grad_accum_steps > 1:
        even = setup.grad_accum_steps % 2 == 0
        larger = 2 * setup.micro_batch_size if even else m.workload.batch_size // setup.dp
        yield (
            f"{why}: --micro-batch-size {larger} does the same samples in fewer, larger operations."
        )
    else:
        yield (
            f"{why}: a larger --batch-size (now {m.workload.batch_size}) gives every operation "
            "more rows for the same overhead."
        )


def _exchanges(m: Measured) -> Iterator[str]:
    setup, situation = m.setup, m.situation
    communicates = m.shares[COMMUNICATION] >= EXPOSED_SHARE
    # Shared memory needs the compiled module, which the first rule asks for.
    if communicates and setup.transport == "gloo" and situation.forced_backend != "none":
        yield "Ranks of one host exchange over gloo: --transport auto uses shared memory."
    waited = situation.waited_ms
    longest = max(waited, key=lambda kind: waited[kind], default=None)
    if longest is not None and waited[longest] >= EXPOSED_SHARE * m.step_ms:
        yield from _WAITS[longest](m, f"{waited[longest]:.1f} ms a step wait for")
    if communicates and situation.deterministic:
        yield (
            "Sums in a fixed order wait for all ranks: leave --deterministic out where bits may "
            "vary."
        )


def _control_waits(m: Measured, why: str) -> Iterator[str]:
    yield (
        f"{why} the slowest rank: other programs use its cores, or ranks have more --threads than "
        "cores."
    )


def _tp_waits(m: Measured, why: str) -> Iterator[str]:
    heads = m.workload.shape.heads_of_rank(m.setup.tp) if m.setup.by_keys else 0
    if m.setup.cp > 1 and heads and heads % m.setup.cp == 0:
        yield (
            f"{why} exchanges of sequences: --cp-method heads sends {4 / (3 * m.setup.cp):.0%} as "
            "much."
        )
    elif m.setup.cp > 1:
        yield (
            f"{why} exchanges of sequences: --cp {m.setup.cp // 2} with --activation-checkpointing "
            "full holds as many activations with fewer of them."
        )
    if m.setup.tp == 1:
        return
    yield (
        f"{why} exchanges inside of layers: --tp {m.setup.tp // 2} with a higher --zero stage "
        "splits the memory with less of them."
    )


def _gather_waits(m: Measured, why: str) -> Iterator[str]:
    setup = m.setup
    if setup.zero_stage == 3:
        whole = m.workload.n_parameters / setup.tp * setup.weight_bytes * (1 - 1 / setup.data) / 1e6
        yield (
            f"{why} gathered weights: --zero 2 keeps them whole, for {whole:,.0f} MB more a rank."
        )
    elif setup.zero_stage:
        yield (
            f"{why} updated weights: --zero 0 keeps the optimizer whole on every rank; or a larger "
            "--batch-size, for more work to hide them in."
        )


def _reduce_waits(m: Measured, why: str) -> Iterator[str]:
    setup, n_buckets, mean_mb = m.setup, m.situation.n_buckets, m.situation.bucket_mb
    why += " reduced gradients"
    if setup.grad_accum_steps > 1 and setup.accumulate == "shard":
        yield (
            f"{why}, which are sent {setup.grad_accum_steps} times: --accumulate full sends their "
            "sum once."
        )
    elif setup.dtype != "fp32" and setup.reduce_dtype == "fp32":
        yield f"{why}: --reduce-dtype {setup.dtype} halves the bytes."
    elif n_buckets <= 2:
        yield (
            f"{why} in {n_buckets} buckets, the first of which leaves late: --bucket-mb "
            f"{max(0.1, mean_mb / 4):.2g}."
        )
    elif mean_mb < SMALL_BUCKET_MB and n_buckets > 8:
        yield f"{why} in {n_buckets} buckets of {mean_mb:.2g} MB: --bucket-mb {4 * mean_mb:.2g}."
    else:
        yield (
            f"{why}: a larger --batch-size per step with --grad-accum-steps sends them less often."
        )


def _stage_waits(m: Measured, why: str) -> Iterator[str]:
    setup = m.setup
    why += " other stages of the pipeline"
    if setup.grad_accum_steps < 4 * setup.pp and setup.micro_batch_size > 1:
        half = setup.micro_batch_size // 2
        yield f"{why}: --micro-batch-size {half} gives them more, smaller micro-batches."
    elif setup.schedule not in ("zb-v", "interleaved"):
        yield f"{why}: --schedule zb-v has two stages a rank and waits less."
    else:
        yield f"{why}: a larger --batch-size has more micro-batches; --pp-split moves layers."


_WAITS: dict[str, Callable[[Measured, str], Iterator[str]]] = {
    CONTROL: _control_waits,
    TP: _tp_waits,
    PP: _stage_waits,
    GATHER: _gather_waits,
    REDUCE: _reduce_waits,
}


def _update(m: Measured) -> Iterator[str]:
    setup, share = m.setup, m.phase(OPTIMIZER).ms / max(m.step_ms, 1e-9)
    why = f"The optimizer takes {percent(share)} of the step"
    if share < UPDATE_SHARE:
        pass
    elif setup.data > 1 and setup.zero_stage == 0 and setup.optimizer == "adamw":
        yield f"{why}: --zero 1 gives each of {setup.data} ranks its part of the update."
    elif (setup.moment_dtype, setup.optimizer, setup.device_type) == ("fp32", "adamw", "cuda"):
        yield f"{why}: --moment-dtype bf16 moves half the bytes of its moments."
    else:
        yield f"{why}: a larger --batch-size with --grad-accum-steps updates less often."
    mode = setup.activation_checkpointing
    if mode != "none":
        yield (
            f"Blocks are computed again in backward (--activation-checkpointing {mode}): "
            f"{'selective' if mode == 'full' else 'none'} does less of it, where memory allows."
        )


RULES: tuple[Callable[[Measured], Iterator[str]], ...] = (_kernels, _host, _exchanges, _update)
