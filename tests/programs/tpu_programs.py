"""Compiles a small model for the TPU slices named on the command line; prints reports and programs as a JSON list."""

from __future__ import annotations

import contextlib
import io
import json
import sys

from paxcli.config.resolve import resolve
from paxcli.programs.ahead_of_time import compile_ahead
from paxcli.programs.topologies import find_compile_target, hide_accelerators

SMALL = (
    "train_input=SyntheticInput",
    "num_layers=3",
    "hidden_dims=512",
    "model_dims=256",
    "num_heads=2",
    "dims_per_head=128",
    "fprop_dtype=bfloat16",
    "remat_policy=nothing",
    "unroll=1",
    "learner.optimizer=Sgd",
    "task.train.percore_batch_size=4",
)


def main() -> None:
    """`v4:2x2x1=[1,4,1]`, with slices `v4:2x2x1*2=[1,4,1]`, with other values `v4:2x2x1=[1,4,1]+unroll=2`."""
    hide_accelerators()
    reports = []
    for word in sys.argv[1:]:
        word, *more = word.split("+")
        name, _, mesh = word.partition("=")
        name, _, slices = name.partition("*")
        sets = dict(value.split("=", 1) for value in (*SMALL, *more))
        sets |= {"mesh.ici_mesh_shape": mesh} | ({"mesh.dcn_mesh_shape": f"[{slices},1,1]"} if slices else {})
        with contextlib.redirect_stdout(io.StringIO()):
            config = resolve("tiny", (), [f"{path}={value}" for path, value in sets.items()]).config
            compiled = compile_ahead(config, find_compile_target(name, int(slices or 1)))
        reports.append(compiled.report | {"text": compiled.text})
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
