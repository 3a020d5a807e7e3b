"""The decorator that marks a function as a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[], Any])


def recipe(pax_name: str | None = None) -> Callable[[F], F]:
    """Marks a public function that returns an `fdl.Config[Experiment]` as a recipe.

    Recipes and their Pax names are found by reading source (`index.py`), so the decorator must be written under the
    name `recipe`. It returns the function unchanged.

    Args:
      pax_name: The experiment class of Pax that this recipe computes the same as.
    """
    return lambda function: function
