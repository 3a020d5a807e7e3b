"""Trains small models on meshes, in one process: `python -m tests.training.on_meshes CASES.json OUT.npz`.

A case is `{"recipe": name, "overlays": [name, …], "sets": [assignment, …], "steps": n}`. Of case `i`, the file gets the
losses and gradient norms of its steps, every gradient of the first batch, and how the first parameter `w_in`, if there
is one, and its moments are split.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from paxcli.config.resolve import resolve
from paxcli.mesh.sharding import put_batch
from paxcli.training.session import build_session
from paxcli.training.step import make_train_step


def run(case: dict[str, Any]) -> dict[str, np.ndarray]:
    config = resolve(case["recipe"], case.get("overlays", ()), case["sets"]).config
    with build_session(config).active() as session:
        task = session.experiment.task
        state = session.new_state()
        batches = [session.experiment.train_input.get_next() for _ in range(case["steps"])]

        def loss(params, batch):
            return task.model.apply({"params": task.model.cast(params)}, batch)[0]["loss"][0]

        gradients = jax.jit(jax.grad(loss))(state.params, put_batch(batches[0], session.mesh))
        out = {f"gradient{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(gradients)}
        step = make_train_step(task, session.abstract)
        losses, norms = [], []
        for batch in batches:
            state, metrics = step(state, put_batch(batch, session.mesh))
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
        shards = [
            leaf for path, leaf in jax.tree.leaves_with_path((state.params, state.opt_state)) if "w_in" in str(path[-1])
        ]
        out |= {f"shard{i}": np.array(w.addressable_shards[0].data.shape) for i, w in enumerate(shards)}
        return jax.device_get(out | {"losses": np.array(losses), "norms": np.array(norms)})


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        results = [run(case) for case in json.load(file)]
    np.savez(sys.argv[2], **{f"{i}/{name}": x for i, result in enumerate(results) for name, x in result.items()})
