"""The training loop: restore or initialize, train, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import fiddle as fdl
import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from paxcli.checkpoint.local_tier import local_steps
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import OnCorrupt
from paxcli.config.bucket import count_retries, repeat_operations
from paxcli.config.render import config_text, with_set
from paxcli.config.values import plain_values
from paxcli.errors import ConfigError, DataError, PaxError, Stopped
from paxcli.inputs.base_input import BaseInput
from paxcli.layers.scopes import EVALUATE_PHASE, INPUT_PHASE, SAVE_PHASE, TRAIN_PHASE
from paxcli.mesh.mesh import describe
from paxcli.mesh.sharding import put_batch
from paxcli.mesh.startup import agree, exit_on_error, find_different, return_free_memory
from paxcli.metrics.curves import FILE_NAME
from paxcli.metrics.goodput import COMPILE, EVAL, RESTORE, SAVE, START_UP, STEP, Goodput
from paxcli.metrics.meter import Meter, Record
from paxcli.metrics.trackers import TrackerWriter, check_installed
from paxcli.metrics.writers import TRAIN, JsonlWriter, MetricValues, TensorBoardWriter, Writer, read_lines
from paxcli.nested_map import NestedMap
from paxcli.training.divergence import DivergenceCheck
from paxcli.training.evaluate import evaluate
from paxcli.training.experiment import Experiment, tokens_in
from paxcli.training.instrument import Instrument
from paxcli.training.out_of_memory import explain_out_of_memory
from paxcli.training.progress import ProgressPrinter, Reporter
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session, build_session, device_name, with_counted_steps
from paxcli.training.signals import StopRequest
from paxcli.training.start_from import WarmStart, check_start, copy_origin, load_warm_start
from paxcli.training.state import TrainState, count_parameters
from paxcli.training.step import TrainStep, make_eval_step
from paxcli.training.tokenizer_copies import copy_tokenizers
from paxcli.training.watchdog import Watchdog

_RUN_SEED, _DATA_SEED = "task.train.random_seed", "train_input.input_random_seed"
# From a step and its parameters to each of the `sample_prompts` with its continuation.
Sample = Callable[[int, dict], list[tuple[str, str]]]
_EVALUATED = "evaluated"  # a key of saved positions: whether those of eval inputs are after that step's evaluation


class TrainingRun:
    """The state of a training run on one process; `train` below drives it."""

    def __init__(self, session: Session, run_dir: RunDir, report: Reporter, stop: StopRequest, instrument: Instrument):
        self.session, self.run_dir, self.report, self.stop = session, run_dir, report, stop
        self.instrument = instrument
        self.sample: Sample | None = None
        check_installed(session.experiment.writers)
        self.task = session.experiment.task
        self.num_train_steps: int = session.config.task.train.num_train_steps
        self.input = session.experiment.train_input
        self.store = CheckpointStore(run_dir.checkpoints, session.experiment.checkpoint)
        self.eval_step = make_eval_step(self.task)
        self.recipe = plain_values(session.config)
        # Eval inputs that continue where their last evaluation ended. Their positions are those after the last complete
        # evaluation, so that an interrupted one can be repeated.
        self.continued = {_split(one): one for one in session.experiment.eval_inputs if not one.reset_for_eval}
        self.eval_positions, self.evaluated_step = self._eval_positions(), 0
        newest, model = self.store.latest_step(), self.task.model
        # Imported weights have neither adapters nor the copy that DPO compares with: training starts from them.
        is_import = newest == 0 and (model.lora is not None or model.keeps_reference)
        self.imported = WarmStart(os.fspath(run_dir.path), 0) if is_import else None
        self.resumes, self.last_step = newest is not None and not is_import, newest or 0
        self.lines = list(read_lines(run_dir.path / FILE_NAME, sample=True)) if self.resumes else []
        self.is_copy = not self.lines
        self.watchdog = Watchdog(self.task.train.step_timeout_seconds)

    def start(self, warm_start: WarmStart | None, created: Future[TrainState] | None) -> TrainState:
        """The state to start from: the latest checkpoint's; without one, the `created` one, or another run's."""
        if created is None:
            with self.goodput.time(RESTORE):
                self.last_step, state, positions = self.store.restore_newest(self.session.abstract, self.report.message)
            self.report.message(f"Resuming {self.run_dir.path} at step {self.last_step}.")
            self._restore_positions(self.last_step, positions, self.store.recipe(self.last_step))
            return state
        state = created.result()
        if warm_start is not None:
            state, report = load_warm_start(state, warm_start, self.task)
            self.report.message(report.text())
        return state

    def _restore_positions(self, step: int, saved: dict[str, Any], recipe: Mapping[str, Any]) -> None:
        """Restores the positions that a checkpoint has; those of eval inputs only if no eval input was changed.

        If the evaluation of `step` ended after the checkpoint was saved, the eval inputs are moved past it.
        """
        evals = [path for path in recipe if path.startswith("eval_inputs.")]
        changed = next((f"`{path}` changed" for path in evals if self.recipe.get(path) != recipe[path]), None)
        ended = self._is_eval_ended(step) and not saved.get(_EVALUATED)
        for split, source in {TRAIN: self.input, **self.continued}.items():
            if split in saved and (split == TRAIN or changed is None):
                source.set_state(saved[split])
                for _ in source.eval_batches() if split != TRAIN and ended else ():
                    pass
            else:  # otherwise a converted checkpoint, or one that an earlier version wrote
                reason = changed if split in saved else "the checkpoint has no position of it"
                self.report.message(f"Input `{source.name}` starts at its beginning: {reason}.")
        self.eval_positions, self.evaluated_step = self._eval_positions(), step if self._is_eval_ended(step) else 0

    def _eval_positions(self) -> dict[str, Any]:
        return {split: source.get_state() for split, source in self.continued.items()}

    def run(self, warm_start: WarmStart | None, goodput: Goodput, recipe_text: str) -> None:
        """Trains from the latest checkpoint, or from the start: to the last step, an early stop, or a signal.

        `recipe_text`: the recipe as YAML, which replaces that of a resumed run once its checkpoint is restored.
        """
        self.started, self.goodput = time.perf_counter(), goodput
        with goodput.time(COMPILE):
            train_step, state, first_batch = self._compile(warm_start)
        if self.resumes and jax.process_index() == 0:
            self.run_dir.describe(self.session.config, recipe_text)
        self.last_step = goodput.first_step = goodput.step = int(state.step)
        lines = [line for line in self.lines if line["step"] <= self.last_step]
        self.divergence = DivergenceCheck(self.task.train.learner, self.last_step, int(state.skipped_steps), lines)
        self.lines = [line for line in lines if line["split"] != TRAIN]  # those of train steps may be large
        batch, peak = self.session.batch, self.session.peak_flops
        flops = self.task.model.step_flops(batch)
        self.meter = Meter(
            flops_per_step=flops.total if flops else None,
            tokens_per_step=tokens_in(batch),
            num_train_steps=self.num_train_steps,
            peak_flops_total=peak * self.session.mesh.size if peak else None,
            summary_interval_steps=self.task.train.summary_interval_steps,
        )
        self.writers = self._writers(self.last_step if self.resumes else 0)
        goodput.switch(STEP)
        with self.watchdog, contextlib.ExitStack() as stack:
            for close in (*(writer.close for writer in self.writers), self._close):  # called in reverse order
                stack.push(close)
            self._train(train_step, state, self.last_step + 1, first_batch)

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the trace and the last save; `kind` is the type of what ended the run, if it did not end by itself."""
        self.goodput.switch(SAVE)
        self.seconds = time.perf_counter() - self.started
        self.instrument.close()
        if jax.process_count() == 1 or kind is None:  # else it could wait for the others for ever
            self.store.close()

    def _train(self, train_step: TrainStep, state: TrainState, first_step: int, first_batch: NestedMap | None) -> None:
        if self.is_eval_missing(first_step - 1):
            self._evaluate(first_step - 1, state, _logged_splits(self.lines, first_step - 1))
        for step in range(first_step, self.num_train_steps + 1):
            if self._is_eval_due(self.last_step) and (reason := self.end_reason()):
                self._save(self.last_step, state, force=True)
                self.report.message(f"Stopping early: {reason}. Saved at step {self.last_step}.")
                break
            self.instrument.before(step)
            begin = time.perf_counter()
            with TraceAnnotation(INPUT_PHASE):
                batch, first_batch = first_batch or self._next_batch(step), None
            waited = time.perf_counter() - begin
            self.goodput.add_input_wait(self.meter.idle_seconds(begin))
            with StepTraceAnnotation(TRAIN_PHASE, step_num=step):
                state, metrics = train_step(state, put_batch(batch, self.session.mesh))
            self.goodput.step = step
            self.instrument.after(step, metrics)
            self._emit(self.meter.record(step, metrics, waited))
            if step == first_step:
                self._emit(self.meter.flush())  # report the first step at once
            self._after(step, state)
            self.last_step = step
            self.watchdog.beat()
        self._emit(self.meter.flush())

    def _next_batch(self, step: int) -> NestedMap:
        try:
            return self.input.get_next()
        except StopIteration:
            hint = "Leave its repeat unset, or train fewer steps."
            self.input.refuse(f"it ended before step {step} of {self.num_train_steps}.", hint, DataError)

    def _compile(self, warm_start: WarmStart | None) -> tuple[TrainStep, TrainState, NestedMap | None]:
        """The compiled step, the initial state and the first batch, each in a thread of its own.

        A resumed run reads its first batch last, after the input's position is restored. The batch is None if an
        evaluation is due first: the run may then save the input's position, or stop.
        """
        with ThreadPoolExecutor(3, "start-up") as pool:
            created = None if self.resumes else pool.submit(self.instrument.programs.prepare_state(self.session))
            compiling = pool.submit(self.instrument.prepare(self.session))
            reading = None if self.resumes else pool.submit(self._next_batch, 1)
            with self.goodput.time(START_UP):
                state = self.start(warm_start, created)
                if self.resumes and not self._is_eval_due(self.last_step):
                    reading = pool.submit(self._next_batch, self.last_step + 1)
                with self.watchdog:
                    batch = reading.result() if reading else None
            train_step = compiling.result()
        return_free_memory()
        return train_step, state, batch

    def _after(self, step: int, state: TrainState) -> None:
        """Saves, stops or evaluates, in this order, if that is due after step `step`."""
        last, evaluates = step == self.num_train_steps, self._is_eval_due(step)
        stops = self.stop.should_stop("train")
        if last or stops or self.store.should_save(step):
            self._save(step, state, force=last or stops)
        if stops and (evaluates or not last):
            self._stop(f"saved at step {step} of {self.num_train_steps}")
        if evaluates:
            self._evaluate(step, state)

    def _save(self, step: int, state: TrainState, force: bool) -> None:
        self._emit(self.meter.flush())
        self.divergence.check_params(step, state.params)
        self.run_dir.check_in_place()
        with self.meter.pause(), self.goodput.time(SAVE), TraceAnnotation(SAVE_PHASE):
            positions = {TRAIN: self.input.get_state(), **self.eval_positions, _EVALUATED: self.evaluated_step == step}
            self.store.save(step, state, positions, force, self.recipe)

    def _stop(self, what: str) -> None:
        with self.goodput.time(SAVE):
            self.store.wait()
        cause = self.stop.signal_name or "a signal to another process"
        raise Stopped(f"Stopped by {cause} and {what}.", "Start it again to resume from there.")

    def _is_eval_due(self, step: int) -> bool:
        return bool(_due_splits(self.task.train, self.session.experiment.eval_inputs, step))

    def is_eval_missing(self, step: int) -> bool:
        """Whether the evaluation after step `step` was due and did not end: the run stopped in between."""
        return self._is_eval_due(step) and not self._is_eval_ended(step)

    def _is_eval_ended(self, step: int) -> bool:
        """Whether the evaluation after step `step` ended. A copy, which has no metrics, is thought to have had it."""
        if self.is_copy:
            return self._is_eval_due(step)
        return {_split(source) for source in self.session.experiment.eval_inputs} <= _logged_splits(self.lines, step)

    def end_reason(self) -> str | None:
        """Why the run ends after `last_step`: that is the last of all, or an early stop. None = it does not."""
        if self.last_step >= self.num_train_steps:
            return f"it has {self.last_step} of {self.num_train_steps} steps"
        return self.task.early_stopping_fn.reason(self.lines, self.last_step)

    def _evaluate(self, step: int, state: TrainState, logged: Set[str] = frozenset()) -> None:
        """Evaluates, and writes the metrics of all splits but those in `logged`."""
        self._emit(self.meter.flush())
        params = self.task.train.learner.eval_params(state.params, state.opt_state)

        def check_stop() -> None:
            self.watchdog.beat()
            if self.stop.should_stop("evaluate"):
                self._save(step, state, force=True)
                self._stop(f"saved at step {step} of {self.num_train_steps}, without the end of its evaluation")

        with self.meter.pause(), self.goodput.time(EVAL), TraceAnnotation(EVALUATE_PHASE):
            inputs, mesh = self.session.experiment.eval_inputs, self.session.mesh
            metrics = evaluate(self.eval_step, params, inputs, mesh, self.task.metrics, check_stop)
            for prompt, text in self.sample(step, params) if self.sample else ():
                self.report.message(f"step {step} · sample · {prompt!r} → {text!r}")
        self.eval_positions, self.evaluated_step = self._eval_positions(), step
        for name, values in metrics.items():
            if (split := f"eval/{name}") not in logged:
                self._write(step, values, split)
                self.lines.append({"step": step, "split": split, **values})
        self.report.evaluation(step, metrics)

    def _emit(self, records: list[Record]) -> None:
        for record in records:
            self.run_dir.check_in_place()
            self.report.step(record)
            accounts = {"goodput": self.goodput.report()["goodput"]}
            if "://" in os.fspath(self.run_dir.path):
                accounts["storage_retries"] = count_retries()
            self._write(record.step, record.values | accounts, TRAIN)
            self.divergence.check_record(record)

    def _write(self, step: int, values: MetricValues, split: str) -> None:
        for writer in self.writers:
            writer.write(step, values, split)

    def _writers(self, first_step: int) -> list[Writer]:
        if jax.process_index() != 0:
            return []
        path = self.run_dir.path
        trackers = [TrackerWriter(name, path, self.recipe, first_step) for name in self.session.experiment.writers]
        files = [JsonlWriter(path / FILE_NAME, first_step), TensorBoardWriter(path / "tensorboard", first_step)]
        return [*files, *trackers]


