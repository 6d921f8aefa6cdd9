"""Text generation: prompts and tokenizer, a stream of tokens, and their text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastpar.data import tokenizer as tokenizers
from fastpar.data.tokenizer import Tokenizer
from fastpar.files.plain_files import shown
from fastpar.models.gpt import GPT, nothing_read
from fastpar.models.hf import check_whole
from fastpar.settings.options import SampleSettings

SEPARATOR = "\n" + 40 * "-" + "\n"


def generate(
    model: GPT,
    idx: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    vocab_size: int | None = None,
) -> Iterator[Tensor]:
    """Continue each row of idx token by token, without dropout, as an iterator.

    Keys and values are cached, so a step computes one token. Beyond block_size tokens the window
    moves, which changes all positions: then each step computes the whole window.

    Args:
        idx: [B, T] int64, T >= 1, or B rows [T_b] of different lengths. The model reads at most the
            last block_size tokens of a row. All rows start at the length of the shortest; longer
            ones read their own next tokens first.
        max_new_tokens: >= 0.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only.
        generator: one CPU generator, or one per row; None: torch's default generator. Tokens are
            drawn on the CPU for every device.
        vocab_size: draw from the first vocab_size tokens only, if the tokenizer has fewer than the
            model.
    Returns:
        An iterator of tensors [B] int64 on idx's device: max_new_tokens tokens per row, and -1
        before and after them. Padding of the vocabulary is never drawn.
    Raises:
        ValueError: an argument outside the above.
    """
    check_whole("generate", model)
    shapes = [list(row.shape) for row in idx]
    if isinstance(idx, Tensor) and (idx.dim() != 2 or idx.shape[1] < 1):
        raise ValueError(
            f"generate: expected idx [B, T] with T >= 1, got idx.shape={list(idx.shape)}; "
            "pass at least one token"
        )
    if any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(
            f"generate: expected rows of at least one token, got shapes={shapes}; "
            "pass at least one token per row"
        )
    if max_new_tokens < 0:
        raise ValueError(
            f"generate: expected max_new_tokens >= 0, got max_new_tokens={max_new_tokens}; "
            "set the number of tokens to generate"
        )
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(
            f"generate: expected 0 <= temperature < inf, got temperature={temperature}; "
            "0 is greedy, 1 the model's own distribution"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(
            f"generate: expected top_k >= 1, got top_k={top_k}; drop it to draw from all"
        )
    if isinstance(generator, Sequence) and len(generator) != len(idx):
        raise ValueError(
            f"generate: expected one generator or one for each of {len(idx)} rows, got "
            f"{len(generator)}; pass one per row"
        )
    rows = [row[-model.config.block_size :] for row in idx]

    def draw(logits: Tensor, of_rows: list[int]) -> Tensor:
        drawn_by = generator
        if isinstance(generator, Sequence):
            drawn_by = [generator[i] for i in of_rows]
        return _draw(logits, temperature, top_k, drawn_by)

    if not rows or not max_new_tokens:
        return iter(())
    return _tokens(model, rows, max_new_tokens, vocab_size, draw)


def _tokens(
    model: GPT,
    rows: list[Tensor],
    max_new_tokens: int,
    vocab_size: int | None,
    draw: Callable[[Tensor, list[int]], Tensor],
) -> Iterator[Tensor]:
    """The iterator of generate(). draw: logits [N, V], indices of these rows -> tokens [N]."""
    size = model.config.block_size
    first, last = min(map(len, rows)), max(map(len, rows))
    new = idx = torch.stack([row[:first] for row in rows])
    read = nothing_read(model.config, len(rows), model.wte.weight)
    for length in range(first, last + max_new_tokens):
        with torch.no_grad():
            logits = model.logits(model.features(new, read=read)[:, -1])
            logits = logits[:, :vocab_size].float().cpu()
            grow = [i for i, r in enumerate(rows) if len(r) <= length < len(r) + max_new_tokens]
            token = torch.full((len(rows),), -1, dtype=torch.int64, device="cpu")
            token[grow] = draw(logits[grow], grow)
            given = [int(row[length]) if length < len(row) else 0 for row in rows]
            read_next = token.where(
                token >= 0, torch.tensor(given, dtype=torch.int64, device="cpu")
            ).to(idx.device)
            idx = torch.cat((idx, read_next[:, None]), dim=1)
            new = idx[:, -1:]
            if idx.shape[1] > size:  # the window moved: compute all positions again
                new = idx = idx[:, -size:]
                for layer in read:
                    layer.length = 0
        yield token.to(idx.device)


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> Tensor:
    """Draw tokens [B] from logits [B, V]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    # The largest logit becomes 0, so that a tiny temperature cannot overflow to inf - inf.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1])).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    likely = logits.softmax(dim=-1)
    if isinstance(generator, Sequence):
        return torch.cat([torch.multinomial(p, 1, generator=g) for p, g in zip(likely, generator)])
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
    Adjacent texts whose prompt lengths differ by at most max_new_tokens are computed as one batch;
    the first one is streamed, the others follow. Tokens that only pad the vocabulary (nanoGPT's
    50304) are never drawn. Without a prompt, the text starts with a newline.

    Args:
        say: called with a message about a prompt longer than the context.
    Raises:
        ValueError: a prompt without tokens or not in UTF-8; see generate().
    """
    texts: list[tuple[str, Tensor]] = []
    for prompt in settings.prompt or (_free_prompt(tokenizer),):
        try:
            prompt.encode()
        except UnicodeEncodeError:  # as read from a terminal or a setting
            raise ValueError(
                f"sample: expected a prompt in UTF-8, got prompt={shown(prompt)}; correct it"
            ) from None
        ids = tokenizer.encode(prompt or _free_prompt(tokenizer))
        if not ids:
            raise ValueError(
                f"sample: expected a prompt of at least one token, got prompt={prompt!r}; "
                "drop it to start with a newline"
            )
        size = model.config.block_size
        if say and len(ids) > size:
            say(f"the prompt has {len(ids)} tokens; the model reads only the last {size}")
        row = torch.tensor(ids[-size:], dtype=torch.int64, device=model.wte.weight.device)
        texts += [(prompt, row)] * settings.num_samples
    done = 0
    while done < len(texts):
        group = _next_batch(texts[done:], settings.max_new_tokens)
        stream = generate(
            model,
            [row for _, row in group],
            settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k or None,
            generator=[
                torch.Generator("cpu").manual_seed(seed + done + i) for i in range(len(group))
            ],
            vocab_size=tokenizer.vocab_size,
        )
        rows: list[list[int]] = [[] for _ in group]
        for i, (prompt, _) in enumerate(group):
            yield SEPARATOR * (done + i > 0) + prompt
            last = group[i][1][-1:].tolist()
            yield from stream_text(_row(i, stream, rows), tokenizer.decode, last)
            yield "\n"
        done += len(group)


def _next_batch(texts: list[tuple[str, Tensor]], max_new_tokens: int) -> list[tuple[str, Tensor]]:
    """The first texts whose lengths are close enough to compute them as one batch."""
    for end in range(1, len(texts) + 1):
        lengths = [len(row) for _, row in texts[:end]]
        if max(lengths) - min(lengths) > max_new_tokens:
            return texts[: end - 1]
    return texts


def _row(i: int, stream: Iterator[Tensor], rows: list[list[int]]) -> Iterator[int]:
    """Yield tokens of row i of a stream [B] as they come; store those of all rows in rows."""
    yield from rows[i]
    done = len(rows[i])
    for step in stream:
        for row, token in zip(rows, step.tolist()):
            row += [token] * (token >= 0)
        yield from rows[i][done:]
        done = len(rows[i])


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
