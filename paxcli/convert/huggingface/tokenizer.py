"""The files of a Hugging Face directory besides its weights, and the recipe's values for its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fiddle as fdl

from paxcli.config.paths import copy_file
from paxcli.config.tree import walk
from paxcli.convert.huggingface.generation import GENERATION
from paxcli.errors import DataError
from paxcli.inputs.tokenizers import hugging_face_fields

TOKENIZER = "tokenizer.json"
_CARRIED = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", GENERATION,
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


def carry_files(source: Path, target: Path) -> list[str]:
    """Copies the files of the tokenizer and of generation, those that exist; returns their names."""
    found = [name for name in _CARRIED if (source / name).is_file()]
    target.mkdir(parents=True, exist_ok=True)
    for name in found:
        copy_file(source / name, target / name)
    return found


def eos_id(config: fdl.Buildable) -> int | None:
    """The id of the end token of the recipe's first tokenizer; None without one, or without its file."""
    templates = (node.value for node in walk(config) if node.key == "tokenizer")
    template = next((value for value in templates if isinstance(value, fdl.Buildable)), None)
    if template is None:
        return None
    file = fdl.ordered_arguments(template, include_defaults=True).get("path", "/")  # bytes need none
    return fdl.build(template)().eos_id if Path(str(file)).expanduser().exists() else None


def input_values(source: Path, path: Path) -> dict[str, Any]:
    """The recipe's inputs: text with the tokenizer in `source`, which will be at `path`; without one, synthetic rows.

    Raises:
      DataError: The tokenizer cannot be read, or has no end-of-text token.
    """
    if not (source / TOKENIZER).is_file():
        return {"train_input": "SyntheticInput"}
    tokenizer = hugging_face_fields(source) | {"path": str(path)}
    if "eos_token" not in tokenizer:
        raise DataError(f"{source} names no end-of-text token.", "Add `eos_token` to tokenizer_config.json.")
    fields = {"": "HuggingFaceTokenizer", **{f".{name}": value for name, value in tokenizer.items()}}
    values: dict[str, Any] = {"train_input": "StdlibInput", "eval_inputs": ["StdlibInput"]}
    values |= {"eval_inputs.0.name": "stdlib", "eval_inputs.0.eval_loop_num_batches": 8}
    inputs = ("train_input", "eval_inputs.0")
    return values | {f"{one}.tokenizer{field}": value for one in inputs for field, value in fields.items()}
