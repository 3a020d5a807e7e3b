"""Consent to run Python code that a run directory names: a run directory is data."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

from paxcli.errors import ConfigError
from paxcli.log import log

# The YAML recipe of a run directory.
RUN_RECIPE = "recipe.yaml"

# Prefix of the module name of a Python file with recipes.
RECIPE_FILE = "pax_recipe_file."

# Answers the question whether to run code that the user did not name.
code_consent: ContextVar[Callable[[str], bool]] = ContextVar("code_consent", default=lambda question: False)


def require_consent(recipe: Path, code: str) -> None:
    """Announces Python code that the recipe of a run directory names.

    Raises:
      ConfigError: There is no consent to run it.
    """
    fact = f"{recipe} names Python code: {code}."
    if not code_consent.get()(f"{fact} Run it?"):
        hint = "Read the code. To run it, write `pax --trust-code …`; in Python, `pax.load(…, trust_code=True)`."
        raise ConfigError(f"{fact} A run directory is data: its code runs only with your consent.", hint)
    log.warning("Running Python code that %s names: %s", recipe, code)
