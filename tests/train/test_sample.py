"""fastpar.train.sample: which tokens may come out, with which probability, and as which text."""

import pytest
import torch
from cells import sweep

from fastpar.comm.mesh import Mesh
from fastpar.data.tokenizer import BpeTokenizer, CharTokenizer, IdTokenizer, make_tokenizer
from fastpar.engine.parallelize import parallelize
from fastpar.models.gpt import GPT, nothing_read
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import SampleSettings
from fastpar.testing import run_ranks
from fastpar.train.sample import SEPARATOR, _draw, generate, sample, stream_text

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=67, dropout=0.5)
BYTES = make_tokenizer("bytes")


@pytest.fixture
def model():
    model = GPT(TINY)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0)  # so that the distributions are far from uniform
    return model


@pytest.fixture
def byte_model():
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=256))


def tokens_of(*args, **kwargs):
    return torch.stack(list(generate(*args, **kwargs)), dim=1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_most_likely_token_beyond_the_context_too(model):
    start = torch.tensor([[1, 2, 3], [4, 5, 6]])
    idx = start
    with torch.no_grad():
        model.eval()
        for _ in range(12):
            idx = torch.cat((idx, model(idx[:, -8:])[:, -1].argmax(-1, keepdim=True)), dim=1)
        model.train()
    tokens = tokens_of(model, start, 12, temperature=0.0)
    assert torch.equal(tokens, idx[:, 3:])
    assert len(tokens.unique()) > 2
    assert model.training
    assert not tokens.requires_grad
    for how in ({"top_k": 1, "generator": seeded()}, {"temperature": 1e-40}):
        assert torch.equal(tokens_of(model, start, 12, **how), tokens)
    long = torch.arange(20)[None]  # a prompt is cropped to the context
    tokens = tokens_of(model, long, 3, temperature=0.0)
    assert torch.equal(tokens, tokens_of(model, long[:, -8:], 3, temperature=0.0))


def test_the_generator_rules_what_is_drawn(model):
    start = torch.tensor([[1], [1]])
    first, again, other = (tokens_of(model, start, 20, generator=seeded(n)) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(0)
    assert torch.equal(tokens_of(model, start, 20), first)


def test_what_was_read_gives_the_features_of_the_whole_text(model):
    """In fp64 to 1e-12; in fp32 no further off than the whole forward or rounded weights."""
    idx = torch.randint(67, (3, 8), generator=seeded())
    model.eval()

    def both():
        read = nothing_read(TINY, 3, model.wte.weight)
        with torch.no_grad():
            parts = [model.features(part, read=read) for part in idx.split((3, 1, 2, 1, 1), dim=1)]
            return torch.cat(parts, dim=1), model.features(idx)

    single, single_whole = both()
    model.double()
    got, expected = both()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + 2.0**-24 * torch.randint(-1, 2, p.shape, generator=seeded())
    condition = (both()[1] - expected).abs().max()
    error = (single_whole - expected).abs().max()
    assert (single - expected).abs().max() <= 2 * (error + condition)
    read = nothing_read(TINY, 3, torch.zeros(()))
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        read[1].add(*torch.zeros(2, 3, 9, 2, 16))


def test_tokens_come_one_by_one(model, monkeypatch):
    calls, features = [], model.features

    def recorded(idx, read):
        assert not torch.is_grad_enabled()
        calls.append((read[0].length, idx.shape[1]))
        return features(idx, read=read)

    monkeypatch.setattr(model, "features", recorded)
    stream = generate(model, torch.tensor([[1, 2]]), 9)
    assert calls == []
    next(stream)
    assert calls == [(0, 2)]
    assert torch.is_grad_enabled()
    assert len(list(stream)) == 8
    # The window moves after 8 tokens.
    assert calls == [(0, 2), *((read, 1) for read in range(2, 8)), (0, 8), (0, 8)]
    assert list(generate(model, torch.tensor([[1]]), 0)) == []


def test_rows_without_a_token_are_never_drawn(model):
    """Padding, and nanoGPT's 50304 rows of 50257 tokens: what decode() would refuse."""
    with torch.no_grad():
        model.wte.weight[67:] = 100.0 * torch.randn(128 - 67, 32, generator=seeded())
    for temperature in (0.0, 1.0, 100.0):
        how = {"temperature": temperature, "generator": seeded()}
        assert tokens_of(model, torch.zeros(32, 1).long(), 16, **how).max() < 67
    with torch.no_grad():
        model.wte.weight[3:] *= 100.0
    settings = {"num_samples": 1, "max_new_tokens": 40, "temperature": 5.0}
    assert set(text_of(model, "ab", CharTokenizer("abc"), **settings).strip()) == set("abc")
    tokens = tokens_of(model, torch.tensor([[0]]), 40, vocab_size=2, temperature=5.0)
    assert set(tokens[0].tolist()) == {0, 1}


@sweep(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 99)])
def test_draws_follow_the_distribution(temperature, top_k):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    probs = (logits / temperature).softmax(0)
    if top_k == 3:
        probs[[0, 3]] = 0.0
        probs /= probs.sum()
    n = 20_000
    frequencies = _draw(logits.expand(n, 5), temperature, top_k, seeded()).bincount(minlength=5) / n
    # Five sigma of a binomial frequency; 0 stays exactly 0.
    assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / n).sqrt()).all()


