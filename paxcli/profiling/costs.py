"""PGLE profiles: the cost of each instruction of a program, which XLA's scheduler reads, as binary and as text."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from paxcli.errors import DataError, MissingError

BINARY, TEXT = ".pb", ".pbtxt"
_SCHEMA = pathlib.Path(__file__).parent / "data" / "profiled_instructions.txtpb"

LIKELY_CAUSES = (
    "Likely causes: another profiler is using the GPU (Nsight Systems, or DCGM: `dcgmi profile --pause`); several"
    " processes on one machine profile at once; XLA_FLAGS enable command buffers, which hide kernels; or the device is"
    " not an NVIDIA GPU."
)


def aggregate(profiles: Sequence[bytes], percentile: int) -> bytes:
    """Combines the profiles of several steps into the given percentile of each instruction's cost.

    The percentile is the lower nearest rank, as in JAX's automatic mode.

    Raises:
      MissingError: No step has any costs.
    """
    if not any(profiles):
        raise MissingError(f"The profiler gave no costs in {len(profiles)} steps.", LIKELY_CAUSES)
    from jaxlib import _profiler  # JAX has no public API that aggregates profiles

    return _profiler.aggregate_profiled_instructions([profile for profile in profiles if profile], percentile)


def read_costs(path: epath.Path) -> dict[str, float]:
    """Reads the microseconds of each instruction from a profile: text if it ends in `.pbtxt`, otherwise binary.

    Raises:
      DataError: The file does not exist, or is not a profile, or is empty.
    """
    if not path.is_file():
        raise DataError(f"There is no profile {path}.", "Collect one: `pax pgle collect RECIPE`.")
    try:
        if path.suffix == TEXT:
            costs = decode(text_format.Parse(path.read_text(), _message()()).SerializeToString())
        else:
            costs = decode(path.read_bytes())
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        hint = "Collect one: `pax pgle collect RECIPE`."
        raise DataError(f"{path} is not a profile of instruction costs: {error}.", hint) from error
    if not costs:
        raise DataError(f"{path} is empty: it has no costs.", "Collect it again: `pax pgle collect RECIPE`.")
    return costs


def write_costs(profile: bytes, stem: epath.Path) -> None:
    """Writes `stem.pb` for XLA, and `stem.pbtxt` for people."""
    stem.with_suffix(BINARY).write_bytes(profile)
    stem.with_suffix(TEXT).write_text(text_format.MessageToString(_message().FromString(profile)))


def decode(profile: bytes) -> dict[str, float]:
    """Microseconds by instruction. Names of a GPU program's instructions start with its fingerprint and `::`."""
    return {cost.name: cost.cost_us for cost in _message().FromString(profile).costs}


def encode(costs: Mapping[str, float]) -> bytes:
    """Serializes microseconds by instruction."""
    message = _message()()
    for name, microseconds in costs.items():
        message.costs.add(name=name, cost_us=microseconds)
    return message.SerializeToString()


def fingerprints(costs: Mapping[str, float]) -> set[str]:
    """Fingerprints of the programs that the costs belong to; empty if the names have none."""
    return {name.partition("::")[0] for name in costs if "::" in name}


def describe(costs: Mapping[str, float], top: int) -> dict[str, Any]:
    """`instructions`, `total_microseconds`, `fingerprints`, and the `top` `costliest` by `name` and `microseconds`."""
    by_cost = sorted(costs, key=costs.__getitem__, reverse=True)
    return {
        "instructions": len(costs),
        "total_microseconds": math.fsum(costs.values()),
        "fingerprints": sorted(fingerprints(costs)),
        "costliest": [{"name": name.rpartition("::")[2], "microseconds": costs[name]} for name in by_cost[:top]],
    }


@functools.cache
def _message() -> Any:
    """The class of `tensorflow.profiler.ProfiledInstructionsProto`."""
    file = text_format.Parse(_SCHEMA.read_text(), descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()  # TensorFlow may have registered its own message in the default pool
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{file.message_type[0].name}"))
