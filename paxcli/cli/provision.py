"""`pax provision`: TPU VMs and queued resources, through the user's gcloud."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import time
from typing import Annotated, Any

import typer
import typer.core

from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result
from paxcli.cloud import commands, states
from paxcli.cloud.accelerators import find_accelerator
from paxcli.cloud.commands import Order, Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.targets import find_target, find_zone_and_project, forget, remember
from paxcli.cloud.values import seconds
from paxcli.errors import ConfigError
from paxcli.log import log


class CreateByDefault(typer.core.TyperGroup):
    """`pax provision NAME …` means `pax provision create NAME …`."""

    default = "create"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # A name comes with --accelerator; without it, a word that resembles a command is a misspelt command.
        typed = any(arg.startswith("--accelerator") for arg in args)
        verb_meant = not typed and difflib.get_close_matches(args[0], self.commands, cutoff=0.7)
        if args[0] not in self.commands and not args[0].startswith("-") and not verb_meant:
            args = [self.default, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=CreateByDefault, help="Create, wait for, connect to and delete TPU VMs. `pax provision NAME …` creates them."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the TPU VM or queued resource.")]
_RECORDED = "Default: recorded for NAME, else $CLOUDSDK_{}, else gcloud's."
ZoneOption = Annotated[str | None, typer.Option(help="Zone. " + _RECORDED.format("COMPUTE_ZONE"))]
ProjectOption = Annotated[str | None, typer.Option(help="Project. " + _RECORDED.format("CORE_PROJECT"))]
AcceleratorOption = Annotated[str, typer.Option(metavar="TYPE", help="Slice type, such as v4-128.")]
SlicesOption = Annotated[int, typer.Option(min=1, max=1024, help="How many slices.")]
QueuedOption = Annotated[bool, typer.Option("--queued", help="Queue for capacity. Default: only with several slices.")]
SpotOption = Annotated[bool, typer.Option("--spot", help="Cheaper chips that may be preempted. Default: on demand.")]
ReservedOption = Annotated[bool, typer.Option("--reserved", help="Use the project's reservation. Default: on demand.")]
UntilOption = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Leave the queue after 6h, or at a time. Default: never.")
]
NetworkOption = Annotated[str | None, typer.Option(help="Network. Default: the project's.")]
SubnetworkOption = Annotated[str | None, typer.Option(help="Subnetwork. Default: the network's.")]
InternalOption = Annotated[bool, typer.Option("--internal-ips", help="No external IP addresses. Default: with them.")]
AccountOption = Annotated[str | None, typer.Option(metavar="EMAIL", help="Service account. Default: Compute Engine's.")]
LabelsOption = Annotated[str | None, typer.Option(metavar="KEY=VALUE,…", help="Labels. Default: none.")]
RuntimeOption = Annotated[str | None, typer.Option(help="TPU software version. Default: the usual one for the type.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until every slice runs. Default: return after the request.")
]
TimeoutOption = Annotated[str, typer.Option(metavar="DURATION", help="How long to wait.")]
RecreateOption = Annotated[
    bool, typer.Option("--recreate", help="Delete and recreate what failed or was preempted. Default: report it.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation. Default: ask.")]


@app.command("create")
def create(
    name: NameArgument,
    accelerator: AcceleratorOption,
    slices: SlicesOption = 1,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    queued: QueuedOption = False,
    spot: SpotOption = False,
    reserved: ReservedOption = False,
    valid_until: UntilOption = None,
    network: NetworkOption = None,
    subnetwork: SubnetworkOption = None,
    internal_ips: InternalOption = False,
    service_account: AccountOption = None,
    labels: LabelsOption = None,
    runtime_version: RuntimeOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = "24h",
    recreate: RecreateOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Create a TPU VM; with several slices, a queued resource. `pax provision NAME …` does the same.

    \b
    Examples:
      pax provision create demo --accelerator v4-8 --zone us-central2-b
      pax provision create demo --accelerator v4-128 --slices 2 --zone us-central2-b --spot --wait
    """
    found = find_accelerator(accelerator)
    if found.alias:
        log.info("%s is called %s by Google.", found.alias, found.type)
    deadline = time.monotonic() + seconds(timeout)
    zone, project = find_zone_and_project(zone, project, log.info)
    target = Target(name, zone, project, queued or slices > 1, slices, found.type, internal_ips)
    order = Order(
        target, found, spot, reserved, valid_until, network, subnetwork, service_account, labels, runtime_version
    )
    if dry_run:
        return say_commands([commands.create(order)], as_json)
    gcloud = Gcloud()
    status = states.ensure(order, gcloud, recreate, log.info, deadline)
    remember(target)
    if wait:
        status = states.wait(target, gcloud, deadline, log.info, order if recreate else None)
    elif status.phase in (states.Phase.FAILED, states.Phase.PREEMPTED):
        raise states.not_usable(status, target)
    then = f"pax install --on {name}" if status.phase is states.Phase.READY else f"pax provision wait {name}"
    say_result(_report(target, status), f"{name}: {status}\nNext: {then}", as_json)


