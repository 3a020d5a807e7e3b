"""Follows a launch script from top to bottom and collects the trainings that it starts. Nothing of it is run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from paxcli.convert.maxtext.expansion import Scope, Value, expand, expand_one, split_assignment
from paxcli.convert.maxtext.launch import Launch, Pair, Reading, Report, entry_of, options_of, read_arguments
from paxcli.convert.maxtext.lexing import Token, tokenize
from paxcli.convert.maxtext.parsing import ArgumentLoop, If, Simple, Statement, Unread, parse

Open = Callable[[str], str | None]
"""The text of another script that a script names, or None when it is not at hand."""

_QUIET = ("echo", "set", "printf", ":", "true", "exit", "sleep", "date", "shift", "cd", "popd", "pushd")
_RUNS_SCRIPT = ("bash", "sh", "source", ".", "/bin/bash")
_MOST_STATEMENTS = 20_000
_DEEPEST = 8


def read_script(text: str, arguments: Mapping[str, str] | None = None, open_script: Open = lambda _: None) -> Reading:
    """The trainings that a script would start.

    Args:
      text: The script.
      arguments: Variables set from outside, which win over the script's own; `1`, `2` … are positional.
      open_script: Finds scripts that this one calls.
    """
    arguments = dict(arguments or {})
    numbers = [int(name[:4]) for name in arguments if name.isdigit()]
    positional = [Value(arguments.get(str(i), "")) for i in range(1, max(numbers, default=0) + 1)]
    pinned = {name: Value(value) for name, value in arguments.items() if not name.isdigit()}
    walk = _Walk(Scope(dict(pinned), positional), pinned, open_script)
    walk.follow(parse(tokenize(text)))
    return walk.reading


@dataclasses.dataclass
class _Walk:
    scope: Scope
    pinned: Mapping[str, Value]
    open_script: Open
    depth: int = 0
    reading: Reading = dataclasses.field(default_factory=Reading)
    exported: set[str] = dataclasses.field(default_factory=set)
    assigned_at: dict[str, int] = dataclasses.field(default_factory=dict)
    left: list[int] = dataclasses.field(default_factory=lambda: [_MOST_STATEMENTS])
    options: dict[str, Value] = dataclasses.field(default_factory=dict)  # of the wrapper around this command
    line: int | None = None  # of that wrapper: lines inside its string are not the file's

    def follow(self, statements: Sequence[Statement]) -> None:
        previous: bool | None = True
        for statement in statements:
            self.left[0] -= 1
            if self.left[0] < 0:
                return
            if isinstance(statement, Unread):
                self._skip(statement.line, statement.text, statement.why)
            elif isinstance(statement, If):
                self._if(statement)
            elif isinstance(statement, Simple):
                previous = self._joined(statement, previous)
            else:
                assert isinstance(statement, ArgumentLoop)  # its arguments are pinned from the start

    def _skip(self, line: int, text: str, why: str) -> None:
        self.reading.skipped.append(Report(self.line or line, text[:80], why))

    def _joined(self, statement: Simple, previous: bool | None) -> bool | None:
        """One command of `a && b || c`; returns whether it succeeds, as far as that can be known."""
        if statement.joined == "|":
            return None
        if statement.joined and previous is not None and previous != (statement.joined == "&&"):
            return previous
        words = [value for token in statement.words for value in expand(token, self.scope)]
        if words and words[0].text in ("[", "[[", "test", "!"):
            return _test(words)
        if statement.joined and previous is None:
            self._skip(statement.line, _text(statement), "the condition before it cannot be known")
            return None
        self._command(statement)
        return True

    def _if(self, statement: If) -> None:
        for condition, body in statement.branches:
            holds = self._condition(condition)
            if holds is None:
                text = " ".join(_text(one) for one in condition if isinstance(one, Simple))
                self._skip(statement.line, f"if {text}", "its condition cannot be known")
                return
            if holds:
                self.follow(body)
                return
        self.follow(statement.otherwise)

    def _condition(self, statements: Sequence[Statement]) -> bool | None:
        result: bool | None = None
        for statement in statements:
            if not isinstance(statement, Simple):
                return None
            if statement.joined and result is None:
                return None
            if statement.joined and result != (statement.joined == "&&"):
                continue
            result = _test([value for token in statement.words for value in expand(token, self.scope)])
        return result

    def _command(self, statement: Simple) -> None:
        tokens = list(statement.words)
        while tokens and tokens[0].text in ("export", "declare", "local", "readonly", "env"):
            exports = tokens.pop(0).text == "export"
            if exports:
                self.exported |= {token.text for token in tokens if "=" not in token.text}
                self.exported |= {found[0] for token in tokens if (found := split_assignment(token))}
        saved = dict(self.scope.variables), set(self.exported)
        prefix = []
        while tokens and (found := split_assignment(tokens[0])) is not None:
            self._assign(*found)
            prefix.append(found[0])
            tokens.pop(0)
        tokens = [token for token in tokens if not (prefix and token.text.startswith("#"))]
        if statement.words and statement.words[0].text == "export":
            return
        words, lines = self._expanded(tokens)
        if not words:
            return
        self.exported |= set(prefix)
        self._run(words, lines, statement)
        if prefix:  # `NAME=value command` sets it for that command only
            self.scope.variables, self.exported = saved

    def _expanded(self, tokens: Sequence[Token]) -> tuple[list[Value], list[int]]:
        words, lines = [], []
        for token in tokens:
            values = expand(token, self.scope)
            words += values
            lines += [self.line or token.line] * len(values)
        return words, lines

    def _assign(self, name: str, appends: bool, right: Token) -> None:
        value = expand_one(right, self.scope)
        if appends:
            before = self.scope.get(name) or Value()
            value = Value((before.text + value.text)[: 1 << 16], before.missing | value.missing)
        self.assigned_at[name] = self.line or right.line
        if name not in self.pinned:
            self.scope.variables[name] = value

    def _run(self, words: list[Value], lines: list[int], statement: Simple) -> None:
        name = words[0].text.rpartition("/")[2]
        entry = entry_of(words)
        if entry is not None:
            self._python(entry, words, lines, statement)
        elif name in ("xpk", "xpk.py"):
            self._wrapper(words, statement)
        elif name == "eval" or (name in _RUNS_SCRIPT and words[1:2] and words[1].text == "-c"):
            inner = words[1:] if name == "eval" else words[2:3]
            self._inner(" ".join(word.text for word in inner), statement)
        elif name in _RUNS_SCRIPT or words[0].text.endswith(".sh"):
            self._script(words if words[0].text.endswith(".sh") else words[1:], statement)
        elif name not in _QUIET and not name.endswith("["):
            self._skip(statement.line, _text(statement), "no command that pax knows")

    def _python(self, entry: tuple[str, str, int], words: list[Value], lines: list[int], statement: Simple) -> None:
        kind, name, used = entry
        line = self.line or statement.line
        if kind == "wrapper":
            return self._wrapper(words[used:], statement)
        if kind != "train":
            why = "trains after pre-training, which pax does not" if kind == "post-train" else "not a training command"
            self.reading.others.append(Report(line, name, why))
            return None
        launch = Launch(line, name, note=statement.note)
        read_arguments(words[used:], lines[used:], launch)
        self._environment(launch)
        self.reading.launches.append(launch)
        return None

    def _environment(self, launch: Launch) -> None:
        """What the environment and a wrapper's flags say about a launch."""
        for name in sorted(self.exported | set(self.pinned)):
            value = self.scope.get(name)
            if value is None:
                continue
            if name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
                launch.flags[name] = " ".join(value.text.split())
            elif name.startswith("M_"):
                launch.overrides.append(Pair(name[2:], value.text, self.assigned_at.get(name, 0), value.missing))
        device = next((self.options[n] for n in ("tpu-type", "device-type") if n in self.options), None)
        launch.topology = device.text if device else None
        slices = self.options.get("num-slices") or self.options.get("num-nodes") or Value()
        launch.num_slices = int(slices.text) if re.fullmatch(r"[0-9]{1,6}", slices.text) else None

    def _wrapper(self, words: Sequence[Value], statement: Simple) -> None:
        options = options_of(words)
        if "command" not in options:
            return self._skip(statement.line, _text(statement), "no command that pax knows")
        return self._inner(options["command"].text, statement, options)

    def _inner(self, text: str, statement: Simple, options: dict[str, Value] | None = None) -> None:
        """A command that stands in a string."""
        if self.depth >= _DEEPEST:
            return self._skip(statement.line, _text(statement), "too many commands inside each other")
        walk = dataclasses.replace(
            self,
            scope=Scope(dict(self.scope.variables), list(self.scope.positional)),
            depth=self.depth + 1,
            exported=set(self.exported),
            options=self.options if options is None else options,
            line=self.line or statement.line,
        )
        before = len(self.reading.launches)
        walk.follow(parse(tokenize(text)))
        for launch in self.reading.launches[before:]:
            launch.note = launch.note or statement.note
        return None

    def _script(self, words: Sequence[Value], statement: Simple) -> None:
        name = words[0].text if words else ""
        other = self.open_script(name) if name and self.depth < _DEEPEST else None
        if other is None:
            return self._skip(statement.line, _text(statement), "a script that is not at hand")
        arguments = [word for word in words[1:] if not re.match(r"[A-Za-z_]\w*=", word.text)]
        given = dict(word.text.split("=", 1) for word in words[1:] if re.match(r"[A-Za-z_]\w*=", word.text))
        pinned = {**{key: Value(value) for key, value in given.items()}, **self.pinned}
        known = {name: value for name, value in self.scope.variables.items() if name in self.exported}
        scope = Scope({**known, **pinned}, [*arguments])
        walk = dataclasses.replace(
            self, scope=scope, pinned=pinned, depth=self.depth + 1, exported=set(self.exported), line=statement.line
        )
        walk.follow(parse(tokenize(other)))
        return None


