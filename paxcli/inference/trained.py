"""Evaluates and decodes the checkpoints of a run."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax

from paxcli.checkpoint.manager import CheckpointStore, find_steps, format_steps
from paxcli.checkpoint.warm_start import load_params
from paxcli.config.fields import Seed
from paxcli.config.paths import replace_text
from paxcli.config.tree import check_range
from paxcli.errors import ConfigError, DataError, DivergedError
from paxcli.inference.decode import OnText, PromptDecoder, check_continues_prompts, check_decodes, override
from paxcli.inference.prompts import Prompt, PromptLike, parse_prompt
from paxcli.inputs.base_input import BaseInput, Prompts, tokenizer_of
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.documents import TEXT, TOKENS, format_of
from paxcli.inputs.stdlib import StdlibInput
from paxcli.inputs.text import TextInput
from paxcli.log import log
from paxcli.mesh.sharding import infeed_shard
from paxcli.mesh.startup import agree
from paxcli.metrics.curves import FILE_NAME
from paxcli.metrics.writers import JsonlWriter, TensorBoardWriter, read_lines
from paxcli.models.sampling import Decoding, Sampling
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import Experiment, data_of, with_derived_sizes
from paxcli.training.learner import Averaged
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session, build_session
from paxcli.training.step import make_eval_step
from paxcli.training.tokenizer_copies import with_copied_tokenizers

_POLL_SECONDS = 10
_COPIED_FIELDS = {TextInput: ("text_field",), ChatInput: ("text_field", "column_map", "chat_template", "template_date")}
_TURN = threading.RLock()  # of the thread that evaluates or decodes: parameters and inputs are shared
_EVERY_STEP = 2**62  # a writer drops lines of later steps than this: none


def open_trained(config: fdl.Config[Experiment], run_dir: RunDir) -> TrainedRun:
    """The checkpoints of a run, whose recipe is `config`, on this machine's devices, with the run's own tokenizers.

    Raises:
      DataError: The run has no checkpoint.
    """
    find_steps(run_dir.path)
    return TrainedRun(build_session(with_copied_tokenizers(config, run_dir.path)), run_dir)


def wait_for_checkpoint(run_dir: RunDir) -> None:
    """Waits until a run has a checkpoint. Its directory need not exist yet."""
    log.info("Watching %s for checkpoints.", run_dir.path)
    while not CheckpointStore(run_dir.checkpoints).steps():
        time.sleep(_POLL_SECONDS)


class TrainedRun:
    """The checkpoints of a run directory. Writes nothing but `eval/` and `decoded/`.

    Calls of several threads run one after the other.
    """

    def __init__(self, session: Session, run_dir: RunDir):
        self._session, self._run_dir = session, run_dir
        self._held: tuple[int, dict] | None = None  # the parameters that were loaded last, and their step
        self._last_decoder: tuple[Any, PromptDecoder] | None = None
        self._eval_step = make_eval_step(session.experiment.task)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return CheckpointStore(self._run_dir.checkpoints).steps()

    def evaluate(self, step: int, files: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Metrics of one checkpoint on all evaluation inputs: input name → metric → value. Written to `eval/` too.

        Each evaluation starts the inputs over, so that checkpoints are compared on the same examples.

        Args:
          step: The checkpoint.
          files: Instead of the evaluation inputs, these files, read as in training: with its tokenizer, `text_field`
            and chat template. The name of the input is then `files`.

        Raises:
          ConfigError: The recipe has no evaluation input, or no tokenizer to read `files` with.
          DivergedError: A loss is not finite.
        """
        inputs = [self._files_input(list(files))] if files else self._session.experiment.eval_inputs
        if not inputs:
            raise ConfigError("The recipe has no evaluation input.", "Give it `eval_inputs`, or give `--files`.")
        self.params(step)  # first, since `pax eval --watch` handles the error of a step that was deleted
        with _TURN, self._session.active():
            for source in inputs:
                source.reset()
            metrics = self._metrics(step, inputs)
        for name, values in metrics.items():
            if not math.isfinite(values.get("loss", 0.0)):
                hint = f"Evaluate an earlier one with `--step`. There are {format_steps(self.steps())}."
                raise DivergedError(f"The loss of the checkpoint of step {step} on `{name}` is {values['loss']}.", hint)
        self._write_evaluation(step, f"{step}-files.json" if files else f"{step}.json", metrics)
        return metrics

    def run_tasks(self, step: int, names: Sequence[str], manager: Any, **settings: Any) -> dict[str, dict[str, float]]:
        """Metrics of one checkpoint on tasks of lm-eval: task → metric → value. Written to `eval/` too.

        Args:
          step: The checkpoint.
          names: The tasks.
          manager: What `harness.find_tasks` returns.
          **settings: Those of `harness.run_tasks`.

        Raises:
          ConfigError: The model does not continue prompts, or a task needs what it does not have.
          DataError: A task cannot be loaded, or fails.
        """
        from paxcli.inference.harness import run_tasks

        experiment = self._session.experiment
        check_continues_prompts(experiment.task.model)
        greedy = Sampling(batch_size=experiment.decoding.batch_size, eos_ids=experiment.decoding.eos_ids)
        with _TURN, self._session.active():
            decoder = self._decoder(step, experiment.train_input, greedy, seed=0)
            metrics = run_tasks(decoder, names, manager, **settings)
        self._write_evaluation(step, f"{step}-tasks.json", metrics)
        return metrics

    def _write_evaluation(self, step: int, name: str, metrics: dict[str, dict[str, float]]) -> None:
        self._write("eval", step, name, json.dumps({"step": step, "metrics": metrics}) + "\n", metrics)

    def _files_input(self, files: list[str]) -> TextInput:
        """All documents of these files, read as in training; records are chats if training has chats."""
        tokenizer, training = tokenizer_of(self._session.experiment.train_input), self._session.config.train_input
        trained, has_records = fdl.get_callable(training), not {TEXT, TOKENS} & {*map(format_of, files)}
        kind = ChatInput if trained is ChatInput and has_records else TextInput
        source = kind.config(name="files", files=files, reset_for_eval=True, eval_loop_num_batches=None)
        for field in _COPIED_FIELDS[kind] if trained in (kind, StdlibInput) else ():
            setattr(source, field, getattr(training, field))
        source.tokenizer = lambda: tokenizer
        built = self._eval_input(source)
        built.check_data()
        return built

    def _eval_input(self, source: fdl.Config) -> Any:
        """An input as `eval_inputs` are built: each process reads its share."""
        config, mesh = fdl.copy_with(self._session.config, eval_inputs=[source]), self._session.mesh
        return fdl.build(with_derived_sizes(config, mesh.size, *infeed_shard(mesh)).eval_inputs[0])

    def watch(self) -> Iterator[int]:
        """The step of every checkpoint, as it appears, up to the last training step or an early stop."""
        task, seen, is_logged = self._session.experiment.task, -1, False
        rule, path, name = task.early_stopping_fn, self._run_dir.path / FILE_NAME, "task.train.num_train_steps"
        while True:
            # Training may have deleted some meanwhile, and another process may see others.
            while (later := agree(min((step for step in self.steps() if step > seen), default=-1))) >= 0:
                seen = later
                yield seen
            # If the recipe has epochs, the number of steps is only in the run directory.
            end = task.train.num_train_steps or self._run_dir.original_config().get(name, math.inf)
            if agree(seen >= end or rule.reason(read_lines(path, sample=True), seen) is not None):
                return
            if not is_logged and (is_logged := self._is_idle()):
                log.info("No process trains in %s: waiting until one saves another checkpoint.", self._run_dir.path)
            time.sleep(_POLL_SECONDS)

    def _is_idle(self) -> bool:
        """Whether no process trains in the run directory; False in a bucket, where that is not known."""
        try:
            with self._run_dir.lock(dry_run=True):
                return "://" not in str(self._run_dir.path)
        except ConfigError:
            return False

    def continue_prompts(
        self, step: int, prompts: Sequence[PromptLike], settings: Mapping[str, Any], seed: int, on_text: OnText | None
    ) -> list[dict[str, Any]]:
        """Continuations of prompts. Written to `decoded/` too.

        Args:
          step: The checkpoint.
          prompts: Texts, or the fields of `Prompt`.
          settings: Fields of the recipe's `decoding` to replace; None = the recipe's value.
          seed: Seed of sampling.
          on_text: Receives the text while it is generated; None = nothing does.
        """
        check_continues_prompts(self._session.experiment.task.model)
        if not (parsed := [parse_prompt(one) for one in prompts]):
            return []
        with _TURN, self._session.active():
            decoding = override(self._session.experiment.decoding, **settings)
            decoder = self._decoder(step, self._session.experiment.train_input, decoding, seed)
            outputs = decoder.continue_prompts(parsed, on_text)
        self._write_outputs(step, outputs, {})
        return outputs

    def answer_inputs(
        self, step: int, settings: Mapping[str, Any], seed: int, on_text: OnText | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        """Continuations of the recipe's decode inputs, and the inputs' own metrics. Written to `decoded/` too.

        Inputs that have metrics of scores are evaluated as well, as by `evaluate`: each process evaluates its share.

        Raises:
          ConfigError: The recipe has no decode input.
        """
        experiment = self._session.experiment
        check_decodes(experiment.task.model)
        inputs, decoding = experiment.decode_inputs, override(experiment.decoding, **settings)
        prompts = [Prompt(text) for source in inputs if isinstance(source, Prompts) for text in source.prompts]
        data, outputs, metrics = data_of(inputs), [], {}
        if not prompts and not data:
            raise ConfigError("There is no prompt.", 'Give one with `--prompt "…"`.')
        with _TURN, self._session.active():
            if prompts:
                decoder = self._decoder(step, experiment.train_input, decoding, seed)
                outputs += decoder.continue_prompts(prompts, on_text)
            for source, config in zip(data, data_of(self._session.config.decode_inputs), strict=True):
                found, values = self._decoder(step, source, decoding, seed).decode_data(source)
                outputs += found
                if source.example_metrics("scores") is not None:
                    values = self._metrics(step, [self._eval_input(config)])[str(source.name)] | values
                metrics |= {str(source.name): values} if values else {}
        self._write_outputs(step, outputs, metrics)
        return outputs, metrics

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be conversations."""
        return self._session.experiment.train_input.prompt_template() is not None

    def _decoder(self, step: int, source: BaseInput, decoding: Decoding, seed: int) -> PromptDecoder:
        """A decoder with the tokenizer of `source`. The last one is kept, with what it has compiled."""
        check_range("seed", seed, Seed)
        experiment, params = self._session.experiment, self.params(step)
        key = (step, id(source), decoding, seed)
        if self._last_decoder is None or self._last_decoder[0] != key:
            tokenizer, template = tokenizer_of(source), source.prompt_template()
            decoder = PromptDecoder(experiment.task.model, params, tokenizer, decoding, seed, template)
            self._last_decoder = key, decoder
        return self._last_decoder[1]

    def params(self, step: int) -> dict:
        """The parameters to evaluate: their moving averages, if the recipe keeps them. The last ones stay loaded.

        The dicts are new ones, so that a caller may change them.
        """
        with _TURN:
            if self._held is None or self._held[0] != step:
                self._held = self._last_decoder = None  # frees the memory first
                self._held = step, self._load(step)
            return jax.tree.map(lambda leaf: leaf, self._held[1])

    def _metrics(self, step: int, inputs: Sequence[BaseInput]) -> dict[str, dict[str, float]]:
        combine, mesh = self._session.experiment.task.metrics, self._session.mesh
        return evaluate(self._eval_step, self.params(step), inputs, mesh, combine)

    def _load(self, step: int) -> dict:
        learner, abstract = self._session.experiment.task.train.learner, self._session.abstract
        wanted: Any = abstract.params
        averages = learner.ema_decay is not None
        if averages:
            wanted = {"params": wanted, "opt_state": {"ema": abstract.opt_state.ema}}
        loaded, report = load_params(str(self._run_dir.path), step, wanted, "all" if averages else "params")
        if report.arrays.missing or report.arrays.mismatched or report.cast:
            raise DataError(report.text(), "Use the recipe that the run was trained with: its `recipe.yaml`.")
        return learner.eval_params(loaded["params"], Averaged(None, loaded["opt_state"]["ema"])) if averages else loaded

    def _write_outputs(self, step: int, outputs: list[dict[str, Any]], metrics: dict[str, dict[str, float]]) -> None:
        lines = "".join(json.dumps(output, ensure_ascii=False) + "\n" for output in outputs)
        self._write("decoded", step, f"{step}.jsonl", lines, metrics)

    def _write(self, folder: str, step: int, name: str, text: str, metrics: dict[str, dict[str, float]]) -> None:
        """Writes results to a file, and adds metrics to `metrics.jsonl` and the TensorBoard events beside it."""
        if jax.process_index() != 0:
            return
        directory = self._run_dir.path / folder
        writers = ((JsonlWriter, "metrics.jsonl"), (TensorBoardWriter, "tensorboard")) if metrics else ()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            replace_text(directory / name, text)
            for kind, file in writers:
                writer = kind(directory / file, _EVERY_STEP)
                for split, values in metrics.items():
                    writer.write(step, values, split=f"{folder}/{split}")
                writer.close()
        except OSError as error:  # the results are worth more than their file
            log.warning("The results of step %d were not written to %s: %s", step, directory, error)
