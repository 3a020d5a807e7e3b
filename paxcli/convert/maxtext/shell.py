"""Evaluates a launch script: follows its syntax tree from top to bottom and collects the MaxText launches.

tree-sitter parses the script, and nothing of it is run. Evaluated are assignments, arrays, commands, `&&`, `||`, `if`,
groups, and commands in strings or in other scripts. Loops, `case` and functions are skipped and reported; the variables
that they may set are unknown after them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import tree_sitter
import tree_sitter_bash
from tree_sitter import Node

from paxcli.convert.maxtext import shell_words, tables
from paxcli.convert.maxtext.launch import Diagnostic, Launch, LaunchFile, Pair, options_of, program_at, python_program
from paxcli.convert.maxtext.shell_words import SHIFTED, Variables, Word, expand, expand_unsplit, join, source, value_of
from paxcli.errors import ConfigError, names_hint

# The name of a script -> its text; None if the file does not exist.
OpenScript = Callable[[str], str | None]

_QUIET = ("echo", "printf", ":", "true", "sleep", "date", "cd", "popd", "pushd")
_RUNS_SCRIPT = ("bash", "sh")
NO_TRAINING = "not a training command"
# `KEY=VALUE` of each argument, or `export "$@"`.
_TAKES_ARGUMENTS = re.compile(r"""\$\{?KEY\}?["']?=["']?\$\{?VALUE|(export|declare|local)\s+["']?\$[@{\w]""")
_QUOTED_NAME = re.compile(r"""\b((?:export|declare|local|readonly)\s+)(["'])([A-Za-z_]\w*=)""")
_LANGUAGE = tree_sitter.Language(tree_sitter_bash.language())
# Nodes that the grammar parses wrongly, for `_rewrite`.
_ODD = '"$" @dollar (file_redirect destination: (_) . destination: (_)) @redirect (command (variable_assignment) @set)'
_MISREAD = tree_sitter.Query(_LANGUAGE, _ODD)
_LINE_END = re.compile(rb"[ \t]*(#.*)?\n")
_VARIABLE = re.compile(rb"(?<=\$)([0-9]|[A-Za-z_][A-Za-z_0-9]*)")
_INVALID = "not valid shell syntax"
_BRACKETED = re.compile(r"\[\[?\s(.*\S.*)\s\]\]?", re.DOTALL)
_COMMENTS = re.compile(r"[ \t]*(?:#.*)?(?:\n{1,2}[ \t]*#.*)*")
_CHUNK = 1 << 14
_MAX_STATEMENTS = 20_000
_MAX_SCRIPTS = 8  # scripts and commands in strings, inside each other
_MAX_DEPTH = 40
_MAX_SECONDS = 1.0
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_ASSIGNMENTS = ("variable_assignment", "variable_assignments", "declaration_command")
_MAX_ITEMS = 4096  # of an array


def read_script(
    text: str, arguments: Mapping[str, str] | None = None, open_script: OpenScript = lambda _: None
) -> LaunchFile:
    """The launches of a script.

    Args:
      text: The script.
      arguments: Variables set from outside, which override the script's own; `1`, `2` … are positional.
      open_script: Finds scripts that this one calls.

    Raises:
      ConfigError: A launch has a syntax error, the parser gives up on the script, or the script has no such variable.
    """
    arguments, names = dict(arguments or {}), set(shell_words.NAMES.findall(text))

    def other_script(name: str) -> str | None:
        other = open_script(name)
        names.update(shell_words.NAMES.findall(other or ""))
        return other

    numbers = [int(name[:4]) for name in arguments if name.isdigit()]
    positional = [Word(arguments.get(str(i), "")) for i in range(1, max(numbers, default=0) + 1)]
    pinned = {name: [Word(value)] for name, value in arguments.items() if not name.isdigit()}
    evaluator = _Evaluator({**pinned, "@": positional}, pinned, other_script)
    evaluator.run(_parse(text))
    for name in sorted(pinned.keys() - names):
        hint = names_hint(name, names) if names else "Leave `--arg` out."
        raise ConfigError(f"The script has no variable `{name}`, which `--arg` sets.", hint)
    return evaluator.found


def _parse(text: str) -> Node:
    """The syntax tree of a script.

    Raises:
      ConfigError: It takes too long.
    """
    # `export "NAME=value"` as `export NAME="value"`, which the grammar takes for an assignment.
    content = _QUOTED_NAME.sub(r"\1\3\2", text.replace("\r\n", "\n")).encode("utf-8", "replace")
    deadline = time.thread_time() + _MAX_SECONDS
    root = _parse_bytes(content, deadline)
    while (rewritten := _rewrite(root, content)) != content:
        content = rewritten
        root = _parse_bytes(content, deadline)
    return root


def _parse_bytes(content: bytes, deadline: float) -> Node:
    parser = tree_sitter.Parser(_LANGUAGE)  # a new one: after a timeout, the old one would resume the old text
    try:  # with a deadline, which only the slower kind of input can have
        parser.parse(
            lambda at, _: content[at : at + _CHUNK], progress_callback=lambda *_: time.thread_time() > deadline
        )
    except ValueError:
        raise ConfigError("The script takes too long to parse.", "Give its keys: `model_name=… steps=…`.") from None
    return parser.parse(content).root_node


def _rewrite(root: Node, content: bytes) -> bytes:
    """The script with three constructs rewritten that the grammar parses wrongly.

    `A=1 B=2` gets a `;` at the end of its line, since the grammar takes the next line for the command that they are set
    for. `$B` becomes `${B}` where the grammar splits a word after the `$`, as it does in `$A-$B-c`. A redirection that
    arguments follow becomes blanks, since the grammar parses those as more files: `train.py > log steps=10`.
    """
    found, text = tree_sitter.QueryCursor(_MISREAD).captures(root), bytearray(content)
    lines = sorted(a.end_byte for a in found.get("set", []) if _LINE_END.match(content, a.end_byte))
    if lines:
        return b";".join(content[start:end] for start, end in itertools.pairwise([0, *lines, len(content)]))
    for redirect in found.get("redirect", []):
        start, end = redirect.start_byte, redirect.children_by_field_name("destination")[0].end_byte
        text[start:end] = b" " * (end - start)
    splits = {d.end_byte for d in found.get("dollar", []) if d.parent and d.parent.type != "simple_expansion"}
    return _VARIABLE.sub(lambda match: b"{%b}" % match[0] if match.start() in splits else match[0], bytes(text))


@dataclasses.dataclass
class _Evaluator:
    """Attributes are the state of the shell; those after `found` change in commands inside others.

    Attributes:
      variables: All variables that are set.
      pinned: Variables that the script cannot change.
      open_script: See `read_script`.
      found: The result.
      budget: How many statements may still be evaluated, as a list of one number that nested scripts share.
      exported: Names of exported variables.
      assigned_at: Variable -> line of its last assignment.
      depth: How many scripts and strings this one is inside of.
      options: Flags of the wrapper around this command, such as xpk.
      line: Line of the command that holds this script as a string; lines inside the string are not the file's.
      functions: Name -> definition.
      exports_all: Whether all variables that are set are exported (`set -a`).
      num_before: How many launches there were before this script.
      has_ended: Whether the script has reached an `exit`, after a launch of its own.
    """

    variables: Variables
    pinned: Mapping[str, list[Word]]
    open_script: OpenScript
    found: LaunchFile = dataclasses.field(default_factory=LaunchFile)
    budget: list[int] = dataclasses.field(default_factory=lambda: [_MAX_STATEMENTS])
    exported: set[str] = dataclasses.field(default_factory=set)
    assigned_at: dict[str, int] = dataclasses.field(default_factory=dict)
    depth: int = 0
    options: Mapping[str, Word] = dataclasses.field(default_factory=dict)
    line: int | None = None
    functions: dict[str, Node] = dataclasses.field(default_factory=dict)
    exports_all: bool = False
    num_before: int = 0
    has_ended: bool = False

    def run(self, root: Node) -> None:
        """Evaluates a script, up to where its syntax tree breaks off."""
        breaks = (i for i, child in enumerate(root.children) if child.is_error or not child.is_named)
        end = next(breaks, None) if root.type == "ERROR" else None
        self._block(root.children[:end], 0)
        if end is not None:
            self._skip(root.children[end], _INVALID)

    def _block(self, nodes: Iterable[Node], nesting: int) -> None:
        for node in (node for node in nodes if node.is_named and node.type != "comment"):
            if self.has_ended:
                return self._skip(node, "after an `exit`")
            self._statement(node, nesting)

    def _statement(self, node: Node, nesting: int) -> bool | None:
        """Evaluates a statement; returns whether it succeeds, or None if that is unknown."""
        self.budget[0] -= 1
        if self.budget[0] < 0:
            return None
        if nesting > _MAX_DEPTH:
            return self._skip(node, "nested too deeply")
        if any(child.is_missing for child in node.children):
            return self._skip(node, _INVALID)
        children = [child for child in node.named_children if child.type != "comment"]
        match node.type:
            case "command" | "test_command" | "negated_command" if shell_words.is_test(node):
                return self._test(node)
            case "list":
                return self._list(node, nesting)
            case "pipeline" | "negated_command":
                for part in (children[0], *(part for part in children[1:] if "python" in source(part))):
                    self._statement(part, nesting + 1)
                return None
            case "redirected_statement":
                return self._statement(children[0], nesting + 1)
            case "if_statement":
                return self._if(node, nesting)
            case "subshell":
                self._copy()._block(children, nesting + 1)
            case "compound_statement" | "variable_assignments":
                self._block(children, nesting + 1)
            case "unset_command":
                for name in {source(child) for child in children} - self.pinned.keys():
                    self.variables.pop(name, None)
            case "variable_assignment":
                self._assign(node)
            case "declaration_command":
                self._declare(node)
            case "command":
                self._command(node)
            case "function_definition":
                self.functions[source(node.named_children[0])] = node
                self._skip(node, "a function")
            case "ERROR":
                if source(node).strip("\\ \n"):  # a backslash at the end of a script is harmless
                    self._skip(node, _INVALID)
            case kind if kind.endswith("_statement"):
                if self._runs(node):
                    self._skip(node, f"a `{source(node.children[0])}` statement")
            case _:
                self._skip(node, "not a command that pax knows")
        return True

    def _list(self, node: Node, nesting: int) -> bool | None:
        result: bool | None = None
        num_skipped = len(self.found.skipped)
        for joined, part in shell_words.links(node):
            if len(self.found.skipped) > num_skipped and part.type in _ASSIGNMENTS:  # after an unknown command
                self._skip(part, "whether it runs is unknown")
            elif joined and result is not None and result != (joined == "&&"):
                continue
            elif joined and result is None and not shell_words.is_test(part):
                self._skip(part, "whether it runs is unknown")
            else:
                result = self._statement(part, nesting + 1)
        return result

    def _if(self, node: Node, nesting: int) -> None:
        for branch in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
            names = [child.type for child in branch.children]
            then = names.index("then") if "then" in names else 0
            condition = [child for child in branch.children[1:then] if child.is_named]
            holds = self._test(condition[-1]) if condition else branch.type == "else_clause"
            if holds is None:
                self._block((part for part in condition if "python" in source(part)), nesting + 1)  # launches
                self._forget(node)
                return self._skip(branch, "its condition is unknown")
            if holds:
                body = [child for child in branch.children[then + 1 :] if not child.type.endswith("_clause")]
                return self._block(body, nesting + 1)

    def _test(self, node: Node, is_doubled: bool = False) -> bool | None:
        """Whether a condition, or with `is_doubled` what is inside `[[ ]]`, holds; None if only a shell can know."""
        match node.type:
            case "negated_command":
                result = self._test(node.named_children[-1], is_doubled)
                return None if result is None else not result
            case "list":
                result = None
                for joined, part in shell_words.links(node):
                    if joined and result is None:
                        return None
                    if not joined or result == (joined == "&&"):
                        result = self._test(part, is_doubled)
                return result
            case "test_command" if bracketed := _BRACKETED.fullmatch(source(node)):
                is_doubled = source(node).startswith("[[")
                script = bracketed[1] if is_doubled else f"test {bracketed[1]}"
                return self._test(_parse(script).children[0], is_doubled)
            case "command" if is_doubled:
                parts = (*node.children_by_field_name("name"), *node.children_by_field_name("argument"))
                return shell_words.evaluate_test(shell_words.expand_operands(parts, self.variables))
            case "command":
                name, *operands = self._words(node)[0] or [Word()]
                if name.text == "test":
                    return shell_words.evaluate_test(operands)
                with_operands = {} if self.variables["@"] else {"getopts": False}
                return (with_operands if operands else {"true": True, ":": True, "false": False}).get(name.text)
        return None

    def _line(self, node: Node) -> int:
        return self.line or node.start_point[0] + 1

    def _skip(self, node: Node, reason: str) -> None:
        self.found.skipped.append(Diagnostic(self._line(node), " ".join(source(node).split()), reason))
        self._forget(node)

    def _forget(self, node: Node) -> None:
        """Makes the variables unknown that a statement may set."""
        for name in shell_words.variables_set_by(node) - self.pinned.keys():
            self.variables[name] = [Word.unknown(f"${{{name}}}", [f"${{{name}}}"])]

    def _runs(self, loop: Node) -> bool:
        """Whether a loop may run at least once: for example over arguments, if there are some."""
        if loop.type == "for_statement" and (values := loop.children_by_field_name("value")):
            return any(expand(value, self.variables) for value in values)
        condition = loop.child_by_field_name("condition")
        return condition is None or self._test(condition) is not (source(loop.children[0]) == "until")

    def _declare(self, node: Node) -> None:
        found = [child for child in node.named_children if child.type in ("variable_assignment", "variable_name")]
        names = {source(child) if child.type == "variable_name" else self._assign(child) for child in found}
        flags = "".join(source(child) for child in node.named_children if child.type == "word")
        if len(node.named_children) > len(found) + flags.count("-") and "$@" not in source(node):
            self._skip(node, "the variables that it sets are unknown")
        if "n" in flags:
            self.exported -= names
        elif source(node.children[0]) == "export" or "x" in flags:
            self.exported |= names

    def _assign(self, node: Node) -> str:
        """Sets a variable; returns its name."""
        left, *_, right = node.children
        name = source(left)
        if left.type != "variable_name":
            self._skip(node, "an element of an array")
            return source(left.children[0])
        adds = source(node.children[1]) == "+="
        if right.type == "array":
            items = [word for item in right.named_children for word in expand(item, self.variables)]
            self.variables[name] = [*(self.variables.get(name, []) if adds else []), *items][:_MAX_ITEMS]
            return name
        value = expand_unsplit(right, self.variables) if right.is_named else Word()
        if adds:
            value = join([*self.variables.get(name, [])[:1], value])
        self.assigned_at[name] = self._line(node)
        self.exported |= {name} if self.exports_all else set()
        if name not in self.pinned:
            self.variables[name] = [value]
        return name

    def _words(self, node: Node) -> tuple[list[Word], list[int]]:
        """The words of a command, and the line of each."""
        words, lines, end = [], [], -1
        for part in (*node.children_by_field_name("name"), *node.children_by_field_name("argument")):
            expanded = expand(part, self.variables)
            if part.start_byte == end and words and expanded:  # the grammar takes `"a"--b` for two words
                lines.pop()
                expanded[0] = join([words.pop(), expanded[0]])
            end = part.end_byte
            words += expanded
            lines += [self._line(part)] * len(expanded)
        return words, lines

    def _command(self, node: Node) -> None:
        prefix = [child for child in node.named_children if child.type == "variable_assignment"]
        words, lines = self._words(node)
        # `NAME=value command` sets NAME for that command only.
        shell = self._copy() if prefix or [word.text for word in words[:1]] == ["env"] else self
        shell.exported |= {shell._assign(child) for child in prefix}
        while words and words[0].text == "env":
            words, lines = words[1:], lines[1:]
            while words and (match := _ASSIGNMENT.match(words[0].text)):
                shell.variables[match[1]] = [words[0].slice(match.end())]
                shell.exported.add(match[1])
                words, lines = words[1:], lines[1:]
        if words:
            shell._run(node, words, lines)

    def _copy(self) -> _Evaluator:
        """An evaluator whose assignments do not change this one's variables."""
        return dataclasses.replace(self, variables=dict(self.variables), exported=set(self.exported))

    def _child(self, arguments: Sequence[Word]) -> _Evaluator:
        """An evaluator of another shell, which has the exported variables, and arguments of its own."""
        kept = self.exported | self.pinned.keys()
        variables = {name: value for name, value in self.variables.items() if name in kept}
        return dataclasses.replace(self._copy(), variables=variables | {"@": list(arguments)})

    def _run(self, node: Node, words: list[Word], lines: list[int]) -> None:
        start = program_at(words)
        words, lines = words[start:], lines[start:]
        name = words[0].text.rpartition("/")[2]
        while name in _RUNS_SCRIPT and words[1:] and re.fullmatch("-[abd-z]+|--[a-z]+", words[1].text):  # such as -x
            words = [words[0], *words[3 if words[1].text.endswith("o") else 2 :]]
        if program := python_program(words):
            self._python(node, words, lines, *program)
        elif name in ("xpk", "xpk.py", "gcloud"):
            self._wrapper(node, words)
        elif name == "eval" or (name in _RUNS_SCRIPT and re.fullmatch("-[a-z]*c", words[1].text if words[1:] else "")):
            inner = words[1:] if name == "eval" else words[2:3]
            shell = self if name == "eval" else self._child(words[4:])
            shell._string(node, " ".join(word.as_script() for word in inner), self.options)
        elif name == "shift":
            count = int(words[1].text) if words[1:] and re.fullmatch("[0-9]{1,3}", words[1].text) else 1
            self.variables["@"] = self.variables["@"][count:]
            self.variables[SHIFTED] = [*self.variables.get(SHIFTED, []), *[Word()] * count]
        elif name == "set":
            texts = [word.text for word in words]
            if switch := re.search(r" ([-+])(o allexport|[a-z]*a[a-z]*)( |$)", " ".join(texts)):
                self.exports_all = switch[1] == "-"
            if "--" in texts:
                self.variables["@"] = words[texts.index("--") + 1 :]
        elif name == "exit":  # before a launch, it is for those who call the script without its arguments
            self.has_ended = len(self.found.launches) > self.num_before
        elif name in ("source", "."):
            self._script(node, words[1:], is_sourced=True)
        elif name in _RUNS_SCRIPT or words[0].text.endswith(".sh"):
            self._script(node, words if words[0].text.endswith(".sh") else words[1:], is_sourced=False)
        elif shell_words.SETTERS.match(source(node)) or (name not in _QUIET and not name.endswith("[")):
            self._skip(node, "not a command that pax knows")
            self._forget(self.functions.get(name, node))

    def _python(self, node: Node, words: list[Word], lines: list[int], kind: str, name: str, used: int) -> None:
        line = self._line(node)
        if kind == "wrapper":
            return self._wrapper(node, words[used:])
        if kind != "train":
            reason = tables.part("other_training").get(kind, NO_TRAINING)
            return self.found.others.append(Diagnostic(line, name, reason))
        if error := _syntax_error(node):
            hint = "Correct it, for example a quote that is never closed, or give its keys: `model_name=… steps=…`."
            raise ConfigError(f"Line {self._line(error)}: the training command is not valid shell syntax.", hint)
        launch = Launch(line, name, note=_comment_after(node))
        launch.read_arguments(words[used:], lines[used:])
        self._add_environment(launch)
        return self.found.launches.append(launch)

    def _add_environment(self, launch: Launch) -> None:
        """Adds what exported variables and the flags of a wrapper say about a launch."""
        for name in sorted(self.exported | set(self.pinned)):
            value = value_of(name, self.variables)
            if name in value.missing:
                continue
            if name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
                launch.flags[name] = " ".join(value.text.split())
            elif name.startswith("M_"):
                launch.overrides.append(Pair(name[2:], value.text, self.assigned_at.get(name, 0), value.missing))
        device = self.options.get("tpu-type") or self.options.get("device-type")
        launch.topology = device.text if device else None
        slices = self.options.get("num-slices") or self.options.get("num-nodes") or Word()
        launch.num_slices = int(slices.text) if re.fullmatch(r"[0-9]{1,6}", slices.text) else None

    def _wrapper(self, node: Node, words: Sequence[Word]) -> None:
        options = options_of(words)
        if "command" not in options:
            return self._skip(node, "not a command that pax knows")
        return self._child(())._string(node, options["command"].as_script(), options)

    def _string(self, node: Node, text: str, options: Mapping[str, Word]) -> None:
        """Evaluates a command that a string holds."""
        if self.depth >= _MAX_SCRIPTS:
            return self._skip(node, "too many commands inside each other")
        inner = dataclasses.replace(self._inside(node), options=options)
        inner.run(_parse(text))
        for launch in self.found.launches[inner.num_before :]:
            launch.note = launch.note or _comment_after(node)

    def _inside(self, node: Node) -> _Evaluator:
        """An evaluator of what a command runs, with the same state."""
        before = len(self.found.launches)
        return dataclasses.replace(self, depth=self.depth + 1, line=self._line(node), num_before=before)

    def _script(self, node: Node, words: Sequence[Word], is_sourced: bool) -> None:
        """Evaluates another script: with this one's variables if it is sourced, else with the words as arguments."""
        name = words[0].text if words else ""
        text = self.open_script(name) if name and self.depth < _MAX_SCRIPTS else None
        if text is None:
            lost = "; the variables that it sets are unknown" if is_sourced else ""
            return self._skip(node, f"a script that was not found{lost}")
        taken = words[1:] if _TAKES_ARGUMENTS.search(text) and not is_sourced else ()
        inner = (self if is_sourced else self._child(() if taken else words[1:]))._inside(node)
        if not is_sourced:
            given = dict(word.text.split("=", 1) for word in taken if _ASSIGNMENT.match(word.text))
            inner.pinned = {**{key: [Word(value)] for key, value in given.items()}, **self.pinned}
            inner.variables |= inner.pinned
        return inner.run(_parse(text))


def _syntax_error(node: Node) -> Node | None:
    """The first error in a command or right after it, other than a backslash at the end of the script."""
    after = node.next_sibling
    waiting = [node] if after is None or after.start_point[0] > node.end_point[0] else [after, node]
    while waiting:
        part = waiting.pop()
        if part.is_missing or (part.is_error and source(part).strip("\\ \n")):
            return part
        waiting += [child for child in reversed(part.children) if child.has_error]
    return None


def _comment_after(node: Node) -> str:
    """The comments after a command: on its line, and on the lines that follow, with at most one empty line between."""
    while node.parent is not None and node.parent.type in ("redirected_statement", "list", "subshell"):
        node = node.parent
    script = node.parent or node
    comments = _COMMENTS.match((script.text or b"")[node.end_byte - script.start_byte :].decode("utf-8", "replace"))
    return " ".join(filter(None, (line.strip("# \t\r") for line in comments[0].splitlines()))) if comments else ""
