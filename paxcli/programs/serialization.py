"""Compiled programs as bytes, without pickle.

Pytrees and shardings are not serialized: they follow from the session. `jax.experimental.serialize_executable` does
serialize them, with pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import xla_client

from paxcli.errors import ConfigError, first_line
from paxcli.training.session import Session


@dataclasses.dataclass(frozen=True)
class SerializedProgram:
    """A compiled program that returns the training state, or the state and metrics.

    Attributes:
      executable: XLA's serialization of it.
      arguments: Indices of the arguments that it uses. JAX drops the others.
      metrics: Shape of each metric; None = it returns the state only.
    """

    executable: bytes
    arguments: list[int]
    metrics: dict[str, list[int]] | None

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> SerializedProgram:
        """Serializes a program.

        Raises:
          ConfigError: The program, or this platform, does not support it.
        """
        hint = "Compile without `--save`."
        # JAX has no public API for these two.
        private: Any = compiled._executable
        callbacks, arguments = private._unloaded_executable.host_callbacks, sorted(private._kept_var_idx)
        if callbacks:
            raise ConfigError("A program that calls Python, as `jax.debug.print` does, cannot be saved.", hint)
        outputs = compiled.out_info
        metrics = outputs[1] if isinstance(outputs, tuple) else None
        if not all(one.sharding.is_fully_replicated for one in jax.tree.leaves(metrics)):
            raise ConfigError("The step cannot be saved: one of its metrics is sharded.", hint)
        runtime: Any = compiled.runtime_executable()
        try:
            executable = runtime.serialize()
        except (jax.errors.JaxRuntimeError, ValueError, AttributeError) as error:
            raise ConfigError(f"This platform cannot serialize executables: {first_line(error)}", hint) from error
        return cls(executable, arguments, metrics and {name: list(one.shape) for name, one in metrics.items()})

    @property
    def facts(self) -> dict[str, Any]:
        """The other attributes, with a checksum of all: to be saved beside the executable."""
        described = {"arguments": self.arguments, "metrics": self.metrics}
        checksum = hashlib.sha256(json.dumps(described).encode() + self.executable).hexdigest()
        return described | {"sha256": checksum}

    @classmethod
    def from_facts(cls, facts: dict[str, Any], executable: bytes) -> SerializedProgram | None:
        """The program that was saved with these `facts`; None if one of the two is damaged."""
        program = cls(executable, facts["arguments"], facts["metrics"])
        return program if program.facts["sha256"] == facts["sha256"] else None


class LoadedProgram:
    """A compiled program, loaded onto the devices of a session. It is called, and donates, like the jitted function.

    Raises:
      jax.errors.JaxRuntimeError, ValueError: It is for other devices or other software.
    """

    def __init__(self, program: SerializedProgram, session: Session):
        devices = tuple(session.mesh.devices.flat)
        self._executable: Any = devices[0].client.deserialize_executable(
            program.executable, executable_devices=xla_client.DeviceList(devices)
        )
        self._arguments = program.arguments
        self._replicated = NamedSharding(session.mesh, PartitionSpec())
        metrics = program.metrics or {}
        state = session.abstract
        self._tree = jax.tree.structure(state if program.metrics is None else (state, dict.fromkeys(metrics, 0)))
        self._results = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state)]
        self._results += [(tuple(metrics[name]), self._replicated) for name in sorted(metrics)]
        self._handlers: list[Any] = []  # make arrays of the results; known after the first call

    def __call__(self, *arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        used = [leaves[index] for index in self._arguments]
        used = [jax.device_put(leaf, self._replicated) if isinstance(leaf, np.generic) else leaf for leaf in used]
        outputs = self._executable.execute_sharded(used)
        if self._handlers:  # without checks, which would take milliseconds in each step
            return self._tree.unflatten(outputs.consume_with_handlers(self._handlers))
        arrays = [
            jax.make_array_from_single_device_arrays(shape, sharding, on_devices)
            for (shape, sharding), on_devices in zip(
                self._results, outputs.disassemble_into_single_device_arrays(), strict=True
            )
        ]
        self._handlers = [_result_handler(array) for array in arrays]
        return self._tree.unflatten(arrays)

    def as_text(self) -> str:
        """The program after XLA's optimizations."""
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """Bytes of arguments, results and temporary arrays, as `jax.stages.Compiled` returns them."""
        return self._executable.get_compiled_memory_stats()


def _result_handler(array: jax.Array) -> Any:
    """Makes arrays of the same type, shape and sharding from their parts on each device."""
    handler: Any = xla_client.array_result_handler
    try:
        return handler(jax.typeof(array), array.sharding, committed=True, _skip_checks=True)
    except TypeError:  # JAX 0.12, which has no checks to skip
        return handler(jax.typeof(array), array.sharding, committed=True)
