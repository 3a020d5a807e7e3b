"""`pax inspect-input`: look at batches as the model will see them."""

from __future__ import annotations

import enum
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paxcli.cli.options import JsonOption, OverlayOption, RecipeArgument, SetOption
from paxcli.cli.output import say_result, use_color
from paxcli.errors import ConfigError, MissingError

if TYPE_CHECKING:
    import fiddle as fdl

    from paxcli.inputs.inspection import Inspection

_SHOWN_ROWS = 4
_SHOWN_CHARACTERS = 480


class Split(enum.StrEnum):
    """Which inputs of a recipe."""

    TRAIN = "train"
    EVAL = "eval"
    DECODE = "decode"


SplitOption = Annotated[Split, typer.Option("--split", help="Which inputs.")]
NumBatches = Annotated[int, typer.Option("--num-batches", min=1, help="How many batches to look at.")]
Hosts = Annotated[int, typer.Option("--hosts", min=1, help="Share the data out over this many simulated hosts.")]
HostIndex = Annotated[int, typer.Option("--host-index", min=0, help="Whose batches to show.")]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE.npz", help="Write the first batch there. Default: nowhere.")
]


def inspect_input(
    recipe: RecipeArgument,
    split: SplitOption = Split.TRAIN,
    num_batches: NumBatches = 2,
    hosts: Hosts = 1,
    host_index: HostIndex = 0,
    save: SaveOption = None,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show batches: shapes, text with segment borders, padding, sharding over hosts, speed. Starts no device.

    \b
    Examples:
      pax inspect-input tiny
      pax inspect-input tiny --split eval --hosts 4 --host-index 1
    """
    if host_index >= hosts:
        raise ConfigError(f"There is no host {host_index} of {hosts}.", f"Hosts count from 0: --hosts {host_index + 1}")
    from paxcli.config.resolve import resolve
    from paxcli.training.experiment import data_of

    if split is Split.DECODE and hosts > 1:
        raise ConfigError("Every host decodes all decode inputs.", "Leave out --hosts.")
    config = resolve(recipe, overlays or (), sets or ()).config
    sources = _sources(config, split)
    numbers = [number for number, source in enumerate(sources) if data_of([source])]
    if save is not None and not numbers:
        raise ConfigError("Its decode inputs are prompts, not batches.", "Leave out --save.")
    prompts = _prompts(config, [source for source in sources if not data_of([source])])
    shown = [_inspect(config, split, number, num_batches, hosts, host_index) for number in numbers]
    if save is not None:
        _save(save, [found for found, _ in shown])
    result: dict[str, Any] = {"recipe": recipe, "split": split.value, "hosts": hosts, "host_index": host_index}
    result |= {"prompts": prompts} if split is Split.DECODE else {}
    result |= {"inputs": [found.report() | {"shared_rows": shared} for found, shared in shown]}
    result |= {"saved": save and str(save)}
    texts = [f"{len(prompt['ids'])} ids  {_printable(prompt['prompt'])}" for prompt in prompts]
    texts += [_text(found, shared, hosts, use_color(sys.stdout)) for found, shared in shown]
    say_result(result, "\n\n".join(texts) if shown else "\n".join(texts), as_json)


def _sources(config: fdl.Config, split: Split) -> list[Any]:
    sources = {Split.TRAIN: [config.train_input], Split.EVAL: config.eval_inputs, Split.DECODE: config.decode_inputs}
    if not sources[split]:
        there = " or ".join(f"--split {name}" for name in sources if sources[name])
        raise ConfigError(f"The recipe has no {split} inputs.", f"Try {there}.")
    return sources[split]


def _inspect(
    config: fdl.Config, split: Split, number: int, num_batches: int, hosts: int, host_index: int
) -> tuple[Inspection, int]:
    """What an input gives to one host, and how many rows it gives to more than one of them."""
    from paxcli.inputs.inspection import inspect_batches, rows_of_several_hosts

    data = _input(config, split, number, hosts, host_index)
    found = inspect_batches(data, num_batches, getattr(config.task.model, "vocab_size", None))
    makers = [functools.partial(_input, config, split, number, hosts, host) for host in range(hosts)]
    shared = rows_of_several_hosts(makers, num_batches) if hosts > 1 else 0
    if shared:
        found.warnings.append(f"{shared} rows are in the batches of more than one of {hosts} hosts.")
    if getattr(_sources(config, split)[number], "tokenizer", None) != getattr(config.train_input, "tokenizer", None):
        found.warnings.append("Its tokenizer is not the training input's.")
    return found, shared


def _input(config: fdl.Config, split: Split, number: int, hosts: int, host_index: int) -> Any:
    """One input as that host would have it, its data checked."""
    import fiddle as fdl

    from paxcli.training.experiment import prepared

    num_devices = fdl.build(config.mesh).num_devices() or hosts
    data = fdl.build(_sources(prepared(config, num_devices, hosts, host_index), split)[number])
    data.validate()
    data.check_data()
    return data


def _prompts(config: fdl.Config, sources: list[Any]) -> list[dict[str, Any]]:
    """The prompts of decode inputs, as the model will read them."""
    if not sources:
        return []
    tokenizer = getattr(_input(config, Split.TRAIN, 0, 1, 0), "text_tokenizer", None)
    if tokenizer is None:
        raise ConfigError("The training input has no tokenizer, so prompts cannot become ids.")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompts = [prompt for source in sources for prompt in source.prompts]
    return [{"prompt": prompt, "ids": [*bos, *tokenizer.encode(prompt).tolist()]} for prompt in prompts]


def _text(found: Inspection, shared: int, hosts: int, color: bool) -> str:
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
    if hosts > 1:
        lines.append(f"  hosts: {shared or 'no'} rows are on more than one of {hosts}")
    speed = f"{found.rows_per_second:,.0f} rows/s"
    speed += f" = {found.tokens_per_second:,.0f} tokens/s" if found.tokens_per_second is not None else ""
    lines.append(f"  speed: first batch in {found.first_batch_seconds:.2f} s, then {speed}")
    return "\n".join(lines + [f"  warning: {warning}" for warning in found.warnings])


def _row(row: dict[str, list[str]], color: bool) -> list[str]:
    """One line for each field of a row that can be read, with its name where there is more than one."""
    width = max(map(len, row), default=0)
    named = len(row) > 1 or any(not field.endswith("ids") for field in row)
    return [(f"{field:<{width}}  " if named else "") + _segments(segments, color) for field, segments in row.items()]


def _segments(segments: list[str], color: bool) -> str:
    """Segments between bars, and in turn in two colours."""
    shown, room = [], _SHOWN_CHARACTERS
    for number, segment in enumerate(segments):
        text = _printable(segment)
        cut = text if len(text) <= room else text[:room] + "…"
        shown.append(f"\x1b[{36 if number % 2 else 33}m{cut}\x1b[0m" if color else cut)
        room -= len(text)
        if room <= 0:
            break
    return "│".join(shown)


def _printable(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _save(path: Path, shown: list[Inspection]) -> None:
    """Writes the first batch of each input; of several, each field's name starts with its input's."""
    import numpy as np

    prefixes = [f"{found.name}/" if len(shown) > 1 else "" for found in shown]
    arrays = {
        prefix + field: array
        for prefix, found in zip(prefixes, shown, strict=True)
        for field, array in found.batches[0].flatten_items()
    }
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise MissingError(f"Cannot write {path}: {error.strerror}.", "Choose another place for --save.") from None
