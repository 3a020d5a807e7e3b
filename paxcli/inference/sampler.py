"""Continues the recipe's sample prompts during training."""

from __future__ import annotations

import json

import jax

from paxcli.config.paths import replace_text
from paxcli.errors import ConfigError
from paxcli.inference.decode import Prompt, PromptDecoder, check_continues_prompts
from paxcli.inputs.base_input import tokenizer_of
from paxcli.metrics.writers import read_records
from paxcli.training.run_dir import SAMPLES, RunDir
from paxcli.training.session import Session


class Sampler:
    """Continues `sample_prompts` with the recipe's `decoding`, always with the same seed. Compiled once.

    Args:
      session: The session of the training run.
      run_dir: Its directory, for `samples.jsonl`.
      last_step: The step that the run resumes from; 0 in a new run. Samples of later steps are dropped.

    Raises:
      ConfigError: There is no evaluation to sample after, the model does not continue prompts, or one does not fit.
    """

    def __init__(self, session: Session, run_dir: RunDir, last_step: int):
        experiment = session.experiment
        check_continues_prompts(experiment.task.model)
        if not experiment.eval_inputs:
            problem = "`sample_prompts` are continued after each evaluation, and the recipe has no `eval_inputs`."
            raise ConfigError(problem, "Give it one, or leave out `sample_prompts`.")
        self._prompts = [Prompt(text) for text in experiment.sample_prompts]
        tokenizer = tokenizer_of(experiment.train_input)
        self._decoder = PromptDecoder(experiment.task.model, {}, tokenizer, experiment.decoding, seed=0)
        self._decoder.requests(self._prompts)
        self._path = run_dir.path / SAMPLES
        self._lines = [line for line in read_records(self._path) if line["step"] <= last_step]

    def __call__(self, step: int, params: dict) -> list[tuple[str, str]]:
        """Each prompt and its continuation. Written to `samples.jsonl` too, in place of later steps' lines."""
        self._decoder.generator.set_params(params)
        outputs = self._decoder.continue_prompts(self._prompts)
        self._decoder.generator.set_params({})  # training reuses their memory
        samples = [(output["prompt"], output["text"]) for output in outputs]
        self._lines = [line for line in self._lines if line["step"] < step]
        self._lines += [{"step": step, "prompt": prompt, "text": text} for prompt, text in samples]
        if jax.process_index() == 0:
            replace_text(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines))
        return samples
