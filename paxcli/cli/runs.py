"""From what was typed to a run that has checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paxcli.errors import ConfigError, DataError

if TYPE_CHECKING:
    from paxcli.training.trained import TrainedRun


def default_run_dir(recipe_name: str) -> Path:
    """Where a recipe's run is when nothing else is said."""
    return Path("runs") / recipe_name


@contextlib.contextmanager
def open_run(
    target: str, overlays: Sequence[str] | None, sets: Sequence[str] | None, run_dir: str | None
) -> Iterator[TrainedRun]:
    """The run in a directory, or of a recipe, on this machine's devices."""
    from paxcli.config.paths import located
    from paxcli.config.resolve import resolve

    if (path := located(target)).is_dir():
        if run_dir is not None:
            raise ConfigError(f"{target} is a run directory, and so is --run-dir {run_dir}.", "Give one of them.")
        if not (path / "recipe.yaml").exists():
            raise DataError(f"{target} is not a run directory: it has no recipe.yaml.", "Give one that was trained in.")
        run_dir, target = target, str(path)
    resolved = resolve(target, overlays or (), sets or ())

    from paxcli.training.run_dir import RunDir
    from paxcli.training.session import open_session
    from paxcli.training.trained import TrainedRun

    directory = RunDir(run_dir or default_run_dir(resolved.name))
    directory.require_checkpoint()
    with open_session(resolved.config) as session:
        yield TrainedRun(session, directory)
