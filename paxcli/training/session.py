"""An experiment on its devices: what training, evaluation and decoding all begin with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import fiddle as fdl
from jax.sharding import Mesh

from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput
from paxcli.mesh.compiler_options import Options, compiler_options
from paxcli.mesh.mesh import build_mesh, libtpu_arguments
from paxcli.mesh.rules import merge_rules
from paxcli.mesh.sharding import global_spec, infeed_shard, use_mesh
from paxcli.mesh.startup import start_distributed
from paxcli.metrics.peaks import peak_flops
from paxcli.nested_map import NestedMap, num_rows
from paxcli.training.experiment import Experiment, global_batch_size, prepared
from paxcli.training.state import TrainState, abstract_state
from paxcli.training.validate import validate


@dataclasses.dataclass(frozen=True)
class Session:
    """A built experiment and its mesh.

    Attributes:
      config: The recipe, as given.
      experiment: What it builds, derived values filled in.
      mesh: The device mesh.
      abstract: Shapes and shardings of the training state.
      spec: Shapes of a batch of this process.
      global_batch_size: Examples of a step over all processes.
    """

    config: fdl.Config[Experiment]
    experiment: Experiment
    mesh: Mesh
    abstract: TrainState
    spec: NestedMap
    global_batch_size: int

    @property
    def compiler_options(self) -> Options:
        """What the train step is compiled with: pax's own options for these devices, and the recipe's over them."""
        device = self.mesh.devices.flat[0]
        asked = self.config.mesh.compiler_options
        return compiler_options(device.platform, device.device_kind, asked, self.mesh.size)

    @property
    def batch(self) -> NestedMap:
        """Shapes and shardings of a global batch."""
        return global_spec(self.spec, self.global_batch_size, self.mesh)

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of one device at best, as the recipe or its maker says; None when nobody does."""
        given = self.config.mesh.peak_tflops
        return given * 1e12 if given is not None else peak_flops(self.mesh.devices.flat[0].device_kind)


@contextlib.contextmanager
def open_session(config: fdl.Config[Experiment], devices: Sequence[Any] | None = None) -> Iterator[Session]:
    """Validates, starts the devices, and builds; the mesh is in use inside.

    Args:
      config: The recipe.
      devices: What to build for instead of this machine's devices, such as those of a `mesh.topologies.Target`:
        programs can then be compiled, and nothing is started.

    Raises:
      ConfigError: Parts of the recipe do not fit each other or the devices.
    """
    here = devices is None
    validate(config, reads_data=here)
    if here:
        start_distributed(libtpu=libtpu_arguments(config.mesh.libtpu_options))
    mesh_config = fdl.build(config.mesh)
    mesh = build_mesh(mesh_config, devices)
    validate(config, mesh.size, reads_data=here)
    batch = global_batch_size(config, mesh.size)
    experiment = fdl.build(prepared(config, mesh.size, *infeed_shard(mesh)))
    rules = merge_rules(mesh_config.logical_axis_rules)
    with use_mesh(mesh, rules):
        spec = experiment.train_input.element_spec()
        _check_rows(experiment.train_input, spec, batch)
        abstract = abstract_state(experiment.task, spec, mesh, rules)
        yield Session(config, experiment, mesh, abstract, spec, batch)


def _check_rows(source: BaseInput, spec: NestedMap, global_batch: int) -> None:
    rows = num_rows(spec)
    if rows * source.num_infeed_hosts != global_batch:
        raise ConfigError(
            f"train_input makes batches of {rows} rows on each of {source.num_infeed_hosts} hosts, "
            f"but the global batch is {global_batch}.",
            f"Change the input's batch size, or `--set global_batch_size={rows * source.num_infeed_hosts}`.",
        )


def device_name(mesh: Mesh) -> str:
    """What the run is on, as JAX calls it."""
    kinds = {device.device_kind for device in mesh.devices.flat}
    return f"{mesh.size} × {', '.join(sorted(kinds))}"
