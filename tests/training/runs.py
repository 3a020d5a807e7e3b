"""Small real runs as processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

from tests.devices import cpu_devices

ROOT = pathlib.Path(__file__).resolve().parents[2]

_SMALL = {
    "num_layers": 1,
    "model_dims": 32,
    "hidden_dims": 64,
    "max_seq_len": 32,
    "num_train_steps": 60,
    "eval_interval_steps": 30,
    "save_interval_steps": 10,
    "warmup_steps": 5,
    "train_input.input_random_seed": 7,
    "eval_inputs.0.batch_size": 128,  # an evaluation costs by the batch
    "eval_inputs.0.eval_fraction?": 0.003,  # where it reads text
}


def small(**changes: object) -> list[str]:
    """`--set` options that make `tiny` smaller still; `None` stands for null."""
    values = {**_SMALL, **changes}
    if "eval_inputs" in changes:
        del values["eval_inputs.0.batch_size"], values["eval_inputs.0.eval_fraction?"]
    return [f"--set={path}={'null' if value is None else value}" for path, value in values.items()]


def on_meshes(folder: pathlib.Path, devices: int, cases: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """What `tests/training/on_meshes.py` computes for each case on so many devices, as one process."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.on_meshes", folder / "cases.json", folder / "out.npz"],
        cwd=ROOT,
        env={**os.environ, **cpu_devices(devices)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "out.npz") as arrays:
        return [
            {name.partition("/")[2]: arrays[name] for name in arrays if name.startswith(f"{i}/")}
            for i in range(len(cases))
        ]


def losses(run_dir: pathlib.Path) -> dict[int, float]:
    """Step → training loss, of every line of `metrics.jsonl`; a step that is there twice is a failure."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [(line["step"], line["loss"]) for line in lines if line["split"] == "train"]
    assert len(dict(train)) == len(train), "a step was logged twice"
    return dict(train)


def evals(run_dir: pathlib.Path) -> dict[int, Any]:
    """Step → evaluation metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["split"] != "train"}


def final_arrays(run_dir: pathlib.Path) -> dict[str, Any]:
    """Every array of the newest checkpoint, by name."""
    import jax
    import orbax.checkpoint as ocp

    step = max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        directory = run_dir / "checkpoints" / str(step) / "state"
        arguments = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(directory).item_metadata.tree
        )
        tree = reader.restore(directory, args=ocp.args.PyTreeRestore(restore_args=arguments))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
