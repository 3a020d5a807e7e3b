"""The command `pax` and its verbs. Imports nothing that is slow to load."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from paxcli import __version__, errors
from paxcli.cli import (
    checkpoints,
    compile,
    data,
    decode,
    doctor,
    emit,
    eval,
    export_weights,
    import_weights,
    inspect_input,
    install,
    maxtext_convert,
    notebook,
    pgle,
    plot,
    profile,
    provision,
    provision_access,
    recipes,
    report,
    train,
)
from paxcli.cli.interrupts import interrupts
from paxcli.cli.output import run, say, say_failure, say_interrupted
from paxcli.cli.remote import on_workers
from paxcli.config.consent import code_consent
from paxcli.jax_defaults import configure_jax
from paxcli.log import setup_logging

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
app.command("train")(on_workers(train.train))
app.command("eval")(on_workers(eval.evaluate))
app.command("decode")(on_workers(decode.decode))
app.command("inspect-input")(on_workers(inspect_input.inspect_input))
app.command("compile")(compile.compile)
app.command("pgle-profile")(pgle.pgle_profile)
app.command("plot")(on_workers(plot.plot, everywhere=False))
app.command("report")(on_workers(report.report, everywhere=False))
app.command("notebook")(notebook.notebook)
app.command("doctor")(on_workers(doctor.doctor))
app.command("install")(install.install)
for group in (recipes, checkpoints, data, pgle, profile, provision):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])
for verb in (*provision_access.VERBS, emit.emit):
    provision.app.command(verb.__name__)(verb)
app.command("import")(import_weights.import_weights)
app.command("export")(export_weights.export_weights)
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
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run Python code that a run directory names. Default: ask, or refuse.")
    ] = False,
) -> None:
    """Configure, launch, run and measure large-model training on JAX.

    \b
    Examples:
      pax recipes ls
      pax train tiny
    """
    if os.path.expanduser("~") == "~":  # no HOME, and a user without an entry in /etc/passwd
        os.environ["HOME"] = "/"  # as container runtimes do: libraries need the name of a directory
    configure_jax()
    code_consent.set(lambda question: trust_code or (sys.stdin.isatty() and typer.confirm(question, err=True)))


def main() -> None:
    """Runs this process's command line and exits."""
    arguments = sys.argv[1:] or ["--help"]
    interrupts.install(lambda code: say_interrupted(arguments, code))
    errors.report_exit = lambda error: say_failure(arguments, error)
    setup_logging()
    sys.stdout.reconfigure(errors="backslashreplace")  # pyrefly: ignore - as stderr: a locale may lack letters
    code = run(app, arguments)
    if interrupts.exit_code or code == errors.RemoteError.exit_code:
        # The usual exit waits for threads, which may still ask a bucket, and a library may crash in it.
        os._exit(interrupts.exit_code or code)
    sys.exit(code)
