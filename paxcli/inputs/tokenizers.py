"""Tokenizers: UTF-8 bytes, SentencePiece models, and files of Hugging Face `tokenizers` and of tiktoken."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paxcli.config.configurable import Configurable
from paxcli.config.fields import TokenizerFile
from paxcli.config.paths import read_text
from paxcli.errors import ConfigError, DataError, load_library
from paxcli.inputs.hub import find_model
from paxcli.inputs.tokenizer_files import special_tokens

# Of Llama 3, whose `tokenizer.model` contains neither.
_LLAMA3_PATTERN, *_LLAMA3_TOKENS = (Path(__file__).parent / "data" / "llama3_tokens.txt").read_text().splitlines()

# Llama's code splits longer whitespace, too: at a million characters, tiktoken's regular expressions fail.
_LONG_SPACE = re.compile(r"\s{25000}(?=\s)")

Encoded = tuple[np.ndarray, np.ndarray]  # ids [T], and the start and end of each token's characters [T, 2]


class Tokenizer(Protocol):
    """The tokenizer interface of inputs and decoding. `bos_id` is None if the vocabulary has no such token."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def path(self) -> str | None:
        """The tokenizer's file; None if it needs no file."""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Maps names of special tokens in chat templates, such as `eos_token`, to their text."""

    @property
    def special_tokens_by_id(self) -> Mapping[int, str]:
        """Ids that `decode` leaves out, such as those of a chat template, and their text."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` [T], without special tokens at the start or end."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `encode` returns them; some tokenizers use all cores."""

    def encode_chat(self, text: str) -> Encoded:
        """Tokenizes a rendered chat, including the special tokens in its text.

        Returns:
          The ids [T], and the start and end of each token's characters in `text` [T, 2].
        """

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [T], without special tokens."""


TokenizerTemplate = Callable[[], Tokenizer]


def count_bytes(tokenizer: Tokenizer, ids: np.ndarray, before: np.ndarray) -> int:
    """UTF-8 bytes of the text of ids [T], in which end tokens separate documents.

    An incomplete character at the start or end of `ids` counts as one byte, unless ids are bytes.

    Args:
      tokenizer: The tokenizer of the ids.
      ids: The ids.
      before: The id before each of them in its text, without which some tokenizers drop a space at the start of a part
        of a document; -1 at the start of a text [T].
    """
    if isinstance(tokenizer, ByteTokenizer):
        return int(np.sum(ids > tokenizer.bos_id))

    def size(part: np.ndarray) -> int:
        text = tokenizer.decode(part)
        # Elsewhere, the text itself has this character, of 3 bytes.
        return len(text.encode()) - 2 * (len(text) - len(text.strip("\ufffd")))

    ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
    firsts = [part[:1][part[:1] >= 0] for part in np.split(before, ends)]
    return sum(map(size, map(np.append, firsts, np.split(ids, ends)))) - sum(map(size, firsts))


