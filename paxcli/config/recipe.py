"""The decorator that marks a function as a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[[], Any])


@overload
def recipe(pax_name: F) -> F: ...
@overload
def recipe(pax_name: str | None = None) -> Callable[[F], F]: ...
def recipe(pax_name: Any = None) -> Any:
    """Marks a public function that returns an `fdl.Config[Experiment]` as a recipe.

    Recipes and their Pax names are found by reading source (`index.py`), so the decorator must be written under the
    name `recipe`. It returns the function unchanged. The parentheses may be left out: `@recipe`.

    Args:
      pax_name: The experiment class of Pax that this recipe computes the same as.
    """
    return pax_name if callable(pax_name) else lambda function: function
