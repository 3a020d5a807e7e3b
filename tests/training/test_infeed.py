"""Two real processes hand the devices the batch of one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.devices import cpu_devices
from tests.jobs import free_port, job_variables

CODE = """
import sys
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from paxcli.config.resolve import resolve
from paxcli.mesh.sharding import put_batch
from paxcli.training.session import build_session

sets = ["num_layers=1", "model_dims=32", "hidden_dims=64", "max_seq_len=32", "train_input.input_random_seed=5"]
with build_session(resolve("tiny", (), sets).config).active() as session:
    train, (evaluation,) = session.experiment.train_input, session.experiment.eval_inputs
    assert (train.infeed_host_index, train.num_infeed_hosts) == (jax.process_index(), jax.process_count())
    batches = [train.get_next() for _ in range(3)]
    batches += list(evaluation.eval_batches())
    arrays = {}
    for number, batch in enumerate(batches):
        whole = multihost_utils.process_allgather(put_batch(batch, session.mesh), tiled=True)
        arrays |= {f"{number}/{field}": array for field, array in whole.items()}
np.savez(f"{sys.argv[1]}/{jax.process_index()}-of-{jax.process_count()}.npz", **arrays)
"""


def _start(folder, index: int, count: int, port: int) -> subprocess.Popen:
    env = os.environ | cpu_devices(4 // count)
    if count > 1:
        env |= job_variables(port, index, count)
    return subprocess.Popen([sys.executable, "-c", CODE, folder], env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_global_batch_of_two_processes_is_that_of_one(tmp_path):
    port = free_port()
    processes = [_start(tmp_path, index, count, port) for count in (1, 2) for index in range(count)]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    one, *two = (np.load(tmp_path / name) for name in ("0-of-1.npz", "0-of-2.npz", "1-of-2.npz"))
    assert len(one.files) > 3 * 5
    for other in two:
        assert set(other.files) == set(one.files)  # as many batches, of the eval epoch too
        for name in one.files:
            np.testing.assert_array_equal(other[name], one[name], err_msg=name)
