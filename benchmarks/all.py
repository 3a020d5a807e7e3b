"""Runs every benchmark that has a peer, prints one table of ratios, and fails if one is below its floor.

    python benchmarks/all.py [--quick] [--only NAME…] [--peer-python PYTHON] [--out all.json]
    python benchmarks/all.py --page docs/benchmarks.md [--out all.json]

Ratios are what a benchmark's JSON calls `pax_over_…`: 2 means that pax is twice as fast, or takes half the memory.
Floors are in `floors.yaml`. Exits with 1 if a benchmark fails or a ratio is below its floor. PYTHON has the peers:
torch 2.13.0, transformers, accelerate, datasets, litdata, peft and trl; without it, what needs them is left out.
`--page` runs nothing: it writes the page from results.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import rich
import yaml
from rich.table import Table

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "all.json"
PEERS = ("torch", "transformers", "accelerate", "datasets", "litdata", "peft", "trl", "litgpt")
OURS = ("jax", "jaxlib", "flax", "orbax-checkpoint", "grain", "tensorflow", "numpy")


INTRODUCTION = """# Benchmarks

pax beside its peers, on the same work, alternating in one run. A ratio of 2: pax is twice as fast, or takes half
the memory; the floor is the ratio below which `benchmarks/all.py` fails. Ratios hold for this machine. Size A is a
model of 4 layers of 256 with a vocabulary of 1,024, and batches of 8 × 256 tokens. How each change came about is in
`benchmarks/results/README.md`; predictions for TPUs are in [Compile for TPUs](compile.md), measurements on a GPU in
[GPUs](gpu.md#measured).

""".splitlines()

# Words of results -> words of the page.
MEASURES = {
    "ratios": "seconds",
    "cpu_ratios": "CPU seconds",
    "first_step_seconds": "seconds to the first step",
    "peak_memory_bytes": "peak memory",
    "batches": "batch size",
    "lora": "LoRA",
    "full": "all parameters",
}
ENDINGS = {"_cpu": "CPU seconds", "_cold": "nothing cached", "_warm": "compiled steps cached"}
NAMES = {
    "naive_jax": "plain JAX",
    "torch": "PyTorch",
    "torch_compiled": "PyTorch, compiled",
    "hf_trainer": "transformers, `Trainer`",
    "hf": "transformers",
    "trl": "TRL",
    "trl_packed": "TRL, packed",
    "hf_datasets": "datasets",
    "hf_datasets_processes": "datasets, all cores",
    "tf_data": "tf.data",
    "disk": "one file, `fsync`",
}


class Benchmark(NamedTuple):
    """A script, and how to call it.

    Attributes:
      question: The heading of its part of the page.
      arguments: For a full run.
      quick: For a quick one.
      peers: `none` = its peers are installed with pax; `optional` = it takes `--peer-python`; `required` = it needs it.
    """

    question: str
    arguments: str = ""
    quick: str = ""
    peers: str = "none"


BENCHMARKS = {
    "train_step": Benchmark("Seconds of a training step", "--sizes A B", "--sizes A --rounds 3", "optional"),
    "finetune": Benchmark("Seconds per token of fine-tuning", "", "--sizes A --rounds 3", "required"),
    "decode": Benchmark("Seconds to generate", "", "--batches 1 8 --rounds 3", "required"),
    "start_up": Benchmark("Seconds from process start to the end of the first step", "", "", "optional"),
    "tokenizing": Benchmark("Tokens/s from JSON lines to files of ids", "", "", "required"),
    "input_peers": Benchmark("Tokens/s from files to batches", "", "", "optional"),
    "checkpoint_rate": Benchmark(
        "Seconds to save and to restore a train state",
        "--sets model_dims=1024",
        "--sets model_dims=1024 --rounds 3",
        "optional",
    ),
}


def run(name: str, quick: bool, peer_python: str | None) -> dict[str, Any]:
    """Runs one benchmark; a failure is part of its result."""
    benchmark = BENCHMARKS[name]
    if benchmark.peers == "required" and not peer_python:
        return {"left_out": "needs --peer-python"}
    arguments = shlex.split(benchmark.quick if quick else benchmark.arguments)
    shown = shlex.join(["python", f"benchmarks/{name}.py", *arguments])
    if benchmark.peers != "none" and peer_python:
        arguments += ["--peer-python", peer_python]
        shown += " --peer-python PYTHON"
    began = time.perf_counter()
    env = {"JAX_PLATFORMS": "cpu", **os.environ}  # without it, JAX looks for a TPU where libtpu is installed
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments], stdout=subprocess.PIPE, env=env)
    facts = {"command": shown, "seconds": round(time.perf_counter() - began)}
    if done.returncode:
        return facts | {"failed": f"exit code {done.returncode}"}
    return facts | {"result": json.loads(done.stdout)}


def ratios(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Each `pax_over_…` of a result, with its path."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key.startswith("pax_over_"):
                yield f"{path}{key.removeprefix('pax_over_')}", value
            else:
                yield from ratios(value, f"{path}{key} / ")


def versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that a Python has."""
    code = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    installed = json.loads(subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE).stdout)
    return {name: installed[name] for name in packages if name in installed}


