"""`pax train`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import paxcli as pax
from paxcli.cli import options
from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, RecipeArgument, RunDirOption, SetOption
from paxcli.cli.output import say_result
from paxcli.cli.restarts import keep_restarting
from paxcli.cli.runs import HF, import_once, load_recipe, model_name
from paxcli.config.paths import default_run_dir
from paxcli.errors import ConfigError
from paxcli.metrics.text import values_text

if TYPE_CHECKING:
    from paxcli.api import Recipe
    from paxcli.profiling.instruments import Instrumentation
    from paxcli.training.start_from import WarmStart

_FROM = "Initialize parameters from another run or from Hugging Face. Default: random initialization."
_ON_CORRUPT = "If the newest checkpoint is damaged: refuse to resume, or use an earlier one. Default: refuse."
_PERCENTILE = "With --auto-pgle: the percentile of an instruction's costs to use. Default: 90."

FromOption = Annotated[str | None, typer.Option("--from", metavar="RUN_DIR[@STEP]|hf:DIR", help=_FROM)]
WithOptimizerOption = Annotated[
    bool, typer.Option("--with-optimizer", help="With --from: its optimizer state and step too. Default: do not.")
]
AllowChangedOption = Annotated[
    bool, typer.Option("--allow-changed", help="Resume with a changed recipe, if it is safe. Default: refuse.")
]
OnCorruptOption = Annotated[Literal["refuse", "previous"] | None, typer.Option(help=_ON_CORRUPT)]
RestartsOption = Annotated[int, typer.Option(min=0, help="Restarts after preemptions and crashes.")]
CompiledOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Use the train step of `pax compile --save`. Default: compile.")
]
ProfileStepsOption = Annotated[str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps. Default: none.")]
AutoPgleOption = Annotated[
    bool,
    typer.Option("--auto-pgle", help="Profile the first steps and recompile with the profile (GPUs). Default: off."),
]
PgleRunsOption = Annotated[int | None, typer.Option(min=1, help="With --auto-pgle: steps to profile. Default: 3.")]
PglePercentileOption = Annotated[int | None, typer.Option(min=1, max=100, help=_PERCENTILE)]
ExpectPgleOption = Annotated[
    bool, typer.Option("--expect-pgle", help="Use the program --auto-pgle left in JAX's cache. Default: off.")
]


def train(
    recipe: RecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    source: FromOption = None,
    with_optimizer: WithOptimizerOption = False,
    allow_changed: AllowChangedOption = False,
    on_corrupt: OnCorruptOption = None,
    restarts: RestartsOption = 0,
    compiled: CompiledOption = None,
    profile_steps: ProfileStepsOption = None,
    auto_pgle: AutoPgleOption = False,
    pgle_runs: PgleRunsOption = None,
    pgle_percentile: PglePercentileOption = None,
    expect_pgle: ExpectPgleOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe. Resumes from the latest checkpoint in the run directory, if there is one.

    \b
    Examples:
      pax train tiny
      pax train runs/tiny
      pax train tiny --set num_layers=2 --set num_train_steps=200 --run-dir runs/small
      pax train hf:Qwen/Qwen3-0.6B --set num_train_steps=200
      pax train tiny --profile-steps 10:15 --run-dir runs/traced
    """
    from paxcli.config.load import is_run_dir
    from paxcli.profiling.instruments import Instrumentation

    observed = Instrumentation(compiled, profile_steps, auto_pgle, pgle_runs, pgle_percentile, expect_pgle, True)
    if restarts and not dry_run:
        keep_restarting(restarts)

    if recipe.startswith(HF):
        if source is not None or with_optimizer:
            raise ConfigError(
                f"The run starts from the weights of {recipe}.", "Leave out `--from` and `--with-optimizer`."
            )
        run_dir = run_dir or default_run_dir(model_name(recipe))
        loaded = import_once(recipe, run_dir, None, overlays, sets, dry_run, as_json)
    elif source is not None and source.startswith(HF):
        if with_optimizer:
            raise ConfigError("Weights of Hugging Face have no optimizer state.", "Leave out `--with-optimizer`.")
        run_dir = run_dir or default_run_dir(load_recipe(recipe, overlays, sets).name)
        loaded = import_once(source, run_dir, recipe, overlays, sets, dry_run, as_json)
        source = None
    else:
        run_dir = recipe if run_dir is None and is_run_dir(recipe) else run_dir
        loaded = load_recipe(recipe, overlays, sets)
    if dry_run:
        from paxcli.training.start_from import warm_start_from

        warm_start = warm_start_from(source, with_optimizer)
        return say_result(*_describe(loaded, run_dir, warm_start, allow_changed, observed), as_json)
    run = pax.train(
        loaded,
        run_dir,
        init_from=source,
        with_optimizer=with_optimizer,
        allow_changed=allow_changed,
        on_corrupt=on_corrupt,
        **dataclasses.asdict(observed),
    )
    if run.result is not None:
        say_result(run.result, run_text(run.result), as_json)


