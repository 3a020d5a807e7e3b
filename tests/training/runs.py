"""Small real runs as processes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

_SMALL = {
    "num_layers": 1,
    "model_dims": 32,
    "hidden_dims": 64,
    "max_seq_len": 32,
    "num_train_steps": 60,
    "eval_interval_steps": 30,
    "save_interval_steps": 10,
    "warmup_steps": 5,
}


def small(**changes: object) -> list[str]:
    """`--set` options that make `tiny` smaller still; `None` stands for null."""
    values = {**_SMALL, **changes}
    return [f"--set={path}={'null' if value is None else value}" for path, value in values.items()]


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
