"""What a word of a script stands for, given the variables that are known.

Nothing is run: what only a shell can know stays as it is written, and is named as missing.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence

from paxcli.convert.maxtext.lexing import Part, Token, closing

DATE = "DATE"
"""Stands for the time at which a script would have run: `$(date …)`."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED = re.compile(r"\A([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(:?[-=?+]|%%|%|##|#)?", re.DOTALL)
_LONGEST = 1 << 16
_DEEPEST = 20


@dataclasses.dataclass(frozen=True)
class Value:
    """A text, and what it lacks: names of variables that are set nowhere, and commands that only a shell can run."""

    text: str = ""
    missing: frozenset[str] = frozenset()


@dataclasses.dataclass
class Scope:
    """Variables, and the script's positional arguments ($1 and up)."""

    variables: dict[str, Value] = dataclasses.field(default_factory=dict)
    positional: list[Value] = dataclasses.field(default_factory=list)

    def get(self, name: str) -> Value | None:
        """A variable or positional argument that is set."""
        if name.isdigit():
            index = int(name[:6]) - 1
            return self.positional[index] if 0 <= index < len(self.positional) else self.variables.get(name)
        return self.variables.get(name)


def expand(word: Token, scope: Scope) -> list[Value]:
    """The words that a word becomes: one, except where an unquoted variable holds none or several."""
    if word.text in ('"$@"', "$@", '"${@}"', "${@}"):
        return list(scope.positional)
    pieces: list[tuple[Value, bool]] = []  # with whether blanks in it part words
    for part in word.parts:
        if part.quote == "'":
            pieces.append((Value(part.text), False))
        else:
            pieces += [(v, e and not part.quote) for v, e in _pieces(part.text, scope, bool(part.quote), 0)]
    quoted = any(part.quote for part in word.parts)
    return _split(pieces, quoted)


def expand_one(word: Token, scope: Scope) -> Value:
    """The text of a word where the shell does not part it, as on the right of `=`."""
    return _joined(
        Value(part.text) if part.quote == "'" else _joined(v for v, _ in _pieces(part.text, scope, bool(part.quote), 0))
        for part in word.parts
    )


def expand_text(text: str, scope: Scope, depth: int = 0) -> Value:
    """The text that stands in double quotes, or after `:-` in `${…}`."""
    if depth > _DEEPEST:
        return Value(text, frozenset({text[:40]}))
    return _joined(value for value, _ in _pieces(text, scope, True, depth))


def split_assignment(word: Token) -> tuple[str, bool, Token] | None:
    """`NAME=…` or `NAME+=…` as name, whether it appends, and the word on the right; None for any other word."""
    first = word.parts[0] if word.parts else Part("")
    match = re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", first.text) if not first.quote else None
    if match is None:
        return None
    rest = (Part(first.text[match.end() :]), *word.parts[1:])
    return match[1], bool(match[2]), Token("word", word.line, word.text[match.end() :], rest)


def _joined(values: Iterable[Value]) -> Value:
    """One after the other. A script cannot make a text grow without end: there is a limit."""
    text, missing = "", frozenset()
    for value in values:
        if len(text) + len(value.text) > _LONGEST:
            return Value(text, missing | value.missing | {"a text that is too long"})
        text, missing = text + value.text, missing | value.missing
    return Value(text, missing)


def _split(pieces: Sequence[tuple[Value, bool]], quoted: bool) -> list[Value]:
    """Pieces as words: blanks in an unquoted expansion part words."""
    words: list[list[Value]] = []
    current: list[Value] | None = None
    for value, parts in pieces:
        for index, chunk in enumerate(re.split(r"\s+", value.text) if parts else [value.text]):
            if index:
                words += [current] if current else []
                current = None
            if chunk or value.missing or not parts:
                current = current or []
                current.append(Value(chunk, value.missing))
    words += [current] if current else []
    return [_joined(word) for word in words] or ([Value()] if quoted else [])


def _pieces(text: str, scope: Scope, quoted: bool, depth: int) -> list[tuple[Value, bool]]:
    """A text as literal stretches and expansions, which are marked."""
    found: list[tuple[Value, bool]] = []
    at = literal = 0

    def flush(to: int) -> None:
        if to > literal:
            found.append((Value(text[literal:to]), False))

    while at < len(text):
        if quoted and text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\"):
            flush(at)
            found.append((Value(text[at + 1]), False))
            at = literal = at + 2
        elif text[at] in "$`" and (end := _expansion_end(text, at)) > at:
            flush(at)
            found.append((_expansion(text[at:end], scope, depth), True))
            at = literal = end
        else:
            at += 1
    flush(len(text))
    return found


def _expansion_end(text: str, at: int) -> int:
    if text[at] == "`" or text[at + 1 : at + 2] in ("(", "{"):
        return closing(text, at)
    name = _NAME.match(text, at + 1)
    return name.end() if name else -1


def _expansion(text: str, scope: Scope, depth: int) -> Value:
    if depth > _DEEPEST:
        return Value(text, frozenset({text[:40]}))
    if text.startswith("$((") and text.endswith("))"):
        return _arithmetic(text, scope, depth)
    if text.startswith(("$(", "`")):
        command = text[2:-1] if text[0] == "$" else text[1:-1]
        is_date = command.split()[:1] == ["date"]
        return Value(DATE) if is_date else Value(text, frozenset({text[:80]}))
    if text.startswith("${"):
        return _parameter(text[2:-1], text, scope, depth)
    return _variable(text[1:], scope)


def _variable(name: str, scope: Scope) -> Value:
    if name in "@*":
        return _joined(v for i, a in enumerate(scope.positional) for v in ((Value(" "), a) if i else (a,)))
    value = scope.get(name)
    return Value("", frozenset({name})) if value is None else value


def _parameter(inside: str, text: str, scope: Scope, depth: int) -> Value:
    match = _BRACED.match(inside)
    if match is None or (match[2] is None and match.end() != len(inside)):
        return Value(text, frozenset({text[:80]}))
    name, how, word = match[1], match[2] or "", inside[match.end() :]
    value = _variable(name, scope)
    if not how:
        return value
    is_set = name not in value.missing
    if how[-1] in "-=?+":
        counts = is_set and (bool(value.text or value.missing) or not how.startswith(":"))
        if how[-1] == "+":
            return expand_text(_unquoted(word), scope, depth + 1) if counts else Value()
        if counts or how[-1] == "?":
            return value
        default = expand_text(_unquoted(word), scope, depth + 1)
        if how[-1] == "=":
            scope.variables[name] = default
        return default
    pattern = expand_text(_unquoted(word), scope, depth + 1)
    return dataclasses.replace(value, text=_trimmed(value.text, pattern.text, how))


def _unquoted(word: str) -> str:
    """A default of `${V:-"…"}` without the quotes around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _trimmed(text: str, pattern: str, how: str) -> str:
    if len(text) * len(pattern) > _LONGEST:
        return text
    if "*" not in pattern and "?" not in pattern and "[" not in pattern:
        return text.removesuffix(pattern) if how[0] == "%" else text.removeprefix(pattern)
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if len(how) == 2 else lengths:
        piece = text[len(text) - length :] if how[0] == "%" else text[:length]
        if fnmatch.fnmatchcase(piece, pattern):
            return text[: len(text) - length] if how[0] == "%" else text[length:]
    return text


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def _arithmetic(text: str, scope: Scope, depth: int) -> Value:
    expanded = expand_text(text[3:-2], scope, depth + 1)
    if expanded.missing:
        return Value(text, expanded.missing)
    try:
        if len(expanded.text) > 200:
            raise ValueError("too long")
        return Value(str(_evaluate(ast.parse(expanded.text.strip(), mode="eval").body, scope)))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return Value(text, frozenset({text[:80]}))


def _evaluate(node: ast.expr, scope: Scope) -> int:
    """A shell's whole-number arithmetic, out of Python's syntax tree of it."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if (known := scope.get(name)) is not None:
            return int(known.text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, scope)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, scope), _evaluate(right, scope))
    raise ValueError("not whole-number arithmetic")