@app.command("list")
def list_targets(zone: ZoneOption = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """List the queued resources and TPU VMs in a zone.

    \b
    Examples:
      pax provision list --zone us-central2-b
      pax provision list --json
    """
    zone, project = find_zone_and_project(zone, project, log.info)
    gcloud = Gcloud()
    rows = []
    for kind in ("queued-resources", "tpu-vm"):
        for item in gcloud.json(commands.list_all(kind, zone, project)):
            spec = ((item.get("tpu") or {}).get("nodeSpec") or [{}])[0].get("node") or item
            state = states.queued_status(item).state if kind == "queued-resources" else item.get("state")
            name = str(item.get("name", "")).rsplit("/", 1)[-1]
            rows.append({"name": name, "kind": kind, "state": state, "accelerator": spec.get("acceleratorType")})
    text = [f"{row['name']:<30}{row['kind']:<18}{row['accelerator'] or '':<16}{row['state']}" for row in rows]
    say_result({"zone": zone, "resources": rows}, "\n".join(text) or f"Nothing in {zone}.", as_json)


@app.command("describe")
def describe(
    name: NameArgument, zone: ZoneOption = None, project: ProjectOption = None, as_json: JsonOption = False
) -> None:
    """Print type, state and workers of a TPU VM or queued resource.

    \b
    Examples:
      pax provision describe demo
      pax provision describe demo --json
    """
    target = find(name, zone, project)
    report = _report(target, states.look(target, Gcloud()))
    lines = [f"{key}: {value}" for key, value in report.items() if value not in (None, "", [])]
    say_result(report, "\n".join(lines), as_json)


@app.command("wait")
def wait_for(
    name: NameArgument,
    timeout: TimeoutOption = "24h",
    zone: ZoneOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until every slice runs.

    \b
    Examples:
      pax provision wait demo
      pax provision wait demo --timeout 30m
    """
    deadline = time.monotonic() + seconds(timeout)
    target = find(name, zone, project)
    status = states.wait(target, Gcloud(), deadline, log.info)
    say_result(_report(target, status), f"{name}: {status}\nNext: pax install --on {name}", as_json)


@app.command("delete")
def delete(
    name: NameArgument,
    yes: YesOption = False,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a TPU VM, or a queued resource with all its slices. Their disks are deleted too.

    \b
    Examples:
      pax provision delete demo
      pax provision delete demo --yes
    """
    if not yes and not dry_run and not sys.stdin.isatty():
        raise ConfigError(f"This would delete {name}.", "Add --yes to do it.")
    target = find(name, zone, project, dry_run)
    if dry_run:
        return say_commands([commands.delete(target)], as_json)
    if not yes:
        what = f"{target.slices} slices of" if target.slices > 1 else "the TPU VM of"
        typer.confirm(f"Delete {what} {name} in {target.zone}?", abort=True, err=True)
    states.delete(target, Gcloud())
    forget(target)
    say_result({"name": name, "deleted": True}, f"Deleted {name}.", as_json)


def find(name: str, zone: str | None = None, project: str | None = None, dry_run: bool = False) -> Target:
    """The TPU VMs of a name. A dry run does not ask Google Cloud."""
    return find_target(name, zone, project, Gcloud(), log.info, dry_run)


def say_commands(lines: list[list[str]], as_json: bool) -> None:
    """Prints the result of a dry run: shell commands, or with `--json` argument lists."""
    say_result({"commands": lines}, "\n".join(commands.shell_line(argv) for argv in lines), as_json)


def _report(target: Target, status: states.Status) -> dict[str, Any]:
    return {**dataclasses.asdict(target), **dataclasses.asdict(status), "workers": list(status.workers)}
