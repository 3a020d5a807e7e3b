"""Cost on the host as the number of files, logged steps, inputs of a recipe or devices grows: one JSON line a point.

    python benchmarks/host_sweep.py files [--values 100 1000 10000 100000]
    python benchmarks/host_sweep.py metrics | recipe | devices

| sweep | varies | measures |
|---|---|---|
| files | text files of 2 KB, one document each | seconds to the first batch, and to a batch after a restored position |
| metrics | lines of `metrics.jsonl`, one in 1,000 of an evaluation | seconds of `pax plot`, and of a resumed step |
| recipe | its evaluation inputs | seconds of `pax recipes show` |
| devices | chips of a TPU v5p, compiled for without one | seconds of `pax compile` |

Each line has slopes: the exponents of the growth since the line before. 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

VALUES = {
    "files": (100, 1_000, 10_000, 100_000),
    "metrics": (10_000, 100_000, 1_000_000, 10_000_000),
    "recipe": (1, 10, 100),
    "devices": (4, 64, 1024, 4096),
}


def pax(*arguments: str) -> float:
    """Seconds of a command.

    Raises:
      CalledProcessError: It failed; its error is on stderr.
    """
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "paxcli", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def files(count: int, directory: pathlib.Path) -> dict[str, float]:
    """Seconds of opening text files."""
    for number in range(count):
        folder = directory / f"{number // 1000}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"document {number} " * 128)
    script = [sys.executable, str(pathlib.Path(__file__).resolve()), "files", "--in-process", str(directory)]
    return json.loads(subprocess.run(script, check=True, stdout=subprocess.PIPE).stdout)


def open_files(directory: str) -> dict[str, float]:
    """In a process of its own: seconds to the first batch, and to the next one in a second input."""
    from paxcli.inputs.text import TextInput

    def make() -> TextInput:
        return TextInput(files=[f"{directory}/*/*.txt"], is_training=True, batch_size=8, seq_len=512)

    began = time.perf_counter()
    first = make()
    first.get_next()
    opened = time.perf_counter()
    again = make()
    again.set_state(first.get_state())
    again.get_next()
    return {"first_batch_seconds": opened - began, "resumed_batch_seconds": time.perf_counter() - opened}


def metrics(count: int, directory: pathlib.Path) -> dict[str, float]:
    """Seconds of plotting, and of resuming a run for a step, whose file has many lines of its first step."""
    run, path = str(directory / "run"), directory / "run" / "metrics.jsonl"
    train = ["train", "tiny-synthetic", "--set=num_layers=1", "--set=unroll=1", "--set=model_dims=32", "--run-dir", run]
    pax(*train, "--set=num_train_steps=2")
    last = path.read_text().splitlines(keepends=True)[-1]
    line = json.dumps(json.loads(last) | {"step": 1, "split": "train"}) + "\n"
    block = line * 1000 + line.replace('"train"', '"eval/text"')
    path.write_text(block * (count // 1000) + last)
    return {
        "bytes": path.stat().st_size,
        "plot_seconds": pax("plot", run),
        "resume_seconds": pax(*train, "--set=num_train_steps=3", "--allow-changed"),
    }


def recipe(count: int, directory: pathlib.Path) -> dict[str, float]:
    """Seconds of printing a recipe with many evaluation inputs."""
    path = directory / "many.py"
    path.write_text(
        "from paxcli.config.recipe import recipe\n"
        "from paxcli.inputs.stdlib import StdlibInput\n"
        "from pax_recipes.tiny import tiny\n\n\n"
        "@recipe()\n"
        "def many():\n"
        '    """A recipe with many evaluation inputs."""\n'
        "    config = tiny()\n"
        f"    config.eval_inputs = [StdlibInput.config(name=f'text-{{n}}') for n in range({count})]\n"
        "    return config\n"
    )
    return {"show_seconds": pax("recipes", "show", f"{path}:many")}


def devices(count: int, directory: pathlib.Path) -> dict[str, float]:
    """Seconds of compiling a small model, with its data and parameters sharded over all chips."""
    sets = ["--set=num_layers=2", "--set=model_dims=512", "--set=max_seq_len=256", f"--set=global_batch_size={count}"]
    sets.append(f"--set=ici_mesh_shape=[1,{count},1]")
    return {"compile_seconds": pax("compile", "tiny-synthetic", "--topology", f"v5p-{2 * count}", *sets)}


SWEEPS: dict[str, Callable[[int, pathlib.Path], dict[str, float]]] = {
    "files": files,
    "metrics": metrics,
    "recipe": recipe,
    "devices": devices,
}


def with_slopes(point: dict[str, float], before: dict[str, float] | None) -> dict[str, float]:
    """A point, with the exponent of each measurement's growth since the point before."""
    grown = {} if before is None else {name: point[name] / before[name] for name in point if name.endswith("_seconds")}
    value = math.log(point["value"] / before["value"]) if before else 1.0
    return point | {name.replace("seconds", "slope"): round(math.log(one) / value, 2) for name, one in grown.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=sorted(SWEEPS))
    parser.add_argument("--values", nargs="+", type=int)
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(open_files(options.in_process)))
        return
    before = None
    for value in options.values or VALUES[options.sweep]:
        with tempfile.TemporaryDirectory() as directory:
            point = {"value": value} | SWEEPS[options.sweep](value, pathlib.Path(directory))
        print(json.dumps(with_slopes(point, before)), flush=True)
        before = point


if __name__ == "__main__":
    main()