def _describe(
    recipe: Recipe, run_dir: str | None, warm_start: WarmStart | None, allow_changed: bool, observed: Instrumentation
) -> tuple[dict[str, Any], str]:
    """Whether training would start, resume or do nothing, and on what: as values and as text. Writes nothing.

    Raises what training would raise before it reads data or compiles.
    """
    from paxcli.mesh.mesh import describe
    from paxcli.training.loop import resume_step
    from paxcli.training.run_dir import RunDir
    from paxcli.training.session import build_session, device_name, with_counted_steps
    from paxcli.training.state import bytes_per_device

    run_dir = default_run_dir(recipe.name) if run_dir is None else run_dir
    config, text, _ = with_counted_steps(recipe.config, recipe.yaml())
    done, is_finished = resume_step(config, text, RunDir(run_dir), allow_changed, warm_start)
    unfinished = "start" if done is None else f"resume at step {done:,}"
    would = "do nothing: the run is finished" if is_finished else unfinished
    instrument = observed.instrument(config, RunDir(options.creatable(run_dir)))
    session = build_session(config)
    if warm_start is not None and done is None:  # a run that resumes takes nothing from it
        warm_start.first_step(session)
    if observed.compiled is not None and not is_finished:
        instrument.prepare(session)  # only reads the file
    sizes = {"would": would} | recipe.sizes() | {"run_dir": run_dir, "steps": config.task.train.num_train_steps}
    # XLA checks the compiler options; unknown ones are an error.
    sizes |= {"devices": device_name(session.mesh), "compiler_options": session.compiler_options}
    sizes |= {"mesh": describe(session.mesh.shape), "state_bytes_per_device": bytes_per_device(session.abstract)}
    sources = (session.experiment.train_input, *session.experiment.eval_inputs)
    data = {str(source.name): source.describe_data() for source in sources}
    shown = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in sizes.items()]
    shown += [f"data of `{name}`: {text}" for name, text in data.items()]
    return sizes | {"data": data}, "\n".join([f"Would {would}. Nothing was written.", *shown[1:]])


def run_text(result: dict[str, Any]) -> str:
    """The summary of a training run, as text."""
    # Without a loss, the last one was not finite; or the run directory has no metrics, as in a copy.
    missing = "unknown" if result.get("tokens_per_second") is None else "not finite"
    loss = missing if result["loss"] is None else f"{result['loss']:.4f}"
    lines = [f"{result['run_dir']}: {result['steps']} steps, loss {loss}"]
    lines += [f"eval {name}: {values_text(metrics)}" for name, metrics in result["eval"].items()]
    run_dir = shlex.quote(result["run_dir"])
    return "\n".join([*lines, f"Next: pax plot {run_dir}, pax decode {run_dir}"])
