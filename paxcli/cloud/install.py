"""Installs pax on every worker, retries failures, and verifies that all workers have the same versions."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from paxcli.cloud import commands
from paxcli.cloud.accelerators import find_accelerator
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.package import Package
from paxcli.cloud.workers import Worker, on_each, run_script
from paxcli.errors import PaxError, RemoteError

SHIP = ".pax/ship"
_ROUNDS = 3
_INSTALL_SECONDS, _COPY_SECONDS, _DOCTOR_SECONDS = 1800.0, 600.0, 300.0

# A bash script that runs on a worker. Python on TPU VMs (Ubuntu 22.04) is too old, so uv installs a newer one.
_SCRIPT = """\
set -eu
cd "$HOME"
if [ "$(cat .pax/installed 2>/dev/null || true)" = {hash} ]; then echo already; exit 0; fi
if [ -e .pax/jobs/lock ] && ! flock --nonblock .pax/jobs/lock true; then
  echo 'a job is running on this worker: pax provision stop' >&2
  exit 1
fi
rm -rf .pax/installed .pax/venv
found=
for python in {pythons}; do
  if command -v "$python" >/dev/null && "$python" -c 'import ensurepip, venv' 2>/dev/null; then found=$python; break; fi
done
if [ -n "$found" ]; then
  "$found" -m venv .pax/venv
else
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --seed --python {uv_python} .pax/venv
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
.pax/venv/bin/python -m pip install --quiet --constraint {ship}/constraints.txt {requirement}
echo {hash} > .pax/installed
echo installed
"""
_DOCTOR = '"$HOME/.pax/venv/bin/python" -m paxcli doctor --json || true'
_PREPARE = f"mkdir -p {SHIP}"


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one worker.

    Args:
      worker: The worker.
      result: `already`, `installed`, or an error message.
      failed: Whether `result` is an error message.
      doctor: The report of `pax doctor` on the worker.
    """

    worker: Worker
    result: str
    failed: bool = False
    doctor: dict[str, Any] = dataclasses.field(default_factory=dict)


def install_script(package: Package) -> str:
    """The script that installs the package on a worker, after its files were copied there."""
    minor = sys.version_info[1]
    pythons = [f"python3.{minor}", *(f"python3.{other}" for other in (12, 11, 13) if other != minor)]
    return _SCRIPT.format(
        hash=package.hash,
        pythons=" ".join(pythons),
        uv_python=f"3.{minor}",
        ship=SHIP,
        requirement=shlex.quote(package.requirement.replace("{ship}", f"./{SHIP}")),
    )


def install_commands(target: Target, package: Package, node: str, worker: str) -> list[list[str]]:
    """The commands that prepare, copy and install, for one worker or `all`."""
    files = [str(file) for file in package.files]
    return [
        commands.ssh(target, node, worker, _PREPARE),
        commands.scp(target, files, f"{target.name}:{SHIP}/", node, worker),
        commands.ssh(target, node, worker, install_script(package)),
    ]


def install(
    target: Target,
    workers: Sequence[Worker],
    package: Package,
    gcloud: Gcloud,
    say: Callable[[str], None],
    others: Collection[Worker] = (),
) -> list[Result]:
    """Installs the package on every worker that does not have it, and verifies all of them.

    The first connection to a target makes gcloud distribute an ssh key; worker 0 goes first so that this happens once.
    A slice with one of `others`, which are not installed, is verified without its chips: they start on all workers.
    """

    def attempt(worker: Worker) -> str:
        prepare, copy, run = install_commands(target, package, str(worker.slice), str(worker.index))
        gcloud.run(prepare)
        say(f"{worker} | copying")
        gcloud.run(copy, timeout=_COPY_SECONDS)
        say(f"{worker} | installing")
        lines = gcloud.run(run, timeout=_INSTALL_SECONDS).split()
        say(f"{worker} | {lines[-1] if lines else 'no answer'}")
        return lines[-1] if lines else ""

    done: dict[Worker, str | PaxError] = on_each(workers[:1], attempt)
    done |= on_each(workers[1:], attempt)
    for _ in range(_ROUNDS - 1):
        failed = [worker for worker, result in done.items() if isinstance(result, PaxError)]
        for worker in failed:
            say(f"{worker} | failed, trying again: {_text(done[worker])}")
        done |= on_each(failed, attempt) if failed else {}
    results = [Result(worker, _text(result), isinstance(result, PaxError)) for worker, result in done.items()]
    return _verify(target, results, gcloud, {worker.slice for worker in others})


