"""The next step after a usage error: the verb of pax for another tool's word, `--set` for a bare value, an import."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from paxcli.config.names_elsewhere import field_of
from paxcli.errors import did_you_mean

# What other tools call it → what to type.
_VERBS = {
    "pax train": ("fit", "run", "pretrain", "resume", "finetune", "fine-tune", "sft", "lora"),
    "pax eval": ("evaluate", "test", "score", "validate", "benchmark"),
    "pax decode": ("generate", "chat", "sample", "infer", "inference", "predict", "complete"),
    "pax export": ("serve", "deploy", "publish", "save"),
    "pax import": ("load", "download", "pull"),
    "pax import` or `pax maxtext-convert": ("convert", "migrate"),
    "pax data tokenize": ("tokenize", "prepare", "preprocess"),
    "pax recipes ls": ("ls", "list", "models"),
    "pax recipes show": ("show", "config"),
    "pax inspect-input": ("inspect",),
    "pax profile summarize": ("trace",),
}


def usage_hint(arguments: Sequence[str], command: str, message: str = "", has_sets: bool = False) -> str:
    """The hint of a usage error.

    Args:
      arguments: The command line, without `pax`.
      command: The command that failed, such as `pax train`.
      message: The error message.
      has_sets: Whether the command has the option `--set`.
    """
    word = arguments[0].lower() if arguments else ""
    verb = next((verb for verb, words in _VERBS.items() if word in words), None)
    if command == "pax" and verb is not None:
        return f"In pax that is `{verb}`."
    if values := [b for a, b in pairwise(arguments) if "=" in b and not a.startswith("-") and not b.startswith("-")]:
        sets = " ".join(f"--set {shlex.quote(value)}" for value in values)
        return f"Values are given with `--set`: `{sets}`."
    option = re.match(r"No such option: --([\w-]+)( \()?", message)  # in brackets: similar options
    field = None if option is None else "PATH" if option[1] == "config" else field_of(option[1])
    if option and has_sets and (field or not option[2]) and f"--{field}".replace("_", "-") not in message:
        field = field or option[1].replace("-", "_")
        return f"A recipe's fields are given as `--set {field}=…`, or in `--overlay FILE.yaml`. See `{command} --help`."
    return f"See `{command} --help`."


def import_hint(error: BaseException | None) -> str | None:
    """The import that a recipe or layer of the user's meant, if it asked one of pax's packages for another's name."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith("paxcli"):
        return None
    asked = re.search(r"cannot import name '(\w+)'", str(error))
    root = Path(__file__).resolve().parents[1]
    names = {path: ".".join(("paxcli", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    if asked is None:
        return did_you_mean(str(error.name), modules)
    defines = re.compile(rf"^(class|def) {asked[1]}\b", re.MULTILINE)
    found = [name for name, path in modules.items() if defines.search(path.read_text(encoding="utf-8"))]
    return f"It is `from {found[0]} import {asked[1]}`." if found else None
