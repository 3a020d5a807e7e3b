"""`--on NAME`: the same command on all workers of TPU VMs at once, shown here as if it ran here."""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from paxcli.accelerators import find_accelerator
from paxcli.cli.provision import say_commands
from paxcli.cloud import commands
from paxcli.cloud.gcloud import Gcloud
from paxcli.cloud.jobs import Argument, Job, start_script
from paxcli.cloud.targets import find_target
from paxcli.cloud.workers import Worker, find_workers
from paxcli.errors import ConfigError
from paxcli.log import log

OnOption = Annotated[
    str | None,
    typer.Option("--on", metavar="NAME", help="Run on these TPU VMs (pax provision), on all workers. Default: here."),
]
# Arguments that may be files of this machine: they travel with the command.
_FILES = {"recipe", "target", "overlays", "prompts_file"}
# Verbs whose processes share a run directory.
_SHARING = {"train", "eval", "decode"}


def on_workers(verb: Callable[..., None], everywhere: bool = True) -> Callable[..., None]:
    """Gives a verb the option `--on`. What writes a file by itself runs on worker 0 alone (not `everywhere`)."""

    @functools.wraps(verb)
    def wrapped(ctx: typer.Context, on: str | None = None, **params: Any) -> None:
        if on is None:
            verb(**params)
            return
        run_on(on, ctx, everywhere)

    signature, hints = inspect.signature(verb), get_type_hints(verb, include_extras=True)
    known = [param.replace(annotation=hints[name]) for name, param in signature.parameters.items()]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    option = inspect.Parameter("on", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OnOption)
    wrapped.__signature__ = signature.replace(parameters=[*known, context, option])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {**hints, "ctx": typer.Context, "on": OnOption}
    return wrapped


def run_on(name: str, ctx: typer.Context, everywhere: bool) -> None:
    """Runs the verb of `ctx` on TPU VMs and exits with its exit code."""
    params = dict(ctx.params)
    arguments, files = retype(ctx)
    devices = _needed_devices(params)
    gcloud = Gcloud()
    target = find_target(name, None, None, gcloud, log.info, bool(params.get("dry_run")))
    if ctx.info_name == "train":
        _check_devices(devices, target)
    job_name = f"{ctx.info_name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    if params.get("dry_run"):
        which = "all" if everywhere else "0"
        script = start_script(job_name, arguments, files)
        say_commands([commands.ssh(target, which, which, script)], bool(params.get("as_json")))
        return
    workers = find_workers(target, gcloud)
    if everywhere:
        _require_shared_disk(str(ctx.info_name), params, workers)
    job = Job(target, job_name, workers if everywhere else workers[:1], gcloud, log.info)
    log.info("starting %s on %d workers of %d slices of %s", job_name, len(job.workers), target.slices, name)
    job.start(arguments, files)
    raise typer.Exit(watch(job))


def watch(job: Job) -> int:
    """Shows what worker 0 prints until the job ends; returns its exit code. Ctrl-C asks what is meant."""
    while True:
        try:
            return job.follow(show)
        except KeyboardInterrupt:
            answer = _ask()
            if answer == "detach":
                log.info("%s goes on: pax provision attach %s", job.name, job.target.name)
                return 0
            if answer == "stop":
                log.info("stopping %s; it saves first", job.name)
                job.stop()


def retype(ctx: typer.Context) -> tuple[list[Argument], dict[str, str]]:
    """The command line of a verb again, without `--on` and `--dry-run`, and the local files it names, to be shipped.

    Raises:
      ConfigError: Two files have one name, or one cannot be read.
    """
    options: list[Argument] = [str(ctx.info_name)]
    positional: list[Argument] = []
    files: dict[str, Path] = {}
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if param.name in ("on", "dry_run") or value is None or value == param.default:
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            text = str(item.value if isinstance(item, Enum) else item)
            word = _shipped(text, files) if param.name in _FILES else text
            if param.param_type_name == "argument":
                positional.append(word)
            elif item is True:
                options.append(param.opts[0])
            elif isinstance(word, str):
                options.append(f"{param.opts[0]}={word}")
            else:
                options += [param.opts[0], word]
    texts = {}
    for name, path in files.items():
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read {path}: {error}.") from None
    return [*options, "--", *positional] if positional else options, texts


def _shipped(text: str, files: dict[str, Path]) -> Argument:
    """`./mine.py:my_recipe` as (file to ship, the rest), or the text itself when it names no file here."""
    start, separator, rest = text.partition(":")
    path = Path(start)
    if not path.is_file():
        return text
    if files.setdefault(path.name, path) != path:
        raise ConfigError(f"{files[path.name]} and {path} have one name.", "Rename one: they travel side by side.")
    return path.name, separator + rest


def _needed_devices(params: dict[str, Any]) -> int | None:
    """How many devices the recipe's mesh takes, None for any. Mistakes in the recipe show here, not on the workers."""
    if "recipe" not in params:
        return None
    import fiddle as fdl

    from paxcli.config.resolve import resolve

    config = resolve(params["recipe"], params.get("overlays") or (), params.get("sets") or ()).config
    return fdl.build(config.mesh).num_devices()


def _check_devices(wanted: int | None, target: commands.Target) -> None:
    if target.accelerator is None:
        return
    there = find_accelerator(target.accelerator).devices * target.slices
    if wanted not in (None, there):
        raise ConfigError(
            f"The recipe's mesh takes {wanted} devices, and {target.name} has {there} ({target.slices} x "
            f"{target.accelerator}).",
            "Set mesh.ici_mesh_shape and mesh.dcn_mesh_shape, or take other TPUs: pax provision create --help",
        )


def _require_shared_disk(verb: str, params: dict[str, Any], workers: list[Worker]) -> None:
    places = [str(params[key]) for key in ("run_dir", "target") if params.get(key)]
    if verb in _SHARING and len(workers) > 1 and not any("://" in place or place.startswith("/") for place in places):
        raise ConfigError(
            f"{len(workers)} workers share no disk, and the run directory would be on each one's own.",
            "Give one that all can reach: --run-dir gs://BUCKET/RUN",
        )


def show(stream: str, text: str) -> None:
    """Prints what a worker printed, to the stream it printed it to."""
    print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def _ask() -> str:
    """What Ctrl-C is to mean: `detach`, `stop` or `go on`. Where nobody can be asked the job goes on."""
    if not sys.stdin.isatty():
        return "detach"
    print("\n[d]etach and let it run, [s]top it, or go on watching? ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        return "detach"
    return {"d": "detach", "s": "stop"}.get(answer[:1], "go on")
