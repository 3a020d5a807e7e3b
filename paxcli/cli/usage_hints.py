"""The next step after a usage error: the verb of pax for another tool's word, `--set` for a bare value."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

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


def usage_hint(arguments: Sequence[str], command: str) -> str:
    """The hint of a usage error.

    Args:
      arguments: The command line, without `pax`.
      command: The command that failed, such as `pax train`.
    """
    word = arguments[0].lower() if arguments else ""
    verb = next((verb for verb, words in _VERBS.items() if word in words), None)
    if command == "pax" and verb is not None:
        return f"In pax that is `{verb}`."
    values = [argument for argument in arguments[1:] if _is_bare_value(argument, arguments)]
    if values:
        sets = " ".join(f"--set {shlex.quote(value)}" for value in values)
        return f"Values are given with `--set`: `{sets}`."
    return f"See `{command} --help`."


def _is_bare_value(argument: str, arguments: Sequence[str]) -> bool:
    before = arguments[arguments.index(argument) - 1]
    return "=" in argument and not argument.startswith("-") and not before.startswith("-")
