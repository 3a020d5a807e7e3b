"""A command that starts MaxText: its program, keys, flags and devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.shell_words import Word


@dataclasses.dataclass(frozen=True)
class Pair:
    """One `key=value`, with its line, and the variables and commands that its value is missing.

    `in_config`: whether it is from a `.yml`, whose keys those of a model override.
    """

    key: str
    value: str
    line: int
    missing: frozenset[str] = frozenset()
    in_config: bool = False


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """Something in a file that was not used, and why."""

    line: int
    text: str
    reason: str


@dataclasses.dataclass
class Launch:
    """One training run.

    Attributes:
      line: The first line of the command.
      entry: The program that Python runs: a path, or a module.
      config: The .yml on its command line, or None.
      pairs: Its keys in order, duplicates included.
      overrides: Keys set by exported `M_…` variables.
      flags: `LIBTPU_INIT_ARGS` and `XLA_FLAGS`, as written.
      topology: The accelerator in the flags of a wrapper such as xpk: `v4-128`.
      num_slices: The number of slices in those flags.
      note: The comment after the command.
      diagnostics: Words of the command that are not `key=value`.
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
    diagnostics: list[Diagnostic] = dataclasses.field(default_factory=list)

    def read_arguments(self, words: Sequence[Word], lines: Sequence[int]) -> None:
        """Adds the words after the program: a config, `key=value` pairs, and diagnostics for the rest."""
        with_next = zip(words, [*words[1:], Word()], lines, strict=False)
        for word, after, line in with_next:
            text = word.text
            key, equals, value = text.partition("=")
            if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key):
                # Besides, what a shell would have expanded, quoted in a string.
                self.pairs.append(Pair(key, value, line, word.missing | {*re.findall(r"\$[({].*[)}]", value)}))
            elif text.endswith((".yml", ".yaml")) and not equals:
                self.config = text
            elif re.fullmatch(r"[A-Za-z_]\w*:", text) and after.text and "=" not in after.text:
                reason = f"not key=value, which MaxText rejects. Read as {text[:-1]}={after.text}"
                self.diagnostics.append(Diagnostic(line, f"{text} {after.text}", reason))
                self.pairs.append(Pair(text[:-1], after.text, line, after.missing))
                next(with_next)
            elif word.missing:
                unset = text[:80] or ", ".join(f"${name}" for name in sorted(word.missing))
                self.diagnostics.append(Diagnostic(line, unset, "its value is unknown, and with it its keys"))
            else:
                self.diagnostics.append(Diagnostic(line, text[:80], "not key=value, which MaxText rejects"))


@dataclasses.dataclass
class LaunchFile:
    """The launches in a file.

    Attributes:
      launches: MaxText's training commands.
      skipped: Statements that were not evaluated.
      others: Python commands that do not train.
    """

    launches: list[Launch] = dataclasses.field(default_factory=list)
    skipped: list[Diagnostic] = dataclasses.field(default_factory=list)
    others: list[Diagnostic] = dataclasses.field(default_factory=list)


_PROGRAM = re.compile(r"(.*/)?(python[0-9.]*|bash|sh|xpk|gcloud|[^/]+\.sh)")


def program_at(words: Sequence[Word]) -> int:
    """The index of the program that a command runs: behind a launcher such as `srun` or `$CMD`, else the first word."""
    first = next((i for i, word in enumerate(words) if word.text), 0)
    if words[first].text.rpartition("/")[2] not in tables.part("launchers") and not words[first].missing:
        return first
    return next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word.text)), first)


def python_program(words: Sequence[Word]) -> tuple[str, str, int] | None:
    """The program that a command runs with Python; None if it does not start Python.

    Returns:
      Its kind (`train`, `rl`, `post-train`, `wrapper` or `other`), its name, and how many words that took.
    """
    if not re.fullmatch(r"(.*/)?python[0-9.]*", words[0].text):
        return None
    at = 1
    while at < len(words) and words[at - 1].text != "-m" and words[at].text[:1] in ("-", ""):
        at += 1
    if at >= len(words):
        return None
    name = words[at].text
    program = f"-m {name}" if words[at - 1].text == "-m" else name
    kinds = tables.part("programs")
    return next((kind for kind, pattern in kinds.items() if re.fullmatch(pattern, program)), "other"), name, at + 1


def options_of(words: Sequence[Word]) -> dict[str, Word]:
    """`--name=value` and `--name value` of a wrapper, names in lower case with `-`."""
    options: dict[str, Word] = {}
    for word, after in zip(words, [*words[1:], Word()], strict=True):
        if word.text.startswith("--"):
            name, equals, value = word.text[2:].partition("=")
            options[name.lower().replace("_", "-")] = word.slice(len(word.text) - len(value)) if equals else after
    return options
