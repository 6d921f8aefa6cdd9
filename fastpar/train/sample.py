"""Text from a model: a stream of tokens, and a stream of the characters that they spell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from fastpar.config.options import SampleSettings
from fastpar.data.tokenizer import Tokenizer
from fastpar.models.gpt import GPT
from fastpar.models.hf import check_whole
from fastpar.models.reads import nothing_read

SEPARATOR = "\n" + 40 * "-" + "\n"


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

    Keys and values of what was read are kept: a step computes one token. Beyond block_size tokens
    the window moves, and with it the positions of all: then each step reads the window anew.

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
    check_whole("generate", model)
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
    size = model.config.block_size

    def tokens(idx: Tensor) -> Iterator[Tensor]:
        idx = idx[:, -size:]
        read = nothing_read(model.config, len(idx), model.wte.weight)
        new = idx
        for _ in range(max_new_tokens):
            with torch.no_grad():
                x = model.features(new, read=read)
                logits = model.logits(x[:, -1])[:, :vocab_size].float().cpu()
                token = _draw(logits, temperature, top_k, generator).to(idx.device)
                idx = torch.cat((idx, token[:, None]), dim=1)
                new = idx[:, -1:]
                if idx.shape[1] > size:  # every token moves to another position: read all anew
                    new = idx = idx[:, -size:]
                    for layer in read:
                        layer.length = 0
            yield token

    return tokens(idx)


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
    model: GPT, tokenizer: Tokenizer, settings: SampleSettings, *, seed: int = 0
) -> Iterator[str]:
    """Texts as they are drawn: settings.num_samples times the prompt and the model's continuation.

    Sample i has a generator of its own, seeded by seed + i. Rows that pad a vocabulary beyond the
    tokenizer's, as nanoGPT's 50304, are never drawn. Without a prompt, free text.

    Raises:
        ValueError: a prompt without tokens; see generate.
    """
    prompt = settings.prompt or _free_prompt(tokenizer)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(
            f"sample: expected a prompt of one token at least, got prompt={prompt!r}; "
            "begin with a newline for free text"
        )
    start = torch.tensor([ids], dtype=torch.int64, device=model.wte.weight.device)
    for i in range(settings.num_samples):
        tokens = generate(
            model,
            start,
            settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k or None,
            generator=torch.Generator("cpu").manual_seed(seed + i),
            vocab_size=tokenizer.vocab_size,
        )
        yield SEPARATOR * (i > 0) + prompt
        yield from stream_text(map(int, tokens), tokenizer.decode)
        yield "\n"


def _free_prompt(tokenizer: Tokenizer) -> str:
    """A new line, or the first token of a tokenizer that has none."""
    with contextlib.suppress(ValueError):
        if tokenizer.encode("\n"):
            return "\n"
    return tokenizer.decode([0])
