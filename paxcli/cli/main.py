"""The command `pax`: its verbs, and nothing that takes time to load."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paxcli import __version__
from paxcli.cli import (
    checkpoints,
    compile,
    data,
    decode,
    doctor,
    emit,
    eval,
    inspect_input,
    install,
    maxtext_convert,
    pgle,
    plot,
    profile,
    provision,
    provision_access,
    recipes,
    train,
)
from paxcli.cli.output import run, say
from paxcli.cli.remote import on_workers
from paxcli.log import setup_logging

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(recipes.app, name="recipes")
app.command("train")(on_workers(train.train))
app.command("eval")(on_workers(eval.evaluate))
app.command("decode")(on_workers(decode.decode))
app.command("inspect-input")(on_workers(inspect_input.inspect_input))
app.command("compile")(compile.compile)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(data.app, name="data")
app.add_typer(pgle.app, name="pgle")
app.command("pgle-profile")(pgle.pgle_profile)
app.add_typer(profile.app, name="profile")
app.command("plot")(on_workers(plot.plot, everywhere=False))
app.command("doctor")(on_workers(doctor.doctor))
app.command("install")(install.install)
for verb in (*provision_access.VERBS, emit.emit):
    provision.app.command(verb.__name__)(verb)
app.add_typer(provision.app, name="provision")
app.command("maxtext-convert")(maxtext_convert.maxtext_convert)


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
    setup_logging()
    sys.exit(run(app, sys.argv[1:] or ["--help"]))