def train(
    config: fdl.Config[Experiment],
    recipe_text: str,
    run_dir: RunDir,
    report: Reporter | None = None,
    warm_start: WarmStart | None = None,
    allow_changed: bool = False,
    instrument: Instrument | None = None,
    on_corrupt: OnCorrupt | None = None,
    make_sampler: Callable[[Session, RunDir, int], Sample] | None = None,
) -> dict[str, Any] | None:
    """Trains a recipe in a run directory, from its latest checkpoint if it has one.

    Args:
      config: The resolved recipe.
      recipe_text: The same recipe as YAML, for the run directory.
      run_dir: The directory that everything is written to.
      report: Receives progress; None = print it.
      warm_start: The checkpoint that initializes a new run's parameters; None = random initialization.
      allow_changed: Whether a resumed run may differ in fields that are safe to change.
      instrument: Compiles and observes the train step; None = compile ahead of time, observe nothing.
      on_corrupt: What to do when the newest checkpoint is damaged; None = the value in the recipe.
      make_sampler: Makes what continues the recipe's `sample_prompts`; None = they are not continued.

    Returns:
      `run_dir`, `steps`, `loss`, `log_pplx`, `tokens_per_second`, `mfu`, `goodput`, `seconds` and `eval`; None on every
      process but process 0.

    Raises:
      Stopped: A signal stopped the run; its state is saved.
      DivergedError: The loss or the parameters are not finite.
      ConfigError: Among others, the recipe does not fit into the devices' memory.
    """
    repeat_operations(config.checkpoint.storage_timeout_seconds)
    fdl.build(config.mesh).start_processes()
    # Only process 0 writes and prints. A single process has not started its devices yet.
    is_first = not jax.distributed.is_initialized() or jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_error())
        if is_first:
            run_dir.create()
            stack.enter_context(run_dir.lock())
        report = (report or stack.enter_context(ProgressPrinter())) if is_first else Reporter()
        config, recipe_text, counted = with_counted_steps(*with_seeds(config, recipe_text, run_dir))
        run_dir.check_same_recipe(config, allow_changed)
        session = stack.enter_context(build_session(config).active())
        session.experiment.train_input = counted or session.experiment.train_input  # the first has read its data
        if others := find_different(config_text(config)):
            problem = f"The recipe of process {others[0]} of this job is not that of process 0."
            raise ConfigError(problem, "Start all with the same recipe, overlays and `--set` options.")
        stop = stack.enter_context(StopRequest(report.message))
        policy = session.experiment.checkpoint
        policy.on_corrupt = on_corrupt or policy.on_corrupt
        run = TrainingRun(session, run_dir, report, stop, instrument or Instrument())
        check_start(run_dir, config, warm_start, run.resumes)
        if warm_start is not None and run.resumes:
            report.message(f"{run_dir.path} has checkpoints, so nothing is taken from {warm_start.run_dir}.")
            warm_start = None
        elif warm_start is not None:
            run.last_step = warm_start.first_step(session)  # an error is found before the step is compiled
        if make_sampler and session.experiment.sample_prompts:
            run.sample = make_sampler(session, run_dir, run.last_step)
        if run.end_reason() and (policy.on_corrupt == "previous" or run.last_step not in run.store.steps()):
            # A finished run would read no checkpoint. One of the local tier is copied to the run directory.
            run.last_step, *saved = run.store.restore_newest(session.abstract, report.message)
            run.store.save(run.last_step, *saved, force=True, recipe=run.recipe)
        if (reason := run.end_reason()) and not run.is_eval_missing(run.last_step):
            run.store.close()
            report.message(f"{run_dir.path} is finished: {reason}.")
            return run_summary(run_dir, run.last_step, 0.0) if is_first else None
        session.experiment.train_input.check_data()
        if is_first:
            copy_tokenizers(config, run_dir.path)
            if warm_start is not None:
                copy_origin(warm_start, run_dir.path)
            if not run.resumes:  # else `run` describes it, once the checkpoint is restored
                run_dir.describe(config, recipe_text, warm_start.options if warm_start is not None else None)
        warmup = fdl.ordered_arguments(config.task.train.learner.schedule, include_defaults=True).get("warmup_steps", 0)
        if warmup > run.num_train_steps:
            report.message(f"The run ends within its warmup of {warmup} steps: its rate stays below the peak.")
        facts = {
            "parameters": count_parameters(session.abstract.params),
            "devices": device_name(session.mesh),
            "mesh": describe(session.mesh.shape),
            "global_batch_size": session.global_batch_size,
            "tokens_per_step": tokens_in(session.batch),
            "peak_flops_per_device": session.peak_flops,
            "data_seed": session.config.train_input.input_random_seed,
            "first_step": run.last_step,
            "num_train_steps": run.num_train_steps,
        }
        report.start(facts)
        goodput = stack.enter_context(contextlib.closing(Goodput(run_dir.path if is_first else None, run.last_step)))
        try:
            with explain_out_of_memory(session, run_dir.profile):
                run.run(warm_start or run.imported, goodput, recipe_text)
        except PaxError:
            run_dir.check_in_place()  # if the directory was renamed, that is the cause
            raise
        finally:
            report.message(goodput.text())
    return run_summary(run_dir, run.last_step, run.seconds) if is_first else None


