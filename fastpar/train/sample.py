"""Text generation: prompts and tokenizer, a stream of tokens, and their text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastpar.data import tokenizer as tokenizers
from fastpar.data.tokenizer import Tokenizer
from fastpar.models.gpt import GPT, nothing_read
from fastpar.models.hf import check_whole
from fastpar.settings.options import SampleSettings

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
    """Continue each row of idx token by token, without dropout, as an iterator.

    Keys and values are cached, so a step computes one token. Beyond block_size tokens the window
    moves, which changes all positions: then each step computes the whole window.

    Args:
        idx: [B, T] int64, T >= 1. The model reads at most the last block_size tokens.
        max_new_tokens, temperature, top_k: as the rules of SampleSettings allow; temperature
            divides the logits, 0 takes the most likely token; top_k None: draw from all.
        generator: a CPU generator; None: torch's default. Tokens are drawn on the CPU for every
            device.
        vocab_size: draw from the first vocab_size tokens only, if the tokenizer has fewer than the
            model.
    Returns:
        An iterator of max_new_tokens tensors [B] int64 on idx's device. Padding of the vocabulary
        is never drawn.
    Raises:
        ValueError: a model of which this rank has a part.
    """
    check_whole("generate", model)
    return _tokens(
        model, idx[:, -model.config.block_size :], max_new_tokens, vocab_size,
        partial(_draw, temperature=temperature, top_k=top_k, generator=generator),
    )  # fmt: skip


def _tokens(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    vocab_size: int | None,
    draw: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """The iterator of generate(). draw: logits [B, V] -> tokens [B]."""
    new, read = idx, nothing_read(model.config, len(idx), model.wte.weight)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model.logits(model.features(new, read=read)[:, -1])
            token = draw(logits[:, :vocab_size].float().cpu()).to(idx.device)
            new = token[:, None]
            idx = torch.cat((idx, new), dim=1)
            if idx.shape[1] > model.config.block_size:  # the window moved: compute all of it again
                new = idx = idx[:, 1:]
                for layer in read:
                    layer.length = 0
        yield token


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw tokens [B] from logits [B, V]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    # The largest logit becomes 0, so that a tiny temperature cannot overflow to inf - inf.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if top_k is not None:
        top = logits.topk(min(top_k, logits.shape[-1])).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, top, logits.gather(-1, top))
    likely = logits.softmax(dim=-1)
    return torch.multinomial(likely, 1, generator=generator)[:, 0]


def stream_text(
    tokens: Iterable[int], decode: Callable[[list[int]], str], before: Sequence[int] = ()
) -> Iterator[str]:
    """Decode a stream of tokens to text, in pieces that end at whole characters.

    A token may end within the UTF-8 bytes of a character; decode then ends in U+FFFD. This last
    U+FFFD is held back until the next token completes the character or shows that it is invalid.

    Args:
        before: the token before the stream: some tokenizers drop a text's first blank.
    """
    pending = list(before)
    emitted = len(decode(pending)) if pending else 0  # characters of decode(pending)
    for token in tokens:
        pending.append(token)
        text = decode(pending)
        ready = len(text) - text.endswith("\ufffd")
        if ready > emitted:
            yield text[emitted:ready]
            emitted = ready
        if ready == len(text):
            pending = [token]
            emitted = len(decode(pending))
    if pending and (rest := decode(pending)[emitted:]):
        yield rest


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    settings: SampleSettings,
    *,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Generate texts as a stream: for each prompt, num_samples times the prompt and continuation.

    Text i has its own generator, seeded by seed + i, so it does not depend on the other texts.
    Tokens that only pad the vocabulary (nanoGPT's 50304) are never drawn. Without a prompt, the
    text starts with a newline.

    Args:
        say: called with a message about a prompt longer than the context.
    Raises:
        ValueError: a prompt without tokens; see generate().
    """
    number, size = seed, model.config.block_size
    for prompt in settings.prompt or (_free_prompt(tokenizer),):
        ids = tokenizer.encode(prompt or _free_prompt(tokenizer))
        if not ids:
            raise ValueError(
                f"sample: expected a prompt of at least one token, got prompt={prompt!r}; "
                "drop it to start with a newline"
            )
        if say and len(ids) > size:
            say(f"the prompt has {len(ids)} tokens; the model reads only the last {size}")
        idx = torch.tensor([ids], dtype=torch.int64, device=model.wte.weight.device)
        for _ in range(settings.num_samples):
            tokens = generate(
                model,
                idx,
                settings.max_new_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k or None,
                generator=torch.Generator("cpu").manual_seed(number),
                vocab_size=tokenizer.vocab_size,
            )
            yield SEPARATOR * (number > seed) + prompt
            yield from stream_text((int(token) for token in tokens), tokenizer.decode, ids[-1:])
            yield "\n"
            number += 1


def _free_prompt(tokenizer: Tokenizer) -> str:
    """A newline, or the first token if the tokenizer has no newline."""
    with contextlib.suppress(ValueError):
        if tokenizer.encode("\n"):
            return "\n"
    return tokenizer.decode([0])


def find_tokenizer(
    named: str | None, source: Path, vocab_size: int, *, say: Callable[[str], None]
) -> Tokenizer:
    """The tokenizer for some weights: the named one, or the one saved with them."""
    name = named or tokenizers.tokenizer_of_weights(source, vocab_size)
    if name and not named and (source.is_file() or name == "gpt2"):
        say(f"tokenizer {name}, as in nanoGPT; use --tokenizer for another one")
    if name is None:
        raise ValueError(
            f"fastpar sample: expected --tokenizer for the {vocab_size} tokens of {source}, which "
            "has none; use gpt2, bytes, or a folder with a saved tokenizer or nanoGPT's meta.pkl"
        )
    if tokenizers.learns_from_text(name):
        raise ValueError(
            f"fastpar sample: expected a saved tokenizer, got tokenizer={name}, which has to be "
            "trained; name the folder of the saved one"
        )
    tokenizer = tokenizers.make_tokenizer(name)
    if tokenizer.vocab_size > vocab_size and (named or source.is_file()):
        raise ValueError(
            f"fastpar sample: expected a tokenizer of at most the {vocab_size} tokens of {source}, "
            f"got tokenizer={name} with {tokenizer.vocab_size}; use the one it was trained with"
        )
    return tokenizer


def typed_prompts(say: Callable[[str], None]) -> Iterator[str]:
    """Lines of stdin until its end, with a prompt on a terminal; an empty line: no prompt."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        say("type one prompt per line (an empty line for none), Ctrl-D to end")
        import readline  # noqa: F401  line editing and history
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if on_terminal else "")