def processor() -> str:
    """The processor's name, as Linux gives it."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def environment(peer_python: str | None) -> dict[str, Any]:
    """The machine and the versions, which the figures depend on."""
    facts = {"date": datetime.date.today().isoformat(), "processor": processor()}
    facts |= {"cores": len(os.sched_getaffinity(0)), "load_at_start": round(os.getloadavg()[0], 1)}
    facts |= {"pax": importlib.metadata.version("paxcli"), "python": platform.python_version()}
    return facts | {"versions": versions(sys.executable, OURS) | (versions(peer_python, PEERS) if peer_python else {})}


def rows(results: dict[str, Any], floors: dict[str, dict[str, float]]) -> list[tuple[str, str, float, float | None]]:
    """Benchmark, path, ratio and floor of every ratio."""
    return [
        (name, path, value, floors.get(name, {}).get(path))
        for name, found in results["benchmarks"].items()
        for path, value in ratios(found.get("result"))
    ]


def readable(path: str) -> tuple[str, str]:
    """The measure and the peer of a ratio, in the words of the page."""
    *measured, peer = path.split(" / ")
    for ending, measure in ENDINGS.items():
        if peer.endswith(ending):
            peer = peer.removesuffix(ending)
            measured.append(measure)
    words = (MEASURES.get(word, word) for part in measured for word in part.split("/"))
    return ", ".join(words) or "–", NAMES.get(peer, peer)


def page(results: dict[str, Any], floors: dict[str, dict[str, float]]) -> str:
    """The documentation's page of a run."""
    facts = results["environment"]
    kit = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    machine = f"{facts['date']}, {facts['processor']}, {facts['cores']} cores"
    lines = [*INTRODUCTION, f"{machine}, pax {facts['pax']}, Python {facts['python']}, {kit}."]
    for name, found in results["benchmarks"].items():
        lines += ["", f"## {BENCHMARKS[name].question}", ""]
        if "result" not in found:
            lines.append(f"Not measured: {found.get('left_out') or found['failed']}.")
            continue
        lines += [
            f"`{found['command']}`, {found['seconds']} s:",
            "",
            "| measured | peer | ratio | floor |",
            "|---|---|---|---|",
        ]
        for other, path, value, floor in rows(results, floors):
            if other == name:
                lines.append(
                    f"| {' | '.join(readable(path))} | {value:.2f} | {'' if floor is None else f'{floor:.2f}'} |"
                )
    again = "python benchmarks/all.py --quick --peer-python PYTHON"
    lines += [
        "",
        "## Repeat it",
        "",
        f"`{again}` takes some 12 minutes on two cores; its docstring lists the packages that PYTHON needs.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--peer-python")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    floors = yaml.safe_load((HERE / "floors.yaml").read_text()) or {}
    if options.page:
        options.page.write_text(page(json.loads(options.out.read_text()), floors))
        return
    results: dict[str, Any] = {"environment": environment(options.peer_python), "benchmarks": {}}
    for name in options.only:
        rich.print(f"{name} …", file=sys.stderr)
        results["benchmarks"][name] = run(name, options.quick, options.peer_python)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    table = Table("benchmark", "pax over", "ratio", "floor", "")
    found = rows(results, floors)
    for name, path, value, floor in found:
        low = floor is not None and value < floor
        table.add_row(name, path, f"{value:.2f}", "" if floor is None else f"{floor:.2f}", "below" if low else "")
    rich.print(table)
    failed = [name for name, one in results["benchmarks"].items() if "failed" in one]
    low = [
        f"{name}: {path}" for name, path, value, floor in rows(results, floors) if floor is not None and value < floor
    ]
    for line in [*(f"{name} failed." for name in failed), *(f"{one} is below its floor." for one in low)]:
        rich.print(line, file=sys.stderr)
    sys.exit(bool(failed or low))


if __name__ == "__main__":
    main()
