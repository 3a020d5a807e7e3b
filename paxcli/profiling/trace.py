"""Reads traces of JAX's profiler: the operations of each device, and the phases of the training loop on the host."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from etils import epath

from paxcli.errors import DataError, first_line
from paxcli.layers.scopes import PHASES, TRAIN_PHASE

TRACES = "plugins/profile"  # where JAX writes traces, and xprof and TensorBoard look for them
_STEP_MODULE = "jit_train_step"
_COMMAND_BUFFER = "command_buffer"  # as XLA names the calls of its CUDA graphs


class Span(NamedTuple):
    """One execution of an operation, or one phase of the host. Times are nanoseconds since the start of the trace.

    An operation of another program than the train step is named with that: `jit_eval_step/fusion.3`.
    """

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """A trace.

    Attributes:
      operations: Of each device.
      phases: Of the host, by start.
      num_steps: Number of training steps that were dispatched.
    """

    operations: dict[str, list[Span]]
    phases: list[Span]
    num_steps: int


def find_trace(directory: str) -> epath.Path:
    """Finds the newest trace of a run directory, or of its `profile/`; the directory of a trace is returned itself.

    Raises:
      DataError: There is no trace.
    """
    start = epath.Path(directory)
    roots = (start, start / TRACES, start / "profile" / TRACES)
    for root in (one for one in roots if one.is_dir()):
        if found := [path for path in (root, *root.iterdir()) if path.is_dir() and any(path.glob("*.xplane.pb"))]:
            return max(found, key=lambda path: path.name)
    raise DataError(f"There is no trace in {directory}.", "Trace some steps: `pax train RECIPE --profile-steps 10:15`.")


def read_trace(directory: epath.Path) -> Trace:
    """Reads the traces of a directory, one for each host.

    Raises:
      DataError: A file is damaged, or the trace has no operations of a device.
    """
    operations: defaultdict[str, list[Span]] = defaultdict(list)
    phases: list[Span] = []
    steps = set()
    with warnings.catch_warnings():
        # Python 3.12 warns about the names of jaxlib's types, where a warning must not be turned into an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for file in sorted(directory.glob("*.xplane.pb")):
            try:
                data = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
                planes = list(data.planes)
            except (RuntimeError, ValueError) as error:
                hint = "Delete it, and trace again."
                raise DataError(f"{file} is not a readable trace: {first_line(error)}", hint) from error
            host = file.name.removesuffix(".xplane.pb")
            for plane in planes:
                if plane.name.startswith("/device:"):
                    for operation in _accelerator_operations(plane):
                        operations[f"{host}{plane.name}"].append(operation)
                for event in _events(plane.lines) if plane.name == "/host:CPU" else ():
                    if event.name in PHASES:
                        phases.append(_span(event, event.name))
                        if event.name == TRAIN_PHASE:
                            steps.add(dict(event.stats).get("step_num"))
                    elif event.duration_ns > 0 and "::" not in event.name and "hlo_op" in (stats := dict(event.stats)):
                        device = f"{host}/device:CPU:{stats.get('device_ordinal', 0)}"
                        operations[device].append(_span(event, stats["hlo_op"], stats.get("hlo_module")))
    if not operations:
        hint = "Check that the traced steps ran, and that no other profiler, such as Nsight or DCGM, is using the GPU."
        raise DataError(f"The trace in {directory} has no operations of a device.", hint)
    return Trace(operations, sorted(phases, key=lambda phase: phase.start), len(steps))


def _accelerator_operations(plane: Any) -> Iterator[Span]:
    """The operations in the streams of a GPU, or those of a TPU.

    A kernel in a command buffer has its own name: of the instruction, or of the library's.
    """
    lines = list(plane.lines)
    streams = [line for line in lines if line.name.startswith("Stream")]
    for event in _events(streams or [line for line in lines if line.name == "XLA Ops"]):
        stats = dict(event.stats)
        operation = str(stats.get("hlo_op") or "")
        if not operation or operation.startswith(_COMMAND_BUFFER):
            operation = _instruction_name(event.name)
        yield _span(event, operation, stats.get("hlo_module"))


def _events(lines: Iterable[Any]) -> Iterator[Any]:
    return (event for line in lines for event in line.events)


def _span(event: Any, name: Any, module: Any = None) -> Span:
    name = name if module in (None, _STEP_MODULE) else f"{module}/{name}"
    return Span(str(name), event.start_ns, event.start_ns + event.duration_ns)


def _instruction_name(name: str) -> str:
    """Name of an instruction. TPU events are named by its text: `%fusion.3 = bf16[8]{0} fusion(…)`."""
    found = re.match(r"%([\w.\-]+) = ", name)
    return found[1] if found else name
