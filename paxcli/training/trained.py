"""A run that has checkpoints: its metrics and its text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax

from paxcli.checkpoint.manager import CheckpointStore, listing_of_steps
from paxcli.checkpoint.warm_start import load_params
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.base_input import Prompts
from paxcli.metrics.writers import JsonlWriter, TensorBoardWriter
from paxcli.models.decoding import Sampling
from paxcli.training.decode import check_decodes, decode, decode_data
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import data_of
from paxcli.training.learner import Averaged
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session
from paxcli.training.step import make_eval_step, make_score_step

_POLL_SECONDS = 10
_EVERY_STEP = 2**62  # nothing that a writer finds is later, and to be taken back


class TrainedRun:
    """A run directory, read only but for `eval/` and `decoded/`."""

    def __init__(self, session: Session, run_dir: RunDir):
        self._session, self._run_dir = session, run_dir
        self._store = CheckpointStore(run_dir.checkpoints)
        self._eval_step = make_eval_step(session.experiment.task)
        self._score_step = make_score_step(session.experiment.task)

    def step(self, wanted: int | None) -> int:
        """`wanted`, or the newest step.

        Raises:
          DataError: There is no such checkpoint.
        """
        steps = self._store.steps()
        if not steps:
            raise DataError(f"There is no checkpoint in {self._run_dir.path}.", "Train it first: `pax train`.")
        if wanted is not None and wanted not in steps:
            raise DataError(
                f"{self._run_dir.path} has no checkpoint of step {wanted}.", f"Steps there: {listing_of_steps(steps)}."
            )
        return steps[-1] if wanted is None else wanted

    def evaluate(self, step: int) -> dict[str, dict[str, float]]:
        """Metrics of one checkpoint on all evaluation inputs, also written to `eval/`."""
        inputs = self._session.experiment.eval_inputs
        if not inputs:
            raise ConfigError("The recipe has no evaluation input.", "Give it `eval_inputs`.")
        combine = self._session.experiment.task.metrics
        metrics = evaluate(self._eval_step, self._params(step), inputs, self._session.mesh, combine, self._score_step)
        self._write("eval", f"{step}.json", json.dumps({"step": step, "metrics": metrics}) + "\n")
        self._write_metrics("eval", step, metrics)
        return metrics

    def watch(self) -> Iterator[int]:
        """Every checkpoint as it appears, the last step's included."""
        last, seen = self._session.experiment.task.train.num_train_steps, 0
        while seen < last:
            for step in self._store.steps():
                if step > seen:
                    seen = step
                    yield step
            if seen < last:
                time.sleep(_POLL_SECONDS)

    def decode(
        self, step: int, prompts: Sequence[str], max_tokens: int, sampling: Sampling, seed: int
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        """Continuations of prompts, or of the recipe's decode inputs, and the metrics of those; also in `decoded/`.

        Raises:
          ConfigError: There is no prompt, and no decode input.
        """
        check_decodes(self._session.experiment.task.model)
        inputs, metrics, params = self._session.experiment.decode_inputs, {}, self._params(step)
        data = [] if prompts else data_of(inputs)
        asked = prompts or [prompt for source in inputs if isinstance(source, Prompts) for prompt in source.prompts]
        if not asked and not data:
            raise ConfigError("There is no prompt.", 'Give one with `--prompt "…"`.')
        outputs = decode(self._session, params, asked, max_tokens, sampling, seed) if asked else []
        for source in data:
            found, values = decode_data(self._session, params, source, max_tokens, sampling, seed)
            outputs += found
            metrics |= {str(source.name): values} if values else {}
        lines = "".join(json.dumps(output, ensure_ascii=False) + "\n" for output in outputs)
        self._write("decoded", f"{step}.jsonl", lines)
        self._write_metrics("decoded", step, metrics)
        return outputs, metrics

    def _params(self, step: int) -> dict:
        """The parameters to evaluate: moving averages, where the run has them."""
        learner, abstract = self._session.experiment.task.train.learner, self._session.abstract
        if learner.ema_decay is None:
            return self._loaded(step, abstract.params, "params")
        saved = {"params": abstract.params, "opt_state": {"ema": abstract.opt_state.ema}}
        loaded = self._loaded(step, saved, "all")
        return learner.evaluated(loaded["params"], Averaged(None, loaded["opt_state"]["ema"]))

    def _loaded(self, step: int, wanted: Any, what: Literal["params", "all"]) -> Any:
        loaded, report = load_params(self._run_dir.path, step, wanted, what)
        if report.missing or report.mismatched:
            raise DataError(report.text(), "Use the recipe that the run was trained with: its `recipe.yaml`.")
        return loaded

    def _write_metrics(self, folder: str, step: int, metrics: dict[str, dict[str, float]]) -> None:
        """Adds metrics to the folder's `metrics.jsonl` and TensorBoard events; the run's own are its training's."""
        if jax.process_index() != 0 or not metrics:
            return
        path = self._run_dir.path / folder
        writers = [
            JsonlWriter(path / "metrics.jsonl", _EVERY_STEP),
            TensorBoardWriter(path / "tensorboard", _EVERY_STEP),
        ]
        for writer in writers:
            for name, values in metrics.items():
                writer.write(step, values, split=f"{folder}/{name}")
            writer.close()

    def _write(self, folder: str, name: str, text: str) -> None:
        if jax.process_index() == 0:
            (self._run_dir.path / folder).mkdir(parents=True, exist_ok=True)
            (self._run_dir.path / folder / name).write_text(text)
