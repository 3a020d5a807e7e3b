"""`pax checkpoints`: list, verify, delete and copy the checkpoints of a run."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from paxcli.cli.options import DryRunOption, JsonOption, directory_option
from paxcli.cli.output import say_result
from paxcli.errors import DataError, first_line

app = typer.Typer(no_args_is_help=True, help="List, verify, delete and copy the checkpoints of a run.")

RunDirArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run directory, local or in a bucket.")]


def _steps_option(default: str = "") -> Any:
    return typer.Option("--step", min=0, help=f"A checkpoint's step. Repeatable.{default}")


StepsOption = Annotated[list[int] | None, _steps_option(" Default: all.")]
NewestStepsOption = Annotated[list[int] | None, _steps_option(" Default: the newest.")]
DoomedStepsOption = Annotated[list[int], _steps_option()]
OutOption = Annotated[str, directory_option("The run directory to copy into.")]


@app.command("ls")
def ls(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run: step, size, time. Includes those of its local tier on this machine.

    \b
    Examples:
      pax checkpoints ls runs/tiny
      pax checkpoints ls gs://bucket/runs/c4-1b --json
    """
    from paxcli.checkpoint.maintenance import list_checkpoints, list_local_checkpoints

    with _explain_deletion(run_dir):
        found = [info._asdict() for info in list_checkpoints(run_dir)]
        local = [info._asdict() for info in list_local_checkpoints(run_dir)]
    say_result({"checkpoints": found, "local": local}, "\n".join(map(_line, found + local)), as_json)


@app.command()
def verify(run_dir: RunDirArgument, steps: StepsOption = None, as_json: JsonOption = False) -> None:
    """Read checkpoints completely, and check every array. Compares with the fingerprints recorded at the save.

    Exits with 5 if one of them cannot be used. Runs on the CPU.

    \b
    Examples:
      pax checkpoints verify runs/tiny
      pax checkpoints verify runs/tiny --step 750 --step 900
    """
    import jax

    from paxcli.checkpoint.maintenance import verify_checkpoints

    jax.config.update("jax_platforms", "cpu")
    found = list(verify_checkpoints(run_dir, steps or ()))
    lines = [f"step {x.step}: {x.problem or f'intact, {x.arrays} arrays, {x.bytes / 2**20:,.1f} MiB'}" for x in found]
    damaged = [one.step for one in found if one.problem]
    intact = [str(one.step) for one in found if not one.problem]
    if not damaged:
        return say_result({"checkpoints": [one._asdict() for one in found]}, "\n".join(lines), as_json)
    problem = f"{len(damaged)} of {len(found)} checkpoints of {run_dir} cannot be used:"
    delete = f"pax checkpoints rm {run_dir} --step {damaged[0]}"
    hint = f"Intact: {', '.join(intact) or 'none'}. Delete a damaged one: `{delete}`."
    raise DataError("\n  ".join([problem, *lines]), hint)


@app.command()
def rm(
    run_dir: RunDirArgument, steps: DoomedStepsOption, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Delete checkpoints of a run that is not training. The last one is never deleted.

    Those that stay are not read: `pax checkpoints verify` finds damaged ones.

    \b
    Examples:
      pax checkpoints rm runs/tiny --step 100
      pax checkpoints rm runs/tiny --step 100 --step 200 --dry-run
    """
    from paxcli.checkpoint.maintenance import delete_checkpoints
    from paxcli.checkpoint.manager import find_steps
    from paxcli.training.run_dir import RunDir

    find_steps(run_dir)
    with RunDir(run_dir).lock(dry_run):
        deleted = [info._asdict() for info in delete_checkpoints(run_dir, steps, dry_run)]
    verb = "Would delete" if dry_run else "Deleted"
    say_result({"deleted": deleted}, "\n".join(f"{verb} {_line(one)}" for one in deleted), as_json)


@app.command()
def copy(
    run_dir: RunDirArgument,
    out: OutOption,
    steps: NewestStepsOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy checkpoints into a new run directory, local or in a bucket. The run's recipe and tokenizers are copied, too.

    \b
    Examples:
      pax checkpoints copy runs/tiny --out gs://bucket/runs/tiny
      pax checkpoints copy runs/tiny --step 750 --out runs/tiny-750
    """
    from paxcli.checkpoint.maintenance import copy_checkpoints

    with _explain_deletion(run_dir):
        copied = [info._asdict() for info in copy_checkpoints(run_dir, out, steps or (), dry_run)]
    verb = "Would copy" if dry_run else "Copied"
    say_result({"copied": copied}, "\n".join(f"{verb} {_line(one)}" for one in copied), as_json)


@contextlib.contextmanager
def _explain_deletion(run_dir: str) -> Iterator[None]:
    """Explains that a file is gone: training deletes its older checkpoints, also while they are read."""
    try:
        yield
    except FileNotFoundError as error:
        problem = f"A checkpoint of {run_dir} was deleted while it was read: {first_line(error)}."
        raise DataError(problem, "If the run is training, run the same command again.") from error


def _line(info: dict[str, Any]) -> str:
    saved = "" if info["saved_at"] is None else f"{datetime.datetime.fromtimestamp(info['saved_at']):%Y-%m-%d %H:%M:%S}"
    return f"step {info['step']:>8}  {info['bytes'] / 2**20:>10,.1f} MiB  {saved}  {info['path']}"
