"""A script's text as words, operators and comments, each with its line. The first of three steps; nothing is run.

The subset of POSIX shell and bash that launch scripts are written in. What the text means is `parsing.py`'s and
`expansion.py`'s to say.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Quote = Literal["", "'", '"']
Kind = Literal["word", "operator", "newline", "comment", "problem"]

_OPERATORS = ("<<<", "<<-", ";;", "&&", "||", "<<", ">>", ">&", "<&", ";", "&", "|", "(", ")", "<", ">")
_BLANK = " \t"
_ENDS_WORD = frozenset(" \t\n;&|()<>")


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a word, and how it is quoted: `'` is literal, `"` and nothing are expanded."""

    text: str
    quote: Quote = ""


@dataclasses.dataclass(frozen=True)
class Token:
    """One piece of a script.

    Attributes:
      kind: A `problem` is what the lexer could not read; its text says why.
      line: Where it begins, from 1.
      text: As written.
      parts: What a word is made of.
    """

    kind: Kind
    line: int
    text: str
    parts: tuple[Part, ...] = ()


def tokenize(text: str) -> list[Token]:
    """All of a script's tokens. Never fails: what cannot be read is a `problem`."""
    return _Lexer(text.replace("\r\n", "\n")).run()


class _Lexer:
    def __init__(self, text: str):
        self.text, self.at, self.line = text, 0, 1
        self.found: list[Token] = []
        self.heredocs: list[str] = []
        self.unclosed: set[str] = set()  # Quotes and brackets known to have no end in what is left.

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            self._next()
        return self.found

    def _next(self) -> None:
        text, at = self.text, self.at
        if text.startswith("\\\n", at):
            self.at, self.line = at + 2, self.line + 1
        elif text[at] == "\n":
            self._add("newline", "\n")
            self.at, self.line = at + 1, self.line + 1
            self._skip_heredocs()
        elif text[at] in _BLANK:
            self.at += 1
        elif text[at] == "#":
            end = _find(text, "\n", at)
            self._add("comment", text[at:end])
            self.at = end
        elif operator := next((o for o in _OPERATORS if text.startswith(o, at)), None):
            self._add("operator", operator)
            self.at += len(operator)
        else:
            self._word()

    def _add(self, kind: Kind, text: str, parts: tuple[Part, ...] = (), line: int | None = None) -> None:
        self.found.append(Token(kind, line or self.line, text, parts))

    def _word(self) -> None:
        start, line, parts = self.at, self.line, []
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD:
            parts += self._part()
        raw = self.text[start : self.at]
        if raw:
            before = self.found[-1] if self.found else None
            if before is not None and before.kind == "operator" and before.text in ("<<", "<<-"):
                self.heredocs.append("".join(part.text for part in parts))
            self._add("word", raw, tuple(parts), line)

    def _part(self) -> list[Part]:
        text, at = self.text, self.at
        if text[at] == "\\":
            return self._escape()
        if text[at] in "'\"":
            return self._quoted(text[at])
        end = at
        while end < len(text) and text[end] not in _ENDS_WORD and text[end] not in "\\'\"":
            end = self._over_expansion(end)
        self._move(end)
        return [Part(text[at:end])]

    def _escape(self) -> list[Part]:
        follows = self.text[self.at + 1 : self.at + 2]
        self._move(self.at + 2)
        return [] if follows in ("\n", "") else [Part(follows, "'")]

    def _quoted(self, quote: str) -> list[Part]:
        text, start = self.text, self.at + 1
        end = self._end_of_quote(quote, start)
        if end < 0:
            self._add("problem", f"the quote {quote} is never closed")
            end = _find(text, "\n", start)
            self._move(end)
            return [Part(text[start:end], "'")]
        self._move(end + 1)
        inside = text[start:end]
        return [Part(inside, "'")] if quote == "'" else [Part(inside.replace("\\\n", ""), '"')]

    def _end_of_quote(self, quote: str, start: int) -> int:
        if quote in self.unclosed:
            return -1
        at, text = start, self.text
        if quote == "'":
            at = text.find("'", start)
        else:
            while at < len(text) and text[at] != '"':
                at = at + 2 if text[at] == "\\" else self._over_expansion(at)
            at = at if at < len(text) else -1
        if at < 0:
            self.unclosed.add(quote)
        return at

    def _over_expansion(self, at: int) -> int:
        """Past a `$(…)`, `${…}` or backquotes that begin at `at`, else past one character."""
        opening = next((o for o in ("$((", "$(", "${", "`") if self.text.startswith(o, at)), None)
        if opening is None or opening in self.unclosed:
            return at + 1
        end = closing(self.text, at)
        if end < 0:
            self.unclosed.add(opening)
            return at + 1
        return end

    def _move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = min(to, len(self.text))

    def _skip_heredocs(self) -> None:
        for end_mark in self.heredocs:
            while self.at < len(self.text):
                end = _find(self.text, "\n", self.at)
                line = self.text[self.at : end]
                self._move(end + 1)
                if line.strip() == end_mark:
                    break
        self.heredocs = []


def closing(text: str, at: int) -> int:
    """Where the expansion that begins at `text[at]` (`$(`, `$((`, `${` or a backquote) ends; -1 when it does not."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return end + 1 if end >= 0 else -1
    opening, close = text[at + 1], ")" if text[at + 1] == "(" else "}"
    depth, position, quote = 0, at + 1, ""
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == opening:
            depth += 1
        elif char == close:
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return -1


def _find(text: str, what: str, start: int) -> int:
    found = text.find(what, start)
    return len(text) if found < 0 else found
