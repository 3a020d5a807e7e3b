"""Writes the first checkpoint of a run whose weights come from another format."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.reading import named_leaves
from paxcli.config.paths import replace_text
from paxcli.errors import ConfigError
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import DEFAULT_RULES
from paxcli.mesh.sharding import use_mesh
from paxcli.training.experiment import Experiment, with_derived_sizes
from paxcli.training.run_dir import RunDir
from paxcli.training.state import TrainState, abstract_state


def state_shapes(config: fdl.Config[Experiment]) -> TrainState:
    """The shapes of a recipe's training state, without its data and devices."""
    config = copy.deepcopy(config)
    config.train_input, config.eval_inputs, config.decode_inputs = SyntheticInput.config(), [], []
    experiment = fdl.build(with_derived_sizes(config, 1))
    mesh = build_mesh(Mesh(), jax.local_devices()[:1])
    with use_mesh(mesh):
        return abstract_state(experiment.task, experiment.train_input.element_spec(), mesh, DEFAULT_RULES)


def check_new(run_dir: str | os.PathLike[str]) -> None:
    """Raises ConfigError if the run has checkpoints."""
    if CheckpointStore(RunDir(run_dir).checkpoints).steps():
        raise ConfigError(f"{run_dir} already has checkpoints.", "Give a new directory with `--out`.")


def write_run(
    config: fdl.Config[Experiment],
    recipe_text: str,
    run_dir: str | os.PathLike[str],
    shapes: TrainState,
    arrays: Mapping[str, Any],
    step: int = 0,
) -> None:
    """Writes `recipe.yaml` and a checkpoint.

    Args:
      config: The recipe.
      recipe_text: The recipe as YAML.
      run_dir: The run.
      shapes: Those of its training state.
      arrays: Name in the state → array. The optimizer's missing arrays are 0, as in a new run.
      step: The checkpoint's.

    Raises:
      MissingError: The run cannot be written.
    """
    directory = RunDir(run_dir)
    directory.create()
    root = jax.random.key(config.task.train.random_seed or 0)
    known = {"step": np.int32(step), "key": jax.random.key_data(jax.random.fold_in(root, 1)), **arrays}
    leaves = named_leaves(shapes)
    state = [np.asarray(known[name] if name in known else np.zeros(x.shape, x.dtype)) for name, x in leaves.items()]
    replace_text(directory.path / "recipe.yaml", recipe_text)
    with CheckpointStore(directory.checkpoints, Checkpoint(async_save=False)) as store:
        store.save(step, jax.tree.unflatten(jax.tree.structure(shapes), state), {}, force=True)
