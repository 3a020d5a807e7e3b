"""A command that starts MaxText: what it runs, with which keys, on which devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from paxcli.convert.maxtext.shell_words import Word


@dataclasses.dataclass(frozen=True)
class Pair:
    """One `key=value`, with the line that it stands on and what its value lacks."""

    key: str
    value: str
    line: int
    missing: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """Something that was read and not followed."""

    line: int
    text: str
    reason: str


@dataclasses.dataclass
class Launch:
    """One start of a training.

    Attributes:
      line: Where the command begins.
      entry: What Python runs: a path, or a module.
      config: The .yml that it names, or None.
      pairs: Its keys in order, duplicates too.
      overrides: Keys set by exported `M_…` variables.
      flags: `LIBTPU_INIT_ARGS` and `XLA_FLAGS`, as written.
      topology: Accelerator of a wrapper's flags, such as `v4-128`.
      num_slices: Slices of a wrapper's flags.
      note: The comment after it.
      reports: Words of the command that are no keys.
    """

    line: int
    entry: str = ""
    config: str | None = None
    pairs: list[Pair] = dataclasses.field(default_factory=list)
    overrides: list[Pair] = dataclasses.field(default_factory=list)
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    topology: str | None = None
    num_slices: int | None = None
    note: str = ""
    reports: list[Diagnostic] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class LaunchFile:
    """What a file holds: launches, and what was passed over."""

    launches: list[Launch] = dataclasses.field(default_factory=list)
    skipped: list[Diagnostic] = dataclasses.field(default_factory=list)
    others: list[Diagnostic] = dataclasses.field(default_factory=list)


_TRAIN_FILES = ("train.py", "train_compile.py", "train", "train_compile")
_TRAIN_MODULE = re.compile(r"(?i)maxtext(\.trainers\.pre_train)?\.train(_compile)?")
_POST_TRAIN = re.compile(
    r"(?i)maxtext\.(trainers\.post_train\.\w+\.\w+|sft_trainer|sft\.\w+|rl\.\w+|experimental\.rl\.\w+)"
)
_BEFORE_PYTHON = ("nsys", "nohup", "time", "sudo", "env", "numactl", "stdbuf", "timeout", "exec", "srun", "ldd")
_BEFORE_OPTIONS = 24


def python_program(words: Sequence[Word]) -> tuple[str, str, int] | None:
    """What a Python command runs, or None when the words are no Python command.

    Returns:
      Its kind (`train`, `post-train`, `wrapper` or `other`), its name, and how many words that took.
    """
    start = _python_at([word.text for word in words])
    if start is None:
        return None
    at, is_module = start + 1, False
    while at < len(words) and (words[at].text.startswith("-") or not words[at].text):
        is_module = words[at].text == "-m"
        at += 1
        if is_module:
            break
    if at >= len(words):
        return None
    name = words[at].text
    return _kind(name, is_module), name, at + 1


def _python_at(words: Sequence[str]) -> int | None:
    """Where `python` stands: first, or after a program that runs another."""
    first = next((i for i, word in enumerate(words) if word), None)
    if first is None:
        return None
    reach = _BEFORE_OPTIONS if words[first].rpartition("/")[2] in _BEFORE_PYTHON else 1
    candidates = range(first, min(len(words), first + reach))
    return next((i for i in candidates if re.fullmatch(r"(.*/)?python[0-9.]*", words[i])), None)


def _kind(name: str, is_module: bool) -> str:
    if is_module:
        if _POST_TRAIN.fullmatch(name):
            return "post-train"
        return "train" if _TRAIN_MODULE.fullmatch(name) else "other"
    file = name.rpartition("/")[2]
    if file in ("multihost_runner.py", "multihost_job.py", "xpk.py"):
        return "wrapper"
    return "train" if file in _TRAIN_FILES else "other"


def options_of(words: Iterable[Word]) -> dict[str, Word]:
    """`--name=value` and `--name value` of a wrapper, names in lower case with `-`."""
    options: dict[str, Word] = {}
    waiting = ""
    for word in words:
        if word.text.startswith("--"):
            name, equals, value = word.text[2:].partition("=")
            waiting = name.lower().replace("_", "-")
            if equals:
                options[waiting] = Word(value, word.missing)
                waiting = ""
        elif waiting:
            options[waiting] = word
            waiting = ""
    return options


def read_arguments(words: Sequence[Word], lines: Sequence[int], launch: Launch) -> None:
    """The words after the entry: a config file, `key=value` pairs, and what is neither."""
    at = 0
    while at < len(words):
        word, line = words[at], lines[at]
        text = word.text
        key, equals, value = text.partition("=")
        after = words[at + 1].text if at + 1 < len(words) else ""
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key):
            launch.pairs.append(Pair(key, value, line, word.missing))
        elif text.endswith((".yml", ".yaml")) and not equals:
            launch.config = text
        elif re.fullmatch(r"[A-Za-z_]\w*:", text) and after and "=" not in after:
            reason = f"no key=value: MaxText refuses it. Read as {text[:-1]}={after}"
            launch.reports.append(Diagnostic(line, f"{text} {after}", reason))
            launch.pairs.append(Pair(text[:-1], after, line, words[at + 1].missing))
            at += 1
        elif text or not word.missing:
            launch.reports.append(Diagnostic(line, text[:80], "no key=value: MaxText refuses it"))
        at += 1
