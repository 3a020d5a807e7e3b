"""One device against eight: the same losses, and parameters that are really split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

_PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax
    from paxcli.training.session import open_session
    from paxcli.training.state import create_state
    from paxcli.training.step import make_train_step
    from paxcli.mesh.sharding import put_batch
    from paxcli.optim.adafactor import ShardedAdafactor
    from pax_recipes.tiny import tiny_synthetic

    ici, dcn, steps, factored = json.loads(sys.argv[1])
    config = tiny_synthetic()
    if factored:
        config.task.train.learner.optimizer = ShardedAdafactor.config()
        config.task.train.learner.ema_decay = 0.9
    config.mesh.ici_mesh_shape, config.mesh.dcn_mesh_shape = ici, dcn
    model = config.task.model
    model.num_layers, model.model_dims, model.hidden_dims, model.max_seq_len = 2, 64, 128, 32
    with open_session(config) as session:
        state = create_state(session.experiment.task, session.spec, session.abstract)
        step = make_train_step(session.experiment.task, session.abstract)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, put_batch(session.experiment.train_input.get_next(), session.mesh))
            losses.append(float(metrics["loss"]))
        w = state.params["stack"]["layers"]["feed_forward"]["w_in"]
        moments = [
            leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if jax.tree_util.keystr(path).endswith("['w_in']")
        ]
        print(json.dumps({
            "losses": losses, "shape": w.shape, "shard": w.addressable_shards[0].data.shape,
            "moment_shards": [m.addressable_shards[0].data.shape for m in moments],
        }))
    """
)


def _train(devices: int, ici: dict, dcn: dict | None = None, steps: int = 20, factored: bool = False) -> dict:
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([ici, dcn, steps, factored])],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_device():
    return _train(1, {"data": 1})


@pytest.mark.parametrize(
    ("ici", "dcn", "shard"),
    [
        ({"fsdp": 4, "tensor": 2}, None, [2, 16, 64]),
        ({"data": 8}, None, [2, 64, 128]),
        ({"fsdp": 2, "tensor": 2}, {"data": 2}, [2, 32, 64]),
    ],
)
def test_eight_devices_compute_the_same(one_device, ici, dcn, shard):
    eight = _train(8, ici, dcn)
    np.testing.assert_allclose(eight["losses"], one_device["losses"], rtol=1e-5)
    assert eight["shard"] == shard
    assert eight["moment_shards"] == [shard, shard]


def test_factored_moments_and_averages_are_split_too():
    one = _train(1, {"data": 1}, steps=5, factored=True)
    eight = _train(8, {"fsdp": 4, "tensor": 2}, steps=5, factored=True)
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-5)
    # Momentum, row and column of the second moment, average of the parameters.
    assert eight["moment_shards"] == [[2, 16, 64], [2, 16], [2, 64], [2, 16, 64]]
