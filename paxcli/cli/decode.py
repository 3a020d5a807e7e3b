"""`pax decode`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paxcli.cli.options import JsonOption, RunDirOption, RunOrRecipeArgument, StepOption
from paxcli.cli.output import metrics_text, say, say_result
from paxcli.cli.startup import configure_jax, restart_tuned
from paxcli.errors import ConfigError

PromptOption = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text to continue. Repeatable. Default: the recipe's prompts.")
]
PromptsFileOption = Annotated[
    Path | None, typer.Option("--prompts-file", metavar="FILE", help="A prompt on each line. Default: none.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate. Default: 128.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time. Default: 0.7.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", min=1, help="Choose among the k likeliest. Default: among all.")
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", min=0.0, max=1.0, help="Choose among the likeliest that add up to p. Default: among all."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the sampling. Default: 0.")]


def decode(
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
) -> None:
    """Continue prompts with a run's model; one JSON line each in a pipe and in the run's `decoded/`.

    \b
    Examples:
      pax decode runs/tiny --prompt "def "
      pax decode runs/tiny --prompt "import " --temperature 0 --max-tokens 40
    """
    restart_tuned()
    configure_jax()
    from paxcli.cli.runs import open_run
    from paxcli.models.decoding import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    with open_run(target, None, None, run_dir) as run:
        step = run.step(step)
        asked = [*(prompts or ()), *_lines(prompts_file)]
        outputs, metrics = run.decode(step, asked, max_tokens, sampling, seed)
    lines = "\n".join(json.dumps(output, ensure_ascii=False) for output in outputs)
    if as_json or not sys.stdout.isatty():
        say_result({"step": step, "outputs": outputs, "metrics": metrics}, lines, as_json)
    else:
        for output in outputs:
            say(f"\x1b[1m{output['prompt']}\x1b[0m{output['text']}\n[{output['finish_reason']}]\n")
    if metrics and not as_json:
        print(metrics_text(step, metrics), file=sys.stderr)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
