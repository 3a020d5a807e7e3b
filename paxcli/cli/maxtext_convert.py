"""`pax maxtext-convert`: a MaxText launch as a recipe, and a recipe as a MaxText launch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paxcli.cli.maxtext_weights import export_weights, import_weights, stay_on_host
from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result

if TYPE_CHECKING:
    import datetime

    from paxcli.convert.maxtext.conversion import Converted
    from paxcli.convert.maxtext.launch import Launch, LaunchFile

ScriptArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT|KEY=VALUE...", help="A launch script, a MaxText .yml, or bare keys. Never run."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="A model of MaxText's. Default: none.")
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="What a script expects from outside. Repeatable. Default: none."),
]
DateOption = Annotated[
    str | None, typer.Option("--date", metavar="YYYY-MM-DD", help="Whose defaults hold. Default: told from the keys.")
]
TopologyOption = Annotated[
    str | None, typer.Option("--topology", metavar="v4-128", help="One slice. Default: told from flags and file name.")
]
SlicesOption = Annotated[int | None, typer.Option("--slices", min=1, help="How many. Default: told from the script.")]
OutOption = Annotated[
    # Not a Path, which would take one slash out of gs://.
    str | None,
    typer.Option(
        "--out", metavar="FILE|DIR", help="Write the recipe here; with --checkpoint, the run. Default: stdout."
    ),
]
PythonOption = Annotated[bool, typer.Option("--python", help="A Python recipe. Default: a YAML recipe.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Validate it, and compare FLOPs with MaxText's. Default: no.")
]
BackOption = Annotated[
    str | None,
    typer.Option("--to-maxtext", metavar="RECIPE|RUN_DIR", help="Print its MaxText command. Default: none."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="A MaxText checkpoint to begin the run --out with; with --to-maxtext, where to write one. Default: none.",
    ),
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
    to_maxtext: BackOption = None,
    checkpoint: CheckpointOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a MaxText launch script, config or model into a recipe; report on stderr what is not exact.

    \b
    Examples:
      pax maxtext-convert 2xv4-128.sh --date 2023-07-21 --out 22b.yaml
      pax maxtext-convert --model llama2-7b --checkpoint gs://mine/0/items --out runs/llama
      pax maxtext-convert --to-maxtext maxtext-base
    """
    if checkpoint is not None:
        stay_on_host()
    if to_maxtext is not None:
        return _back(to_maxtext, checkpoint, dry_run, as_json)
    reading, name = _read(script or [], model, arg or [])
    from paxcli.convert.maxtext.conversion import convert

    day = _day(date)
    converted = [
        convert(launch, _name(name, launch, index), date=day, topology=topology, slices=slices)
        for index, launch in enumerate(reading.launches)
    ]
    if checkpoint is not None:
        out = _run_dir(out, len(converted), python)
    file = Path(out) if out and checkpoint is None else None
    _check_out(file, 1 if as_json or checkpoint else len(converted), python)
    results = [_result(one, reading, python, check) for one in converted]
    if checkpoint is not None and out is not None:
        text = import_weights(converted[0], checkpoint, out, results[0], dry_run)
        print(results[0]["report"], file=sys.stderr, end="\n\n")
        say_result(results[0], text, as_json)
        return None
    files = (
        [file.with_name(f"{file.stem}-{i + 1}{file.suffix}" if i else file.name) for i in range(len(results))]
        if file
        else []
    )
    for file, result in zip(files, results, strict=False):
        if not dry_run:
            _write(file, result["recipe"])
    for result in results:
        print(result["report"], file=sys.stderr, end="\n\n")
    wrote = "\n".join(
        f"{'Would write' if dry_run else 'Wrote'} {file}. To train it: pax train {file}" for file in files
    )
    more = {"recipes": [result["recipe"] for result in results]} if len(results) > 1 else {}
    say_result({**results[0], **more, "files": list(map(str, files))}, wrote or results[0]["recipe"].rstrip(), as_json)
    return None


def _read(script: list[str], model: str | None, args: list[str]) -> tuple[LaunchFile, str]:
    from paxcli.convert.maxtext.launch import Launch, LaunchFile, Pair
    from paxcli.convert.maxtext.source import read_source
    from paxcli.errors import ConfigError

    if bool(script) == (model is not None):
        raise ConfigError(
            "Name a script, keys, or `--model`: one of them.", "For example `pax maxtext-convert run.sh`."
        )
    given = dict(_pair(text) for text in args)
    if model is not None:
        return LaunchFile([Launch(1, pairs=[Pair("model_name", model, 1)])]), model
    is_file = len(script) == 1 and "=" not in script[0]
    return read_source(script, given), Path(script[0]).name if is_file else "maxtext"


