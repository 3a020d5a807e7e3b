"""Speed of saving and restoring a train state of random numbers, as JSON.

    python benchmarks/checkpoint_rate.py [--recipe tiny-synthetic] [--overlays …] [--sets …] [--rounds 3]

`blocked_seconds`: until `save` returns and training continues; `step_over_alone`: time of a step during writing, over
that of a step alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import jax

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.resolve import resolve
from paxcli.mesh.sharding import put_batch
from paxcli.training.session import open_session
from paxcli.training.state import create_state
from paxcli.training.step import make_train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-synthetic")
    parser.add_argument("--overlays", nargs="*", default=[])
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = resolve(options.recipe, options.overlays, options.sets).config
    found: dict[str, list[float]] = {name: [] for name in ("blocked", "save", "restore", "alone", "beside")}
    with tempfile.TemporaryDirectory() as name, open_session(config) as session:
        task = session.experiment.task
        state = create_state(task, session.spec, session.abstract)
        step = make_train_step(task, session.abstract)
        batch = put_batch(session.experiment.train_input.get_next(), session.mesh)

        def steps(count: int = 3) -> float:
            nonlocal state
            began = time.perf_counter()
            for _ in range(count):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            return (time.perf_counter() - began) / count

        steps()
        with CheckpointStore(pathlib.Path(name), Checkpoint(save_interval_steps=1, save_max_to_keep=2)) as store:
            for number in range(1, options.rounds + 1):
                found["alone"].append(steps())
                began = time.perf_counter()
                store.save(number, state, {})
                found["blocked"].append(time.perf_counter() - began)
                found["beside"].append(steps(1))
                store.wait()
                found["save"].append(time.perf_counter() - began)
                began = time.perf_counter()
                restored, _ = store.restore(number, session.abstract)
                jax.block_until_ready(restored)
                found["restore"].append(time.perf_counter() - began)
                del restored
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        on_disk = sum(path.stat().st_size for path in pathlib.Path(name, str(number)).rglob("*") if path.is_file())
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
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
