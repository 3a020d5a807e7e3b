"""Tokens as statements: simple commands and `if`. Other compound statements are kept apart, to be reported."""

from __future__ import annotations

import dataclasses
import re

from paxcli.convert.maxtext.lexing import Token

_CLOSES = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}", "if": "fi"}
_REDIRECTIONS = ("<<<", "<<-", "<<", ">>", ">&", "<&", "<", ">")
_MOST_NESTED = 40
_ASSIGNS_ARGUMENT = re.compile(r"""(export|declare|local)?\s*["']?\$\{?KEY\}?["']?=["']?\$\{?VALUE\}?["']?""")


@dataclasses.dataclass(frozen=True)
class Simple:
    """A simple command. `joined` is the operator before it: `&&`, `||`, `|` or nothing. `note`: comments after it."""

    line: int
    words: tuple[Token, ...]
    joined: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class If:
    """Conditions with what each guards, and what follows otherwise."""

    line: int
    branches: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]
    otherwise: tuple[Statement, ...]


@dataclasses.dataclass(frozen=True)
class ArgumentLoop:
    """The loop by which a script takes KEY=VALUE arguments in place of its own assignments."""

    line: int


@dataclasses.dataclass(frozen=True)
class Unread:
    """A statement outside the subset."""

    line: int
    text: str
    why: str


Statement = Simple | If | ArgumentLoop | Unread


def parse(tokens: list[Token]) -> list[Statement]:
    """The statements of a whole script. Never fails."""
    return _Parser(tokens).block(frozenset(), 0)


class _Parser:
    def __init__(self, tokens: list[Token]):
        self.tokens, self.at = tokens, 0

    def block(self, ends: frozenset[str], depth: int) -> list[Statement]:
        """Statements up to one of the words `ends`, which is left in place, or to the end of the script."""
        found: list[Statement] = []
        joined = ""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "word" and token.text in ends:
                break
            if token.kind == "problem":
                found.append(Unread(token.line, "", token.text))
                self.at += 1
            elif token.kind in ("newline", "comment"):
                self.at += 1
            elif token.kind == "operator":
                joined = token.text if token.text in ("&&", "||", "|") else ""
                if token.text in ("(", ")"):
                    found.append(Unread(token.line, token.text, "a subshell"))
                self.at += 1
            else:
                found.append(self._statement(joined, depth))
                joined = ""
        return found

    def _statement(self, joined: str, depth: int) -> Statement:
        token = self.tokens[self.at]
        following = [t.text for t in self.tokens[self.at + 1 : self.at + 3]]
        if token.text == "if" and depth < _MOST_NESTED:
            return self._if(depth)
        if token.text in _CLOSES:
            return self._compound(_CLOSES[token.text])
        if token.text == "function" or following == ["(", ")"]:
            return self._function()
        return self._simple(joined)

    def _if(self, depth: int) -> Statement:
        line, branches, otherwise = self.tokens[self.at].line, [], ()
        word = "if"
        while word in ("if", "elif"):
            self.at += 1
            condition = tuple(self.block(frozenset({"then"}), depth + 1))
            self.at += 1
            body = tuple(self.block(frozenset({"elif", "else", "fi"}), depth + 1))
            branches.append((condition, body))
            word = self.tokens[self.at].text if self.at < len(self.tokens) else ""
        if word == "else":
            self.at += 1
            otherwise = tuple(self.block(frozenset({"fi"}), depth + 1))
        closed = self.at < len(self.tokens)
        self.at += 1
        return If(line, tuple(branches), otherwise) if closed else Unread(line, "if …", "an `if` without its `fi`")

    def _function(self) -> Statement:
        line, name = self.tokens[self.at].line, self.tokens[self.at].text
        while self.at < len(self.tokens) and self.tokens[self.at].text != "{":
            self.at += 1
        if self.at < len(self.tokens):
            self._compound("}")
        return Unread(line, name, "a function")

    def _compound(self, close: str) -> Statement:
        """Passes over a compound statement, the ones inside it too."""
        first, start, waiting = self.tokens[self.at], self.at, [close]
        self.at += 1
        starts = False
        while self.at < len(self.tokens) and waiting:
            token = self.tokens[self.at]
            if starts and token.kind == "word":
                if token.text == waiting[-1]:
                    waiting.pop()
                elif token.text in _CLOSES:
                    waiting.append(_CLOSES[token.text])
            starts = token.kind in ("newline", "operator") or token.text in ("do", "then", "else", "{")
            self.at += 1
        text = " ".join(t.text for t in self.tokens[start : self.at] if t.kind == "word")
        if first.text == "for" and "$@" in text and _ASSIGNS_ARGUMENT.search(text):
            return ArgumentLoop(first.line)
        why = f"a `{first.text}` statement" + ("" if not waiting else f" without its `{waiting[-1]}`")
        return Unread(first.line, text[:80], why)

    def _simple(self, joined: str) -> Statement:
        line, words = self.tokens[self.at].line, []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "operator" and token.text in _REDIRECTIONS:
                if words and words[-1].text.isdigit():
                    words.pop()
                self.at += 2
            elif token.kind == "operator" and token.text == "(" and words and words[-1].text.endswith("="):
                return self._array(line)
            elif token.kind == "word":
                words.append(token)
                self.at += 1
            else:
                break
        return Simple(line, tuple(words), joined, self._note())

    def _array(self, line: int) -> Statement:
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at].text != ")":
            self.at += 1
        self.at += 1
        name = self.tokens[start - 1].text
        return Unread(line, f"{name}(…)", "an array")

    def _note(self) -> str:
        """The comments right after a command: on its line, and on the lines after it."""
        notes, newlines, at = [], 0, self.at
        while at < len(self.tokens) and newlines < 3:  # one empty line at most
            token = self.tokens[at]
            if token.kind == "comment":
                notes.append(token.text.lstrip("# ").rstrip())
                newlines = 0
            elif token.kind == "newline":
                newlines += 1
            else:
                break
            at += 1
        return " ".join(filter(None, notes))
