"""Explains an exception that was raised in, or below, code of the user's: a recipe, or a layer or input beside it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from paxcli.config.consent import RECIPE_FILE
from paxcli.config.index import package_directories

_HINT = "PAX_DEBUG=1 prints the traceback."


def explain(error: BaseException) -> tuple[str, str] | None:
    """Message and hint, which name the user's line and the contract of its class; None if no such code was loaded.

    If none of its lines was running, the code may have returned what its contract does not allow.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith(RECIPE_FILE)]
    recipes = [Path(str(module.__file__)) for module in modules]
    if not recipes:
        return None
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    running = list(traceback.walk_tb(error.__traceback__))
    of_user = [(frame, line) for frame, line in running if _is_beside(recipes, Path(frame.f_code.co_filename))]
    if not of_user:
        files = ", ".join(map(str, recipes))
        message = f"{cause.rstrip('.')}. A part that is defined in {files} may not return what its contract states."
        return message, f"Compare it with the docstring of its base class. {_HINT}"
    frame, line = of_user[-1]
    message = f"{frame.f_code.co_filename}:{line}: {frame.f_code.co_qualname} failed: {cause}"
    classes = type(frame.f_locals.get("self")).__mro__
    base = next((cls for cls in classes if cls.__module__.startswith("paxcli.")), None)
    if base is None:
        return message, _HINT
    contract = f"{base.__module__}.{base.__name__}"
    return message, f"{classes[0].__name__} inherits {contract}, whose docstring states its contract. {_HINT}"


def _is_beside(recipes: list[Path], file: Path) -> bool:
    """Whether a file is in the directory of a recipe file, or below it, and is not of an installed package."""
    is_installed = "site-packages" in file.parts or any(file.is_relative_to(root) for root in package_directories())
    return not is_installed and any(file.is_relative_to(recipe.parent) for recipe in recipes)
