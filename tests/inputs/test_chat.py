from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.text import TextInput
from paxcli.inputs.tokenizers import HuggingFaceTokenizer
from paxcli.models.language_model import LanguageModel
from paxcli.report.inspection import inspect_batches
from tests.inputs.formats import write_array_record
from tests.inputs.hf_chat import CASES, REFERENCE, messages, write_tokenizer
from tests.tolerances import FLOAT32

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}
CHATML = [case for case in CASES if case["template"] == "chatml"]
RECORDS = [{"messages": messages(case)} for case in CHATML]


def write(path: pathlib.Path, records: list) -> pathlib.Path:
    """Writes a JSON object a line, and strings verbatim."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def chat_input(*files, **fields) -> ChatInput:
    fields = {"seq_len": 128, "batch_size": 8, **EPOCH, **fields}
    return ChatInput(files=[str(file) for file in files], **fields)


def chatml(tmp_path, **fields) -> ChatInput:
    fields = {"tokenizer": write_tokenizer(tmp_path), "chat_template": REFERENCE["templates"]["chatml"], **fields}
    return chat_input(write(tmp_path / "a.jsonl", RECORDS), **fields)


def conversations(batch) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each segment of a batch. The first token is never a label, and has weight 0."""
    found = []
    for row in range(len(batch.ids)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            (here,) = np.nonzero(batch.segment_ids[row] == segment)
            assert batch.segment_pos[row, here].tolist() == list(range(len(here)))
            tokens = [*batch.ids[row, here], batch.labels[row, here[-1]]]
            assert batch.labels[row, here].tolist() == tokens[1:]
            found.append(([int(token) for token in tokens], [0, *batch.weights[row, here].astype(int).tolist()]))
    return found


@pytest.mark.parametrize("packing", ["first_fit", "one_per_row"])
def test_tokens_and_loss_masks_equal_those_of_transformers(tmp_path, packing):
    data = chatml(tmp_path, packing=packing)
    batch = data.get_next()
    assert (batch.segment_ids.max() > 1) == (packing == "first_fit")
    expected = [(case["ids"], case["mask"]) for case in CHATML]
    assert sorted(conversations(batch)) == sorted(expected)
    assert not batch.weights[batch.segment_ids == 0].any()
    assert data.corpus.num_truncated == data.corpus.num_dropped == 0


def test_only_assistant_tokens_have_loss(tmp_path):
    """The loss equals one computed in numpy, for both packings."""
    sizes = {
        "vocab_size": 320,
        "max_seq_len": 128,
        "model_dims": 16,
        "hidden_dims": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    model = LanguageModel(**sizes)
    packed, apart = (chatml(tmp_path, packing=packing).get_next() for packing in ("first_fit", "one_per_row"))
    params = jax.jit(model.init)(jax.random.key(0), packed)
    losses = []
    for batch in (packed, apart):
        batch = jax.tree.map(jnp.asarray, batch)
        metrics, _ = jax.jit(model.apply)(params, batch)
        predictions = model.apply(params, batch, method="compute_predictions")
        logits = np.asarray(predictions.logits, np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        tokens, masks = zip(*conversations(batch), strict=True)
        total, position = 0.0, 0
        rows, columns = np.nonzero(batch.segment_ids)
        for ids, mask in zip(tokens, masks, strict=True):
            for label, weight in zip(ids[1:], mask[1:], strict=True):
                total -= weight * log_probs[rows[position], columns[position], label]
                position += 1
        count = sum(map(sum, masks))
        assert count == sum(sum(case["mask"]) for case in CHATML) == float(metrics["loss"][1])
        np.testing.assert_allclose(metrics["loss"][0], total / count, **FLOAT32)
        losses.append(metrics["loss"][0])
    np.testing.assert_allclose(*losses, **FLOAT32)


def test_all_formats_give_the_same_batch(tmp_path):
    records = [record for record in RECORDS if "tool_calls" not in str(record)]
    write(tmp_path / "a.jsonl", records)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=2)
    write_array_record(tmp_path / "a.arrayrecord", [json.dumps(record).encode() for record in records])
    batches = [
        chat_input(tmp_path / f"a.{kind}", seq_len=512).get_next() for kind in ("jsonl", "parquet", "arrayrecord")
    ]
    for batch in batches[1:]:
        jax.tree.map(np.testing.assert_array_equal, batch, batches[0])


def test_processes_tokenize_to_the_same(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", RECORDS if name == "a" else ['{"prompt": "Hi", "response": "Hello"}', "{"])
    fields = {"on_bad_record": "skip", "seq_len": 512}
    one, two = (chat_input(tmp_path / "*.jsonl", num_workers=n, **fields) for n in (0, 2))
    jax.tree.map(np.testing.assert_array_equal, one.get_next(), two.get_next())
    assert one.data_fingerprint() == two.data_fingerprint()
    assert one.corpus.bad_records == two.corpus.bad_records
    assert "b.jsonl, line 2 is not JSON" in one.corpus.bad_records[0]


class TestTooLong:
    """One conversation fits, one is truncated within its answer, and one before it."""

    RECORDS = [
        {"prompt": "Hi", "response": "Yes"},
        {"prompt": "Hi", "response": "x" * 100},
        {"prompt": "x" * 100, "response": "Hi"},
    ]

    def test_is_truncated_with_a_warning(self, tmp_path, caplog):
        with caplog.at_level("WARNING", logger="pax"):
            data = chat_input(write(tmp_path / "a.jsonl", self.RECORDS), seq_len=64)
            batches = list(data.eval_batches())
            data.reset()
            data.get_next()
        assert (data.corpus.num_truncated, data.corpus.num_dropped) == (1, 1)
        warnings = [record.getMessage() for record in caplog.records]
        assert warnings == [
            "Input input truncated 1 conversations to 64 tokens.",
            "Input input dropped 1 documents that are too long.",
        ]
        lengths = sorted(len(tokens) for tokens, _ in conversations(batches[0]))
        assert lengths == [len("..<|user|>\nHi\n<|assistant|>\nYes\n"), 65]

    def test_is_dropped_with_drop_longer_than(self, tmp_path):
        data = chat_input(write(tmp_path / "a.jsonl", self.RECORDS), seq_len=64, drop_longer_than=64)
        assert len(conversations(data.get_next())) == 1
        assert (data.corpus.num_truncated, data.corpus.num_dropped) == (0, 2)

    def test_all_of_them_is_an_error(self, tmp_path):
        with pytest.raises(DataError, match="none of 3 conversations in 1 files is usable"):
            chat_input(write(tmp_path / "a.jsonl", self.RECORDS), seq_len=8).check_data()


class TestBadRecords:
    RECORDS = [
        {"prompt": "Hi", "response": "Hello"},
        "{broken",
        "[" * 100_000,
        {"messages": [{"role": "user", "content": "Hi"}]},
        '{"prompt": "Hi", "response": "\\ud800"}',
        {"messages": [{"role": "assistant", "content": "No user"}, {"role": "tool", "content": "3"}]},
    ]
    TEMPLATE = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools') }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )

    def test_the_first_is_an_error_with_its_line(self, tmp_path):
        for number, message in enumerate(
            ["is not JSON", "is not JSON", "no assistant message", "half a character", "fails: No tools"], 1
        ):
            data = chat_input(write(tmp_path / "a.jsonl", self.RECORDS[number:]), chat_template=self.TEMPLATE)
            with pytest.raises(DataError, match=f"a.jsonl, line 1.*{message}"):
                data.check_data()

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_up_to_a_budget_are_skipped_and_counted(self, tmp_path, num_workers):
        file = write(tmp_path / "a.jsonl", self.RECORDS)
        fields = {"chat_template": self.TEMPLATE, "on_bad_record": "skip", "num_workers": num_workers}
        data = chat_input(file, bad_record_budget=5, **fields)
        data.check_data()
        assert len(data.corpus.bad_records) == 5
        with pytest.raises(DataError, match="More than 4 records cannot be read. The last one: .*line 6"):
            chat_input(file, bad_record_budget=4, **fields).check_data()

    def test_parquet_without_the_columns(self, tmp_path):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="no column `messages`, nor `prompt`; it has text"):
            chat_input(tmp_path / "a.parquet").check_data()

    def test_a_template_that_ignores_the_assistant(self, tmp_path):
        data = chat_input(
            write(tmp_path / "a.jsonl", self.RECORDS[:1]), chat_template="{% generation %}{% endgeneration %}x"
        )
        with pytest.raises(DataError, match="line 1: the chat template writes no text of the assistant"):
            data.check_data()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": "concat"}, "packing must be one of first_fit, one_per_row, not concat"),
        ({"format": "text"}, "format must be one of jsonl, csv, tsv, parquet, arrayrecord, not text"),
        ({"text_field": None}, "text_field is None"),
        ({"template_date": "July"}, "template_date is 'July'"),
        ({"chat_template": "{% if %}"}, "is not valid Jinja"),
    ],
)
def test_invalid_settings_are_named(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        chat_input(write(tmp_path / "a.jsonl", RECORDS), **fields).check_data()


@pytest.mark.parametrize("template", ["{% generation %}{{ m.content }}{% endgeneration %}", "{{ m.content }}"])
def test_tools_are_part_of_the_text(template, tmp_path):
    start, end = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}:", "{% endfor %}"
    template = start + template + end + "{{ 'assistant:' if add_generation_prompt }}"
    tools, chat = [{"name": "add"}], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "xyz"}]
    records = [{"messages": chat}, {"messages": chat, "tools": tools}, {"messages": chat, "tools": json.dumps(tools)}]
    data = chat_input(write(tmp_path / "a.jsonl", records), chat_template=template, packing="one_per_row")
    texts = data.ids_to_strings(data.get_next().labels[:3], [40, 40, 40])
    assert ["add" in text for text in texts] == [False, True, True]
    assert texts[1] == texts[2] and all("user:aassistant:xyz" in f"u{text}" for text in texts)
    with pytest.raises(DataError, match="line 1: `tools` is not JSON"):
        chat_input(write(tmp_path / "b.jsonl", [{"messages": chat, "tools": "add"}])).check_data()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_variables_of_records_reach_the_template(suffix, tmp_path):
    start = "{{ 'thinks:' if thinks is defined else 'unset:' }}{{ name }}{% for m in messages %}{{ m.role }}:"
    template = start + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "xyz"}]
    kwargs = {"thinks": False, "messages": "not these"}
    records = [{"messages": chat, "chat_template_kwargs": x} for x in (kwargs, {"name": "N"})] + [{"messages": chat}]
    file = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    else:
        write(file, records)
    data = chat_input(file, chat_template=template, packing="one_per_row")
    texts = sorted(data.ids_to_strings(data.get_next().labels[:3], [40, 40, 40]))
    assert [text[-30:] for text in texts] == [
        "hinks:user:aassistant:xyz",
        "nset:Nuser:aassistant:xyz",
        "nset:user:aassistant:xyz",
    ]
    with pytest.raises(DataError, match="line 1: `chat_template_kwargs` is list, not an object"):
        chat_input(write(tmp_path / "b.jsonl", [{"messages": chat, "chat_template_kwargs": [1]}])).check_data()


