"""What ran when: the operations of each device, and what the host did, out of a trace by JAX's profiler."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from etils import epath

from paxcli.errors import DataError, first_line

STEP = "train"
TRACES = "plugins/profile"  # where JAX puts traces, and xprof and TensorBoard look
# What pax's own loop marks in a trace.
PHASES = (STEP, "input", "save", "evaluate")


class Span(NamedTuple):
    """One execution of an operation, or something that the host did. Times are nanoseconds since the trace began."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """A trace.

    Attributes:
      operations: By device.
      phases: Of the host, by begin.
      num_steps: Training steps that were dispatched.
    """

    operations: dict[str, list[Span]]
    phases: list[Span]
    num_steps: int


def find_trace(directory: str) -> epath.Path:
    """The newest directory with a trace in a run, in its `profile/`, or that directory itself.

    Raises:
      DataError: There is none.
    """
    start = epath.Path(directory)
    for root in (start, start / TRACES, start / "profile" / TRACES):
        if not root.exists():
            continue
        found = [path for path in (root, *root.iterdir()) if path.is_dir() and any(path.glob("*.xplane.pb"))]
        if found:
            return max(found, key=lambda path: path.name)
    raise DataError(
        f"There is no trace in {directory}.",
        "Make one: `pax train RECIPE --profile-steps 10:15`.",
    )


def read_trace(directory: epath.Path) -> Trace:
    """Reads the traces of a directory, one a host.

    Raises:
      DataError: A file is damaged, or no device ran anything.
    """
    operations: dict[str, list[Span]] = {}
    phases: list[Span] = []
    steps = set()
    with warnings.catch_warnings():
        # Python 3.12 warns of the names of jaxlib's types, from where a warning must not become an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for file in sorted(directory.glob("*.xplane.pb")):
            try:
                data = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
                planes = list(data.planes)
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{file} cannot be read as a trace: {first_line(error)}") from error
            host = file.name.removesuffix(".xplane.pb")
            for plane in planes:
                if plane.name.startswith("/device:"):
                    operations.setdefault(f"{host}{plane.name}", []).extend(_of_accelerator(plane))
                elif plane.name == "/host:CPU":
                    for device, operation in _of_cpu(plane):
                        operations.setdefault(f"{host}/device:CPU:{device}", []).append(operation)
                    found, numbers = _marked(plane)
                    phases += found
                    steps |= numbers
    operations = {device: found for device, found in operations.items() if found}
    if not operations:
        raise DataError(
            f"The trace in {directory} holds no operation of a device.",
            "Did the traced steps run? Does another profiler, such as Nsight or DCGM, hold the GPU?",
        )
    return Trace(operations, sorted(phases, key=lambda phase: phase.start), len(steps))


def _of_accelerator(plane: Any) -> Iterator[Span]:
    """Of a GPU, what its streams did; of a TPU, its operations."""
    lines = list(plane.lines)
    streams = [line for line in lines if line.name.startswith("Stream")]
    for line in streams or [line for line in lines if line.name == "XLA Ops"]:
        for event in line.events:
            name = dict(event.stats).get("hlo_op") or _short(event.name)
            yield Span(str(name), event.start_ns, event.start_ns + event.duration_ns)


def _of_cpu(plane: Any) -> Iterator[tuple[int, Span]]:
    for line in plane.lines:
        for event in line.events:
            if event.duration_ns > 0 and "::" not in event.name:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    end = event.start_ns + event.duration_ns
                    yield int(stats.get("device_ordinal", 0)), Span(stats["hlo_op"], event.start_ns, end)


def _marked(plane: Any) -> tuple[list[Span], set[int]]:
    phases, steps = [], set()
    for line in plane.lines:
        for event in line.events:
            if event.name in PHASES:
                phases.append(Span(event.name, event.start_ns, event.start_ns + event.duration_ns))
                if event.name == STEP:
                    steps.add(dict(event.stats).get("step_num"))
    return phases, steps


def _short(name: str) -> str:
    """A TPU's events are called by their whole instruction: `%fusion.3 = bf16[8]{0} fusion(…)`."""
    found = re.match(r"%([\w.\-]+) = ", name)
    return found[1] if found else name
