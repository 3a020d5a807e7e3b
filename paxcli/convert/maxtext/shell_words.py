"""Expands the words of a shell script with the variables that are known. Runs nothing.

What only a shell can know (the output of a command, an unset variable) stays as written and is named as missing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tree_sitter import Node

DATE = "DATE"  # replaces `$(date …)`, the time at which a script would have run
SHIFTED = "@shifted"  # variable with an item for each argument that `shift` removed

_COMMANDS = ("command_substitution", "process_substitution")
_EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", *_COMMANDS)
_STRINGS = ("string", "raw_string", "ansi_c_string")
_ARRAY = re.compile(r'"?\$(?:@|\{@\}|\{(\w+)\[[@*]\]\})"?')
_ESCAPES = re.compile(r"\\(?:\n|(.))", re.DOTALL)
_ESCAPES_IN_QUOTES = re.compile(r'\\(?:\n|([$`"\\]))')
_ASSIGNED = re.compile(r"(?:^|[\s;&|({])(?:for\s+)?([A-Za-z_]\w*)(?:\[[^]]*\])?(?:\s+in\b| *[-+*/%]?=(?!=)|\+\+|--)")
# Commands that set the variables among their words.
SETTERS = re.compile(r"\b(?:read|let|mapfile|readarray|getopts|printf\s+-v)\s([^\n;&|<]*)")
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")  # which a shell expands to several words
_NO_BRACES = re.compile(r"""\$\{[^}]*\}|\$?'[^']*'|"([^"\\]|\\.)*"|\\.""", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,18}")
NAMES = re.compile(r"[A-Za-z_]\w*")
_CASES: dict[str, Callable[[str], str]] = {",,": str.lower, "^^": str.upper}
_TESTS = ("test", "true", "false", ":")
_MAX_TEXT = 1 << 16
_MAX_ARITHMETIC = 200
_MAX_DEPTH = 20


@dataclasses.dataclass(frozen=True)
class Gap:
    """An unknown part of a text: from character `start` to `end`, an unset variable or a command, which is not run."""

    start: int
    end: int
    name: str


@dataclasses.dataclass(frozen=True)
class Word:
    """An expanded word: its text, and the parts of it that are unknown."""

    text: str = ""
    gaps: tuple[Gap, ...] = ()

    @staticmethod
    def unknown(text: str, names: Iterable[str]) -> Word:
        """A text whose every part depends on unset variables or commands."""
        return Word(text, tuple(Gap(0, len(text), name) for name in sorted(names)))

    @property
    def missing(self) -> frozenset[str]:
        """Names of unset variables, and commands, that the text lacks."""
        return frozenset(gap.name for gap in self.gaps)

    def slice(self, start: int, end: int | None = None) -> Word:
        """A part of the text, with the gaps inside it and at its ends."""
        end = len(self.text) if end is None else end
        near = [gap for gap in self.gaps if gap.start <= end and gap.end >= start]
        gaps = [Gap(max(gap.start, start) - start, min(gap.end, end) - start, gap.name) for gap in near]
        return Word(self.text[start:end], tuple(gaps))

    def as_script(self) -> str:
        """The text as a script, in which unset variables are named."""
        text = self.text
        for gap in sorted(self.gaps, key=lambda gap: -gap.start):
            if gap.start == gap.end and re.fullmatch(r"\w+", gap.name):
                text = f"{text[: gap.start]}${{{gap.name}}}{text[gap.end :]}"
        return text


# Name -> its words: one, those of an array, or for `@` the positional arguments ($1 and up).
Variables = dict[str, list[Word]]

# A part of a word, and whether blanks in it separate words (an unquoted expansion).
_Part = tuple[Word, bool]


def source(node: Node) -> str:
    """The source text of a syntax node."""
    return (node.text or b"").decode("utf-8", "replace")


def expand(node: Node, variables: Variables) -> list[Word]:
    """The words that a word of the script becomes: one, unless an unquoted variable holds none or several."""
    array = _ARRAY.fullmatch(source(node).strip())
    if array and (name := array[1] or "@") in variables:
        return list(variables[name])
    if _BRACES.search(_NO_BRACES.sub("", source(node))):
        return [_unknown(source(node))]
    words: list[list[Word]] = [[]]
    for part, splits in _parts(node, variables, quoted=False, depth=0):
        for index, chunk in enumerate(_split_at_blanks(part) if splits else [part]):
            if index:
                words.append([])
            if chunk.text or chunk.gaps or not splits:
                words[-1].append(chunk)
    return [join(word) for word in words if word]


def _split_at_blanks(word: Word) -> Iterator[Word]:
    start = 0
    for blanks in re.finditer(r"\s+", word.text):
        if not any(gap.start < blanks.start() and blanks.end() < gap.end for gap in word.gaps):  # inside `$(…)`
            yield word.slice(start, blanks.start())
            start = blanks.end()
    yield word.slice(start)


