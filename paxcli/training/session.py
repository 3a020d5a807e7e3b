"""An experiment built for its devices: the start of training, evaluation and decoding."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import fiddle as fdl
import flax.linen as nn
import jax
import numpy as np

from paxcli.config.render import with_set
from paxcli.errors import ConfigError, MeshError
from paxcli.inputs.base_input import BaseInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.log import log
from paxcli.mesh.compiler_options import Options, compiler_options
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import DEFAULT_RULES, merge_rules
from paxcli.mesh.sharding import current_device, global_spec, infeed_shard, use_mesh
from paxcli.mesh.startup import exit_on_error
from paxcli.metrics.peaks import peak_flops
from paxcli.nested_map import NestedMap, num_rows
from paxcli.training.experiment import Experiment, global_batch_size, with_derived_sizes
from paxcli.training.state import TrainState, abstract_state
from paxcli.training.validate import validate
from paxcli.training.watchdog import Watchdog


class Session(NamedTuple):
    """A built experiment and its mesh.

    Attributes:
      config: The recipe, as given.
      experiment: The experiment that it builds, with derived values filled in.
      mesh: The device mesh.
      spec: Shapes of a batch on this process.
      global_batch_size: Examples in a step, over all processes.
      abstract: Shapes and shardings of the training state.
      init_fn: Creates the training state from a seed, its parameters in boxes; JAX has traced it for `abstract`.
    """

    config: fdl.Config[Experiment]
    experiment: Experiment
    mesh: jax.sharding.Mesh
    spec: NestedMap
    global_batch_size: int
    abstract: TrainState
    init_fn: Callable[[Any], TrainState]

    @property
    def seed(self) -> np.uint32:
        """The run's seed. A run has drawn it if it was None; profiling needs no certain one."""
        return np.uint32(self.experiment.task.train.random_seed or 0)

    def jit_init(self) -> jax.stages.Wrapped:
        """The jitted function of the seed that creates each array of the training state on the devices that hold it.

        The parameters are in boxes.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        # Runs once, so on a CPU more optimization takes longer than it saves.
        options = {"xla_backend_optimization_level": 1} if current_device().platform == "cpu" else None
        return jax.jit(self.init_fn, out_shardings=shardings, compiler_options=options)

    def new_state(self, init: Callable[[np.uint32], TrainState] | None = None) -> TrainState:
        """A new training state, created by `init`, the compiled `jit_init`; None = compile it."""
        return nn.meta.unbox((init or self.jit_init())(self.seed))

    @property
    def compiler_options(self) -> Options:
        """Compiler options of the train step: pax's defaults for these devices, overridden by the recipe's."""
        device = self.mesh.devices.flat[0]
        return compiler_options(device.platform, device.device_kind, self.config.mesh.compiler_options, self.mesh.size)

    @property
    def batch(self) -> NestedMap:
        """Shapes and shardings of a global batch."""
        return global_spec(self.spec, self.global_batch_size, self.mesh)

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of one device: the recipe's, else the manufacturer's; None if neither is known."""
        given = self.config.mesh.peak_tflops
        return given * 1e12 if given is not None else peak_flops(self.mesh.devices.flat[0].device_kind)

    @contextlib.contextmanager
    def active(self) -> Iterator[Session]:
        """Makes the mesh and its sharding rules the current ones; handles errors by `exit_on_error`."""
        with exit_on_error(), use_mesh(self.mesh, merge_rules(fdl.build(self.config.mesh).logical_axis_rules)):
            yield self


