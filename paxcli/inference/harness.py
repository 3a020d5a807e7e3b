"""Runs tasks of EleutherAI's lm-eval harness on a trained model. Needs the extra `eval`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paxcli.errors import ConfigError, DataError, MissingError, PaxError, did_you_mean, first_line
from paxcli.inference.decode import PromptDecoder
from paxcli.inference.prompts import Prompt

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise MissingError(f"Tasks need lm-eval: {first_line(error)}.", "pip install 'paxcli[eval]'") from None

_MAX_TOKENS = 256  # of an answer, if the task does not say
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens")
_BOOTSTRAPS = 1000  # resamplings for the standard errors that have no formula


class HarnessModel(TemplateLM):
    """A model as lm-eval calls it. Prompts, truncation and scores are as those of its `hf` model.

    Args:
      decoder: The model, with greedy decoding and its tokenizer.
      is_chat: Whether prompts are conversations.
    """

    eot_token_id, prefix_token_id = 0, 0  # of the tokenizer, below
    tokenizer_name = ""  # names a cache of requests, which is off

    def __init__(self, decoder: PromptDecoder, is_chat: bool):
        super().__init__()
        self._decoder, self._tokenizer, self._is_chat = decoder, decoder.tokenizer, is_chat
        self._max_length, self._bos_id = decoder.max_length, decoder.tokenizer.bos_id
        self.eot_token_id = decoder.tokenizer.eos_id
        self.prefix_token_id = self.eot_token_id if self._bos_id is None else self._bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after the BOS token unless that is part of the text, or unwanted."""
        encoded = self._tokenizer.encode_chat(string)[0] if self._is_chat else self._tokenizer.encode(string)
        ids, bos = encoded.tolist(), [] if self._bos_id is None else [self._bos_id]
        return ids if add_special_tokens is False or ids[:1] == bos else [*bos, *ids]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        rows = [[*context, *continuation][-self._max_length - 1 :] for _, context, continuation in requests]
        starts = [len(row) - len(continuation) for row, (_, _, continuation) in zip(rows, requests, strict=True)]
        if min(starts, default=1) < 1:
            raise DataError(f"A task scores a text beyond max_seq_len={self._max_length}.", "Use shorter texts.")
        return [(float(scores.sum()), bool(best.all())) for scores, best in self._decoder.generator.score(rows, starts)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in parts of at most `max_length` tokens."""
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._max_length, context_len=1
            )
        ]
        totals = np.zeros(len(requests))
        found = self._loglikelihood_tokens([(None, *window) for _, window in windows])
        np.add.at(totals, [number for number, _ in windows], [score for score, _ in found])
        return totals.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to its first stop text."""
        outputs = self._decoder.continue_prompts([self._prompt(*request.args) for request in requests])
        return [output["text"] for output in outputs]

    def _prompt(self, context: str, settings: Mapping[str, Any]) -> Prompt:
        rest = {name: value for name, value in settings.items() if value is not None}
        until = rest.pop("until", [])
        max_tokens = int(next((rest.pop(name) for name in _MAX_TOKENS_NAMES if name in rest), _MAX_TOKENS))
        temperature = float(rest.pop("temperature", 0.0)) if rest.pop("do_sample", True) else 0.0
        own: dict[str, Any] = {name: rest.pop(name, 0) or None for name in ("top_k", "top_p", "repetition_penalty")}
        if rest:
            hint = "Remove it from the task's YAML file."
            raise ConfigError(f"A task sets `{[*rest][0]}` in its generation_kwargs, which pax does not have.", hint)
        if max_tokens >= self._max_length:
            problem = f"A task generates {max_tokens} tokens; the model has max_seq_len={self._max_length}."
            raise ConfigError(problem, "Set `max_gen_toks` in the generation_kwargs of its YAML file.")
        return Prompt(
            ids=self.tok_encode(context)[max_tokens - self._max_length :],
            max_tokens=max_tokens,
            temperature=temperature,
            stop=[text for text in ([until] if isinstance(until, str) else until) if text],
            **own,
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self._decoder.template is None:
            raise ConfigError("The run has no chat template.", "Leave out `--apply-chat-template`.")
        if not add_generation_prompt:
            raise ConfigError("A task starts the answer itself (`gen_prefix`).", "Leave out `--apply-chat-template`.")
        return self._decoder.template.render_prompt(chat_history)


def find_tasks(names: Sequence[str], directory: str | os.PathLike[str] | None) -> TaskManager:
    """The tasks in the YAML files below `directory`, or lm-eval's own.

    Raises:
      ConfigError: One of `names` is not among them; they may be of tasks, groups or tags.
    """
    # Without lm-eval's own tasks, which take long to index, if the user has others.
    manager = TaskManager(include_path=directory, include_defaults=directory is None)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"It has: {', '.join(known[:10]) or 'none'}."
            raise ConfigError(f"{directory or 'lm-eval'} has no task `{name}`.", hint)
    return manager


def run_tasks(
    decoder: PromptDecoder, names: Sequence[str], manager: TaskManager, **settings: Any
) -> dict[str, dict[str, float]]:
    """Metrics of tasks: name of task or group → metric → value, with `num_examples` and `num_fewshot`.

    Args:
      decoder: The model, with greedy decoding.
      names: The tasks.
      manager: What `find_tasks` returned.
      **settings: `limit`, `num_fewshot` and `apply_chat_template` of lm-eval's `simple_evaluate`.

    Raises:
      DataError: A task cannot be loaded, or fails.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # standard errors, in this process: JAX's threads do not survive a fork
    model = HarnessModel(decoder, bool(settings.get("apply_chat_template")))
    settings |= {"tasks": [*names], "task_manager": manager, "log_samples": False, "bootstrap_iters": _BOOTSTRAPS}
    try:
        found = simple_evaluate(model, **settings)
    except (PaxError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # of a task's YAML, data, templates, metrics and own code
        problem = f"lm-eval cannot run {', '.join(names)}: {type(error).__name__}: {first_line(error)}."
        hint = "Check the tasks' YAML files and data; lm-eval's own tasks download theirs."
        raise DataError(problem, hint) from error
    return {
        name: {
            "num_examples" if key == "sample_len" else key.removesuffix(",none"): value
            for key, value in (values | {"num_fewshot": found["n-shot"].get(name)}).items()
            if isinstance(value, int | float)
        }
        for name, values in found["results"].items()
    }