def expand_unsplit(node: Node, variables: Variables) -> Word:
    """The text of a word where a shell does not split it, as on the right of `=`."""
    return join(part for part, _ in _parts(node, variables, quoted=False, depth=0))


def expand_operands(nodes: Sequence[Node], variables: Variables) -> list[Word]:
    """The words of a condition inside `[[ ]]`: a shell does not split them, and an unquoted one on the right is a glob.

    A glob that matches becomes the text that it matches.
    """
    words = [expand_unsplit(node, variables) for node in nodes]
    if len(words) == 3 and nodes[2].type not in _STRINGS and fnmatch.fnmatchcase(words[0].text, words[2].text):
        words[2] = dataclasses.replace(words[2], text=words[0].text)
    return words


def join(words: Iterable[Word]) -> Word:
    """The concatenation of words, cut at `_MAX_TEXT` characters so that no script can grow a text without end."""
    text, gaps = "", []
    for word in words:
        if len(text) + len(word.text) > _MAX_TEXT:
            return Word.unknown(text, {gap.name for gap in gaps} | word.missing | {"a text that is too long"})
        gaps += [Gap(len(text) + gap.start, len(text) + gap.end, gap.name) for gap in word.gaps]
        text += word.text
    return Word(text, tuple(gaps))


def _parts(node: Node, variables: Variables, quoted: bool, depth: int) -> list[_Part]:
    text = source(node)
    if depth > _MAX_DEPTH:
        return [(_unknown(text), False)]
    if node.type in _EXPANSIONS:
        blanks = text[: len(text) - len(text.lstrip())]  # the grammar counts blanks before `$` in quotes as part of it
        leading = [(Word(blanks), False)] if blanks else []
        return [*leading, (_expansion(node, text.lstrip(), variables, depth), not quoted)]
    if node.type in ("raw_string", "ansi_c_string"):  # '…' and $'…'
        return [(Word(text.removeprefix("$")[1:-1]), False)]
    if node.type != "string":
        return _between(node, node.start_byte, node.end_byte, variables, quoted, depth)
    # The grammar counts blanks before the closing quote as part of it.
    end = node.end_byte - len((node.children[-1].text or b"").lstrip()) if len(node.children) > 1 else node.end_byte
    return _between(node, node.start_byte + 1, end, variables, True, depth) or [(Word(), False)]


def _between(node: Node, start: int, end: int, variables: Variables, quoted: bool, depth: int) -> list[_Part]:
    """The parts of a node from byte `start` to `end`: expansions, strings, and the literal text between them."""
    text, offset, parts = node.text or b"", node.start_byte, []

    def add_literal(first: int, last: int) -> None:
        literal = text[first - offset : last - offset].decode("utf-8", "replace")
        literal = (_ESCAPES_IN_QUOTES if quoted else _ESCAPES).sub(lambda match: match[1] or "", literal)
        if literal:
            parts.append((Word(literal), False))

    for child in _expansions_in(node):
        if start <= child.start_byte and child.end_byte <= end:
            add_literal(start, child.start_byte)
            parts += _parts(child, variables, quoted, depth + 1)
            start = child.end_byte
    add_literal(start, end)
    return parts


def _expansions_in(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.type in _EXPANSIONS or child.type in _STRINGS:
            yield child
        else:
            yield from _expansions_in(child)


def _unknown(text: str) -> Word:
    return Word.unknown(text, [text[:80]])


def _expansion(node: Node, text: str, variables: Variables, depth: int) -> Word:
    if node.type == "simple_expansion":
        length = 2 if text[1:2].isdigit() else len(text)  # the grammar takes `$1b` for one variable
        return join([value_of(text[1:length], variables), Word(text[length:])])
    if node.type == "arithmetic_expansion":
        return _arithmetic(node, text, variables, depth)
    if node.type == "expansion":
        return _parameter(node, text, variables, depth)
    return Word(DATE) if text.strip("`$(").split()[:1] == ["date"] else _unknown(text)


def value_of(name: str, variables: Variables) -> Word:
    """The value of a variable, of an argument such as `1`, or of all arguments; unknown if it is not set."""
    arguments = variables["@"]
    if name in ("@", "*"):
        return join(word for i, value in enumerate(arguments) for word in (Word(" " * bool(i)), value))
    if name == "#":
        return Word(str(len(arguments)))
    index = int(name[:6]) if name.isdigit() else 0
    found = arguments[index - 1 : index] if index else variables.get(name)
    name = str(index + len(variables.get(SHIFTED, ()))) if index else name  # as `--arg` counts them
    return found[0] if found else Word.unknown("", [name])


def _parameter(node: Node, text: str, variables: Variables, depth: int) -> Word:
    """`${NAME}`, with a default (`:-` `:=` `:?` `:+`, with or without the colon) or a pattern to cut off (`#` `%`)."""
    if node.has_error or node.children[1].type not in ("variable_name", "special_variable_name"):
        return _unknown(text)
    name, operator = source(node.children[1]), source(node.children[2])
    value = value_of(name, variables)
    if operator == "}":
        return value

    def argument() -> Word:
        first, last = node.children[2].end_byte, node.children[-1].start_byte
        return join(part for part, _ in _between(node, first, last, variables, True, depth + 1))

    if operator.lstrip(":") in ("-", "=", "?", "+"):
        is_set = name not in value.missing and (bool(value.text or value.missing) or not operator.startswith(":"))
        if operator[-1] == "+":
            return Word.unknown(argument().text, argument().missing | value.missing) if is_set else Word()
        if is_set or operator[-1] == "?":
            return value
        default = argument()
        if operator[-1] == "=":
            variables[name] = [default]
        return default
    if operator in _CASES:
        return Word(_CASES[operator](value.text), value.gaps)
    if operator not in ("#", "##", "%", "%%"):
        return _unknown(text)
    pattern = argument()
    return Word.unknown(_trim(value.text, operator, pattern.text), value.missing | pattern.missing)


def _trim(text: str, operator: str, pattern: str) -> str:
    """`text` without the shortest (`#`, `%`) or longest (`##`, `%%`) start or end that matches."""
    if len(text) > 4096 or len(pattern) > 256:
        return text
    cuts = range(len(text) + 1)  # between the piece to cut off and the rest
    for cut in cuts if operator in ("#", "%%") else reversed(cuts):
        start, end = text[:cut], text[cut:]
        piece, rest = (start, end) if operator[0] == "#" else (end, start)
        if fnmatch.fnmatchcase(piece, pattern):
            return rest
    return text


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda a, b: a - b * _quotient(a, b),
}


