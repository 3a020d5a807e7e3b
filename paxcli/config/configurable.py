"""Fiddle configs of the classes in a recipe tree: `Linear.config(…)` and `Linear.partial(…)`.

Both return stock Fiddle objects. An `fdl.Config` builds one object: used in two places, it is one layer with shared
weights. An `fdl.Partial` is a template: its parent creates a new layer from it each time and fills in the widths.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Self, TypeVar

import fiddle as fdl

T = TypeVar("T")

EXPAND = "pax_expand"


def template(cls: type[T], /, **fields: Any) -> Any:
    """A dataclass field that holds a template of `cls`. Default: `functools.partial(cls, **fields)`."""
    return dataclasses.field(default=functools.partial(cls, **fields), metadata={EXPAND: (fdl.Partial, cls, fields)})


def part(cls: type[T], /, **fields: Any) -> Any:
    """A dataclass field that holds a `cls`. Default: `cls(**fields)`."""
    make = functools.partial(cls, **fields)
    return dataclasses.field(default_factory=make, metadata={EXPAND: (fdl.Config, cls, fields)})


class Configurable:
    """Gives a dataclass or a Flax module `config` and `partial`, which expand its default sub-objects.

    Attributes:
      pax_name: The name of the class in Pax where it differs from ours; YAML and `--set` take either.
      short_forms: The texts besides class names that YAML and `--set` take, as errors show them (`from_short_form`).
      has_kinds: Whether its subclasses are of different kinds, so that one cannot replace another. Not inherited: read
        it with `vars`.
    """

    has_kinds: ClassVar[bool] = True
    pax_name: ClassVar[str | None] = None
    short_forms: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_short_form(cls, text: str) -> tuple[type[Configurable], dict[str, Any]] | None:
        """The class and the fields that a short form, such as `hf:DIR` of a tokenizer, means; None for other texts."""
        return None

    @classmethod
    def config(cls, **fields: Any) -> fdl.Config[Self]:
        """An `fdl.Config` of this class. A misspelt field raises immediately."""
        return _buildable(fdl.Config, cls, fields)

    @classmethod
    def partial(cls, **fields: Any) -> fdl.Partial[Self]:
        """An `fdl.Partial` of this class: a template that its parent completes."""
        return _buildable(fdl.Partial, cls, fields)


def _buildable(kind: Any, cls: type, fields: dict[str, Any]) -> Any:
    expanded = {}
    for field in (field for field in dataclasses.fields(cls) if field.name not in fields):  # type: ignore[arg-type]
        if EXPAND in field.metadata:
            child_kind, child, child_fields = field.metadata[EXPAND]
            expanded[field.name] = _buildable(child_kind, child, child_fields)
        elif field.default_factory in (list, dict):
            expanded[field.name] = field.default_factory()
    return kind(cls, **expanded, **fields)
