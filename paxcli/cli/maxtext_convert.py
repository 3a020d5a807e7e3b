"""`pax maxtext-convert`: a MaxText launch as a recipe, and a recipe as a MaxText launch."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption, file_option
from paxcli.cli.output import say_result
from paxcli.config.paths import write_output
from paxcli.errors import ConfigError

_SCRIPT = "A launch script, a MaxText .yml, or keys. Scripts are not run."
_ARG = "Set a variable of the script, or argument 1, 2, … Repeatable. Default: none."
_DATE = "MaxText version, by date, whose default values apply. Default: inferred from the keys."

ScriptArgument = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT|KEY=VALUE...", help=_SCRIPT)]
ModelOption = Annotated[str | None, typer.Option(metavar="NAME", help="A MaxText model. Default: none.")]
ArgOption = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=_ARG)]
DateOption = Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help=_DATE)]
TopologyOption = Annotated[
    str | None, typer.Option(metavar="v4-128", help="One slice. Default: inferred from the keys, flags and file name.")
]
SlicesOption = Annotated[int | None, typer.Option(min=1, help="Number of slices. Default: inferred from the script.")]
OutOption = Annotated[Path | None, file_option("Write the recipe to this file. Default: stdout.")]
PythonOption = Annotated[bool, typer.Option("--python", help="Write a Python recipe. Default: a YAML recipe.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Validate the recipe, and compare its FLOPs with MaxText's. Default: no.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="List all values in the report, defaults too. Default: those of the launch.")
]
BackOption = Annotated[
    str | None, typer.Option(metavar="RECIPE|RUN_DIR", help="Print its MaxText command instead. Default: none.")
]


def maxtext_convert(
    script: ScriptArgument = None,
    model: ModelOption = None,
    arg: ArgOption = None,
    date: DateOption = None,
    topology: TopologyOption = None,
    slices: SlicesOption = None,
    out: OutOption = None,
    python: PythonOption = False,
    check: CheckOption = False,
    verbose: VerboseOption = False,
    to_maxtext: BackOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a MaxText script, config or model to a recipe. Reports on stderr what is not exact.

    \b
    Examples:
      pax maxtext-convert 2xv4-128.sh --date 2023-07-21 --out 22b.yaml
      pax maxtext-convert --model llama2-7b --out llama.yaml
      pax maxtext-convert --to-maxtext maxtext-base
    """
    if to_maxtext is not None:
        return _print_maxtext_command(to_maxtext, as_json)
    from paxcli.convert.maxtext.convert import convert_script, describe

    arguments = dict(map(_parse_argument, arg or []))
    conversions, source = convert_script(
        script or [], model=model, arguments=arguments, date=_parse_date(date), topology=topology, slices=slices
    )
    files = _output_files(out, len(conversions), python, as_json)
    results = [describe(one, source, python, check, verbose) for one in conversions]
    for file, result in zip([] if dry_run else files, results, strict=False):
        write_output(file, result["recipe"].encode())
    for result in results:
        print(result["report"], file=sys.stderr, end="\n\n")
    verb = "Would write" if dry_run else "Wrote"
    wrote = "\n".join(f"{verb} {file}. To train it: pax train {file}" for file in files)
    more = {"recipes": [result["recipe"] for result in results]} if len(results) > 1 else {}
    result = {**results[0], **more, "files": list(map(str, files))}
    return say_result(result, wrote or results[0]["recipe"].rstrip(), as_json)


def _parse_argument(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not (key.isidentifier() or key.isdigit()):
        raise ConfigError(f"`--arg {text}` is not KEY=VALUE.", "For example `--arg OUTPUT_PATH=gs://mine`.")
    return key, value


def _parse_date(text: str | None) -> datetime.date | None:
    from paxcli.convert.maxtext.settings import LAST_DAY
    from paxcli.convert.maxtext.tables import FIRST_DAY

    try:
        date = datetime.date.fromisoformat(text) if text else None
    except ValueError:
        raise ConfigError(f"`--date {text}` is not a date.", "Write it as 2023-07-21.") from None
    if date is not None and not FIRST_DAY <= date <= LAST_DAY:
        problem = f"Pax knows MaxText of {FIRST_DAY} to {LAST_DAY}, not of {date}."
        raise ConfigError(problem, f"Give `--date {LAST_DAY}`.")
    return date


def _output_files(out: Path | None, launches: int, python: bool, as_json: bool) -> list[Path]:
    """The files to write, one for each launch; none where a single recipe goes to stdout."""
    suffix = ".py" if python else ".yaml"
    if out is None:
        if launches > 1 and not as_json:
            raise ConfigError(f"The script has {launches} trainings, each a recipe.", f"Give `--out NAME{suffix}`.")
        return []
    if out.suffix not in ((".py",) if python else (".yaml", ".yml")):
        raise ConfigError(f"{out} does not end in {suffix}.", f"Give `--out {out.with_suffix(suffix)}`.")
    files = [out.with_name(f"{out.stem}-{i + 1}{out.suffix}" if i else out.name) for i in range(launches)]
    if taken := next((file for file in files if file.exists()), None):
        raise ConfigError(f"{taken} already exists.", "Choose another name, or delete it.")
    return files


def _print_maxtext_command(recipe: str, as_json: bool) -> None:
    from paxcli.config.resolve import resolve
    from paxcli.convert.maxtext.recipe_to_launch import command_line, to_maxtext

    keys, left = to_maxtext(resolve(recipe).config)
    if left:
        print("MaxText has no key for: " + ", ".join(left), file=sys.stderr)
    command = command_line(keys)
    say_result({"command": command, "keys": keys, "dropped": left}, command, as_json)
