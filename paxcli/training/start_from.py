"""The start of a run: from a checkpoint of another run (`--from RUN_DIR[@STEP]`), or from arrays of another tool."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import numpy as np
from etils import epath

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.maintenance import files_in
from paxcli.checkpoint.manager import CheckpointStore, find_step
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.reading import named_leaves
from paxcli.checkpoint.warm_start import Report, Rules, load_params, parse_source
from paxcli.config.paths import copy_file, replace_text
from paxcli.errors import ConfigError
from paxcli.layers.lora import ADAPTERS
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session
from paxcli.training.state import TrainState, without_reference
from paxcli.training.task import SingleTask

_LAYER = re.compile(r"layers_\d+")  # a layer of a stack without `scan`; with it, all are in `layers`
# Directory in a run of the files beside its model's imported weights, which an export writes again.
ORIGIN = "huggingface"
SOURCE = "source.txt"  # in it: the directory of the weights, or their name on the hub


class WarmStart(NamedTuple):
    """The checkpoint that initializes a new run's parameters (`--from RUN_DIR[@STEP]`).

    Attributes:
      run_dir: The run that has the checkpoint.
      step: The checkpoint's step; None = the latest.
      everything: Whether to restore the optimizer state and the step as well.
    """

    run_dir: str
    step: int | None = None
    everything: bool = False

    @property
    def options(self) -> str:
        """Its command-line options: `--from RUN_DIR@STEP --with-optimizer`."""
        source = self.run_dir if self.step is None else f"{self.run_dir}@{self.step}"
        return f"--from {shlex.quote(source)}{' --with-optimizer' if self.everything else ''}"

    def first_step(self, session: Session) -> int:
        """The step that a run starts from: with `everything` the checkpoint's, else 0.

        Raises:
          DataError: The checkpoint does not exist, or none of its arrays match.
          ConfigError: It already has all steps of the run, or does not fit the recipe and its rules.
        """
        found, steps = find_step(self.run_dir, self.step), session.config.task.train.num_train_steps
        if self.everything and found >= steps:
            problem = f"{self.run_dir} is at step {found}, and this run would have {steps}: none is left."
            raise ConfigError(problem, "Raise `num_train_steps`, or leave out `--with-optimizer`.")
        load_warm_start(session.abstract, self, session.experiment.task, dry_run=True)
        return found if self.everything else 0


def warm_start_from(source: str | os.PathLike[str] | None, with_optimizer: bool) -> WarmStart | None:
    """The warm start from `RUN_DIR` or `RUN_DIR@STEP`; None if no source is given.

    Raises:
      ConfigError: `with_optimizer` is set, and no source is given.
    """
    if source is not None:
        return WarmStart(*parse_source(os.fspath(source)), everything=with_optimizer)
    if with_optimizer:
        raise ConfigError("There is no checkpoint to take the optimizer state from.", "Name its run: `--from RUN_DIR`.")
    return None


def check_start(run_dir: RunDir, config: fdl.Config[Experiment], source: WarmStart | None, resumes: bool) -> None:
    """Refuses to start a run with random parameters that began with those of another run, and has no checkpoint.

    Refuses also rules for the parameters of another run that would have no effect.

    Args:
      run_dir: The run.
      config: Its recipe.
      source: The start from another run, if any.
      resumes: Whether the run resumes from a checkpoint.

    Raises:
      ConfigError: With the options to add.
    """
    has_rules = config.task.train.init_rename or config.task.train.init_ignore
    if has_rules and (source.everything if source else not run_dir.has_checkpoints()):
        problem = "`init_rename` and `init_ignore` are rules of `--from RUN_DIR`, without `--with-optimizer`."
        raise ConfigError(problem, "Start so, or remove them: `--set init_rename=null --set init_ignore=[]`.")
    if not source and not resumes and (before := run_dir.init_from()):
        problem = f"{run_dir.path} was started with `{before}`, and has no checkpoint: its parameters would be random."
        raise ConfigError(problem, f"Add `{before}`, or give another `--run-dir`.")


def copy_origin(source: WarmStart, run_dir: epath.Path) -> None:
    """Copies the files beside the weights that the other run's model was imported with, if it was."""
    origin = epath.Path(source.run_dir) / ORIGIN
    for file in files_in(origin) if origin.is_dir() else ():
        copy_file(file, run_dir / ORIGIN / file.relative_to(origin))


def load_warm_start(state: TrainState, source: WarmStart, task: SingleTask, dry_run=False) -> tuple[TrainState, Report]:
    """`state` with the parameters, or everything, of another run's checkpoint. `dry_run` only checks, and reads none.

    Raises:
      DataError: The checkpoint does not exist or is damaged, or none of its arrays match.
      ConfigError: It does not fit the recipe and its rules.
    """
    run_dir, step, everything = source
    if everything:
        return load_params(run_dir, step, state, "all", dry_run=dry_run)
    rules = Rules(task.train.init_rename or {}, task.train.init_ignore)
    params, report = load_params(run_dir, step, without_reference(state.params), rules=rules, dry_run=dry_run)
    arrays = report.arrays
    if unused := [name for name in arrays.unexpected if re.search(ADAPTERS, name)]:
        hint = "Add `--overlay lora`, or merge them: `pax export` the run, and `pax import` what that writes."
        raise ConfigError(f"{source.run_dir} has adapters that this model lacks, such as `{unused[0]}`.", hint)
    missing, unexpected = ({_LAYER.sub("layers", x) for x in names} for names in (arrays.missing, arrays.unexpected))
    if missing & unexpected:
        problem = f"{source.run_dir} and this recipe differ in `scan`: all layers would start at random values."
        raise ConfigError(problem, "Set the stack's `scan` as in that run.")
    if dry_run:
        return state, report
    params = task.model.with_reference(params)
    weights = jax.tree.unflatten(jax.tree.structure(params), state.weights)
    shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True, out_shardings=shardings)
    def init(params: dict, _: Any) -> Any:  # in the memory of the old state; some optimizers keep the first parameters
        return task.train.learner.init(params, weights)

    return state.replace(params=params, opt_state=init(params, state.opt_state)), report


def write_run(
    config: fdl.Config[Experiment],
    recipe: str,
    run_dir: str | os.PathLike[str],
    shapes: TrainState,
    arrays: Mapping[str, Any],
    step: int = 0,
) -> None:
    """Writes a checkpoint, and then `recipe.yaml`: an import that is killed leaves no run that would start without it.

    Args:
      config: The recipe.
      recipe: The same as YAML.
      run_dir: The run.
      shapes: Those of its training state.
      arrays: Name in the state → array. Missing moving averages start from the parameters, the optimizer's other
        arrays from 0, as in a new run.
      step: The checkpoint's.

    Raises:
      MissingError: The run cannot be written.
    """
    directory = RunDir(run_dir)
    root = jax.random.key(config.task.train.random_seed or 0)
    known = {"step": np.int32(step), "key": jax.random.key_data(jax.random.fold_in(root, 1)), **arrays}

    def value(name: str, x: ArrayType) -> np.ndarray:
        found = known.get(name, known.get(name.replace("opt_state.ema.", "params.", 1)))
        return np.zeros(x.shape, x.dtype) if found is None else np.asarray(found)

    state = [value(name, x) for name, x in named_leaves(shapes).items()]
    with CheckpointStore(directory.checkpoints, Checkpoint(async_save=False)) as store:
        store.save(step, jax.tree.unflatten(jax.tree.structure(shapes), state), {}, force=True)
    replace_text(directory.path / "recipe.yaml", recipe)
