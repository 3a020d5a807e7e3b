"""The names of other tools for what a recipe's fields set."""

from pathlib import Path

import yaml


def field_of(name: str) -> str | None:
    """The field that another tool calls `name`, with `_` or `-`: `lr` is `learning_rate`."""
    fields: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "data" / "names_elsewhere.yaml").read_text())
    return next((field for field, names in fields.items() if name.lower().replace("-", "_") in names), None)
