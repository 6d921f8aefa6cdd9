"""Text from a model: a stream of tokens, and a stream of the characters that they spell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TextIO

import torch
from torch import Tensor

from fastpar.models.gpt import GPT

SEPARATOR = "\n" + 40 * "-" + "\n"


class Tokenizer(Protocol):
    """What sample needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
) -> Iterator[Tensor]:
    """Continues each row of idx token by token, without dropout, as fast as the caller asks.

    Args:
        idx: [B, T] int64, T >= 1. The model reads the last block_size tokens at most.
        max_new_tokens: >= 0.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws from the k most likely tokens only.
        generator: on the CPU, where tokens are drawn whatever the model's device; torch's default
            one otherwise.
        vocab_size: draws from the first so many tokens only, those of a tokenizer that has fewer
            than the model.
    Returns:
        An iterator of max_new_tokens tensors [B] int64 on idx's device. No token is one of the
        vocabulary's padding.
    Raises:
        ValueError: an argument outside the above.
    """
    if model.tp is not None:
        raise ValueError(
            f"generate: expected a model whose weights are whole on a rank, got one with "
            f"tp={model.tp.size}; load_hf() reads it from a checkpoint of save_checkpoint"
        )
    if idx.dim() != 2 or idx.shape[1] < 1:
        raise ValueError(
            f"generate: expected idx [B, T] with T >= 1, got idx.shape={list(idx.shape)}; "
            "start from one token at least"
        )
    if max_new_tokens < 0:
        raise ValueError(
            f"generate: expected max_new_tokens >= 0, got max_new_tokens={max_new_tokens}; "
            "say how many tokens to add"
        )
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(
            f"generate: expected 0 <= temperature < inf, got temperature={temperature}; "
            "0 is greedy, 1 the model's own distribution"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(
            f"generate: expected top_k >= 1, got top_k={top_k}; leave it out to draw from all"
        )
    return _generate(model, idx, max_new_tokens, temperature, top_k, generator, vocab_size)


def _generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    vocab_size: int | None,
) -> Iterator[Tensor]:
    for _ in range(max_new_tokens):
        with torch.no_grad():
            x = model.features(idx[:, -model.config.block_size :])
            logits = model.logits(x[:, -1])[:, :vocab_size].float().cpu()
            token = _draw(logits, temperature, top_k, generator)
            token = token.to(idx.device)
            idx = torch.cat((idx, token[:, None]), dim=1)[:, -model.config.block_size :]
        yield token


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """logits [B, V] -> tokens [B]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    # The largest logit becomes 0, so that a tiny temperature cannot overflow to inf - inf.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1])).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def stream_text(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of a stream of tokens, in pieces that never cut a character.

    A token may end within a character's UTF-8 bytes; decode then ends in U+FFFD. That last U+FFFD
    is held back until the next token completes it or shows that the bytes are invalid.
    """
    pending: list[int] = []
    emitted = 0  # characters of decode(pending)
    for token in tokens:
        pending.append(token)
        text = decode(pending)
        ready = len(text) - text.endswith("\ufffd")
        if ready > emitted:
            yield text[emitted:ready]
            emitted = ready
        if ready == len(text):
            pending, emitted = [], 0
    if pending:
        yield decode(pending)[emitted:]


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    out: TextIO,
    *,
    n_samples: int = 1,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 200,
    seed: int = 0,
) -> None:
    """Writes the prompt and the model's continuation to `out` as it is drawn, n_samples times.

    Sample i has a generator of its own, seeded by seed + i. Rows that pad a vocabulary beyond the
    tokenizer's, as nanoGPT's 50304, are never drawn.

    Raises:
        ValueError: a prompt without tokens; n_samples < 1; see generate.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(
            f"sample: expected a prompt of one token at least, got prompt={prompt!r}; "
            "begin with a newline for free text"
        )
    if n_samples < 1:
        raise ValueError(f"sample: expected n_samples >= 1, got n_samples={n_samples}; ask for one")
    start = torch.tensor([ids], dtype=torch.int64, device=model.wte.weight.device)
    for i in range(n_samples):
        generator = torch.Generator("cpu").manual_seed(seed + i)
        tokens = generate(
            model,
            start,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            vocab_size=tokenizer.vocab_size,
        )
        out.write(SEPARATOR if i else "")
        out.write(prompt)
        for piece in stream_text((int(token) for token in tokens), tokenizer.decode):
            out.write(piece)
            out.flush()
        out.write("\n")
