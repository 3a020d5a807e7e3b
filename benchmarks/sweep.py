"""Cost of a training step as one size grows: one JSON line a point.

    python benchmarks/sweep.py layers [--recipe gpt2-124m] [--overlays gpu-1] [--sets …] [--values 2 4 8] [--steps 20]

| sweep | varies | expected |
|---|---|---|
| layers | `num_layers` | throughput falls as 1/L at constant MFU; the rest is embedding, head and host |
| batch | rows of a step | throughput stops growing at some size |
| sequence | `max_seq_len` at constant tokens of a step | throughput follows the FLOPs of a token |
| width | `model_dims`, heads of 64, `hidden_dims` four times as large | MFU, and bytes against parameters |
| remat | the remat policy | peak memory against seconds |
| compile | `num_layers`, scanned, scanned four at a time, and unrolled | seconds and program size |

A point is a process of its own, with no compilation cache. Without `--recipe` it is `tiny-synthetic`, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

Point = dict[str, object]


def points(sweep: str, values: list[int] | None, tokens: int) -> list[Point]:
    """The assignments of each point of a sweep."""
    if sweep == "layers":
        return [{"num_layers": n} for n in values or (2, 4, 8, 16, 32)]
    if sweep == "batch":
        return [{"global_batch_size": n, "percore_batch_size": "null"} for n in values or (1, 2, 4, 8, 16, 32)]
    if sweep == "sequence":
        return [
            {"max_seq_len": n, "global_batch_size": max(tokens // n, 1), "percore_batch_size": "null"}
            for n in values or (128, 256, 512, 1024, 2048)
        ]
    if sweep == "width":
        return [{"model_dims": n, "hidden_dims": 4 * n, "num_heads": n // 64} for n in values or (128, 256, 512, 1024)]
    if sweep == "remat":
        policies = ("everything", "dots", "dots_with_no_batch_dims", "qkv_context_out_proj", "context", "nothing")
        return [{"remat_policy": policy} for policy in policies]
    forms = ({"scan": "true", "unroll": 1}, {"scan": "true", "unroll": 4}, {"scan": "false", "unroll": 1})
    return [{"num_layers": n, **form} for n in values or (4, 8, 16) for form in forms]


def measure(recipe: str, overlays: list[str], sets: list[str], steps: int) -> dict:
    """Time and memory of a recipe's step, in this process, which has done nothing else."""
    import jax

    from paxcli.config.resolve import resolve
    from paxcli.mesh.sharding import put_batch
    from paxcli.metrics.meter import peak_memory_bytes
    from paxcli.metrics.peaks import mfu, peak_flops
    from paxcli.training.experiment import tokens_in
    from paxcli.training.instrument import step_of
    from paxcli.training.session import build_session
    from paxcli.training.state import count_parameters

    with build_session(resolve(recipe, overlays, sets).config).active() as session:
        task, source = session.experiment.task, session.experiment.train_input
        marks = [time.perf_counter()]
        traced = step_of(session).trace(session.abstract, session.batch)
        marks.append(time.perf_counter())
        lowered = traced.lower()
        marks.append(time.perf_counter())
        step = lowered.compile()
        marks.append(time.perf_counter())
        state = session.new_state()
        batch = put_batch(source.get_next(), session.mesh)
        for count in (2, steps):
            began, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds, cpu_seconds = (time.perf_counter() - began) / count, (time.process_time() - used) / count
        memory, flops = step.memory_analysis(), task.model.step_flops(session.spec)
        device = session.mesh.devices.flat[0].device_kind
        peak = peak_flops(device)
        return {
            "device": device,
            "devices": session.mesh.size,
            "parameters": count_parameters(session.abstract.params),
            "leaves": len(jax.tree.leaves(session.abstract)),
            "tokens_per_second": (tokens_in(session.spec) or 0) / seconds,
            "step_seconds": seconds,
            "step_cpu_seconds": cpu_seconds,
            "flops_per_second": flops.total / seconds if flops else None,
            "mfu": mfu(flops.total / seconds if flops else None, peak * session.mesh.size if peak else None),
            "trace_seconds": marks[1] - marks[0],
            "lower_seconds": marks[2] - marks[1],
            "compile_seconds": marks[3] - marks[2],
            "hlo_bytes": len(step.as_text()),
            "state_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "peak_memory_bytes": peak_memory_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=["layers", "batch", "sequence", "width", "remat", "compile"])
    parser.add_argument("--recipe", default="tiny-synthetic")
    parser.add_argument("--overlays", nargs="*", default=[])
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--values", nargs="+", type=int)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, in the sweep over `sequence`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        sets = options.sets + [f"{name}={value}" for name, value in options.point.items()]
        print(json.dumps(options.point | measure(options.recipe, options.overlays, sets, options.steps)))
        return
    for point in points(options.sweep, options.values, options.tokens):
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:], "--point", json.dumps(point)]
        env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
        print(done.stdout.strip() or json.dumps(point | {"failed": done.returncode}), flush=True)


if __name__ == "__main__":
    main()
