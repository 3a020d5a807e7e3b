"""Run by test_manager.py: saves or restores one state on the given mesh and prints a digest of its bits."""

from __future__ import annotations

import ast
import hashlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import spec

AXES = {"w": ("embed", "mlp"), "qkv": ("embed", "heads", "head_dim"), "scale": ("norm",), "step": ()}
SHAPES = {"w": (64, 128), "qkv": (64, 8, 5), "scale": (64,), "step": ()}

verb, directory, shape = sys.argv[1:]
mesh = build_mesh(Mesh(ast.literal_eval(shape)))
shardings = {name: NamedSharding(mesh, spec(axes)) for name, axes in AXES.items()}
with CheckpointStore(directory, Checkpoint(save_interval_steps=1)) as store:
    if verb == "save":
        random = np.random.default_rng(0)
        host = {name: random.standard_normal(size).astype(np.float32) for name, size in SHAPES.items()}
        state = jax.device_put(host, shardings)
        store.save(1, state, {"position": 3})
    else:
        wanted = {n: jax.ShapeDtypeStruct(s, np.float32, sharding=shardings[n]) for n, s in SHAPES.items()}
        state, input_state = store.restore(1, wanted)
        assert input_state == {"position": 3}
        assert all(state[name].sharding == shardings[name] for name in state)
print(hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest())
