"""Trains on a Lingvo generator, in this process, which can load Lingvo."""

from __future__ import annotations

import pytest

from tests.inputs.lingvo_marks import MARKS
from tests.training.runs import losses

pytestmark = MARKS


def _config(steps: int, directory):
    from paxcli.config.resolve import resolve
    from paxcli.inputs.lingvo_adaptors import LingvoInputAdaptor
    from tests.inputs import lingvo_data

    class Targets(LingvoInputAdaptor):
        """The target side alone, as a language model's batch."""

        def get_next(self):
            batch = super().get_next()
            return batch.tgt

    sets = ["num_layers=1", "model_dims=32", "hidden_dims=64", "max_seq_len=64", f"num_train_steps={steps}"]
    sets += ["save_interval_steps=2", "eval_interval_steps=null", "summary_interval_steps=1", "global_batch_size=8"]
    config = resolve("tiny", (), sets).config
    config.train_input = Targets.config(input=lambda: lingvo_data.packed_pairs(directory), input_random_seed=3)
    config.eval_inputs = []
    return config


def test_trains_and_resumes(tmp_path):
    from paxcli.training.loop import train
    from paxcli.training.progress import Reporter
    from paxcli.training.run_dir import RunDir

    for name, lengths in {"straight": [6], "resumed": [2, 6]}.items():
        for steps in lengths:
            run_dir = RunDir(tmp_path / name)
            train(_config(steps, tmp_path), "recipe: tiny", run_dir, Reporter(), allow_changed=True)
    straight, resumed = losses(tmp_path / "straight"), losses(tmp_path / "resumed")
    assert len(straight) == 6 and {step: resumed[step] for step in straight} == pytest.approx(straight, rel=1e-6)
