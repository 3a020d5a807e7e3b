"""The command `pax`: its verbs, and nothing that takes time to load."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paxcli import __version__
from paxcli.cli import data, decode, doctor, eval, inspect_input, maxtext_convert, plot, recipes, train
from paxcli.cli.output import run, say

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(recipes.app, name="recipes")
app.command("train")(train.train)
app.command("eval")(eval.evaluate)
app.command("decode")(decode.decode)
app.command("inspect-input")(inspect_input.inspect_input)
app.add_typer(data.app, name="data")
app.command("maxtext-convert")(maxtext_convert.maxtext_convert)
app.command("plot")(plot.plot)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"pax {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Configure, launch, run and measure large-model training on JAX.

    \b
    Examples:
      pax recipes ls
      pax train tiny
    """


def main() -> None:
    """Runs the command line of this process and exits."""
    sys.exit(run(app, sys.argv[1:] or ["--help"]))
