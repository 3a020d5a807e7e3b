"""The run directory: its files, its lock, and the recipe that it belongs to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from etils import epath

import paxcli
from paxcli.config.fields import Mark
from paxcli.config.paths import read_json, replace_text, resolve_path
from paxcli.config.render import config_text, parse_config_text
from paxcli.config.tree import is_at_or_below, marked_paths, walk
from paxcli.config.values import changed_lines
from paxcli.errors import ConfigError, DataError, MissingError

SAMPLES = "samples.jsonl"
EARLIER_RECIPE = "recipe-{}.yaml"  # numbered from 1: what `recipe.yaml` was before a change


class RunDir:
    """A run directory: `recipe.yaml`, `config.txt`, `environment.json`, metrics and checkpoints, with one writer.

    Attributes:
      path: The directory.
      checkpoints: Directory of the checkpoints.
      profile: Directory of traces and profiles.
    """

    def __init__(self, path: str | os.PathLike):
        """Names the directory and touches nothing; a leading `~` is the home directory.

        Raises:
          ConfigError: The path is empty.
        """
        if not os.fspath(path):
            raise ConfigError("The path of the run directory is empty.", "Give one, such as `--run-dir runs/a`.")
        self.path = epath.Path(path).expanduser() if "://" not in os.fspath(path) else epath.Path(path)
        self.checkpoints, self.profile = self.path / "checkpoints", self.path / "profile"
        self._lock_file = self.path / ".lock"
        self._locked: os.stat_result | None = None

    def create(self) -> None:
        """Creates the directory and checks that it is writable.

        Raises:
          ConfigError: The path is a file, or checkpoints in it would have no arrays.
          MissingError: It is not writable.
        """
        hint = "Give another one: `--run-dir`, or `--out` of `pax import`."
        if {*"*?["} & {*(path := str(resolve_path(self.path)))}:  # Orbax finds the arrays of a checkpoint by a pattern
            raise ConfigError(f"The path {path} has one of * ? [: checkpoints would lose their arrays.", hint)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"The run directory {self.path} is a file.", hint)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise MissingError(f"{self.path} cannot be written: {error.strerror or error}.", hint) from error

    def require_recipe(self) -> str:
        """The target that `config.load` takes for the recipe of this run.

        Raises:
          DataError: The directory has no recipe.
        """
        directory = resolve_path(self.path)
        if not (directory / "recipe.yaml").exists():
            hint = "Give a directory that `pax train` wrote."
            if (directory / "config.json").exists():
                hint = f"It is a Hugging Face model: `pax import {self.path} --out RUN_DIR`, or write `hf:{self.path}`."
            raise DataError(f"{self.path} is not a run directory: it has no recipe.yaml.", hint)
        return str(directory)

    @contextlib.contextmanager
    def lock(self, dry_run: bool = False) -> Iterator[None]:
        """Makes this process the only writer of the directory. Directories in buckets have no lock.

        With `dry_run` it only checks, and writes nothing. Hold it briefly: a run cannot start meanwhile.

        Raises:
          ConfigError: Another process, or another run of this one, writes here.
        """
        if "://" in os.fspath(self.path) or (dry_run and not self._lock_file.exists()):
            yield
            return
        import fcntl

        with open(self._lock_file, "r" if dry_run else "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                hint = "Wait for it, stop it, or give another `--run-dir`."
                raise ConfigError(f"{self.path} is in use by {owner}.", hint) from None
            if not dry_run:
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {platform.node()}")
                lock.flush()
                self._locked = os.fstat(lock.fileno())
            yield

    def check_in_place(self) -> None:
        """Checks that the directory is still where this process locked it; a save would create another one.

        Raises:
          MissingError: It was renamed, deleted or replaced.
        """
        with contextlib.suppress(FileNotFoundError):
            if self._locked is None or os.path.samestat(self._locked, os.stat(self._lock_file)):
                return
        hint = "Resume with `--run-dir` and its new name. A save in progress may have left files under the old name."
        raise MissingError(f"The run directory {self.path} was renamed, deleted or replaced during the run.", hint)

    def has_checkpoints(self) -> bool:
        """Whether training saved a checkpoint, here or on local disks: the same on every machine of a job.

        Raises:
          MissingError: Their directory is a link to one that is not there.
        """
        from paxcli.checkpoint.manager import RECORD, CheckpointStore  # here, since it loads JAX

        if os.path.islink(self.checkpoints) and not self.checkpoints.exists():
            raise MissingError(f"{self.checkpoints} is a broken link.", "Mount its file system, or delete the link.")
        return any(CheckpointStore(self.checkpoints).steps()) or (self.checkpoints / RECORD).exists()

    def original_config(self) -> dict[str, Any]:
        """Path → value of the config that this run started with; empty for a new run.

        It is in `config.txt`, and in the manifest of every checkpoint for a run directory without that file.

        Raises:
          DataError: `config.txt` is damaged.
        """
        path = self.path / "config.txt"
        if path.exists():
            try:
                return parse_config_text(path.read_bytes().decode())
            except (UnicodeDecodeError, DataError) as error:
                reason = error.message if isinstance(error, DataError) else f"It is not UTF-8: {error}."
                hint = "Restore it from a backup, or delete it: checkpoints record the recipe and its seeds too."
                raise DataError(f"{path} is damaged. {reason}", hint) from error
        from paxcli.checkpoint.manager import CheckpointStore

        store = CheckpointStore(self.checkpoints)
        latest = store.latest_step()
        return {} if latest is None else dict(store.recipe(latest))

    def checkpointed_config(self) -> dict[str, Any]:
        """As `original_config`, but empty without a checkpoint: there is nothing to resume."""
        return self.original_config() if self.has_checkpoints() else {}

    def check_same_recipe(self, config, allow_changed: bool) -> None:
        """Refuses to resume with a recipe that differs from the one that this run started with.

        A field that is newer than the run and has its default is not a difference: the run behaved so without it. A
        run without a checkpoint has nothing to resume, and takes any recipe.

        The directory of the local tier is not safe to change while it has all checkpoints.

        Raises:
          ConfigError: Fields differ, and `allow_changed` is false or they are not safe to change. Names them.
        """
        from paxcli.checkpoint.manager import CheckpointStore  # here, since it loads JAX

        if not (before := self.checkpointed_config()):
            return
        now = parse_config_text(config_text(config))
        new = {node.path for node in walk(config) if not node.is_set} - before.keys()
        changed = sorted(path for path in before.keys() | now.keys() - new if before.get(path) != now.get(path))
        safe = marked_paths(config, Mark.SAFE_ON_RESUME)
        kept = () if CheckpointStore(self.checkpoints).steps() else ("checkpoint.local_directory",)
        unsafe = [path for path in changed if path in now and (path in kept or not is_at_or_below(path, safe))]
        if not (refused := unsafe if allow_changed else changed):
            return
        hint = "Give another `--run-dir`, or undo the change."
        if not unsafe:
            hint = "Add `--allow-changed` to resume with the new values, or give another `--run-dir`."
        raise ConfigError(f"{self.path} was started with another recipe:\n{changed_lines(before, now, refused)}", hint)

    def init_from(self) -> str | None:
        """The options that named the run's first parameters, such as `--from runs/a`; None = they were random."""
        with contextlib.suppress(DataError, AttributeError):  # missing, or damaged
            return read_json(self.path / "environment.json").get("init_from")
        return None

    def describe(self, config, recipe_text: str, init_from: str | None = None) -> None:
        """Writes the recipe, the resolved config and the environment, with `init_from`; None = as before."""
        import jax

        self._write_recipe(recipe_text)
        replace_text(self.path / "config.txt", config_text(config))
        environment = {
            "pax": paxcli.__version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "platform": platform.platform(),
            "host": platform.node(),
            "device_kind": jax.devices()[0].device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
            "command": sys.argv,
            "init_from": init_from or self.init_from(),
        }
        replace_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    def _write_recipe(self, text: str) -> None:
        """Writes `recipe.yaml`. If `text` is based on the old `recipe.yaml`, a copy of that stays its base."""
        here, content = epath.Path(resolve_path(self.path)), yaml.safe_load(text)
        own, base = here / "recipe.yaml", epath.Path(content["recipe"])
        if base == own:
            more, kept = {**content, "recipe": None}, {**yaml.safe_load(own.read_text()), "recipe": None}
            if len(content) == 1 or more == kept:
                return
            base = next(path for i in itertools.count(1) if not (path := here / EARLIER_RECIPE.format(i)).exists())
            replace_text(base, own.read_text())
        if base.parent == here:  # the directory may be moved
            text = yaml.safe_dump({**content, "recipe": base.name}, sort_keys=False, allow_unicode=True)
        replace_text(own, text)