def _arithmetic(node: Node, text: str, variables: Variables, depth: int) -> Word:
    if len(text) > _MAX_ARITHMETIC or node.has_error or len(node.named_children) != 1:
        return _unknown(text)
    missing = join(part for part, _ in _between(node, node.start_byte, node.end_byte, variables, True, depth)).missing
    if missing:
        return Word.unknown(text, missing)
    try:
        return Word(str(_integer(node.named_children[0], variables)))
    except (ValueError, ArithmeticError):
        return _unknown(text)


def _integer(node: Node, variables: Variables) -> int:
    """The value of an integer expression of a shell.

    Raises:
      ValueError: It has something other than integers, set variables, parentheses and + - * / %.
    """
    operand = node.named_children
    match node.type:
        case "number":
            return int(source(node), 0)  # 010, which is octal in a shell, is a ValueError
        case "variable_name" | "simple_expansion" | "expansion":
            is_bare = node.type == "variable_name"
            return int((value_of(source(node), variables) if is_bare else expand_unsplit(node, variables)).text, 0)
        case "parenthesized_expression":
            return _integer(operand[0], variables)
        case "unary_expression" if source(node.children[0]) == "-":
            return -_integer(operand[0], variables)
        case "binary_expression" if source(node.children[1]) in _BINARY:
            return _BINARY[source(node.children[1])](*(_integer(operand[end], variables) for end in (0, -1)))
    raise ValueError(source(node))


def variables_set_by(statement: Node) -> set[str]:
    """The names of the variables that a statement may set."""
    found = _ASSIGNED.findall(source(statement)) if statement.type != "command" else []
    found += [source(statement)] if statement.type.endswith("_expression") else SETTERS.findall(source(statement))
    return set(NAMES.findall(" ".join(found)))


def evaluate_test(words: Sequence[Word]) -> bool | None:
    """`[ words ]`, where a variable that is not set is empty, as in a shell; None if it is unknown or unsupported."""
    if any(re.search(r"\W", name) for word in words for name in word.missing):
        return None  # it depends on the output of a command
    match [word.text for word in words]:
        case ["!", *_]:
            result = evaluate_test(words[1:]) if len(words) < _MAX_DEPTH else None
            return None if result is None else not result
        case ["-z" | "-n" as how, *text] if len(text) <= 1:
            return any(text) == (how == "-n")
        case [a, "=" | "==" | "!=" as how, b]:
            return (a == b) == (how != "!=")
        case [a, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as how, b] if all(map(_INTEGER.fullmatch, (a, b))):
            return getattr(operator, how[1:])(int(a), int(b))
        case [text] if not text.startswith("-"):
            return bool(text)
    return None


def links(node: Node) -> list[tuple[str, Node]]:
    """`a && b || c` as `("", a)`, `("&&", b)`, `("||", c)`. A loop, since the tree is as deep as the list is long."""
    links = []
    while node.type == "list":
        children = [child for child in node.children if child.type != "comment"]
        links.append((source(children[1]), children[-1]))
        node = children[0]
    return [("", node), *reversed(links)]


def is_test(node: Node) -> bool:
    """Whether a command is a condition, perhaps negated."""
    command = node.named_children[-1] if node.type == "negated_command" else node
    name = command.child_by_field_name("name")
    return command.type == "test_command" or (name is not None and source(name) in _TESTS)
