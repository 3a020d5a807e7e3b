"""Saves arrays of the shapes asked for with bare Orbax and with safetensors, restores them, and prints seconds as JSON.

    python peers/jax_checkpoint.py DIRECTORY '[[[8, 4], "float32"]]'

`disk` writes and reads one file of as many bytes.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    directory, shapes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    random = np.random.default_rng(0)
    arrays = {
        str(number): jax.numpy.asarray(random.random(shape).astype(dtype))
        for number, (shape, dtype) in enumerate(shapes)
    }
    size = sum(array.nbytes for array in arrays.values())

    def save_orbax() -> None:
        with ocp.StandardCheckpointer() as writer:
            writer.save(directory / "orbax", arrays)
        os.sync()

    def restore_orbax() -> None:
        with ocp.StandardCheckpointer() as reader:
            jax.block_until_ready(reader.restore(directory / "orbax", arrays))

    def save_tensors() -> None:
        safetensors.numpy.save_file({name: np.asarray(array) for name, array in arrays.items()}, directory / "tensors")
        os.sync()

    def restore_tensors() -> None:
        jax.block_until_ready(jax.device_put(safetensors.numpy.load_file(directory / "tensors")))

    def save_disk() -> None:
        with (directory / "disk").open("wb") as file:
            block = bytes(1 << 24)
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())

    def restore_disk() -> None:
        (directory / "disk").read_bytes()

    os.sync()
    saves = {"orbax": save_orbax, "safetensors": save_tensors, "disk": save_disk}
    restores = {"orbax": restore_orbax, "safetensors": restore_tensors, "disk": restore_disk}
    found = {"save": {name: seconds_of(action) for name, action in saves.items()}}
    found["restore"] = {name: seconds_of(action) for name, action in restores.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
