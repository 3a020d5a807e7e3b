"""Speed of saving and restoring a train state: pax, bare Orbax, safetensors, PyTorch and the disk, as JSON.

    python benchmarks/checkpoint_rate.py [--recipe tiny-synthetic] [--overlays …] [--sets …] [--rounds 3]
                                         [--peer-python PYTHON]

A save ends when the bytes are on the disk (`fsync`). A restore reads what was just saved, from the page cache, until
the arrays are JAX's (PyTorch: in the state's tensors); only pax compares them with checksums. `blocked_seconds`: until
`save` returns and training continues; `step_over_alone`: time of a step during writing, over that of a step alone. The
disk's own rate is that of one file of the state's size, and for a restore, of reading it. pax runs with the settings of
malloc that `pax train` has, each peer in a process of its own. PYTHON has torch 2.13.0, whose
`torch.distributed.checkpoint` saves as many bytes; it is left out without one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
from train_step import HUGE_PAGES

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.resolve import resolve
from paxcli.mesh.sharding import put_batch
from paxcli.training.instrument import step_of
from paxcli.training.session import build_session

PEERS = pathlib.Path(__file__).parent / "peers"


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def peers(state: object, directory: pathlib.Path, peer_python: str | None) -> dict[str, dict[str, float]]:
    """Seconds in which each peer saves the same bytes, until they are on the disk, and restores them."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.nbytes]
    shapes, size = [[leaf.shape, str(leaf.dtype)] for leaf in leaves], sum(leaf.nbytes for leaf in leaves)
    directory.mkdir()
    found = answer([sys.executable, str(PEERS / "jax_checkpoint.py"), str(directory), json.dumps(shapes)])
    if peer_python:
        seconds = answer([peer_python, str(PEERS / "torch_checkpoint.py"), str(directory / "torch"), str(size)])
        for kind, of_kind in found.items():
            of_kind["torch"] = seconds[f"{kind}_seconds"]
    shutil.rmtree(directory)
    return found


def answer(command: list[str]) -> dict:
    """The JSON that a peer prints, with the memory settings that it would have without pax."""
    env = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-synthetic")
    parser.add_argument("--overlays", nargs="*", default=[])
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    if not HUGE_PAGES.items() <= os.environ.items():  # malloc reads them once
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})
    config = resolve(options.recipe, options.overlays, options.sets).config
    of_peers: list[dict[str, dict[str, float]]] = []
    found: dict[str, list[float]] = {name: [] for name in ("blocked", "save", "restore", "alone", "beside")}
    with tempfile.TemporaryDirectory() as name, build_session(config).active() as session:
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
                of_peers.append(peers(state, pathlib.Path(name, "peers"), options.peer_python))
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
