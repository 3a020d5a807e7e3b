"""The directory of a run: one writer, and everything needed to repeat it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from typing import IO, Any

import yaml
from etils import epath

import paxcli
from paxcli.config.diff import changed_lines
from paxcli.config.paths import located
from paxcli.config.render import config_text, parse_config_text
from paxcli.errors import ConfigError, DataError, MissingError

# Fields that a run may change between a stop and a resume, with `--allow-changed`.
_SAFE = (
    "mesh.",
    "checkpoint.",
    "eval_inputs",
    "decode_inputs",
    "task.name",
    "task.train.num_train_steps",
    "task.train.num_microbatches",
    "task.train.summary_interval_steps",
    "task.train.eval_interval_steps",
    "task.train.learner.",
    "task.model.loss_chunk",
    "task.model.stack.block.attention.kernel",
    "task.model.stack.gather_weights_once",
    "task.model.stack.microbatch_size",
    "task.model.stack.num_microbatches",
    "task.model.stack.offload",
    "task.model.stack.remat_policy",
    "task.model.stack.stream_io",
    "task.model.stack.unroll",
)


class RunDir:
    """`path` with the files of design: `recipe.yaml`, `config.txt`, `environment.json`, metrics and checkpoints."""

    def __init__(self, path: str | os.PathLike):
        self.path = epath.Path(path)
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> epath.Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def profile(self) -> epath.Path:
        """Where traces and profiles are."""
        return self.path / "profile"

    def create(self) -> None:
        """Makes the directory and checks that it can be written.

        Raises:
          ConfigError: The path is a file.
          MissingError: It cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"The run directory {self.path} is a file.", "Give another one with `--run-dir`.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise MissingError(
                f"The run directory {self.path} cannot be written: {reason}.", "Give another one with `--run-dir`."
            ) from error

    def require_checkpoint(self) -> None:
        """Raises DataError when no checkpoint was ever saved here: known before any device starts."""
        if not self.checkpoints.exists() or not any(path.name.isdigit() for path in self.checkpoints.iterdir()):
            raise DataError(f"There is no checkpoint in {self.path}.", "Train first, or give the run with `--run-dir`.")

    def lock(self) -> None:
        """Becomes the one writer until the process ends. Remote directories have no lock.

        Raises:
          ConfigError: Another process writes here.
        """
        if "://" in os.fspath(self.path):
            return
        import fcntl

        self._lock = open(self.path / ".lock", "a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self.unlock()
            raise ConfigError(
                f"{self.path} is in use by {owner}.", "Wait for it, stop it, or give another `--run-dir`."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def unlock(self) -> None:
        """Lets another process write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begun_with(self) -> dict[str, Any]:
        """Path → value of the config that this run began with; empty before that."""
        path = self.path / "config.txt"
        return parse_config_text(path.read_text()) if path.exists() else {}

    def check_same_recipe(self, config, allow_changed: bool) -> None:
        """Refuses to go on with another recipe than the one that began here.

        Raises:
          ConfigError: Names the fields that differ.
        """
        before = self.begun_with()
        if not before:
            return
        now = parse_config_text(config_text(config))
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        unsafe = [key for key in changed if not key.startswith(_SAFE)]
        refused = unsafe if allow_changed else changed
        if not refused:
            return
        hint = "Give another `--run-dir`, or undo the change."
        if not unsafe:
            hint = "Add `--allow-changed` to go on with the new values, or give another `--run-dir`."
        listed = changed_lines(before, now, refused)
        raise ConfigError(f"{self.path} was begun with another recipe:\n{listed}", hint)

    def describe(self, config, recipe_text: str) -> None:
        """Writes what was asked for, what it resolved to, and where it runs."""
        import jax

        self._write_recipe(recipe_text)
        (self.path / "config.txt").write_text(config_text(config))
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
        }
        (self.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")

    def _write_recipe(self, text: str) -> None:
        """A recipe that is this directory's own, with more on it, keeps the old one as its base, beside it."""
        own, content = self.path / "recipe.yaml", yaml.safe_load(text)
        if epath.Path(content["recipe"]) == epath.Path(located(own)):
            more, kept = {**content, "recipe": None}, {**yaml.safe_load(own.read_text()), "recipe": None}
            if len(content) == 1 or more == kept:
                return
            taken = {path.name for path in self.path.glob("recipe-*.yaml")}
            base = next(name for i in itertools.count(1) if (name := f"recipe-{i}.yaml") not in taken)
            own.rename(self.path / base)
            text = yaml.safe_dump({**content, "recipe": base}, sort_keys=False, allow_unicode=True)
        own.write_text(text)