def _verify(target: Target, results: list[Result], gcloud: Gcloud, partial: set[int]) -> list[Result]:
    """Runs `pax doctor` on all workers at once, since the hosts of a slice initialize their chips together."""

    def ask(worker: Worker) -> dict[str, Any]:
        script = f"JAX_PLATFORMS=cpu {_DOCTOR}" if worker.slice in partial else _DOCTOR
        return _doctor(target, worker, script, gcloud)

    asked = [result.worker for result in results if not result.failed]
    answers = on_each(asked, ask, at_once=None) if asked else {}
    reports = {w: {"error": {"message": a.message}} if isinstance(a, PaxError) else a for w, a in answers.items()}
    reference = next((report for report in reports.values() if "error" not in report), {})
    checked = []
    for result in results:
        if report := reports.get(result.worker):
            problem = _find_problem(report, reference)
            done = f"{result.result}, chips not checked" if result.worker.slice in partial else result.result
            result = dataclasses.replace(result, doctor=report, result=problem or done, failed=bool(problem))
        checked.append(result)
    return _count_devices(target, checked, partial)


def _doctor(target: Target, worker: Worker, script: str, gcloud: Gcloud) -> dict[str, Any]:
    output = run_script(target, worker, script, gcloud, _DOCTOR_SECONDS)
    line = next((line for line in reversed(output.splitlines()) if line.startswith("{")), None)
    if line is None:
        hint = f"Try it there: pax provision ssh {target.name} --command '~/.pax/venv/bin/pax doctor'"
        raise RemoteError(f"pax does not start: {output[-300:]!r}.", hint)
    return json.loads(line)


def _versions(report: dict[str, Any]) -> dict[str, str]:
    return {"pax": report["pax"], "python": report["python"], **report["packages"]}


def _find_problem(report: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """The problem in one worker's doctor report, compared with the first worker's; None if there is none."""
    if "error" in report:
        return str(report["error"]["message"])
    versions, expected = _versions(report), _versions(reference)
    differences = [
        f"{name} {versions.get(name)}, not {version}"
        for name, version in expected.items()
        if versions.get(name) != version
    ]
    if differences:
        return "versions differ from worker 0: " + "; ".join(differences)
    on_cpu = all(device["platform"] == "cpu" for device in report["devices"])
    if on_cpu and not report["environment"].get("JAX_PLATFORMS"):
        return "JAX finds no TPU"
    return None


def _count_devices(target: Target, results: list[Result], partial: set[int]) -> list[Result]:
    """Marks complete slices as failed whose devices are not as many as those of the accelerator type."""
    if target.accelerator is None:
        return results
    expected = find_accelerator(target.accelerator).devices
    checked = list(results)
    for number in {result.worker.slice for result in results} - partial:
        members = [result for result in results if result.worker.slice == number]
        found = sum(device["count"] for member in members for device in member.doctor.get("devices", []))
        if found != expected and not any(member.failed for member in members) and members[0].worker.index == 0:
            message = f"slice {number} has {found} devices, not {expected}"
            bad = {member.worker for member in members}
            checked = [dataclasses.replace(r, result=message, failed=True) if r.worker in bad else r for r in checked]
    return checked


def _text(result: str | PaxError) -> str:
    return result.message if isinstance(result, PaxError) else result
