"""Tokenizers: UTF-8 bytes, SentencePiece models, and Hugging Face `tokenizers` files."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paxcli.config.configurable import Configurable
from paxcli.config.fields import TokenizerFile
from paxcli.errors import ConfigError, DataError, MissingError


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

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` [T], without special tokens at the start or end."""

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizes a rendered chat, including the special tokens in its text.

        Returns:
          The ids [T], and the start and end of each token's characters in `text` [T, 2].
        """

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [T], without special tokens."""


def count_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """UTF-8 bytes of the text of ids [T], in which end tokens separate documents.

    An incomplete character at the start or end of `ids` counts as one byte.
    """
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)
    return sum(len(tokenizer.decode(document).replace("\ufffd", "?").encode()) for document in documents)


class TokenizerConfig(Configurable):
    """Base class of the tokenizers that YAML and `--set` may name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokenizer(TokenizerConfig):
    """UTF-8 bytes as ids, after `pad`, `eos` and `bos`. Needs no file."""

    vocab_size = 259
    pad_id = 0
    eos_id = 1
    bos_id = 2
    path = None
    special_tokens = property(lambda self: {"bos_token": "<bos>", "eos_token": "<eos>"})

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8) + np.uint16(3)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        return _encode_around({"<bos>": self.bos_id, "<eos>": self.eos_id}, text, self._encode_with_offsets)

    def _encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        start = np.repeat(np.arange(len(text)), [len(character.encode("utf-8")) for character in text])
        return self.encode(text), np.stack([start, start + 1], axis=1)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        # A model with a padded vocabulary may generate ids beyond the last byte; 0xff is never valid UTF-8.
        shifted = np.minimum(ids[ids > self.bos_id] - 3, 0xFF)
        return shifted.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(TokenizerConfig):
    """A SentencePiece model file (`*.model`). A recipe may leave the path unset, for the user to set."""

    path: TokenizerFile = None

    def __post_init__(self) -> None:
        if self.path is None:
            hint = "Set it to a SentencePiece model for each input, such as --set train_input.tokenizer.path=c4.model."
            raise ConfigError("The tokenizer has no path.", hint)

    @functools.cached_property
    def _model(self) -> Any:
        library = _library("sentencepiece")
        try:
            return library.SentencePieceProcessor(model_proto=_file(self.path).read_bytes())
        except RuntimeError:
            raise DataError(f"{self.path} is not a SentencePiece model.") from None

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

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = {piece: self._model.piece_to_id(piece) for piece in self.special_tokens.values()}
        return _encode_around(ids, text, self._encode_with_offsets)

    def _encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._model.encode(text, return_type="offset_mapping")
        return np.asarray(found["ids"], np.int32), np.asarray(found["offsets"], np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer(TokenizerConfig):
    """A `tokenizer.json` of Hugging Face's `tokenizers`. The file does not define special tokens, so name them here.

    `path` and `eos_token` are required; None only until they are set.
    """

    path: TokenizerFile = None
    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None

    def __post_init__(self) -> None:
        for field in ("path", "eos_token"):
            if getattr(self, field) is None:
                raise ConfigError(f"The tokenizer has no {field}.", f"Set it: --set train_input.tokenizer.{field}=….")

    @functools.cached_property
    def _model(self) -> Any:
        library = _library("tokenizers")
        try:
            return library.Tokenizer.from_str(_file(self.path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self.path} is not a `tokenizers` file: {error}") from None

    def _id(self, token: str) -> int:
        found = self._model.token_to_id(token)
        if found is None:
            raise DataError(f"{self.path} has no token `{token}`.", "Use a token of its vocabulary.")
        return found

    vocab_size = property(lambda self: self._model.get_vocab_size())
    pad_id = property(lambda self: self._id(self.pad_token) if self.pad_token is not None else 0)
    bos_id = property(lambda self: self._id(self.bos_token) if self.bos_token is not None else None)
    eos_id = property(lambda self: self._id(self.eos_token))

    @property
    def special_tokens(self) -> dict[str, str]:
        known = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        return {name: token for name, token in known.items() if token is not None}

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._model.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)


def tokenizer_template(
    name: str, eos_token: str | None = None, bos_token: str | None = None
) -> Callable[[], Tokenizer]:
    """The template of a tokenizer by its name on the command line: `byte`, or a `*.model` or `*.json` file.

    Raises:
      ConfigError: The name is unknown, or a `*.json` file has no `eos_token`.
    """
    if name.endswith(".json"):
        if eos_token is None:
            hint = "Set it, such as --eos-token '</s>'."
            raise ConfigError(f"{name} does not define an end-of-document token.", hint)
        return functools.partial(HuggingFaceTokenizer, path=name, eos_token=eos_token, bos_token=bos_token)
    if eos_token is not None or bos_token is not None:
        raise ConfigError(f"Tokenizer {name} defines its own eos and bos.", "Leave out --eos-token and --bos-token.")
    if name.endswith(".model"):
        return functools.partial(SentencePieceTokenizer, path=name)
    if name != "byte":
        raise ConfigError(f"There is no tokenizer `{name}`.", "Use `byte`, a *.model or a *.json file.")
    return ByteTokenizer


def _encode_around(
    special: Mapping[str, int], text: str, encode: Callable[[str], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes `text` as in `Tokenizer.encode_chat`: special tokens by `special`, the text between them by `encode`."""
    ids, offsets, start = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int64)], 0
    for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
        if part in special:
            found = np.array([special[part]]), np.array([[0, len(part)]])
        else:
            found = encode(part)
        ids.append(found[0])
        offsets.append(found[1] + start)
        start += len(part)
    return np.concatenate(ids).astype(np.int32), np.concatenate(offsets)


def _file(path: str | None) -> Path:
    found = Path(str(path)).expanduser()
    if not found.is_file():
        raise DataError(f"There is no tokenizer file {path}.", "Set the tokenizer's path.")
    return found


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingError(f"This tokenizer needs the package `{name}`.", f"pip install {name}") from None
