"""Writes lm_eval_hf.json: what lm-eval's own `hf` model makes of the tasks in tests/inference/lm_eval_tasks.py.

Needs lm-eval 0.4.13, transformers, accelerate and torch, beside pax: python -m tests.data.lm_eval_hf
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from tests.inference.lm_eval_tasks import TASKS, write_model, write_tasks

FEWSHOT = (0, 2)


def run(model: pathlib.Path, tasks: pathlib.Path, num_fewshot: int) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    settings: dict[str, Any] = {"num_fewshot": num_fewshot, "bootstrap_iters": 1000, "batch_size": 4, "device": "cpu"}
    found = lm_eval.simple_evaluate(
        "hf", f"pretrained={model},dtype=float32", tasks=list(TASKS), task_manager=manager, **settings
    )
    metrics = {
        task: {name.removesuffix(",none"): x for name, x in values.items() if isinstance(x, float)}
        for task, values in found["results"].items()
    }
    responses = {task: [one["resps"] for one in rows] for task, rows in found["samples"].items()}
    return {"metrics": metrics, "responses": responses}


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    model = write_model(folder / "hf")
    drafts = run(model, write_tasks(folder / "drafts", ["?"]), 0)["responses"]["local_answer"]
    answers = [draft[0][0].strip() for draft in drafts[:4]] + ["cat"]  # some are right
    tasks = write_tasks(folder / "tasks", answers)
    results = {str(count): run(model, tasks, count) for count in FEWSHOT}
path = pathlib.Path(__file__).with_suffix(".json")
path.write_text(json.dumps({"answers": answers, "results": results}, indent=1) + "\n")
