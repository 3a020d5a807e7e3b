"""A tiny model of Hugging Face's, and tasks of lm-eval for it: multiple choice, generation and perplexity."""

from __future__ import annotations

import json
import pathlib
import random

from tests.convert.huggingface.directories import write_directory, write_tokenizer

TASKS = ("local_choice", "local_answer", "local_text")
WORDS = ("cat", "dog", "fish", "bird", "tree", "sun", "moon", "red", "blue", "green", "one", "two")

_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
fewshot_split: test
metadata: {{version: 1.0}}
{more}
"""
_CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}?"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_ANSWER = """
output_type: generate_until
doc_to_text: "{{question}}?"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["g", "\\n"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
"""
_TEXT = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""


def write_model(path: pathlib.Path) -> pathlib.Path:
    """A directory that pax imports and transformers loads; the context has 64 tokens."""
    write_directory(path, "llama2")
    write_tokenizer(path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def write_tasks(path: pathlib.Path, answers: list[str]) -> pathlib.Path:
    """A directory of task files and their data; `answers`: the targets of `local_answer`."""
    path.mkdir()
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    choices = [{"question": words(3), "choices": draw.sample(WORDS, 3), "answer": i % 3} for i in range(16)]
    questions = [{"question": words(2 + i), "answer": answers[i % len(answers)]} for i in range(8)]
    texts = [{"text": words(3 + 9 * i)} for i in range(4)]  # the last ones are longer than the context
    rows = zip(TASKS, (choices, questions, texts), (_CHOICE, _ANSWER, _TEXT), strict=True)
    for name, examples, more in rows:
        data = path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in examples))
        (path / f"{name}.yaml").write_text(_TASK.format(name=name, data=data, more=more))
    (path / "broken.yaml").write_text(_TASK.format(name="broken", data=path / "nothing.jsonl", more=_CHOICE))
    return path
