"""Run by test_seqio_metrics.py, in each process of a job: decodes a task with metrics of scores, and prints them."""

from __future__ import annotations

import json
import pathlib
import sys

import fiddle as fdl

from paxcli.inference.trained import TrainedRun
from paxcli.models.language_model import LanguageModel
from paxcli.training.run_dir import RunDir
from paxcli.training.session import build_session
from tests.inference.test_seqio_metrics import LANGUAGE, experiment
from tests.inputs.seqio_tasks import register

register()
config = experiment(LanguageModel, LANGUAGE, "pax_sums", {"inputs": 12, "targets": 20})
with build_session(
    fdl.copy_with(config, mesh=fdl.copy_with(config.mesh, ici_mesh_shape={"fsdp": 8}))
).active() as session:
    params = session.new_state().params
run = TrainedRun(session, RunDir(pathlib.Path(sys.argv[1])))
run.params = lambda step: params
rows = []
step = run._eval_step
run._eval_step = lambda params, batch: rows.append(len(batch.ids)) or step(params, batch)
outputs, metrics = run.answer_inputs(7, {"max_tokens": 3}, seed=0)
print(json.dumps({"rows": rows, "metrics": metrics["toy"], "outputs": outputs}))
