"""`pax install`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result
from paxcli.cli.provision import find, say_commands
from paxcli.cloud import install as remote
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.package import Package, detect_extra, lasting_commands, local_commands, make_package
from paxcli.cloud.values import check_worker
from paxcli.cloud.workers import find_workers, select
from paxcli.errors import ConfigError, MissingError, RemoteError
from paxcli.log import log

OnOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Install on all workers of these TPU VMs. Default: here.")
]
FromOption = Annotated[
    str, typer.Option("--from", metavar="SOURCE", help="git:REF, git:ADDRESS@REF, or local: this checkout.")
]
ForOption = Annotated[
    Literal["tpu", "cuda12", "cuda13", "cpu"] | None,
    typer.Option("--for", help="The accelerator. Default: this machine's; with --on, tpu."),
]
VenvOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The virtual environment. Default: the active one, else ~/.pax/venv.")
]
WorkerOption = Annotated[str, typer.Option(metavar="[SLICE.]N|all", help="With --on: which workers.")]


def install(
    on: OnOption = None,
    source: FromOption = "local",
    extra: ForOption = None,
    venv: VenvOption = None,
    worker: WorkerOption = "all",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Install pax and JAX for the accelerator. Versions are pinned. Installs here, or on every worker of every slice.

    \b
    Examples:
      pax install --dry-run
      pax install --on demo
    """
    chosen = extra or ("tpu" if on else detect_extra())
    node, index = check_worker(worker)
    if on is None and worker != "all":
        raise ConfigError(f"`--worker {worker}` is of a TPU VM, and none is named.", "Name it with `--on`.")
    target = find(on, dry_run=dry_run) if on else None
    with tempfile.TemporaryDirectory() as folder:
        package = make_package(source, chosen, Path(folder), dry_run)
        if target is None:
            _install_here(package, venv, Path(folder), chosen, dry_run, as_json)
        elif dry_run:
            say_commands(lasting_commands(remote.install_commands(target, package, node, index), Path(folder)), as_json)
        else:
            _install_there(target, node, index, package, as_json)


def _install_here(package: Package, venv: Path | None, folder: Path, extra: str, dry_run: bool, as_json: bool) -> None:
    active = Path(sys.prefix) if sys.prefix != sys.base_prefix else None
    place = venv or active or Path.home() / ".pax" / "venv"
    lines = local_commands(package, place, folder)
    if dry_run:
        return say_commands(lasting_commands(lines, folder), as_json)
    log.info("installing for %s into %s", extra, place)
    for argv in lines:
        done = subprocess.run(argv, stdout=sys.stderr, env={**os.environ, "PYTHONNOUSERSITE": "1"})
        if done.returncode:
            raise MissingError(f"`{' '.join(argv[:4])} …` failed.", "Its output is above.")
    say_result({"venv": str(place), "for": extra}, f"Installed into {place}.\nNext: {place}/bin/pax doctor", as_json)


def _install_there(target: Target, node: str, index: str, package: Package, as_json: bool) -> None:
    gcloud = Gcloud()
    everyone = find_workers(target, gcloud)
    workers = select(everyone, node, index)
    others = [worker for worker in everyone if worker not in workers]
    results = remote.install(target, workers, package, gcloud, log.info, others)
    rows = [
        {
            "worker": str(each.worker),
            "result": each.result,
            "failed": each.failed,
            "pax": each.doctor.get("pax"),
            "jax": each.doctor.get("packages", {}).get("jax"),
            "devices": sum(device["count"] for device in each.doctor.get("devices", [])),
        }
        for each in results
    ]
    lines = [f"{row['worker']:<8}{row['devices']:>3} devices  {row['result']}" for row in rows]
    if failed := [row["worker"] for row in rows if row["failed"]]:
        hint = f"Fix the cause and run the command again, or with --worker {failed[0]}; it skips finished workers."
        raise RemoteError(f"{len(failed)} of {len(rows)} workers failed.\n" + "\n".join(lines), hint)
    lines.append(f"Next: pax train RECIPE --on {target.name} --run-dir gs://BUCKET/RUN")
    say_result({"name": target.name, "workers": rows}, "\n".join(lines), as_json)