def _pair(text: str) -> tuple[str, str]:
    from paxcli.errors import ConfigError

    key, equals, value = text.partition("=")
    if not equals or not (key.isidentifier() or key.isdigit()):
        raise ConfigError(f"`--arg {text}` is not KEY=VALUE.", "For example `--arg OUTPUT_PATH=gs://mine`.")
    return key, value


def _day(text: str | None) -> datetime.date | None:
    import datetime

    from paxcli.errors import ConfigError

    try:
        return datetime.date.fromisoformat(text) if text else None
    except ValueError:
        raise ConfigError(f"`--date {text}` is no day.", "Write it as 2023-07-21.") from None


def _name(name: str, launch: Launch, index: int) -> str:
    return name if not index else f"{name}, line {launch.line}"


def _check_out(out: Path | None, launches: int, python: bool) -> None:
    from paxcli.errors import ConfigError

    suffix = ".py" if python else ".yaml"
    if out is None and launches > 1:
        raise ConfigError(f"There are {launches} trainings in it, a recipe each.", f"Say `--out NAME{suffix}`.")
    if out is not None and (out.suffix not in ((".py",) if python else (".yaml", ".yml"))):
        raise ConfigError(f"{out} does not end in {suffix}.", f"Say `--out {out.with_suffix(suffix)}`.")


def _run_dir(out: str | None, launches: int, python: bool) -> str:
    from paxcli.errors import ConfigError

    if launches != 1:
        raise ConfigError(f"There are {launches} trainings in it, and one checkpoint.", "Say one as `--model` or keys.")
    if out is None or python or out.endswith((".yaml", ".yml", ".py")):
        raise ConfigError("A checkpoint becomes a run, with its recipe in it.", "Say its folder: `--out runs/NAME`.")
    return out


def _result(converted: Converted, reading: LaunchFile, python: bool, check: bool) -> dict[str, Any]:
    from paxcli.config.assign import assign
    from paxcli.convert.maxtext.building import config_with
    from paxcli.convert.maxtext.writing import printable, recipe_python, recipe_yaml, report, table_of

    config = config_with(converted.values)
    from paxcli.training.summary import summarize
    from paxcli.training.validate import validate

    assign(config, "train_input", "SyntheticInput")  # Sizes do not depend on the data, which may not be at hand.
    if check:
        validate(config)
    sizes = summarize(config)
    text = report(converted, sizes["parameters"])
    skipped = [f"line {s.line}: {s.text}: {s.reason}" for s in (*reading.skipped, *reading.others)]
    text += "".join(["\n\nPassed over:", *(f"\n  {printable(line)}" for line in skipped)]) if skipped else ""
    result = {
        "recipe": recipe_python(converted) if python else recipe_yaml(converted),
        "parameters": sizes["parameters"],
        "maxtext_parameters": converted.parameters,
        "tokens_per_step": converted.tokens_per_step,
        "num_devices": converted.num_devices,
        "date": str(converted.settings.date),
        "maxtext_tflops_per_device": converted.flops.total,
        "flops_formula": converted.flops.formula,
        "table": table_of(converted),
        "dropped": [{"key": d.key, "value": d.value, "line": d.line, "why": d.reason} for d in converted.dropped],
        "approximated": converted.approximated,
        "undecided": converted.settings.undecided,
        "warnings": converted.settings.warnings,
        "skipped": skipped,
    }
    if check and sizes["flops_per_step"]:
        ours = sizes["flops_per_step"] / sizes["num_devices"] / 1e12
        result["tflops_per_device"] = ours
        apart = ours / converted.flops.total - 1
        text += f"\n\nChecked: pax counts {ours:,.2f} TFLOPs per step and device, {apart:+.2%} of MaxText's formula."
    return result | {"report": text}


def _write(file: Path, text: str) -> None:
    from paxcli.errors import MissingError

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MissingError(f"{file} cannot be written: {error.strerror}.", "Choose another folder.") from None


def _back(recipe: str, checkpoint: str | None, dry_run: bool, as_json: bool) -> None:
    from paxcli.config.paths import located
    from paxcli.config.resolve import resolve

    run_dir = found if (found := located(recipe)).is_dir() else None
    resolved = resolve(recipe if run_dir is None else str(run_dir))
    from paxcli.convert.maxtext.back import command_line, to_maxtext
    from paxcli.training.summary import num_devices

    has_mesh = resolved.values["mesh.ici_mesh_shape"].value is not None
    keys, left = to_maxtext(resolved.config, num_devices(resolved.config) if has_mesh else None)
    if left:
        print("Not carried over: " + ", ".join(left), file=sys.stderr)
    result: dict[str, Any] = {"keys": keys, "dropped": left}
    if checkpoint is not None:
        export_weights(resolved.config, run_dir, recipe, checkpoint, result, dry_run)
    command = command_line(keys)
    say_result({"command": command, **result}, command, as_json)
