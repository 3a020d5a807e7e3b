"""Speed of saving and restoring a train state: pax, bare Orbax, safetensors, PyTorch and the disk, as JSON.

    python benchmarks/checkpoint_rate.py [--recipe tiny-synthetic] [--overlays …] [--sets …] [--rounds 3]
                                         [--peer-python PYTHON]

A save ends when the bytes are on the disk (`fsync`). A restore reads what was just saved, from the page cache, until
the arrays are JAX's (PyTorch: in the state's tensors); only pax compares them with checksums. `blocked_seconds`: until
`save` returns and training continues; `step_over_alone`: time of a step during writing, over that of a step alone. The
disk's own rate is that of one file of the state's size, and for a restore, of reading it. PYTHON has torch 2.13.0,
whose `torch.distributed.checkpoint` saves as many bytes; it is left out without one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.resolve import resolve
from paxcli.mesh.sharding import put_batch
from paxcli.training.instrument import step_of
from paxcli.training.session import open_session

PEER = pathlib.Path(__file__).parent / "peers" / "torch_checkpoint.py"


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def peers(state: object, directory: pathlib.Path, size: int, peer_python: str | None) -> dict[str, dict[str, float]]:
    """Seconds in which each peer saves the same bytes, until they are on the disk, and restores them."""
    arrays = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state)) if leaf.nbytes}

    def save_orbax() -> None:
        with ocp.StandardCheckpointer() as writer:
            writer.save(directory / "orbax", arrays)
        os.sync()

    def restore_orbax() -> None:
        with ocp.StandardCheckpointer() as reader:
            jax.block_until_ready(reader.restore(directory / "orbax", arrays))

    def save_tensors() -> None:
        safetensors.numpy.save_file({name: np.asarray(leaf) for name, leaf in arrays.items()}, directory / "tensors")
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

    directory.mkdir()
    os.sync()
    saves = {"orbax": save_orbax, "safetensors": save_tensors, "disk": save_disk}
    restores = {"orbax": restore_orbax, "safetensors": restore_tensors, "disk": restore_disk}
    found = {"save": {name: seconds_of(action) for name, action in saves.items()}}
    found["restore"] = {name: seconds_of(action) for name, action in restores.items()}
    if peer_python:
        command = [peer_python, str(PEER), str(directory / "torch"), str(size)]
        seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for kind, of_kind in found.items():
            of_kind["torch"] = seconds[f"{kind}_seconds"]
    shutil.rmtree(directory)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-synthetic")
    parser.add_argument("--overlays", nargs="*", default=[])
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    config = resolve(options.recipe, options.overlays, options.sets).config
    of_peers: list[dict[str, dict[str, float]]] = []
    found: dict[str, list[float]] = {name: [] for name in ("blocked", "save", "restore", "alone", "beside")}
    with tempfile.TemporaryDirectory() as name, open_session(config) as session:
        state = session.new_state()
        step = step_of(session)
        batch = put_batch(session.experiment.train_input.get_next(), session.mesh)

        def steps(count: int = 3) -> float:
            nonlocal state
            began = time.perf_counter()
            for _ in range(count):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            return (time.perf_counter() - began) / count

        steps()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with CheckpointStore(pathlib.Path(name), Checkpoint(save_interval_steps=1, save_max_to_keep=2)) as store:
            for number in range(1, 2 * options.rounds, 2):
                found["save"].append(seconds_of(lambda: (store.save(number, state, {}), store.wait())))  # noqa: B023
                found["alone"].append(steps())
                found["blocked"].append(seconds_of(lambda: store.save(number + 1, state, {})))  # noqa: B023
                found["beside"].append(steps(1))
                store.wait()
                began = time.perf_counter()
                restored, _ = store.restore(number + 1, session.abstract)
                jax.block_until_ready(restored)
                found["restore"].append(time.perf_counter() - began)
                del restored
                of_peers.append(peers(state, pathlib.Path(name, "peers"), size, options.peer_python))
        on_disk = sum(path.stat().st_size for path in pathlib.Path(name, str(number + 1)).rglob("*") if path.is_file())
    medians = {name: statistics.median(values) for name, values in found.items()}
    result = {
        "state_bytes": size,
        "bytes_on_disk": on_disk,
        "blocked_seconds": medians["blocked"],
        "saved_bytes_per_second": size / medians["save"],
        "restored_bytes_per_second": size / medians["restore"],
        "step_over_alone": statistics.median(
            beside / alone for beside, alone in zip(found["beside"], found["alone"], strict=True)
        ),
        "blocked_over_save": medians["blocked"] / medians["save"],
    }
    for kind, first in of_peers[0].items():
        ratios = {
            f"pax_over_{peer}": [one[kind][peer] / ours for one, ours in zip(of_peers, found[kind], strict=True)]
            for peer in first
        }
        result[kind] = {name: statistics.median(values) for name, values in ratios.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