def build_session(config: fdl.Config[Experiment], devices: Sequence[Any] | None = None) -> Session:
    """Validates a recipe, starts the devices, and builds the experiment for them.

    Args:
      config: The recipe.
      devices: Devices to build for, such as those of a TPU topology: steps can then be compiled, and no device is
        started. None = this machine's devices.

    Raises:
      ConfigError: Parts of the recipe contradict each other or the devices.
    """
    here = devices is None
    try:
        validate(config, reads_data=here)
    except MeshError:
        _build_mesh(config, devices)  # a mesh for another number of devices is the error to mention first
        raise
    mesh = _build_mesh(config, devices)
    validate(config, mesh.size, reads_data=here)
    batch = global_batch_size(config, mesh.size)
    experiment = fdl.build(with_derived_sizes(config, mesh.size, *infeed_shard(mesh)))
    rules = merge_rules(fdl.build(config.mesh).logical_axis_rules)
    with use_mesh(mesh, rules):
        with Watchdog(experiment.task.train.step_timeout_seconds):  # the input may read a batch
            spec = experiment.train_input.element_spec()
        rows, hosts = num_rows(spec), experiment.train_input.num_infeed_hosts
        if rows * hosts != batch:
            yields = f"train_input yields batches of {rows} rows on each of {hosts} hosts"
            hint = f"Change the input's batch size, or `--set global_batch_size={rows * hosts}`."
            raise ConfigError(f"{yields}, but the global batch is {batch}.", hint)
        return Session(config, experiment, mesh, spec, batch, *abstract_state(experiment.task, spec, mesh, rules))


def with_counted_steps(
    config: fdl.Config[Experiment], recipe_text: str
) -> tuple[fdl.Config[Experiment], str, BaseInput | None]:
    """The recipe, as config and as YAML, with `num_train_steps` in place of `num_train_epochs`, if that is set.

    Returns:
      The recipe, and the training input, which has read its data to count the rows; None if the recipe has no epochs.

    Raises:
      ConfigError: The training input has no end, does not know its number of rows before it has read them, or does not
        repeat for more than one epoch; or the recipe has both fields, or neither.
    """
    if (epochs := config.task.train.num_train_epochs) is None and config.task.train.num_train_steps is not None:
        return config, recipe_text, None
    validate(config)  # refuses both, and neither
    config, mesh = copy.deepcopy(config), _build_mesh(config, None)
    source = fdl.build(with_derived_sizes(config, mesh.size, *infeed_shard(mesh)).train_input)
    if (rows := source.num_rows()) is None:
        hint = "Set `num_train_steps` instead; or of synthetic data, `train_input.num_examples`."
        source.refuse(f"{type(source).__name__} has no known number of rows, which `num_train_epochs` needs.", hint)
    batch = global_batch_size(config, mesh.size)
    steps = -int(-Fraction(str(epochs)) * rows // batch)  # in floats, 1.1 epochs of 10 rows are more than 11 rows
    if steps > -(-rows // batch) and not source.repeats:
        source.refuse(f"it ends after one epoch; the run has {epochs:g}.", "Leave out `train_input.repeat=false`.")
    log.info("%g epochs of %d rows, in batches of %d: %d steps.", epochs, rows, batch, steps)
    config.task.train.num_train_epochs, config.task.train.num_train_steps = None, steps
    values = {"task.train.num_train_epochs": None, "task.train.num_train_steps": steps}
    return config, with_set(recipe_text, values), source


def state_shapes(config: fdl.Config[Experiment]) -> TrainState:
    """The shapes of a recipe's training state, without its data and devices."""
    config = copy.deepcopy(config)
    config.train_input, config.eval_inputs, config.decode_inputs = SyntheticInput.config(), [], []
    experiment = fdl.build(with_derived_sizes(config, 1))
    mesh = build_mesh(Mesh(), jax.local_devices()[:1])
    with use_mesh(mesh):
        return abstract_state(experiment.task, experiment.train_input.element_spec(), mesh, DEFAULT_RULES)[0]


def _build_mesh(config: fdl.Config[Experiment], devices: Sequence[Any] | None) -> jax.sharding.Mesh:
    mesh = fdl.build(config.mesh)
    if devices is None:
        mesh.start_processes()
    return build_mesh(mesh, devices)


def device_name(mesh: jax.sharding.Mesh) -> str:
    """The number and kinds of a mesh's devices, by JAX's names."""
    return f"{mesh.size} × {', '.join(sorted({device.device_kind for device in mesh.devices.flat}))}"
