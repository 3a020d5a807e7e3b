"""Speed of saving and restoring a train state: pax, bare Orbax, safetensors, PyTorch and the disk, as JSON.

    python benchmarks/checkpoint_rate.py [--recipe tiny-synthetic] [--overlays …] [--sets …] [--rounds 3]
                                         [--peer-python PYTHON]

A save ends when the bytes are on the disk (`fsync`). `blocked_seconds`: until `save` returns and training continues;
`step_over_alone`: time of a step during writing, over that of a step alone. The disk's own rate is that of one file of
the state's size. PYTHON has torch 2.13.0, whose `torch.distributed.checkpoint` saves as many bytes; it is left out
without one.
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


def peers_save(state: object, directory: pathlib.Path, size: int, peer_python: str | None) -> dict[str, float]:
    """Seconds that each peer takes for the same bytes, until they are on the disk."""
    arrays = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state)) if leaf.nbytes}

    def orbax() -> None:
        with ocp.StandardCheckpointer() as writer:
            writer.save(directory / "orbax", arrays)
        os.sync()

    def save_tensors() -> None:
        safetensors.numpy.save_file({name: np.asarray(leaf) for name, leaf in arrays.items()}, directory / "tensors")
        os.sync()

    def disk() -> None:
        with (directory / "disk").open("wb") as file:
            block = bytes(1 << 24)
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())

    directory.mkdir()
    os.sync()
    found = {"orbax": seconds_of(orbax), "safetensors": seconds_of(save_tensors), "disk": seconds_of(disk)}
    if peer_python:
        command = [peer_python, str(PEER), str(directory / "torch"), str(size)]
        found["torch"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["save_seconds"]
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
    peers: list[dict[str, float]] = []
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
                peers.append(peers_save(state, pathlib.Path(name, "peers"), size, options.peer_python))
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
    for peer in peers[0]:
        ratios = (one[peer] / save for one, save in zip(peers, found["save"], strict=True))
        result[f"pax_over_{peer}"] = statistics.median(ratios)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
