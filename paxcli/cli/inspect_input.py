"""`pax inspect-input`."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import paxcli as pax
from paxcli.cli.options import JsonOption, OverlayOption, RecipeArgument, SetOption, file_option
from paxcli.cli.output import say_result
from paxcli.cli.runs import load_recipe
from paxcli.config.paths import write_output
from paxcli.errors import ConfigError
from paxcli.log import use_color

if TYPE_CHECKING:
    from paxcli.report.inspection import Inspection

_SHOWN_ROWS = 4
_SHOWN_CHARACTERS = 480
_BAR_CHARACTERS = 40
_GRAY = "\x1b[90m"

SplitOption = Annotated[Literal["train", "eval", "decode"], typer.Option(help="Which inputs to read.")]
NumBatches = Annotated[int, typer.Option(min=1, help="How many batches to read.")]
Hosts = Annotated[int, typer.Option(min=1, help="Shard the data over this many simulated hosts.")]
HostIndex = Annotated[int, typer.Option(min=0, help="The host whose batches to print.")]
SaveOption = Annotated[Path | None, file_option("Write the first batch to a .npz file. Default: do not.")]
HtmlOption = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with all rows. Default: do not.")]


def inspect_input(
    recipe: RecipeArgument,
    split: SplitOption = "train",
    num_batches: NumBatches = 2,
    hosts: Hosts = 1,
    host_index: HostIndex = 0,
    save: SaveOption = None,
    html: HtmlOption = None,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print batches: text with segments, shapes, speed. Also padding and the sharding over hosts. Starts no device.

    \b
    Examples:
      pax inspect-input tiny
      pax inspect-input tiny --split eval --hosts 4 --host-index 1
      pax inspect-input tiny --html batches.html
    """
    found = pax.inspect_input(load_recipe(recipe, overlays, sets), num_batches, split, hosts, host_index)
    if save is not None:
        _save(save, found.inputs)
    if html is not None:
        from paxcli.report.page import write_page

        title = f"{recipe}: {split} inputs"
        write_page("inputs.html", html, title=title, hosts=hosts, inputs=found.inputs, prompts=found.prompts)
    result: dict[str, Any] = {"recipe": recipe, "split": split, "hosts": hosts, "host_index": host_index}
    result |= {"prompts": found.prompts} if split == "decode" else {}
    result |= {"inputs": [one.report() for one in found.inputs], "saved": save and str(save), "html": html}
    texts = [f"{len(prompt['ids'])} ids  {_printable(prompt['prompt'])}" for prompt in found.prompts]
    texts += [_text(one, hosts, use_color(sys.stdout)) for one in found.inputs]
    say_result(result, "\n\n".join(texts) if found.inputs else "\n".join(texts), as_json)


def _text(found: Inspection, hosts: int, color: bool) -> str:
    lines = [f"{found.name}: {len(found.batches)} batches"]
    width = max(map(len, found.fields))
    for field, facts in found.fields.items():
        shape = ", ".join(map(str, facts["shape"]))
        lines.append(f"  {field:<{width}}  {facts['dtype']} [{shape}]  {facts['min']} to {facts['max']}")
    for number, rows in enumerate(found.rows):
        lines.append(f"  batch {number}")
        lines += [f"    {line}" for row in rows[:_SHOWN_ROWS] for line in _row(row, color)]
        lines += [f"    … {len(rows) - _SHOWN_ROWS} more rows"] if len(rows) > _SHOWN_ROWS else []
    lines += [f"  {field}: {share:.2%} are not 0" for field, share in found.weights.items()]
    if found.padding_share is not None:
        lines.append(f"  padding: {found.padding_share:.2%} of positions")
    if found.segments_per_row is not None:
        lines.append(f"  packing: {found.segments_per_row:.2f} segments a row")
    lines += _histogram(found.lengths)
    if hosts > 1:
        lines.append(f"  hosts: {found.shared_rows or 'no'} rows are on more than one of {hosts}")
    speed = f"{found.rows_per_second:,.0f} rows/s"
    speed += f" = {found.tokens_per_second:,.0f} tokens/s" if found.tokens_per_second is not None else ""
    lines.append(f"  speed: first batch in {found.first_batch_seconds:.2f} s, then {speed}")
    return "\n".join(lines + [f"  warning: {warning}" for warning in found.warnings])


def _row(row: dict[str, list[str]], color: bool) -> list[str]:
    """A line for each readable field of a row, with its name if there are several."""
    width = max(map(len, row), default=0)
    named = len(row) > 1 or any(not field.endswith("ids") for field in row)
    return [(f"{field:<{width}}  " if named else "") + _segments(segments, color) for field, segments in row.items()]


def _histogram(lengths: list[dict[str, int]]) -> list[str]:
    """A line for each bin of lengths, and a title."""
    most = max((one["segments"] for one in lengths), default=1)
    texts = [f"{one['first']} to {one['last']}" for one in lengths]
    bars = ["#" * math.ceil(_BAR_CHARACTERS * one["segments"] / most) for one in lengths]
    lines = [
        f"    {text:>{len(texts[-1])}}  {bar:<{_BAR_CHARACTERS}}  {one['segments']:,}".rstrip()
        for text, bar, one in zip(texts, bars, lengths, strict=True)
    ]
    return ["  tokens of a segment, and number of segments", *lines] if lines else []


def _segments(segments: list[str], color: bool) -> str:
    """Segments separated by bars, in two alternating colors; where some tokens have no loss, those are gray."""
    shown, left = [], _SHOWN_CHARACTERS
    masked = any("⟦" in segment for segment in segments)
    for number, segment in enumerate(segments):
        text = _printable(segment)
        cut = text if len(text) <= left else text[:left] + "…"
        own = f"\x1b[{36 if number % 2 else 33}m"
        colored = re.sub("⟦[^⟧]*⟧?", rf"{own}\g<0>{_GRAY}", f"{_GRAY if masked else own}{cut}")
        shown.append(f"{colored}\x1b[0m" if color else cut)
        left -= len(text)
        if left <= 0:
            break
    return "│".join(shown)


def _printable(text: str) -> str:
    """One line, without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _save(path: Path, shown: list[Inspection]) -> None:
    """Writes the first batch of each input; with several inputs, each field's name starts with its input's name."""
    import numpy as np

    if not shown:
        raise ConfigError("The recipe's decode inputs are prompts, not batches.", "Leave out --save.")
    arrays = {}
    for found in shown:
        prefix = f"{found.name}/" if len(shown) > 1 else ""
        arrays |= {prefix + field: array for field, array in found.batches[0].flatten_items()}
    file = io.BytesIO()
    np.savez(file, **arrays)
    write_output(path, file.getvalue())