def _text(statement: Simple) -> str:
    return " ".join(token.text for token in statement.words)[:80]


def _test(words: Sequence[Value]) -> bool | None:
    """`[ … ]` on what is known; None when it asks for more. A variable that is set nowhere is empty, as in a shell."""
    texts = [word.text for word in words]
    if texts[:1] == ["!"]:
        result = _test(words[1:])
        return None if result is None else not result
    if not texts or texts[0] not in ("[", "[[", "test"):
        return {"true": True, ":": True, "false": False}.get(texts[0]) if len(texts) == 1 else None
    if any(re.search(r"\W", name) for word in words for name in word.missing):
        return None  # it depends on a command
    inside = texts[1:-1] if texts[0] != "test" else texts[1:]
    negated = inside[:1] == ["!"]
    result = _primary(inside[1:] if negated else inside)
    return result if result is None or not negated else not result


def _primary(words: Sequence[str]) -> bool | None:
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case ["-z"] | ["-n"]:
            return words[0] == "-z"
        case [a, "=" | "==", b]:
            return a == b
        case [a, "!=", b]:
            return a != b
        case [a, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as how, b]:
            if not all(re.fullmatch(r"-?[0-9]{1,18}", n) for n in (a, b)):
                return None
            x, y = int(a), int(b)
            return {"-eq": x == y, "-ne": x != y, "-lt": x < y, "-le": x <= y, "-gt": x > y, "-ge": x >= y}[how]
        case [text] if not text.startswith("-"):
            return bool(text)
    return None
