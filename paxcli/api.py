"""The public functions and classes, which `import paxcli as pax` offers. The verbs of the command line call them."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import fiddle as fdl
import numpy as np

from paxcli.config.consent import code_consent
from paxcli.config.paths import resolve_path
from paxcli.config.render import recipe_yaml, render_text
from paxcli.config.resolve import Resolved, SourcedValue, resolve
from paxcli.config.tree import check_range
from paxcli.errors import ConfigError, names_hint
from paxcli.inference.generation import Generation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paxcli.convert.formats import Format
    from paxcli.convert.runs import ExportedWeights, ImportedWeights
    from paxcli.inference.decode import OnText
    from paxcli.inference.trained import TrainedRun
    from paxcli.programs.ahead_of_time import Compiled, Step
    from paxcli.report.inspect_input import InspectedInputs, Split
    from paxcli.training.experiment import Experiment
    from paxcli.training.progress import Reporter
    from paxcli.training.run_dir import RunDir

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]


class Recipe:
    """A recipe with its overlays and changes applied. `load` makes it; `print` shows every value and its origin.

    Attributes:
      name: The recipe's name, such as `c4-1b`.
      pax_name: The Pax experiment class that the recipe reproduces, if any.
      config: The configuration tree, an `fdl.Config`. To change a value, load the recipe again with `set`.
      values: Path → `SourcedValue` with `value` and `source` (`default`, `recipe`, `overlay NAME` or `--set`).
    """

    def __init__(self, resolved: Resolved):
        self._resolved = resolved
        self.name: str = resolved.name
        self.pax_name: str | None = resolved.pax_name
        self.config: fdl.Config[Experiment] = resolved.config
        self.values: dict[str, SourcedValue] = resolved.values

    def sizes(self) -> dict[str, Any]:
        """`parameters`, `global_batch_size`, `tokens_per_step`, `flops_per_step`, `num_devices`. Starts no device."""
        from paxcli.training.experiment import summarize

        return summarize(self.config)

    def validate(self) -> None:
        """Raises a ConfigError if the parts of the recipe do not fit each other. Starts no device."""
        from paxcli.training.validate import validate

        validate(self.config)

    def text(self, color: bool = False) -> str:
        """The tree of values, one per line, each with its origin."""
        return render_text(self._resolved, color)

    def yaml(self) -> str:
        """A YAML recipe that loads as this recipe."""
        return recipe_yaml(self._resolved)

    __str__ = text

    def __repr__(self) -> str:
        return f"<Recipe {self.name}>"


def load(
    recipe: PathLike, overlays: Paths = (), set: Mapping[str, Any] | None = None, trust_code: bool = False
) -> Recipe:
    """Loads a recipe and applies overlays, in order, and then `set`.

    Args:
      recipe: A name (`"c4-1b"`), a Pax class name, `"./mine.py:my_recipe"`, `"mine.yaml"`, or a run (`"runs/tiny"`).
      overlays: Names (`"cpu"`) or YAML files of overlays.
      set: Path → plain value, or NumPy scalar. A path may be its shortest unambiguous suffix: `{"num_layers": 4}`.
      trust_code: Whether to run Python code that a run directory names. That of `"./mine.py:my_recipe"` always runs.

    Raises:
      ConfigError: A name or path is unknown or ambiguous, a value has the wrong type, or code is not trusted.
    """
    for name, value, kinds in (("recipe", recipe, str | os.PathLike), ("set", set, Mapping | None)):
        if not isinstance(value, kinds):
            raise ConfigError(f"`{name}` is a {type(value).__name__}.", 'Call pax.load("tiny", set={"num_layers": 4}).')
    values = {path: value.item() if isinstance(value, np.generic) else value for path, value in (set or {}).items()}
    if configs := [path for path, value in values.items() if isinstance(value, fdl.Buildable)]:
        raise ConfigError(f"`{configs[0]}`: `set` takes plain values, not a config.", "Assign it in a recipe function.")
    context = contextvars.copy_context()
    if trust_code:
        context.run(code_consent.set, lambda question: True)
    return Recipe(context.run(resolve, os.fspath(recipe), _several(overlays), values))


def _recipe(recipe: Recipe | PathLike) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load(recipe)


def _several(values: PathLike | Mapping[str, Any] | Sequence[Any] | None) -> Sequence[Any]:
    several = [values] if isinstance(values, str | os.PathLike | Mapping) else values or ()
    return [os.fspath(value) if isinstance(value, os.PathLike) else value for value in several]


class Run:
    """A run directory: the metrics and checkpoints that training writes.

    The first call that needs devices builds the model; later calls reuse it, and the parameters that were loaded last.
    Evaluations and generations that several threads ask for run one after the other.

    Attributes:
      path: The directory.
      result: What `train` ended with: `run_dir`, `steps`, `loss`, `log_pplx`, `tokens_per_second`, `mfu`, `goodput`,
        `seconds` and `eval`. None in a run that was opened by its path, and on every process of a job but process 0.
    """

    def __init__(self, path: PathLike, recipe: Recipe | PathLike | None = None):
        """Opens the run in `path`. `recipe`: or what `load` takes; None = the run's own, if that is not Python code."""
        self.path = os.fspath(path)
        self.result: dict[str, Any] | None = None
        if recipe is not None:
            self.recipe = _recipe(recipe)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe that the run was trained with."""
        return load(self._directory.require_recipe())

    @property
    def config(self) -> fdl.Config[Experiment]:
        """The configuration tree of the recipe."""
        return self.recipe.config

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        from paxcli.checkpoint.manager import CheckpointStore

        return CheckpointStore(self._directory.checkpoints).steps()

    def metrics(self, split: str = "train") -> dict[str, np.ndarray]:
        """Logged metrics of `train` or `eval/<input name>` as columns, for `pandas.DataFrame(run.metrics())`.

        Returns `step` and every metric by name: arrays of equal length, NaN where a line lacks the metric.

        Raises:
          DataError, ConfigError: The directory has no metrics, or there is no such split.
        """
        from paxcli.metrics.curves import read_runs

        (run,) = read_runs([self.path], sample=False)
        lines = [line for line in run.lines if line["split"] == split]
        if not lines:
            hint = names_hint(split, dict.fromkeys(line["split"] for line in run.lines))
            raise ConfigError(f"Run {run.name} has no split `{split}`.", hint)
        names = dict.fromkeys(name for line in lines for name in line if name != "split")
        return {name: np.array([line.get(name) for line in lines], int if name == "step" else float) for name in names}

    def plot(
        self,
        *others: PathLike,
        metrics: str | Sequence[str] = (),
        path: PathLike | None = None,
        smoothing: float = 0.0,
        log: str = "",
    ) -> Figure:
        """Draws the run's curves, and those of other runs beside them.

        Args:
          metrics: One panel for each. Empty = `loss`, and `log_pplx` where it differs.
          path: An image to write; its suffix chooses the format.
          smoothing: Weight of the past in a moving average of the training values, below 1; 0 = off.
          log: Axes with a logarithmic scale: `x`, `y` or `xy`.

        Raises:
          ConfigError: No run has such a metric, or images of this format cannot be written.
          DataError: A run has no values of a metric, or one without a logarithm.
        """
        from paxcli.metrics.curves import check_metric, default_metrics, draw, read_runs, save_figure

        check_range("log", log, Literal["", "x", "y", "xy"])
        runs = read_runs([self, *others])
        metrics = _several(metrics) or default_metrics(runs)
        for metric in metrics:
            check_metric(runs, metric, log)
        figure = draw(runs, metrics, smoothing, log)
        if path is not None:
            save_figure(figure, path)
        return figure

    def report(self, *others: PathLike, path: PathLike, dry_run: bool = False) -> dict[str, Any]:
        """Writes one HTML page about the run, and other runs beside it: it needs no server and no network.

        Returns `path`, `bytes`, and `runs`: name → `run_dir`, the last `step`, the last value of each main metric.
        """
        from paxcli.report.page import write_report

        return write_report([self, *others], path, dry_run)

    def evaluate(
        self, step: int | None = None, files: Paths = (), tasks: str | Sequence[str] = (), **settings: Any
    ) -> dict[str, dict[str, float]]:
        """Evaluates a checkpoint on the recipe's evaluation inputs. Also writes the metrics to `eval/`.

        Args:
          step: The checkpoint; None = the latest.
          files: Paths and globs of files to evaluate on instead, in full, read as in training, as the input `files`.
          tasks: Tasks, groups or tags of lm-eval to evaluate on instead.
          **settings: Of tasks: `tasks_dir`, `limit`, `num_fewshot` and `apply_chat_template`, as of `pax eval`.

        Returns input or task name → metric → value.

        Raises:
          DataError, ConfigError: The checkpoint, input or task does not exist, or the arguments cannot be combined.
        """
        step, tasks = self.step(step), _several(tasks)
        if files and tasks:
            raise ConfigError("--files and --tasks evaluate on different data.", "Give one of them.")
        if settings and not tasks:
            raise ConfigError(f"`{min(settings)}` is a setting of tasks, and there is no task.", "Give it `tasks`.")
        if not tasks:
            return self._trained.evaluate(step, _several(files))
        from paxcli.inference.harness import find_tasks

        return self._trained.run_tasks(step, tasks, find_tasks(tasks, settings.pop("tasks_dir", None)), **settings)

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        max_tokens: int | None = None,
        *,
        seed: int = 0,
        step: int | None = None,
        on_text: OnText | None = None,
        **settings: Any,
    ) -> list[Generation]:
        """Continues prompts with a checkpoint. Also writes the continuations to `decoded/`.

        Args:
          prompts: One or several texts, or dicts with the fields of `inference.prompts.Prompt`.
          max_tokens: The most tokens to generate for each; None = as in the recipe's `decoding`.
          seed: Seed of the sampling.
          step: The checkpoint; None = the latest.
          on_text: Called with number and text of the prompt, the continuation so far, and whether it is complete.
          **settings: Other fields of the recipe's `decoding`, such as `temperature` (0 = greedy), `top_k`, `top_p`.

        Returns for each prompt its `decoding.num_samples` samples, best first.

        Raises:
          DataError: There is no such checkpoint.
          ConfigError: The model cannot decode, or a prompt is too long or has ids outside the vocabulary.
        """
        rows, settings = _several(prompts), {**settings, "max_tokens": max_tokens}
        outputs = self._trained.continue_prompts(self.step(step), rows, settings, seed, on_text)
        return [Generation(**output) for output in outputs]

    def generate_from_inputs(
        self, *, seed: int = 0, step: int | None = None, on_text: OnText | None = None, **settings: Any
    ) -> tuple[list[Generation], dict[str, dict[str, float]]]:
        """Continues the recipe's decode inputs: prompts and datasets. The arguments are those of `generate`.

        Returns the continuations, and the datasets' own metrics: input name → metric → value.
        """
        outputs, metrics = self._trained.answer_inputs(self.step(step), settings, seed, on_text)
        return [Generation(**output) for output in outputs], metrics

    @property
    def has_chat_template(self) -> bool:
        """Whether `generate` takes conversations: dicts with `messages`."""
        return self._trained.has_chat_template

    def params(self, step: int | None = None) -> dict[str, Any]:
        """The parameters of a checkpoint, or of the latest, on this machine's devices: nested dicts of `jax.Array`.

        They are those that evaluation uses: the moving averages, if the recipe keeps them.
        """
        return self._trained.params(self.step(step))

    def step(self, step: int | None = None) -> int:
        """The step of a checkpoint; None = the latest. Raises DataError if that step has no checkpoint."""
        from paxcli.checkpoint.manager import find_step

        return find_step(self._directory.path, step)

    def watch(self) -> Iterator[int]:
        """Yields the step of every checkpoint as it appears, up to the last training step; waits for each."""
        from paxcli.inference.trained import wait_for_checkpoint

        wait_for_checkpoint(self._directory)
        yield from self._trained.watch()

    @property
    def _directory(self) -> RunDir:
        from paxcli.training.run_dir import RunDir

        return RunDir(self.path)

    @functools.cached_property
    def _trained(self) -> TrainedRun:
        from paxcli.inference.trained import open_trained

        return open_trained(self.config, self._directory)

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<Run {self.path}>"


def train(
    recipe: Recipe | PathLike,
    run_dir: PathLike | None = None,
    *,
    init_from: PathLike | None = None,
    with_optimizer: bool = False,
    allow_changed: bool = False,
    compiled: PathLike | None = None,
    profile_steps: str | None = None,
    auto_pgle: bool = False,
    pgle_runs: int | None = None,
    pgle_percentile: int | None = None,
    expect_pgle: bool = False,
    reuse_step: bool = False,
    on_corrupt: Literal["refuse", "previous"] | None = None,
    progress: Reporter | None = None,
) -> Run:
    """Trains a recipe. Resumes from the latest checkpoint in the run directory, if there is one.

    Args:
      recipe: What to train: a loaded recipe, or what `load` takes.
      run_dir: Where the run writes: a directory or `gs://…`. None = `recipe` if it is a run, else `runs/<recipe name>`.
      init_from: `"RUN_DIR"` or `"RUN_DIR@STEP"`: parameters to start a new run with. None = random ones.
      with_optimizer: Whether to restore that checkpoint's optimizer state and step as well.
      allow_changed: Whether to resume although the recipe changed, if all changed fields are safe to change.
      compiled: A train step that `pax compile --save` wrote. None = compile it.
      profile_steps: `"FIRST:LAST"`: steps to trace.
      auto_pgle: Whether JAX profiles the first steps and recompiles with the profile (GPUs only).
      pgle_runs: How many steps `auto_pgle` profiles; None = 3.
      pgle_percentile: The percentile of an instruction's costs that `auto_pgle` uses; None = 90.
      expect_pgle: Whether to use the program that `auto_pgle` left in JAX's cache, and to profile nothing.
      reuse_step: Whether to use the step of an earlier run of the same source, in a program of an installed package.
      on_corrupt: If the newest checkpoint is damaged: `"refuse"`, or use the `"previous"` one. None = the recipe's.
      progress: Receives progress; None = print it.

    Raises:
      Stopped: A signal, in the main thread, stopped the run. A checkpoint is saved; the same call resumes.
      DivergedError: The loss is not finite.
      ConfigError: Recipe or argument is wrong, the run started with another recipe, or it does not fit into memory.
      DataError: The data or a checkpoint cannot be read.
    """
    from paxcli.config.load import is_run_dir
    from paxcli.config.paths import default_run_dir
    from paxcli.inference.sampler import Sampler
    from paxcli.profiling.instruments import Instrumentation
    from paxcli.training import loop, start_from

    if run_dir is None and isinstance(recipe, str | os.PathLike) and is_run_dir(os.fspath(recipe)):
        run_dir = recipe
    check_range("on_corrupt", on_corrupt, Literal["refuse", "previous"] | None)
    observed = Instrumentation(compiled, profile_steps, auto_pgle, pgle_runs, pgle_percentile, expect_pgle, reuse_step)
    recipe = _recipe(recipe)
    run = Run(default_run_dir(recipe.name) if run_dir is None else run_dir, recipe)
    directory = run._directory
    warm_start = start_from.warm_start_from(init_from, with_optimizer)
    instrument = observed.instrument(recipe.config, directory)
    run.result = loop.train(
        recipe.config, recipe.yaml(), directory, progress, warm_start, allow_changed, instrument, on_corrupt, Sampler
    )
    return run


def inspect_input(
    recipe: Recipe | PathLike, batches: int = 1, split: Split = "train", hosts: int = 1, host_index: int = 0
) -> InspectedInputs:
    """Reads batches as the model will see them: arrays, text, padding, packing, speed. Starts no device.

    Args:
      recipe: A loaded recipe, or what `load` takes.
      batches: How many batches to read of each input.
      split: `train`, `eval` or `decode`.
      hosts: How many hosts share the data (simulated).
      host_index: The host whose batches are returned.

    Returns `inputs`, each with its `batches` (dicts of arrays), `rows` (text) and `padding_share`; `prompts` to decode.

    Raises:
      ConfigError: The recipe has no such input, or the host does not exist.
      DataError: The data cannot be read.
    """
    from paxcli.report import inspect_input as inspection

    return inspection.inspect_input(_recipe(recipe).config, split, batches, hosts, host_index)


def compile(
    recipe: Recipe | PathLike,
    topology: str | None = None,
    slices: int | None = None,
    step: Step = "train",
    save: PathLike | None = None,
) -> Compiled:
    """Compiles a recipe's step ahead of time for devices that need not be here: does it fit, how fast would it be?

    Compiling for a TPU makes JAX use the CPU in this process: do it in a process that trains nothing on a GPU.

    Args:
      recipe: A loaded recipe, or what `load` takes.
      topology: The devices: `v4-128`, `v5e-16`, `v4:4x4x12`, `h100:8`, `cpu:8`. None = TPU v4 for the recipe's mesh.
      slices: How many slices of that topology; None = as in the recipe's mesh.
      step: `train`, `eval` or `decode`.
      save: A file to write the compiled train step to, for `train(compiled=…)`.

    Returns `report`, with the keys of `pax compile --json`, and `text`, the optimized HLO; empty if it does not fit.

    Raises:
      ConfigError: The recipe does not match the topology, or has no such step to compile or save.
      MissingError: Something needed to compile for these devices is not installed, or the file cannot be written.
    """
    from paxcli.programs.ahead_of_time import Step, compile_ahead, target_of

    check_range("step", step, Step)
    config = _recipe(recipe).config
    target = target_of(config, topology, slices)
    compiled = compile_ahead(config, target, step, None if save is None else resolve_path(save))
    if compiled.unsaved is not None:
        raise compiled.unsaved
    return compiled


def import_weights(
    source: PathLike,
    run_dir: PathLike,
    dry_run: bool = False,
    recipe: Recipe | None = None,
    format: Format | None = None,
    adapter: PathLike | None = None,
) -> ImportedWeights:
    """Starts a run from weights of Hugging Face, or from a checkpoint of paxml or MaxText.

    Args:
      source: Their directory, or a model on the Hugging Face Hub: `ORGANIZATION/NAME[@REVISION]`.
      run_dir: A run without checkpoints.
      dry_run: Whether only to compare names and shapes.
      recipe: Of the same model. None = made from `config.json`; paxml and MaxText need one.
      format: `hf`, `paxml` or `maxtext`; None = inferred from the files.
      adapter: A LoRA or DoRA adapter of PEFT to merge into weights of Hugging Face: its directory, or name on the hub.

    Raises:
      ConfigError: Pax lacks the architecture, a recipe is missing or of another model, or the run has checkpoints.
      DataError: A file is missing or damaged, or the tensors are not those of the model.
    """
    from paxcli.convert import formats

    check_range("format", format, formats.Format | None)
    given = None if recipe is None else (recipe.name, recipe.config, recipe.yaml())
    return formats.import_weights(source, run_dir, format, given, dry_run, adapter)


def export_weights(
    run: Run | PathLike,
    directory: PathLike,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    format: Literal["hf", "maxtext"] = "hf",
    adapter: bool = False,
    dry_run: bool = False,
) -> ExportedWeights:
    """Writes a checkpoint as weights of Hugging Face or a training state of MaxText. Adapters (LoRA, DoRA) are merged.

    Args:
      run: The run, or its directory.
      directory: A new directory.
      step: The checkpoint; None = the latest.
      dtype: Of Hugging Face's tensors; None = that of the imported weights, else float32.
      format: `hf` or `maxtext`.
      adapter: Whether to write only the adapters, as `adapter_config.json` and `adapter_model.safetensors` of PEFT.
      dry_run: Whether to write nothing.

    Raises:
      ConfigError: No architecture there computes what this model computes, or the directory has a model.
      DataError: There is no such checkpoint.
    """
    from paxcli.convert import formats

    check_range("format", format, Literal["hf", "maxtext"])
    run = run if isinstance(run, Run) else Run(run)
    return formats.export_weights(run.config, run.path, directory, format, step, dtype, adapter, dry_run)