def _split(source: BaseInput) -> str:
    """The split of an eval input in metrics."""
    return f"eval/{source.name}"


def _due_splits(train: Any, eval_inputs: Iterable[BaseInput], step: int) -> set[str]:
    """The splits of the evaluation that is due after step `step`, if one is. `train`: a `Train`, or its config."""
    interval = train.eval_interval_steps
    due = step == train.num_train_steps or (interval is not None and step > 0 and step % interval == 0)
    return {_split(source) for source in eval_inputs} if due else set()


def _logged_splits(lines: Iterable[Mapping[str, Any]], step: int) -> set[str]:
    """The splits of `metrics.jsonl` that have a line of `step`."""
    return {line["split"] for line in lines if line["step"] == step}


def resume_step(
    config: fdl.Config[Experiment],
    recipe_text: str,
    run_dir: RunDir,
    allow_changed: bool = False,
    warm_start: WarmStart | None = None,
) -> tuple[int | None, bool]:
    """The step that training would resume at, None = it would start a new run; and whether it is finished.

    A run that was stopped in its last evaluation is not, or whose last checkpoint is a local one. Writes nothing.

    Raises:
      ConfigError: The run in the directory refuses the recipe or its start, or another process writes there.
    """
    with run_dir.lock(dry_run=True):
        config, _ = with_seeds(config, recipe_text, run_dir)
    run_dir.check_same_recipe(config, allow_changed)
    check_start(run_dir, config, warm_start, run_dir.has_checkpoints())
    own = CheckpointStore(run_dir.checkpoints).steps()
    step = max([*own, *local_steps(run_dir.checkpoints, config.checkpoint.local_directory)], default=None)
    done, train, lines = step or 0, config.task.train, list(read_lines(run_dir.path / FILE_NAME, sample=True))
    early = fdl.build(config.task.early_stopping_fn).reason(lines, done) is not None
    missing = _due_splits(train, fdl.build(config.eval_inputs), done) - _logged_splits(lines, done) if lines else ()
    return step, (early or done >= train.num_train_steps) and not missing and done in own


