"""`pax notebook`: Jupyter with pax's Python, here or on a TPU VM."""

from __future__ import annotations

import importlib.util
import shlex
import signal
import subprocess
import sys
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result
from paxcli.cli.provision import ProjectOption, ZoneOption, find, say_commands
from paxcli.cloud import commands
from paxcli.cloud.gcloud import find_gcloud
from paxcli.cloud.jobs import PYTHON
from paxcli.errors import ConfigError, MissingError, RemoteError

# The kernel `python3` of this Jupyter is the Python that runs it, in which pax is installed.
_JUPYTER = "-m jupyter lab --MultiKernelManager.default_kernel_name=python3"

FolderArgument = Annotated[str, typer.Argument(metavar="[DIR]", help="The folder of the notebooks.")]
OnOption = Annotated[
    str | None,
    typer.Option("--on", metavar="NAME", help="Start it on worker 0 of these TPU VMs. Default: this machine."),
]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="The port, here and on the TPU VM.")]


def notebook(
    folder: FolderArgument = ".",
    on: OnOption = None,
    port: PortOption = 8888,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start Jupyter with pax's Python as kernel, until Ctrl-C; on a TPU VM, with its port forwarded to this machine.

    \b
    Examples:
      pax notebook
      pax notebook --on demo --port 8889
    """
    options = f"{_JUPYTER} --port={port} --ServerApp.port_retries=0"
    argv = [sys.executable, *options.split(), f"--ServerApp.root_dir={folder}"]
    if on is not None:
        ssh_args = ["-t", f"-L{port}:localhost:{port}"]
        argv = commands.ssh(find(on, zone, project, dry_run), script=_remote_script(folder, options), ssh_args=ssh_args)
    if dry_run:
        return say_commands([argv], as_json)
    install = f"{'~/.pax/venv/bin/python' if on else sys.executable} -m pip install jupyterlab"
    hint = f'pax provision ssh {on} --command "{install}"' if on else install
    missing = MissingError("There is no Jupyter in the Python of pax.", hint)
    if on is None and not all(map(importlib.util.find_spec, ("jupyterlab", "ipykernel"))):
        raise missing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter asks what Ctrl-C means
    done = subprocess.run([find_gcloud(), *argv[1:]] if on else argv, stdout=sys.stderr if as_json else None)
    if done.returncode == MissingError.exit_code:
        raise missing
    if done.returncode:
        failure = f"Jupyter exited with {done.returncode}; its output is above."
        raise RemoteError(failure) if on else ConfigError(failure)
    if as_json:
        say_result({"done": True}, "", as_json)


def _remote_script(folder: str, options: str) -> str:
    check = f"{PYTHON} -c 'import jupyterlab, ipykernel' || exit {MissingError.exit_code}"
    return f"cd {shlex.quote(folder)} && {{ {check}; }} && exec {PYTHON} {options} --no-browser"
