"""`pax decode`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paxcli.cli.options import JsonOption, RunDirOption, RunOrRecipeArgument, StepOption
from paxcli.cli.output import metrics_text, say, say_result
from paxcli.cli.remote import OnOption, run_on
from paxcli.cli.runs import open_run
from paxcli.cli.startup import restart_tuned
from paxcli.errors import ConfigError

PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Text to continue. Repeatable. Default: the recipe's decode inputs."),
]
PromptsFileOption = Annotated[
    Path | None, typer.Option("--prompts-file", metavar="FILE", help="A file with one prompt per line. Default: none.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens to generate.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 = the most probable token each time.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", min=1, help="Sample from the k most probable tokens. Default: all.")
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the most probable tokens that sum to p. Default: all."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the sampling.")]


def decode(
    ctx: typer.Context,
    target: RunOrRecipeArgument,
    prompts: PromptOption = None,
    prompts_file: PromptsFileOption = None,
    run_dir: RunDirOption = None,
    step: StepOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    on: OnOption = None,
) -> None:
    """Generate text from a run's checkpoint. Prints one JSON line per prompt into a pipe; also writes RUN_DIR/decoded/.

    \b
    Examples:
      pax decode runs/tiny --prompt "def "
      pax decode runs/tiny --prompt "import " --temperature 0 --max-tokens 40
    """
    if on is not None:
        run_on(on, ctx)
    restart_tuned()
    run = open_run(target, None, None, run_dir)
    step = run.step(step)
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "step": step}
    metrics = {}
    if texts := [*(prompts or ()), *_lines(prompts_file)]:
        generations = run.generate(texts, max_tokens, **sampling)
    else:
        generations, metrics = run.generate_from_inputs(max_tokens, **sampling)
    if as_json or not sys.stdout.isatty():
        outputs = [generation.to_dict() for generation in generations]
        lines = "\n".join(json.dumps(output, ensure_ascii=False) for output in outputs)
        say_result({"step": step, "outputs": outputs, "metrics": metrics}, lines, as_json)
    else:
        for one in generations:
            say(f"\x1b[1m{one.prompt}\x1b[0m{one.text}\n[{one.finish_reason}]\n")
    if metrics and not as_json:
        print(metrics_text(step, metrics), file=sys.stderr)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