def with_seeds(config: fdl.Config[Experiment], recipe_text: str, run_dir: RunDir) -> tuple[fdl.Config[Experiment], str]:
    """The recipe, as config and as YAML, with the seed of the run and that of its training data filled in.

    A seed that the recipe leaves at None is the one that the run's checkpoints have. Without a checkpoint `random_seed`
    is then drawn, and the data's seed is `random_seed`.
    """
    config, before = copy.deepcopy(config), run_dir.checkpointed_config()
    train, data = config.task.train, config.train_input
    if train.random_seed is None:
        seed = before.get(_RUN_SEED)
        # A drawn seed is the same in every process.
        train.random_seed = agree(secrets.randbits(31) or 1) if seed is None else seed
        recipe_text = with_set(recipe_text, {_RUN_SEED: train.random_seed})
    if data.input_random_seed is None:
        data.input_random_seed = before.get(_DATA_SEED, train.random_seed)
        recipe_text = with_set(recipe_text, {_DATA_SEED: data.input_random_seed})
    return config, recipe_text


def run_summary(run_dir: RunDir, steps: int, seconds: float) -> dict[str, Any]:
    """A run's summary, from its last logged metrics up to step `steps`. `seconds`: what this start of it took."""
    last = {line["split"]: line for line in read_lines(run_dir.path / FILE_NAME, sample=True) if line["step"] <= steps}
    train = last.pop(TRAIN, {})
    values = {name: train.get(name) for name in ("loss", "log_pplx", "tokens_per_second", "mfu", "goodput")}
    lines = {split.removeprefix("eval/"): line for split, line in last.items()}
    evals = {name: {k: v for k, v in line.items() if k not in ("step", "split")} for name, line in lines.items()}
    return {"run_dir": str(run_dir.path), "steps": steps, **values, "eval": evals, "seconds": seconds}
