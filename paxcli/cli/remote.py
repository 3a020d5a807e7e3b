"""`--on NAME`: runs the same command on all workers of TPU VMs at once and prints its output here."""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import paxcli as pax
from paxcli.cli.interrupts import interrupts
from paxcli.cli.provision import find, say_commands
from paxcli.cli.runs import HF, check_devices, load_recipe, recipe_files
from paxcli.cloud import commands
from paxcli.cloud.accelerators import find_accelerator
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.jobs import Argument, Job, start_script
from paxcli.cloud.workers import Worker, find_workers
from paxcli.config.paths import read_text
from paxcli.errors import ConfigError
from paxcli.log import log

ON = typer.Option(metavar="NAME", help="Run on all workers of these TPU VMs. Default: this machine.")
ON_ONE = typer.Option(metavar="NAME", help="Run on worker 0 of these TPU VMs. Default: this machine.")
# Arguments, of recipes, and options that may name files of this machine, which are then sent along with the command.
_FILES = {"recipe", "target", "overlays", "prompts_file"}
# Commands whose processes share a run directory.
_SHARING = {"train", "eval", "decode"}


def on_workers(verb: Callable[..., None], everywhere: bool = True) -> Callable[..., None]:
    """The command with the option `--on NAME`, which runs it on TPU VMs.

    Args:
      verb: The command.
      everywhere: Whether to run it on all workers. A command that writes a file of its own runs on worker 0 only.
    """

    @functools.wraps(verb)
    def command(ctx: typer.Context, on: str | None, **options: Any) -> None:
        return verb(**options) if on is None else run_on(on, ctx, everywhere)

    own = inspect.signature(verb, eval_str=True)
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    option = context.replace(name="on", default=None, annotation=Annotated[str | None, ON if everywhere else ON_ONE])
    command.__signature__ = own.replace(parameters=[*own.parameters.values(), option, context])  # type: ignore
    return command


def run_on(name: str, ctx: typer.Context, everywhere: bool) -> None:
    """Runs the command of `ctx`, as it was parsed, on the TPU VMs `name`, and exits with its exit code."""
    params = ctx.params
    recipe = _load_recipe(params)
    arguments, files = retype(ctx)
    target = find(name, dry_run=bool(params.get("dry_run")))
    if recipe is not None and ctx.info_name == "train" and target.accelerator is not None:
        there = find_accelerator(target.accelerator).devices * target.slices
        has = f"{target.name} has {there} ({target.slices} x {target.accelerator})"
        check_devices(recipe, there, target.slices, has, "Create other TPUs: pax provision create --help")
    job_name = f"{ctx.info_name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    if params.get("dry_run"):
        which = "all" if everywhere else "0"
        script = start_script(job_name, arguments, files)
        return say_commands([commands.ssh(target, which, which, script)], bool(params.get("as_json")))
    gcloud = Gcloud()
    workers = find_workers(target, gcloud)
    _check_sharing(str(ctx.info_name), params, workers)
    job = Job(target, job_name, workers if everywhere else workers[:1], gcloud, log.info)
    log.info("starting %s on %d workers of %d slices of %s", job_name, len(job.workers), target.slices, name)
    interrupts.restore()  # now, so that Ctrl-C leaves the time to stop what has started
    job.start(arguments, files)
    raise typer.Exit(watch(job))


def watch(job: Job) -> int:
    """Prints the output of worker 0 until the job ends; returns its exit code. Ctrl-C asks what to do."""
    interrupts.restore()
    while True:
        try:
            return job.follow(show)
        except KeyboardInterrupt:
            answer = _ask()
            if answer == "detach":
                log.info("%s keeps running: pax provision attach %s", job.name, job.target.name)
                return 0
            if answer == "stop":
                log.info("stopping %s after it has saved", job.name)
                job.stop()


def retype(ctx: typer.Context) -> tuple[list[Argument], dict[str, str]]:
    """A parsed command as arguments of pax again, without `--on` and `--dry-run`, and the local files to send along.

    Raises:
      ConfigError: A file cannot be read.
    """
    options: list[Argument] = [*(["--trust-code"] if ctx.find_root().params["trust_code"] else []), str(ctx.info_name)]
    positional: list[Argument] = []
    files: set[Path] = set()
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if param.name in ("on", "dry_run") or value is None or value == param.default:
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            text = str(item)
            word = _find_local_file(text, files, param.param_type_name) if param.name in _FILES else text
            if param.param_type_name == "argument":
                positional.append(word)
            elif item is True:
                options.append(param.opts[0])
            elif isinstance(word, str):
                options.append(f"{param.opts[0]}={word}")
            else:
                options += [param.opts[0], word]
    texts = {str(path): read_text(path, ConfigError) for path in files}
    return [*options, "--", *positional] if positional else options, texts


def _find_local_file(text: str, files: set[Path], kind: str) -> Argument:
    """`./mine.py:my_recipe` as (file to send, the rest); the text itself if it does not name a local file.

    Adds the file to `files`, and those that a recipe, an `argument`, needs.
    """
    start, separator, rest = text.partition(":")
    path = Path(start).resolve()
    if not path.is_file():
        return text
    files |= set(recipe_files(path)) if kind == "argument" else {path}
    return str(path), separator + rest


def _load_recipe(params: dict[str, Any]) -> pax.Recipe | None:
    """The recipe, if there is one. Finds its mistakes before it is sent."""
    name = params.get("recipe", params.get("target"))
    if name is None or name.startswith(HF) or ("target" in params and not Path(name.partition(":")[0]).is_file()):
        return None
    return load_recipe(name, params.get("overlays"), params.get("sets"))


def _check_sharing(verb: str, params: dict[str, Any], workers: list[Worker]) -> None:
    """Raises a ConfigError if several workers cannot share a run directory, or would all import the same weights."""
    if verb not in _SHARING or len(workers) == 1:
        return
    is_shared = verb in _SHARING and len(workers) > 1
    places = [str(params[key]) for key in ("run_dir", "target") if params.get(key)]
    if is_shared and not any("://" in place or place.startswith("/") for place in places):
        hint = "Give one that all of them reach: --run-dir gs://BUCKET/RUN"
        raise ConfigError(f"{len(workers)} workers share no disk: each would have a run directory of its own.", hint)
    if is_shared and (weights := next((text for text in map(str, params.values()) if text.startswith(HF)), None)):
        hint = f"`pax import {weights.removeprefix(HF)} --out gs://BUCKET/RUN`, then write gs://BUCKET/RUN instead."
        raise ConfigError(f"{len(workers)} workers would all import {weights} into one run directory.", hint)


def show(stream: str, text: str) -> None:
    """Prints a worker's output to the same stream here."""
    print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def _ask() -> str:
    """Asks what Ctrl-C means: `detach`, `stop` or `watch`. Without a terminal: `detach`."""
    if not sys.stdin.isatty():
        return "detach"
    print("\n[d]etach and let it run, [s]top it, or keep watching (Enter)? ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        return "detach"
    return {"d": "detach", "s": "stop"}.get(answer[:1], "watch")
