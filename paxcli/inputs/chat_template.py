"""Chat templates: Jinja templates that render a conversation as text, as in Hugging Face tokenizers.

Templates come from files of others, so they run in Jinja's sandbox, with limits on steps and sizes.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from paxcli.config.paths import read_text
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.tokenizer_files import read_object, token_text
from paxcli.inputs.tokenizers import Tokenizer

DEFAULT_TEMPLATE = (Path(__file__).parent / "data" / "default_chat.jinja").read_text(encoding="utf-8")

_MAX_SOURCE = 2**20
_MAX_STEPS = 2_000_000
_STEPS_OF_A_CALL = 20
_MAX_CHARACTERS = 2**24

_FIX_HINT = "Correct the record or the template, or set on_bad_record=skip and a bad_record_budget."
_MARK_HINT = "Put {% generation %} and {% endgeneration %} around the assistant's text; set chat_template to that."

_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # names of templates in a list
_FILES = {_DEFAULT: "chat_template.jinja", _FOR_TOOLS: "additional_chat_templates/tool_use.jinja"}

Message = Mapping[str, Any]
Variables = Mapping[str, Any]
Spans = list[tuple[int, int]]


class RenderedChat(NamedTuple):
    """The text of a conversation, and its assistant turns: (start, end) in characters."""

    text: str
    assistant: Spans


class ChatTemplate:
    """Renders conversations.

    Attributes:
      is_default: Whether it is `DEFAULT_TEMPLATE`.
      for_tools: Renders conversations with tools in its place; None = it renders them itself.

    Args:
      source: The Jinja template. It is rendered as by `apply_chat_template` of Hugging Face transformers.
      variables: Variables besides the messages, such as `eos_token`.
      date: The date that `strftime_now` formats.
      origin: File or other source of the template, for errors.

    Raises:
      ConfigError: The template is not valid Jinja, or too long.
    """

    def __init__(self, source: str, variables: Mapping[str, str], date: datetime.datetime, origin: str) -> None:
        if len(source) > _MAX_SOURCE:
            raise ConfigError(f"The chat template of {origin} has {len(source)} characters.", f"At most {_MAX_SOURCE}.")
        self._environment = _Environment(date)
        self._variables = {"documents": None, "tools": None, **variables}
        self._origin, self.is_default = origin, source is DEFAULT_TEMPLATE
        self.for_tools: ChatTemplate | None = None
        try:
            self._template = self._environment.from_string(_Limits().visit(self._environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            problem = f"line {error.lineno}, is not valid Jinja: {error.message}"
            hint = "Correct it, or set chat_template."
            raise ConfigError(f"The chat template of {origin}, {problem}.", hint) from None
        except RecursionError:
            raise ConfigError(f"The chat template of {origin} is nested too deeply.", "Set chat_template.") from None

    def render(self, messages: Sequence[Message], place: str, variables: Mapping[str, Any] = {}) -> RenderedChat:
        """Renders a conversation, and finds its assistant turns, each with the token that ends it.

        Turns are the template's `{% generation %}` blocks. In a template without them, a turn is the text that an
        assistant message adds to the rendered messages before it.

        Args:
          messages: The conversation.
          place: File and line of the conversation, for errors.
          variables: Further variables, such as `tools`, the functions that the assistant may call.

        Raises:
          DataError: The template fails or exceeds its limits, or its text does not show where assistant turns are.
        """
        if variables.get("tools") and self.for_tools is not None:
            return self.for_tools.render(messages, place, variables)
        text, marked = self._render(messages, False, place, variables)
        has_marks = self._environment.has_generation_block
        return RenderedChat(text, marked if has_marks else self._spans_by_prefix(messages, text, place, variables))

    def render_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> str:
        """Renders a conversation up to the start of the assistant's next turn; see `render`.

        Raises:
          DataError: The template fails or exceeds its limits.
        """
        template = self.for_tools if variables.get("tools") and self.for_tools is not None else self
        return template._render(messages, True, "The conversation", variables)[0]

    def _render(self, messages: Sequence[Message], prompt: bool, place: str, variables: Variables) -> RenderedChat:
        environment, chunks = self._environment, []
        own = {"messages": list(messages), "add_generation_prompt": prompt}
        environment.restart()
        try:
            for chunk in self._template.generate({**self._variables, **variables, **own}):
                environment.count_characters(len(chunk))
                chunks.append(chunk)
        except _LimitExceededError as error:
            raise self._error(place, f"{error}.") from None
        except Exception as error:  # a template may raise any type
            cause = f"{type(error).__name__}: {error}".removeprefix("TemplateError: ").rstrip(".")[:500]
            raise self._error(place, f"fails: {cause}.") from None
        text = "".join(chunks)
        if any(text[start : start + len(turn)] != turn for start, turn in environment.turns):
            hint = "Move {% generation %} to the template's top level."
            raise self._error(place, "has a generation block inside a macro or `set` block.", hint)
        return RenderedChat(text, [(start, start + len(turn)) for start, turn in environment.turns])

    def _spans_by_prefix(self, messages: Sequence[Message], text: str, place: str, variables: Variables) -> Spans:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], True, place, variables)[0] if number else ""
            after = self._render(messages[: number + 1], False, place, variables)[0]
            content = message.get("content", "").strip()
            if not (after.startswith(before) and text.startswith(after)):
                problem = f"leaves the loss mask unknown: the text up to message {number} does not begin all text."
                raise self._error(place, problem, _MARK_HINT)
            turn = after[len(before) :]
            if number == 0 or before == self._render(messages[:number], False, place, variables)[0]:
                # Without a generation prompt, the turn includes its header, if the template writes one.
                if not turn.lstrip().startswith(content):
                    problem = f"writes no generation prompt before message {number}, so its loss mask is unknown."
                    raise self._error(place, problem, _MARK_HINT)
            spans.append((len(before), len(before) + len(_without_separator(turn, content))))
        return spans

    def _error(self, place: str, problem: str, hint: str = _FIX_HINT) -> DataError:
        return DataError(f"{place}: the chat template of {self._origin} {problem}", hint)


def load_chat_template(source: str | None, tokenizer: Tokenizer, date: datetime.datetime) -> ChatTemplate:
    """The chat template of a recipe or tokenizer.

    Args:
      source: A template, or the path of one, `*.jinja`. None: `chat_template.jinja`, with that for tools in
        `additional_chat_templates`, or the `chat_template` of `tokenizer_config.json`, next to the tokenizer's file; or
        else `DEFAULT_TEMPLATE`.
      tokenizer: The tokenizer, for its directory and its special tokens.
      date: The date that `strftime_now` formats.

    Raises:
      ConfigError: The template is not valid Jinja.
      DataError: A file cannot be read.
    """
    directory = Path(tokenizer.path).expanduser().parent if tokenizer.path is not None else None
    config_path = directory / "tokenizer_config.json" if directory is not None else None
    config = read_object(config_path) if config_path is not None and config_path.is_file() else {}
    named = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
    variables = {name: text for name, text in named.items() if text is not None} | tokenizer.special_tokens
    if source is not None and source.endswith(".jinja"):
        texts, origin = {_DEFAULT: read_text(Path(source).expanduser())}, source
    elif source is not None:
        texts, origin = {_DEFAULT: source}, "the recipe"
    elif directory is not None and (file := directory / _FILES[_DEFAULT]).is_file():
        files = [(name, directory / path) for name, path in _FILES.items()]
        texts, origin = {name: read_text(path) for name, path in files if path.is_file()}, str(file)
    elif (found := config.get("chat_template")) is not None:
        texts, origin = _by_name(found, config_path), str(config_path)
    else:
        texts, origin = {_DEFAULT: DEFAULT_TEMPLATE}, "pax"
    made = {name: ChatTemplate(text, variables, date, origin) for name, text in texts.items()}
    made[_DEFAULT].for_tools = made.get(_FOR_TOOLS)
    return made[_DEFAULT]


def _by_name(found: Any, path: Path | None) -> dict[str, str]:
    """The templates in `chat_template` of a `tokenizer_config.json`: text, or a list of named templates."""
    rows = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    named = {str(each.get("name")): each.get("template") for each in rows if isinstance(each, dict)}
    known = {name: text for name, text in named.items() if name in (_DEFAULT, _FOR_TOOLS) and isinstance(text, str)}
    if _DEFAULT not in known:
        hint = "Set the input's `chat_template` to a template, or to the path of a .jinja file."
        raise DataError(f"The chat_template of {path} is neither text nor a list with one named `default`.", hint)
    return known


def _without_separator(turn: str, content: str) -> str:
    """Removes white space after the end-of-turn token. Without such a token, the white space itself ends the turn."""
    stripped = turn.rstrip()
    return turn if content and stripped.endswith(content) else stripped


class _LimitExceededError(Exception):
    """A template exceeds a limit. Templates cannot catch it, since Jinja has no exception handling."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, configured as in Hugging Face, with limits on steps and sizes.

    Attributes:
      has_generation_block: Whether its template has one.
      num_characters: How many were rendered since `restart`.
      turns: Position in characters and text of each generation block rendered since then.
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, date: datetime.datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
        to_json = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
        self.filters |= {"tojson": to_json, "count_steps": self._count_steps, "limit_size": _limit_size}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": date.strftime}  # pyrefly: ignore
        self.has_generation_block = False
        self.restart()

    def restart(self) -> None:
        self._num_steps = self.num_characters = 0
        self.turns: list[tuple[int, str]] = []

    def count_characters(self, count: int) -> None:
        self.num_characters += count
        if self.num_characters > _MAX_CHARACTERS:
            raise _LimitExceededError(f"writes more than {_MAX_CHARACTERS:,} characters")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Named as in Jinja, so that a template may pass arguments of any name.
        __self._count_step(_STEPS_OF_A_CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_product(operator, left, right)
        return _limit_size(super().call_binop(context, operator, left, right))

    def _count_steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count_step()
            yield value

    def _count_step(self, steps: int = 1) -> None:
        self._num_steps += steps
        if self._num_steps > _MAX_STEPS:
            raise _LimitExceededError(f"takes more than {_MAX_STEPS:,} steps")


class _GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}`, around the text of an assistant turn."""

    tags = {"generation"}
    environment: _Environment  # pyrefly: ignore

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.has_generation_block = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generate"), [], [], body).set_lineno(line)

    def _generate(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.turns.append((self.environment.num_characters, text))
        return text


class _Limits(NodeTransformer):
    """Adds filters to a template that count iterations of loops and limit the size of text in variables."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node.iter = _apply_filter(node.iter, "count_steps")
        return self.generic_visit(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        node.filter = node.filter or _apply_filter(None, "limit_size")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return _apply_filter(self.generic_visit(node), "limit_size")


def _apply_filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Raises before the memory for a product or a power is allocated."""
    if isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    if operator == ("**" if isinstance(left, int) else "*") and isinstance(right, int):
        _check_size(_size_of(left) * right)


def _limit_size(value: Any) -> Any:
    _check_size(_size_of(value))
    return value


def _size_of(value: Any) -> int:
    """The length of a text or list, the bits of an integer; 0 for other values."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_size(size: int) -> None:
    if size > _MAX_CHARACTERS:
        raise _LimitExceededError(f"makes a value of size {size:,}; {_MAX_CHARACTERS:,} is the limit")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
