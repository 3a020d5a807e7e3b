"""`pax decode`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import paxcli as pax
from paxcli.cli.interrupts import interrupts
from paxcli.cli.options import JsonOption, OverlayOption, RunDirOption, RunOrRecipeArgument, SetOption, StepOption
from paxcli.cli.output import json_text, metrics_text, say, say_result
from paxcli.cli.runs import open_run
from paxcli.errors import ConfigError
from paxcli.log import log

PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Text to continue. Repeatable. Default: the recipe's decode inputs."),
]
PromptsFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file with one prompt per line, or .jsonl: objects with `prompt`, `ids` or `messages`, and optionally "
        "settings such as `temperature` and `stop`, or a `continuation` to score. Default: none.",
    ),
]
InteractiveOption = Annotated[
    bool,
    typer.Option("--interactive", help="Chat: read prompts from the terminal, one per line. Default: decode once."),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="The most tokens to generate. Default: 128; as many as fit for data.")
]


def _sampling_option(help: str, **limits: Any) -> Any:
    return typer.Option(help=f"{help} Default: the recipe's.", **limits)


TemperatureOption = Annotated[float | None, _sampling_option("0 = the most probable token each time.", min=0.0)]
TopKOption = Annotated[int | None, _sampling_option("Sample from the k most probable tokens.", min=1)]
TopPOption = Annotated[float | None, _sampling_option("Sample from the nucleus of probability p.", min=0.0, max=1.0)]
SeedOption = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")]


def decode(
    target: RunOrRecipeArgument,
    prompts: PromptOption = None,
    prompts_file: PromptsFileOption = None,
    interactive: InteractiveOption = False,
    run_dir: RunDirOption = None,
    step: StepOption = None,
    overlays: OverlayOption = None,
    sets: SetOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a run's checkpoint. Prints one JSON line per text into a pipe; also writes RUN_DIR/decoded/.

    The recipe's `decoding` has more settings, such as beam search and stop texts.

    \b
    Examples:
      pax decode runs/tiny --prompt "def "
      pax decode runs/tiny --prompt "import " --temperature 0 --max-tokens 40
      pax decode runs/tiny --prompt "import " --set decoding=BeamSearch --set decoding.beam_size=4
    """
    from paxcli.inference.prompts import read_prompts

    if interactive and (prompts or prompts_file or as_json):
        raise ConfigError("--interactive reads prompts from the terminal.", "Leave out --prompt, files and --json.")
    rows: list[Any] = [*(prompts or ()), *(read_prompts(prompts_file) if prompts_file else ())]
    run = open_run(target, overlays, sets, run_dir, as_json)
    step = run.step(step)
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "step": step}
    if interactive:
        return _chat(run, max_tokens, settings)
    printer = None if as_json or not sys.stdout.isatty() else _Printer()
    if rows:
        generations, metrics = run.generate(rows, max_tokens, on_text=printer, **settings), {}
    else:
        generations, metrics = run.generate_from_inputs(max_tokens=max_tokens, on_text=printer, **settings)
    if printer is None:
        outputs = [generation.to_dict() for generation in generations]
        say_result({"step": step, "outputs": outputs, "metrics": metrics}, "\n".join(map(json_text, outputs)), as_json)
    else:
        printer.finish(generations)
    if metrics and not as_json:
        print(metrics_text(step, metrics), file=sys.stderr)


def _chat(run: pax.Run, max_tokens: int | None, settings: dict[str, Any]) -> None:
    """Reads lines and answers each: as a conversation if the run has a chat template, else as prompts.

    `/new` starts a new conversation. Lines with an empty answer are left out of it, and on a terminal also those that
    cannot be answered, such as one that is too long, and those whose answer is stopped with Ctrl-C.
    """
    messages: list[dict[str, str]] = []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        new = " /new starts a new conversation." if run.has_chat_template else ""
        print(f"Type a line and press Enter.{new} Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "")
            if line == "/new" and run.has_chat_template:
                messages, line = [], ""
            if not line:
                continue
            asked = [*messages, {"role": "user", "content": line}]
            row = {"messages": asked} if run.has_chat_template else {"prompt": line}
            with interrupts.catch_first(is_terminal) as is_stopped:
                printer = _Printer(is_stopped, shows_prompts=False)
                generations = run.generate([row], max_tokens, on_text=printer, **settings)
            printer.finish(generations[:1])
            answer = {"role": "assistant", "content": generations[0].text}
            messages = [*asked, answer] if generations[0].text.strip() else messages
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupts.exit_code:  # it came at the prompt, or is the second one
                raise
            say("")
        except ConfigError as error:
            if not is_terminal:
                raise
            log.error("error: %s\nhint: %s", error.message, error.hint)


class _Printer:
    """Prints continuations in order, each while it is generated. Raises KeyboardInterrupt in one that is stopped."""

    def __init__(self, is_stopped: Callable[[], bool] = bool, shows_prompts: bool = True) -> None:
        self._texts: dict[int, tuple[str, str, bool]] = {}
        self._number, self._printed, self._is_stopped, self._shows_prompts = 0, 0, is_stopped, shows_prompts

    def __call__(self, number: int, prompt: str, text: str, is_complete: bool) -> None:
        """Receives the continuation so far of one prompt."""
        self._texts[number] = prompt, text, is_complete
        while self._number in self._texts:
            prompt, text, is_complete = self._texts[self._number]
            is_start = self._shows_prompts and not self._printed and (text or is_complete)
            start = f"\x1b[1m{prompt}\x1b[0m" if is_start else ""
            say(start + text[self._printed :], end="\n" if is_complete else "")
            self._printed = max(self._printed, len(text))  # some tokenizers decode no byte beside a part of a character
            if not is_complete and self._is_stopped():
                raise KeyboardInterrupt
            if not is_complete:
                return
            del self._texts[self._number]
            self._number, self._printed = self._number + 1, 0

    def finish(self, generations: Sequence[pax.Generation]) -> None:
        """Prints the continuations that are not printed yet."""
        for number, one in enumerate(generations[self._number :], self._number):
            self(number, one.prompt, one.text, True)
