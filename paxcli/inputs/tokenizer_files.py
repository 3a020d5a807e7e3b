"""Files of a Hugging Face directory that belong to its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paxcli.config.paths import read_json
from paxcli.errors import DataError

_SPECIAL = ("special_tokens_map.json", "tokenizer_config.json")  # the second one takes precedence
_MODEL = "config.json"


def read_object(path: Path) -> dict[str, Any]:
    """Raises DataError if the file cannot be read or is not a JSON object."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise DataError(f"{path} is a JSON {type(config).__name__}, not an object.", "Correct it or download it again.")
    return config


def token_text(token: Any) -> str | None:
    """The text of a special token, which is written as text or as an object with its `content`; None: it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def special_tokens(directory: Path, tokenizer: Any) -> dict[str, str]:
    """The `eos_token`, `bos_token` and `pad_token` that files of a directory name, or its `config.json` gives by id.

    Args:
      directory: The directory of the files.
      tokenizer: The `tokenizers.Tokenizer` in it, which knows the tokens.
    """
    read = {name: read_object(file) for name in (*_SPECIAL, _MODEL) if (file := directory / name).is_file()}
    named, ids = {**read.get(_SPECIAL[0], {}), **read.get(_SPECIAL[1], {})}, read.get(_MODEL, {})
    found: dict[str, str] = {}
    for kind in ("eos_token", "bos_token", "pad_token"):
        token, number = token_text(named.get(kind)), ids.get(f"{kind}_id")
        number = number[0] if isinstance(number, list) and number else number
        token = token or (tokenizer.id_to_token(number) if isinstance(number, int) and number >= 0 else None)
        if token is not None and tokenizer.token_to_id(token) is not None:
            found[kind] = token
    bos = found.get("bos_token")
    # pax puts BOS before each text if the recipe names it; GPT-2's tokenizer names one that it does not put there.
    if bos is not None and tokenizer.encode("a").ids[:1] != [tokenizer.token_to_id(bos)]:
        del found["bos_token"]
    return found