def test_models_ids_and_prompts_that_are_refused(model, byte_model):
    def draw():
        generate(parallelize(GPT(TINY), Mesh(device="cpu", tp=2)), torch.tensor([[1]]), 1)

    for act, words in (
        (lambda: run_ranks(draw, 2), r"generate: expected a model .* got one with tp=2; load "),
        (lambda: next(generate(model, torch.tensor([[67]]), 1)), r"ids in \[0, 67\), got id=67"),
        (lambda: text_of(byte_model, " ", IdTokenizer(256)), r"at least one .* got prompt=' '"),
    ):
        with pytest.raises(ValueError, match=words):
            act()
    assert text_of(byte_model, num_samples=0) == ""


def streamed(chunks):
    """Pieces of text from tokens that are byte strings."""

    def join(ids):
        return b"".join(chunks[i] for i in ids).decode(errors="replace")

    return list(stream_text(range(len(chunks)), join))


def test_streamed_text_never_cuts_a_character():
    text = "a\u00e9\u20ac\U0001f600\ufffd\u00e9z"
    data = text.encode()
    for size, begin in ((1, 0), (3, 0), (3, 1), (3, 2)):
        edges = [0, *range(begin, len(data), size)][begin == 0 :]
        pieces = streamed([data[a:b] for a, b in zip(edges, [*edges[1:], None])])
        assert "".join(pieces) == text
        assert all(pieces)
        assert sum(piece.count("\ufffd") for piece in pieces) == 1


def test_streamed_text_is_not_held_back():
    """By bytes that are no text, and not until the end."""
    chunks = [b"ok", b"\x80", b"\xff", *(bytes([b]) for b in b"\xf0\x9f\x98\x80")]
    chunks += [b"\xe2\x82", b"!", b"\xe2"]
    pieces = streamed(chunks)
    assert "".join(pieces) == b"".join(chunks).decode(errors="replace")
    assert pieces[:3] == ["ok", "\ufffd", "\ufffd"]
    assert "\U0001f600" in pieces
    assert pieces[-1] == "\ufffd"
    tokens = iter(b"abc")
    assert next(stream_text(tokens, BYTES.decode)) == "a"
    assert list(tokens) == list(b"bc")


def test_streamed_text_keeps_the_blanks_that_a_tokenizer_drops_at_a_start():
    """As those of Llama and T5."""
    library = pytest.importorskip("tokenizers")
    backend = library.Tokenizer(library.models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, "c"))
    backend.pre_tokenizer = library.pre_tokenizers.Metaspace()
    backend.decoder = library.decoders.Metaspace()
    tokenizer = BpeTokenizer(backend, "words")
    assert "".join(stream_text([0, 1, 2, 0], tokenizer.decode)) == "a bc a"
    assert "".join(stream_text([1, 2, 0], tokenizer.decode, tokenizer.encode("a"))) == " bc a"


def text_of(model, prompt="Hi", tokenizer=BYTES, seed=0, **kwargs):
    settings = {"max_new_tokens": 12, "top_k": 200, **kwargs}
    return "".join(sample(model, tokenizer, SampleSettings(prompt, **settings), seed=seed))


def test_several_prompts_give_the_texts_of_each(byte_model):
    """A prompt beyond the context is named."""
    prompts = ("Hi", "Hello you", "H" * 40, "a", "Who are")
    parts = text_of(byte_model, prompts, num_samples=2).split(SEPARATOR)
    assert len(parts) == 10
    for i, part in enumerate(parts):
        prompt = prompts[i // 2]
        assert part == text_of(byte_model, prompt, num_samples=1, seed=i)
        assert part.startswith(prompt)
        assert part.endswith("\n")
    assert len(set(parts)) == 10
    how = {"temperature": 0.8, "top_k": 200, "generator": seeded(1)}
    tokens = tokens_of(byte_model, torch.tensor([[72, 105]]), 12, **how)
    assert parts[1] == "Hi" + BYTES.decode(tokens[0].tolist()) + "\n"
    notes = []
    settings = SampleSettings(("H" * 9,), num_samples=1, max_new_tokens=1)
    "".join(sample(byte_model, BYTES, settings, say=notes.append))
    assert notes == ["the prompt has 9 tokens; the model reads only the last 8"]
