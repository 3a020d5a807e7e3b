"""The files of a Hugging Face directory besides its weights, and the recipe's values for its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tokenizers

from paxcli.convert.huggingface.files import read_json
from paxcli.convert.huggingface.generation import GENERATION
from paxcli.errors import DataError, first_line

FOLDER = "huggingface"
"""Directory of these files in a run."""

TOKENIZER = "tokenizer.json"
_CARRIED = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", GENERATION,
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def carry_files(source: Path, target: Path) -> list[str]:
    """Copies the files of the tokenizer and of generation, those that exist; returns their names."""
    found = [name for name in _CARRIED if (source / name).is_file()]
    target.mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def input_values(source: Path, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The recipe's inputs: text with the tokenizer in `source`, which will be at `path`; without one, synthetic rows.

    Raises:
      DataError: The tokenizer cannot be read, or has no end-of-text token.
    """
    if not (source / TOKENIZER).is_file():
        return {"train_input": "SyntheticInput"}
    fields = {"": "HuggingFaceTokenizer", ".path": str(path), **_special_tokens(source, config)}
    values: dict[str, Any] = {"train_input": "StdlibInput", "eval_inputs": ["StdlibInput"]}
    values |= {"eval_inputs.0.name": "stdlib", "eval_inputs.0.eval_loop_num_batches": 8}
    inputs = ("train_input", "eval_inputs.0")
    return values | {f"{one}.tokenizer{field}": value for one in inputs for field, value in fields.items()}


def _special_tokens(source: Path, config: dict[str, Any]) -> dict[str, str]:
    file = source / TOKENIZER
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a `tokenizers` file: {first_line(error)}.", "Download it again.") from None
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        named |= read_json(source / name) if (source / name).is_file() else {}
    found = {}
    for kind in ("eos", "bos", "pad"):
        token = named.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        ids = config.get(f"{kind}_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        token = token or (tokenizer.id_to_token(first) if isinstance(first, int) and first >= 0 else None)
        if token is not None and tokenizer.token_to_id(token) is not None:
            found[f".{kind}_token"] = token
    if ".eos_token" not in found:
        raise DataError(f"{source} names no end-of-text token.", "Add `eos_token` to tokenizer_config.json.")
    bos = found.get(".bos_token")
    # pax puts BOS before each text if the recipe names it; GPT-2's tokenizer names one that it does not put there.
    if bos is not None and tokenizer.encode("a").ids[:1] != [tokenizer.token_to_id(bos)]:
        del found[".bos_token"]
    return found
