"""`sample_prompts`: text generated after each evaluation, which changes nothing in the training."""

from __future__ import annotations

import json

import pytest

import paxcli as pax
from paxcli.errors import ConfigError
from paxcli.training.progress import Reporter
from tests.training.runs import losses

SMALL = {
    "num_layers": 1,
    "model_dims": 32,
    "hidden_dims": 64,
    "num_heads": 2,
    "max_seq_len": 32,
    "global_batch_size": 4,
    "num_train_steps": 4,
    "summary_interval_steps": 1,
    "save_interval_steps": 2,
    "eval_interval_steps": 2,
    "eval_inputs.0.reset_for_eval": False,
    "eval_inputs.0.eval_loop_num_batches": 1,
    "train_input.input_random_seed": 7,
    "decoding.max_tokens": 6,
}
PROMPTS = ["def ", "é→"]


class Lines(Reporter):
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def train(path, **changes):
    lines = Lines()
    run = pax.train(pax.load("tiny", set=SMALL | changes), path, progress=lines, allow_changed=True)
    return run, lines.lines


def samples(path):
    return [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_samples_are_what_generate_returns_and_training_is_the_same(tmp_path):
    train(tmp_path / "plain")
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    run, lines = train(tmp_path / "sampled", sample_prompts=PROMPTS)
    assert losses(tmp_path / "sampled") == losses(tmp_path / "plain")
    found = samples(tmp_path / "sampled")
    assert [(one["step"], one["prompt"]) for one in found] == [(step, text) for step in (2, 4) for text in PROMPTS]
    for step in (2, 4):
        wanted = [one.text for one in run.generate(PROMPTS, step=step)]
        assert [one["text"] for one in found if one["step"] == step] == wanted
    assert f"step 4 · sample · 'é→' → {found[-1]['text']!r}" in lines

    # A resumed run continues the file.
    train(tmp_path / "sampled", sample_prompts=PROMPTS[:1], num_train_steps=6)
    assert samples(tmp_path / "sampled")[:4] == found
    assert [one["step"] for one in samples(tmp_path / "sampled")] == [2, 2, 4, 4, 6]


class Killer(Lines):
    def evaluation(self, step, metrics):
        if step == 3:
            raise KeyboardInterrupt


def test_samples_of_lost_steps_are_dropped(tmp_path):
    """That of step 3 stayed, although the run that resumed had no evaluation there."""
    recipe = pax.load("tiny", set=SMALL | {"eval_interval_steps": 1, "sample_prompts": PROMPTS[:1]})
    with pytest.raises(KeyboardInterrupt):
        pax.train(recipe, tmp_path, progress=Killer())
    assert [one["step"] for one in samples(tmp_path)] == [1, 2, 3]
    train(tmp_path, sample_prompts=PROMPTS[:1], eval_interval_steps=None)
    assert [one["step"] for one in samples(tmp_path)] == [1, 2, 4]


def test_a_prompt_that_does_not_fit_is_found_before_training(tmp_path):
    with pytest.raises(ConfigError, match="is longer than"):
        train(tmp_path / "run", sample_prompts=["x" * 40])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_prompts_without_an_evaluation_are_refused(tmp_path):
    recipe = pax.load("tiny", set={"eval_inputs": [], "sample_prompts": ["x"]})
    with pytest.raises(ConfigError, match="no `eval_inputs`"):
        pax.train(recipe, tmp_path / "run", progress=Lines())
