"""Compiles MaxText's train step ahead of time, and keeps its optimized HLO, its memory, and the order of its mesh.

    python benchmarks/peers/maxtext_compile.py OUT.hlo NAME=VALUE …

The values are MaxText's own, with `compile_topology` and `compile_topology_num_slices`. Runs under a Python that has
maxtext 0.2.4, which imports as the package `maxtext`, with jax 0.10.2 and libtpu 0.0.42.1.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def main() -> None:
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    out, settings = pathlib.Path(sys.argv[1]), sys.argv[2:]
    compile_step, found = train_compile.jit_and_compile, {}

    def compile_and_keep(function, args, kwargs, mesh, *rest):
        compiled = compile_step(function, args, kwargs, mesh, *rest)
        stats = compiled.memory_analysis()
        found["peak_memory_bytes"] = stats.peak_memory_in_bytes
        found["temporary_host_bytes"] = stats.host_temp_size_in_bytes
        sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        found["total_bytes"] = sizes + stats.temp_size_in_bytes
        devices = mesh.devices.flat
        found["devices"] = [(getattr(one, "slice_index", 0), *one.coords) for one in devices]
        out.write_text(compiled.as_text())
        return compiled

    train_compile.jit_and_compile = compile_and_keep
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    train_compile.main(["", str(base), *settings])
    out.with_suffix(".json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
