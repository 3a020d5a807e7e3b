"""Makes `hf_chat.json`, with HF `transformers` 5: `python tests/data/hf_chat.py`.

A byte-level BPE tokenizer of 320 tokens, chat templates in the styles of published ones, and conversations; of each
pair, the text, ids and mask of the assistant's tokens that `apply_chat_template` returns.
"""

from __future__ import annotations

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>"]

# Without `{% generation %}` and `{% endgeneration %}`, each renders the same text.
TEMPLATES = {
    # ChatML: a header line for each message.
    "chatml": """\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""",
    # As Llama 3: the content is trimmed, and calls of tools are JSON.
    "headers": """\
{{- bos_token }}
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{%- set names = namespace(last='') %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|stop|>\\n\\n' }}
    {%- set names.last = message.role %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- generation %}{{ message.tool_calls | tojson }}{{ '<|eot|>' }}{% endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{{ '<|eot|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}{{ '<|eot|>' }}
    {%- endif %}
    {%- if loop.last and names.last == 'system' %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
""",
    # As Llama 2: no header before an answer, and so no generation prompt.
    "inst": """\
{%- if messages[0].role == 'system' %}
    {%- set rest = messages[1:] %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set rest = messages %}{% set system = '' %}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant, after a system message.') }}
    {%- endif %}
{%- endfor %}
""",
    # Words in place of special tokens: tokens straddle the border of a turn, and a newline ends it.
    "plain": """\
{% for message in messages %}{{ message.role | capitalize }}: \
{% if message.role == 'assistant' %}{% generation %}{{ message.content ~ '\\n' }}{% endgeneration %}\
{% else %}{{ message.content ~ '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}Assistant: {% endif %}\
""",
}

CHATS = {
    "one turn": [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    "two turns": [
        ("system", "Answer in French."),
        ("user", "Hello there"),
        ("assistant", "Bonjour, ça va ?"),
        ("user", "Naïve ☃ 😀?"),
        ("assistant", "Oui ☃ 😀 naïve."),
    ],
    "white space": [
        ("user", "  def f(x):\n    return x\n"),
        ("assistant", "  def g(x):\n    return x + 1\n"),
        ("user", "Thanks"),
        ("assistant", "You are welcome. "),
    ],
    "special tokens in the text": [("user", "What does <|im_end|> do?"), ("assistant", "<|im_end|> ends a turn. </s>")],
    "the answer is in the question": [
        ("user", "4. It is 4."),
        ("assistant", "4."),
        ("user", "4."),
        ("assistant", "4."),
    ],
    "a tool": [
        ("user", "Weather in <Paris>?"),
        ("assistant", [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Pâris <&>"}}}]),
        ("tool", '{"sky": "clear"}'),
        ("assistant", "It is clear."),
    ],
}


def message(role: str, content: str | list) -> dict:
    return {"role": role, "content": content} if isinstance(content, str) else {"role": role, "tool_calls": content}


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [content for chat in CHATS.values() for _, content in chat if isinstance(content, str)]
    tokenizer.train_from_iterator([*texts, "User: Assistant: system user assistant"] * 3, trainer)
    return tokenizer


def references(tokenizer: Tokenizer) -> list[dict]:
    """Text, ids and mask of each template with each chat that it accepts."""
    found = []
    for name, template in TEMPLATES.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        fast.chat_template = template
        for chat, turns in CHATS.items():
            if chat == "a tool" and name != "headers":
                continue
            messages = [message(*turn) for turn in turns]
            out = fast.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            text = fast.apply_chat_template(messages, tokenize=False)
            assert sum(out["assistant_masks"]) > 0
            found.append(
                {"template": name, "chat": chat, "text": text, "ids": out["input_ids"], "mask": out["assistant_masks"]}
            )
    return found


if __name__ == "__main__":
    tokenizer = train_tokenizer()
    chats = {name: [message(*turn) for turn in turns] for name, turns in CHATS.items()}
    made = {"tokenizer": json.loads(tokenizer.to_str()), "templates": TEMPLATES, "chats": chats}
    made["references"] = references(tokenizer)
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
