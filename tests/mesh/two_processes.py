"""One of two processes with four devices each, run by test_startup.py. Argument: a directory that both can write."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.warm_start import load_params
from paxcli.errors import DataError
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.sharding import infeed_shard, put_batch
from paxcli.mesh.startup import agree, start_distributed

received: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
start_distributed(timeout_seconds=60)
os.kill(os.getpid(), signal.SIGTERM)
assert received == [signal.SIGTERM]  # JAX's preemption service has a handler of its own
start_distributed()  # a second call does nothing
process = jax.process_index()
assert jax.process_count() == 2 and jax.device_count() == 8 and jax.local_device_count() == 4

# A sum over every device.
mesh = build_mesh(Mesh([2, 2, 2], None))
total = jax.shard_map(lambda x: jax.lax.psum(x, ("data", "fsdp", "tensor")), mesh=mesh, in_specs=P(), out_specs=P())
assert jax.jit(total)(np.float32(1)) == 8

# Each process feeds its own rows; with `tensor` across both, each feeds all of them.
assert infeed_shard(mesh) == (2, process)
rows = np.arange(8 * 3).reshape(8, 3)
batch = put_batch({"ids": rows[4 * process : 4 * process + 4]}, mesh)["ids"]
assert batch.shape == (8, 3)
assert int(jax.jit(lambda x: (x * np.arange(24).reshape(8, 3)).sum())(batch)) == int((rows * rows).sum())
across = build_mesh(Mesh({"tensor": 8}))
assert infeed_shard(across) == (1, 0)
assert put_batch({"ids": rows}, across)["ids"].shape == (8, 3)

# One checkpoint of both, with an input state for each.
value = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
sharding = NamedSharding(mesh, P(("data", "fsdp"), "tensor"))
state = {"params": {"w": jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])}}
with CheckpointStore(sys.argv[1], Checkpoint(save_interval_steps=2)) as store:
    assert not store.save(1, state, {"position": process})
    assert store.save(2, state, {"position": process})
    assert store.save(4, state, {"position": 7})
    store.wait()
    assert store.steps() == [2, 4]
    other = NamedSharding(mesh, P("tensor", "data"))
    abstract = {"params": {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=other)}}
    restored, input_state = store.restore(2, abstract)
    assert input_state == {"position": process}
    for shard in restored["params"]["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])
    assert store.restore(4, abstract)[1] == {"position": 7}
    # If the newest step differs, since a run saved one in between, both load that of process 0.
    assert agree(5 + process) == 5
    assert load_params(pathlib.Path(sys.argv[1]).parent, (2, 4)[process], abstract["params"])[1].source.name == "2"
    try:
        store.restore(2, {"params": {"w": jax.ShapeDtypeStruct((16, 9), value.dtype, sharding=other)}})
    except DataError:
        pass
    else:
        raise AssertionError("accepted")
print("ok", process)
