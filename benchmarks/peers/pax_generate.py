"""Greedy decoding of pax."""

from __future__ import annotations

import json
import pathlib
import tempfile

import fiddle as fdl
import numpy as np
from hf_generate import prompts
from steps import serve

import paxcli as pax
from paxcli.inference.continuous_batching import Generator, Request
from paxcli.models.sampling import Sampling, sequence_settings


def make_step(task: dict):
    """Generates one batch."""
    with tempfile.TemporaryDirectory() as run_dir:
        pax.import_weights(task["directory"], run_dir)
        run = pax.Run(run_dir)
        model, params = fdl.build(run.config.task.model), run.params()
    greedy = Sampling(batch_size=task["batch"], eos_ids=())
    generator = Generator(model, params, greedy, 0)
    count, path = task["tokens"], pathlib.Path(task["directory"]) / task["ids"]
    requests = [
        Request(np.array(ids), len(ids), count, sequence_settings(greedy, 0, number))
        for number, ids in enumerate(prompts(task))
    ]

    def step() -> None:
        answers = generator.answer(requests, lambda index, ids, is_done: None)
        if not path.exists():
            path.write_text(json.dumps([one.ids.tolist() for (one,) in answers]))

    return step, lambda: None


if __name__ == "__main__":
    serve(make_step)
