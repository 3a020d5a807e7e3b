"""`pax provision ssh|scp|forward|logs|attach|stop`: connect to TPU VMs and to the jobs on them."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result
from paxcli.cli.provision import NameArgument, ProjectOption, ZoneOption, find, say_commands
from paxcli.cli.remote import show, watch
from paxcli.cloud import commands
from paxcli.cloud.gcloud import Gcloud, find_gcloud
from paxcli.cloud.jobs import Job, describe, describe_stop, find_job
from paxcli.cloud.values import check, check_worker
from paxcli.cloud.workers import find_workers, select
from paxcli.errors import ConfigError, RemoteError
from paxcli.log import log

_BACKLOG_BYTES = 4000

WorkerOption = Annotated[str, typer.Option(metavar="[SLICE.]N|all", help="Which worker.")]
CommandOption = Annotated[str | None, typer.Option(help="Run this with bash. Default: open a shell.")]
SshArgument = Annotated[list[str] | None, typer.Argument(metavar="[-- SSH_ARGS...]", help="Passed on to ssh.")]
PathsArgument = Annotated[list[str], typer.Argument(metavar="FROM... TO", help="NAME:PATH is remote, PATH is local.")]
PortsArgument = Annotated[list[str], typer.Argument(metavar="PORT...", help="PORT, or LOCAL:REMOTE.")]
JobOption = Annotated[str | None, typer.Option(help="Which job. Default: the running one, else the last.")]
KillOption = Annotated[bool, typer.Option("--kill", help="Stop at once, without saving. Default: save first.")]


def ssh(
    name: NameArgument,
    ssh_args: SshArgument = None,
    worker: WorkerOption = "0",
    command: CommandOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Open a shell on a worker, or run a command on one or all.

    \b
    Examples:
      pax provision ssh demo --worker 1.3
      pax provision ssh demo --worker all --command "df -h /"
    """
    node, index = check_worker(worker)
    if command is None and "all" in (node, index):
        raise ConfigError("A shell opens on one worker.", "Name the worker, or give a --command.")
    target = find(name, zone, project, dry_run)
    _hand_over(commands.ssh(target, node, index, command, ssh_args or ()), dry_run, as_json)


def scp(
    paths: PathsArgument,
    worker: WorkerOption = "0",
    zone: ZoneOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy files to workers, or from one worker.

    \b
    Examples:
      pax provision scp data.txt demo:data.txt --worker all
      pax provision scp demo:runs/tiny/loss.png .
    """
    names = {path.partition(":")[0] for path in paths if ":" in path and not path.startswith((".", "/"))}
    if len(paths) < 2 or len(names) != 1:
        raise ConfigError("Which side is remote?", "pax provision scp FILE NAME:PATH, or NAME:PATH FILE")
    node, index = check_worker(worker)
    target = find(names.pop(), zone, project, dry_run)
    _hand_over(commands.scp(target, paths[:-1], paths[-1], node, index), dry_run, as_json)


def forward(
    name: NameArgument,
    ports: PortsArgument,
    worker: WorkerOption = "0",
    zone: ZoneOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Forward ports of a worker to localhost until Ctrl-C. Useful for notebooks and TensorBoard.

    \b
    Examples:
      pax provision forward demo 6006
      pax provision forward demo 8080 6007:6006 --worker 1.0
    """
    node, index = check_worker(worker)
    if "all" in (node, index):
        raise ConfigError("Ports are forwarded from one worker.", "Name the worker.")
    for each in ports:
        check("port", each)
    target = find(name, zone, project, dry_run)
    _hand_over(commands.ssh(target, node, index, forwards=ports), dry_run, as_json)


def logs(
    name: NameArgument,
    worker: WorkerOption = "0",
    job: JobOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a job's output so far, of one worker or of all.

    \b
    Examples:
      pax provision logs demo
      pax provision logs demo --worker 1.3
    """
    node, index = check_worker(worker)
    found = _job(name, job, zone, project)
    printed = []
    for one in select(found.workers, node, index):
        texts = {"stdout": "", "stderr": ""}
        answer = found.dump(one, functools.partial(_keep, texts) if as_json else show)
        log.info("%s on worker %s: %s", found.name, one, describe(answer))
        printed.append({"worker": str(one), "state": describe(answer), **texts})
    say_result({"job": found.name, "workers": printed}, "", as_json)


def attach(name: NameArgument, job: JobOption = None, zone: ZoneOption = None, project: ProjectOption = None) -> None:
    """Follow a job that was started with --on, from its last lines. Exits with the job's exit code.

    \b
    Examples:
      pax provision attach demo
      pax provision attach demo --job train-20260131-120000-a1b2
    """
    found = _job(name, job, zone, project)
    found.at = dict.fromkeys(found.at, -_BACKLOG_BYTES)
    raise typer.Exit(watch(found))


def stop(
    name: NameArgument,
    kill: KillOption = False,
    job: JobOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a job save and stop. Training resumes from there when it is started again.

    \b
    Examples:
      pax provision stop demo
      pax provision stop demo --kill
    """
    found = _job(name, job, zone, project)
    answers = found.stop("KILL" if kill else "TERM")
    states = {str(worker): answer["state"] for worker, answer in answers.items()}
    text = f"{describe_stop(found, answers)} See its output: pax provision attach {name}"
    say_result({"job": found.name, "workers": states}, text, as_json)


VERBS = (ssh, scp, forward, logs, attach, stop)


def _keep(texts: dict[str, str], stream: str, text: str) -> None:
    texts[stream] += text


def _job(name: str, job: str | None, zone: str | None, project: str | None) -> Job:
    gcloud = Gcloud()
    target = find(name, zone, project)
    workers = find_workers(target, gcloud)
    return Job(target, find_job(job, target, workers[0], gcloud), workers, gcloud, log.info)


def _hand_over(argv: list[str], dry_run: bool, as_json: bool) -> None:
    """Runs gcloud in this terminal."""
    if dry_run:
        return say_commands([argv], as_json)
    done = subprocess.run([find_gcloud(), *argv[1:]], stdout=sys.stderr if as_json else None)
    if done.returncode:
        hint = "Solve the problem that gcloud names."
        raise RemoteError(f"gcloud exited with {done.returncode}; its output is above.", hint)
    say_result({"done": True}, "", as_json)
