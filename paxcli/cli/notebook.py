"""`pax notebook`: Jupyter with pax's Python, here or on a TPU VM."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result
from paxcli.cli.provision import find, say_commands
from paxcli.cli.remote import ON_ONE
from paxcli.cloud import commands
from paxcli.cloud.gcloud import find_gcloud
from paxcli.cloud.jobs import PYTHON
from paxcli.errors import ConfigError, MissingError, RemoteError

PORT = 8888

FolderArgument = Annotated[str, typer.Argument(metavar="[DIR]", help="The folder of the notebooks.")]
OnOption = Annotated[str | None, ON_ONE]


def notebook(
    folder: FolderArgument = ".", on: OnOption = None, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Start Jupyter with pax's Python as kernel, until Ctrl-C. On a TPU VM, its port is forwarded to this machine.

    \b
    Examples:
      pax notebook
      pax notebook notes --on demo
    """
    python = PYTHON if on else shlex.quote(sys.executable)
    # The kernel `python3` of a Jupyter is the Python that runs it.
    jupyter = f"{python} -m jupyter lab --MultiKernelManager.default_kernel_name=python3 --port={PORT}"
    check = f"{{ {python} -c 'import jupyterlab, ipykernel' || exit {MissingError.exit_code}; }}"
    script = f"cd {shlex.quote(folder)} && {check} && exec {jupyter}"
    argv = ["bash", "-c", script]
    if on is not None:
        forward = ["-t", f"-L{PORT}:localhost:{PORT}"]
        argv = commands.ssh(find(on, dry_run=dry_run), script=f"{script} --no-browser", ssh_args=forward)
    if dry_run:
        return say_commands([argv], as_json)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter asks what Ctrl-C means
    done = subprocess.run([find_gcloud(), *argv[1:]] if on else argv, stdout=sys.stderr if as_json else None)
    if done.returncode == MissingError.exit_code:
        install = f"{'~/.pax/venv/bin/python' if on else sys.executable} -m pip install jupyterlab"
        hint = f'pax provision ssh {on} --command "{install}"' if on else install
        raise MissingError("There is no Jupyter in the Python of pax.", hint)
    if done.returncode:
        failure = f"Jupyter exited with {done.returncode}; its output is above."
        raise (RemoteError if on else ConfigError)(failure, "Solve the problem that Jupyter names.")
    say_result({"done": True}, "", as_json)