@pytest.mark.parametrize("large", [False, True], ids=["list", "large-list"])
@pytest.mark.parametrize("as_json", [False, True], ids=["structs", "json"])
def test_tools_in_parquet_have_only_the_fields_of_their_own_record(as_json, large, tmp_path):
    """Parquet gives all objects the same fields; Hugging Face's `datasets` writes text of the type JSON instead."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endgeneration %}{% endfor %}"
    )
    records = []
    for name, value in {"city": "Bonn", "number": 3}.items():
        call = {"function": {"name": "get", "arguments": {name: value}}}
        parameters = {"type": "object", "properties": {name: {"type": type(value).__name__}}}
        tools = [{"function": {"name": "get", "parameters": parameters}}]
        records.append({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools})
    table = pyarrow.Table.from_pylist(records)
    assert str(table.schema).count("number") > 2
    make_list = pyarrow.large_list if large else pyarrow.list_
    if as_json:
        rows = [{name: [json.dumps(x) for x in record[name]] for name in record} for record in records]
        kind = make_list(pyarrow.json_())
        table = pyarrow.Table.from_pylist(rows).cast(pyarrow.schema({"messages": kind, "tools": kind}))
    elif large:
        fields = {field.name: make_list(field.type.value_type) for field in table.schema}
        table = table.cast(pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    files = write(tmp_path / "a.jsonl", records), tmp_path / "a.parquet"
    lines, rows = (chat_input(file, chat_template=template, seq_len=400).get_next() for file in files)
    for name in lines:
        np.testing.assert_array_equal(lines[name], rows[name])


def test_json_in_parquet_that_is_none_is_an_error(tmp_path):
    schema = pyarrow.schema({"messages": pyarrow.list_(pyarrow.json_())})
    table = pyarrow.Table.from_pylist([{"messages": ["{"]}]).cast(schema)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet is damaged after row 0: Expecting"):
        chat_input(tmp_path / "a.parquet").check_data()


def test_files_of_other_formats_are_rejected(tmp_path):
    for name in ("a.txt", "a.bin"):
        with pytest.raises(ConfigError, match=f"{name} has no suffix"):
            chat_input(write(tmp_path / name, RECORDS)).check_data()
    chat_input(tmp_path / "a.txt", format="jsonl", seq_len=512).check_data()


def test_a_position_saved_with_another_template_is_rejected(tmp_path):
    state = chatml(tmp_path).get_state()
    with pytest.raises(DataError, match="has changed since"):
        chatml(tmp_path, chat_template=None).set_state(state)


@pytest.mark.parametrize(
    ("answers", "seq_len"), [("YN", 64), (("long Yes", "long Nes"), len("odd?long "))], ids=["last", "truncated"]
)
def test_a_position_saved_with_another_last_label_is_rejected(answers, seq_len, tmp_path):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    files = [write(tmp_path / f"{i}.jsonl", [{"prompt": "odd?", "response": each}]) for i, each in enumerate(answers)]
    first, second = (chat_input(file, chat_template=template, seq_len=seq_len) for file in files)
    assert (first.get_next().labels != second.get_next().labels).sum() == 1
    with pytest.raises(DataError, match="has changed since"):
        second.set_state(first.get_state())


def test_inspection_shows_the_loss_mask(tmp_path):
    records = [{"messages": [*_turn("Hi", "Hello"), *_turn("Bye", "Ciao")]}, {"prompt": "A", "response": "B"}]
    found = inspect_batches(chat_input(write(tmp_path / "a.jsonl", records), batch_size=1), 1)
    assert found.rows[0][0]["ids"] == [
        "<bos><|user|>\nHi\n<|assistant|>\n⟦Hello<eos>⟧\n<|user|>\nBye\n<|assistant|>\n⟦Ciao<eos>⟧\n",
        "<bos><|user|>\nA\n<|assistant|>\n⟦B<eos>⟧\n",
        "<pad>×34",
    ]


def test_inspection_names_the_marks_of_the_template_and_shows_the_character_of_the_id_that_pads(tmp_path):
    tokens = ["!", "<|im_start|>", "<|im_end|>", "</s>"]
    library = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate([*tokens, *"abc"])}, []))
    library.add_special_tokens(tokens[1:])
    library.decoder = tokenizers.decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    template = functools.partial(HuggingFaceTokenizer, path=str(tmp_path / "tokenizer.json"), eos_token="</s>")
    turns = "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    turns += "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    records = write(tmp_path / "a.jsonl", [{"prompt": "a!", "response": "b!"}])
    data = chat_input(records, tokenizer=template, chat_template=turns, seq_len=16, batch_size=1)
    assert inspect_batches(data, 1).rows[0][0]["ids"] == [
        "<|im_start|>a!<|im_end|><|im_start|>⟦b!<|im_end|>⟧",
        "<pad>×9",
    ]
    text = TextInput(files=[str(records)], format="text", tokenizer=template, seq_len=16, batch_size=1, **EPOCH)
    assert "!" in inspect_batches(text, 1).rows[0][0]["ids"][0]


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_set_replaces_the_input_of_a_recipe(pax_here, tmp_path):
    write(tmp_path / "chats.jsonl", [{"prompt": "Hi", "response": "Hello"}])
    sets = ["train_input=ChatInput", "train_input.files=[chats.jsonl]", "train_input.packing=one_per_row"]
    done = pax_here("inspect-input", "tiny", *(word for each in sets for word in ("--set", each)), "--num-batches", "1")
    assert done.returncode == 0, done.stderr
    assert "<bos><|user|>\\nHi\\n<|assistant|>\\n⟦Hello<eos>⟧\\n│<pad>×" in done.stdout