class TokenizerConfig(Configurable):
    """Base class of the tokenizers that YAML and `--set` may name, by class or by a short form.

    Attributes:
      required: Fields that must not be None when the tokenizer is built.
    """

    short_forms = ("byte", "hf:DIR", "spm:FILE", "tiktoken:FILE")
    required: tuple[str, ...] = ("path",)

    def __post_init__(self) -> None:
        for field in self.required:
            if getattr(self, field) is None:
                hint = f"Set it: --set tokenizer=hf:DIR, spm:FILE or tiktoken:FILE; or train_input.tokenizer.{field}."
                raise ConfigError(f"The tokenizer has no {field}.", hint)

    @property
    def special_tokens_by_id(self) -> Mapping[int, str]:
        return {}

    def encode_batch(self: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    @classmethod
    def from_short_form(cls, text: str) -> tuple[type[Any], dict[str, Any]] | None:
        """The class and the fields of a tokenizer's short form; None for other texts.

        `byte`, `hf:DIR` with a `tokenizer.json` and the names of its special tokens, `spm:FILE` or `tiktoken:FILE`.
        `DIR` may also be the name of a model on the Hugging Face Hub (`find_model`), whose files are downloaded.

        Raises:
          DataError: A file of `hf:` cannot be read, or the hub has no such model.
          MissingError: The hub does not let this user read the model.
          RemoteError: The hub cannot be reached.
        """
        if text == "byte":
            return ByteTokenizer, {}
        kind, _, path = text.partition(":")
        if kind in ("spm", "tiktoken") and path:
            return SentencePieceTokenizer if kind == "spm" else TiktokenTokenizer, {"path": path}
        return (HuggingFaceTokenizer, hugging_face_fields(Path(find_model(path)))) if kind == "hf" and path else None


class _NamedTokens(TokenizerConfig):
    """A tokenizer whose special tokens the recipe names. `_id` finds the id of one."""

    bos_id = property(lambda self: self._id(self.bos_token) if self.bos_token is not None else None)
    eos_id = property(lambda self: self._id(self.eos_token))

    @property
    def special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token")
        return {name: token for name in names if (token := getattr(self, name, None)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokenizer(TokenizerConfig):
    """UTF-8 bytes as ids, after `pad`, `eos` and `bos`. Needs no file."""

    required = ()
    vocab_size = 259
    pad_id = 0
    eos_id = 1
    bos_id = 2
    path = None
    special_tokens = property(lambda self: {"bos_token": "<bos>", "eos_token": "<eos>"})

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8) + np.uint16(3)

    def encode_chat(self, text: str) -> Encoded:
        return _encode_around({"<bos>": self.bos_id, "<eos>": self.eos_id}, text, self._encode_with_offsets)

    def _encode_with_offsets(self, text: str) -> Encoded:
        # In UTF-8, the bytes of a character after its first are 0b10…
        start = np.cumsum(np.frombuffer(text.encode("utf-8"), np.uint8) & 0xC0 != 0x80) - 1
        return self.encode(text), np.stack([start, start + 1], axis=1)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        # A model with a padded vocabulary may generate ids beyond the last byte; 0xff is never valid UTF-8.
        return np.minimum(ids[ids > self.bos_id] - 3, 0xFF).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(TokenizerConfig):
    """A SentencePiece model file (`*.model`). A recipe may leave the path unset, for the user to set."""

    path: TokenizerFile = None

    @functools.cached_property
    def _model(self) -> Any:
        try:
            return _library("sentencepiece").SentencePieceProcessor(model_proto=_file(self.path).read_bytes())
        except RuntimeError:
            hint = "Give a file that SentencePiece wrote, such as tokenizer.model."
            raise DataError(f"{self.path} is not a SentencePiece model.", hint) from None

    vocab_size = property(lambda self: self._model.vocab_size())
    pad_id = property(lambda self: max(self._model.pad_id(), 0))
    bos_id = property(lambda self: self._model.bos_id() if self._model.bos_id() >= 0 else None)

    @property
    def eos_id(self) -> int:
        """The end-of-document id.

        Raises:
          DataError: The model has no eos piece.
        """
        if self._model.eos_id() < 0:
            raise DataError(f"{self.path} has no eos piece.", "Train the model with an eos piece.")
        return self._model.eos_id()

    @property
    def special_tokens(self) -> dict[str, str]:
        known = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        return {name: self._model.id_to_piece(token) for name, token in known.items() if token is not None}

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(text), np.int32)

    def encode_chat(self, text: str) -> Encoded:
        ids = {piece: self._model.piece_to_id(piece) for piece in self.special_tokens.values()}
        return _encode_around(ids, text, self._encode_with_offsets)

    def _encode_with_offsets(self, text: str) -> Encoded:
        found = self._model.encode(text, return_type="offset_mapping")
        return np.asarray(found["ids"], np.int32), np.asarray(found["offsets"], np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer(_NamedTokens):
    """A `tokenizer.json` of Hugging Face's `tokenizers`. The file does not define special tokens, so name them here.

    `path` and `eos_token` are required; None only until they are set.
    """

    required = ("path", "eos_token")

    path: TokenizerFile = None
    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None

    @functools.cached_property
    def _model(self) -> Any:
        return _read_hugging_face(str(self.path), read_text(_file(self.path)))

    def _id(self, token: str) -> int:
        if (found := self._model.token_to_id(token)) is not None:
            return found
        raise DataError(f"{self.path} has no token `{token}`.", "Use a token of its vocabulary.")

    vocab_size = property(lambda self: _count_ids(self._model))
    pad_id = property(lambda self: self._id(self.pad_token) if self.pad_token is not None else 0)

    @functools.cached_property
    def special_tokens_by_id(self) -> Mapping[int, str]:
        added = self._model.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._model.encode_batch_fast(texts, add_special_tokens=False)  # fast: without offsets
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    def encode_chat(self, text: str) -> Encoded:
        found = self._model.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiktokenTokenizer(_NamedTokens):
    """A file of token ranks in tiktoken's format, such as Llama 3's `tokenizer.model`.

    The file has neither the pattern that splits text into words nor special tokens. The defaults are those of Llama 3.

    Args:
      path: The file: a token in base64 and its id on each line.
      pattern: The regular expression of words.
      added_tokens: Special tokens, whose ids follow those of the file. None: Llama 3's 256.
      eos_token: The end-of-document token.
      bos_token: The token before each document. None: none.
    """

    path: TokenizerFile = None
    pattern: str = _LLAMA3_PATTERN
    added_tokens: tuple[str, ...] | None = None
    eos_token: str = "<|end_of_text|>"
    bos_token: str | None = "<|begin_of_text|>"

    pad_id = 0

    @functools.cached_property
    def _model(self) -> Any:
        library, lines = _library("tiktoken"), _file(self.path).read_bytes().splitlines()
        try:
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in map(bytes.split, lines)}
        except ValueError:
            ranks = {}
        if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
            hint = "Each line has a token in base64 and its id; ids are 0, 1, 2 and so on."
            raise DataError(f"{self.path} is not a tiktoken file.", hint)
        added = _LLAMA3_TOKENS if self.added_tokens is None else self.added_tokens
        ids = {token: len(ranks) + number for number, token in enumerate(added)}
        try:
            return library.Encoding("", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=ids)
        except ValueError as error:
            hint = "Correct `pattern`."
            raise ConfigError(f"The tokenizer's pattern is not a regular expression: {error}.", hint) from None

    def _id(self, token: str) -> int:
        if token not in self._model.special_tokens_set:
            raise DataError(f"{self.path} has no special token `{token}`.", "Name it in the tokenizer's added_tokens.")
        return self._model.encode_single_token(token)

    vocab_size = property(lambda self: self._model.n_vocab)

    @functools.cached_property
    def special_tokens_by_id(self) -> Mapping[int, str]:
        return {self._model.encode_single_token(token): token for token in self._model.special_tokens_set}

    def encode(self, text: str) -> np.ndarray:
        return np.asarray([i for part in _split_long_space(text) for i in self._model.encode_ordinary(part)], np.int32)

    def encode_chat(self, text: str) -> Encoded:
        ids = [i for part in _split_long_space(text) for i in self._model.encode(part, allowed_special="all")]
        starts = np.asarray(self._model.decode_with_offsets(ids)[1], np.int64)
        ends = np.maximum(np.append(starts[1:], len(text)), starts + 1)  # tokens may share a character
        return np.asarray(ids, np.int32), np.stack([starts, ends], axis=1)

    def decode(self, ids: np.ndarray) -> str:
        first_special = self._model.n_vocab - len(self._model.special_tokens_set)
        return self._model.decode([int(i) for i in ids if i < first_special])


def _split_long_space(text: str) -> list[str]:
    cuts = [0, *(found.end() for found in _LONG_SPACE.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def hugging_face_fields(path: Path) -> dict[str, str]:
    """`path` and the special tokens of a `HuggingFaceTokenizer`; the names of the tokens are in the files beside it.

    Args:
      path: A `tokenizer.json`, or its directory.

    Raises:
      DataError: A file cannot be read.
    """
    file = path.expanduser()
    file = file if file.suffix == ".json" else file / "tokenizer.json"
    model = _read_hugging_face(str(file), read_text(_file(str(file))))
    return {"path": str(file), **special_tokens(file.parent, model)}


def _encode_around(special: Mapping[str, int], text: str, encode: Callable[[str], Encoded]) -> Encoded:
    """Encodes `text` as in `Tokenizer.encode_chat`: special tokens by `special`, the text between them by `encode`."""
    ids, offsets, start = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int64)], 0
    for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
        found = (np.array([special[part]]), np.array([[0, len(part)]])) if part in special else encode(part)
        ids.append(found[0])
        offsets.append(found[1] + start)
        start += len(part)
    return np.concatenate(ids).astype(np.int32), np.concatenate(offsets)


@functools.lru_cache(maxsize=4)  # to find its special tokens, it is read before the inputs are built
def _read_hugging_face(path: str, content: str) -> Any:
    library = _library("tokenizers")
    try:
        found = library.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        hint = "Give the `tokenizer.json` of a model of Hugging Face."
        raise DataError(f"{path} is not a `tokenizers` file: {error}", hint) from None
    found.no_truncation()  # settings of the last call, which transformers writes to the file
    found.no_padding()
    return found


@functools.lru_cache(maxsize=4)  # like the models: a tokenizer is built for each file of conversations
def _count_ids(model: Any) -> int:
    """The largest id of a `tokenizers.Tokenizer`, and one: some vocabularies skip ids."""
    return max(model.get_vocab().values(), default=-1) + 1


def _file(path: str | None) -> Path:
    found = Path(str(path)).expanduser()
    if not found.is_file():
        hint = "Set its path; `tokenizer=hf:ORGANIZATION/NAME` downloads one from the Hugging Face Hub."
        raise DataError(f"There is no tokenizer file {path}.", hint)
    return found


def _library(name: str) -> Any:
    return load_library(name, f"This tokenizer needs the package `{name}`.")
