"""Renders a converted recipe as YAML or Python, and the report about it as text."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from typing import Any

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion, Row
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE
from paxcli.convert.maxtext.settings import Dropped
from paxcli.convert.maxtext.sizes import flops, num_parameters


def recipe_yaml(converted: Conversion) -> str:
    """A YAML recipe, with the source of each value as a comment."""
    head = [f"# {line}".rstrip() for line in _description(converted)]
    lines = {path: f"  {path}: {json.dumps(value)}" for path, value in converted.values.items()}
    width = max(len(line) for line in lines.values() if len(line) <= 80)
    sources = {row.pax: _from(row) for row in converted.rows}
    body = [f"{line:<{width}}  # {sources[p]}" if sources.get(p) else line for p, line in lines.items()]
    return "\n".join([*head, f"recipe: {BASE_RECIPE}", "set:", *body, ""])


def recipe_python(converted: Conversion) -> str:
    """A Python recipe with the same values."""
    sources = {row.pax: _from(row) for row in converted.rows}
    name = re.sub(r"\W+", "_", f"{converted.name.rpartition('.')[0] or converted.name}").strip("_").lower()
    # None of these lines can end the string literal that contains it.
    title, *more = (x.replace("\\", "/").replace('"""', "'''").replace('"', "'") for x in _description(converted))
    values = [
        f"    {json.dumps(path)}: {value!r},  # {sources.get(path, '')}".rstrip(" #")
        for path, value in converted.values.items()
    ]
    return tables.read_text("recipe.py.txt").format(
        title=title,
        name=name if name[:1].isalpha() else f"lm_{name}",
        description="\n".join(f"    {line}".rstrip() for line in more),
        values="\n".join(values),
    )


def report(converted: Conversion, parameters: int | None = None, verbose: bool = False) -> str:
    """The report of a conversion: sizes, what is not exact, and the launch's values; with `verbose` all values."""
    settings, flags, step = converted.settings, converted.launch.flags, flops(converted.settings)
    sizes = [
        f"parameters: {num_parameters(settings):,} by MaxText's sizes"
        + (f", {parameters:,} by the recipe" if parameters is not None else ""),
        f"devices: {converted.num_devices or 'all available'}"
        + (f" ({converted.topology.source})" if converted.topology.source else "")
        + ("; as many slices as the DCN axes have" if converted.topology.slices is None else ""),
        *([f"tokens per step: {converted.tokens_per_step:,}"] if converted.tokens_per_step is not None else []),
        f"TFLOPs per step and device: {step.total:,.2f} ({step.formula})",
        *expectation(converted),
    ]
    shown = [row for row in converted.rows if verbose or row.line is not None or row.origin == "environment"]
    hidden = len(converted.rows) - len(shown)
    lines: list[str] = []
    for title, found in (
        (f"{converted.name}: MaxText of {settings.era.text}", sizes),
        ("Warnings:", settings.warnings),
        ("For you to decide:", settings.undecided),
        ("Approximated:", converted.approximated),
        ("Dropped:", [_dropped_key(dropped) for dropped in settings.dropped]),
        ("Environment variables to set:", [f"{name}={value}" for name, value in flags.items()]),
        ("Values:", [f"{row.pax} = {_cell(row.pax_value)}".ljust(48) + f"  {_from(row)}" for row in shown]),
        (f"And {hidden} values of MaxText's models and defaults: `--verbose` shows them.", [""] if hidden else []),
    ):
        texts = [textwrap.wrap(printable(line), 100, initial_indent="  ", subsequent_indent="    ") for line in found]
        lines += ["", *textwrap.wrap(printable(title), 100), *itertools.chain(*texts)] if found else []
    return "\n".join(lines[1:])


def expectation(converted: Conversion) -> list[str]:
    """The speed in the comment after the command, as seconds per step by MaxText's formula."""
    found = re.search(r"([0-9]+[.]?[0-9]*)\s*(?:TFLOPs?/s|TFLOPS|teraflops)", converted.launch.note, re.IGNORECASE)
    rate = float(found[1]) if found else 0
    if not rate:
        return [f"Its comment: {converted.launch.note}"] if converted.launch.note else []
    step = flops(converted.settings)
    return [f"Expected: {rate:g} TFLOP/s per device, counted by {step.formula}: {step.total / rate:.2f} s per step."]


def printable(text: str) -> str:
    """A text without line breaks and control codes, which a script may contain."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+", " ", text)


def _description(converted: Conversion) -> list[str]:
    lines = [
        f"{converted.name}, converted from MaxText of {converted.settings.date}.",
        "",
        f"{num_parameters(converted.settings) / 1e9:.2f} billion parameters"
        + (f" on {converted.num_devices} devices." if converted.num_devices else "."),
        *expectation(converted),
        *(f"Set {name}={value}" for name, value in converted.launch.flags.items()),
        *(f"To decide: {text}" for text in converted.settings.undecided),
        *(f"Approximated: {text}" for text in converted.approximated),
    ]
    return [printable(line) for line in lines]


def _dropped_key(dropped: Dropped) -> str:
    where = f"line {dropped.line}: " if dropped.line else ""  # 0 for a key of a model
    return f"{where}{dropped.key}={dropped.value}: {dropped.why}"


def _from(row: Row) -> str:
    value = _cell(row.value)
    scaled = f", scaled to {_cell(row.scaled)}" if row.scaled != row.value else ""
    where = f"line {row.line}" if row.line is not None else f"MaxText's {row.origin}"
    return printable(f"{row.maxtext}={value}{scaled}, {where}" if row.maxtext != "(fixed)" else "fixed in MaxText")


def _cell(value: Any) -> str:
    text = "off" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
