"""Decoding of prompts: in batches and alone, on meshes, scored, stopped; and mistakes in them."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paxcli as pax
from paxcli.cli.decode import _Printer
from paxcli.errors import ConfigError
from paxcli.inference.decode import PromptDecoder, _lasting_part, override
from paxcli.inference.prompts import Prompt, parse_prompt, read_prompts
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from paxcli.layers.matmul import OutputFirst
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.models.beam_search import BeamSearch
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import Decoding, Sampling
from paxcli.nested_map import NestedMap
from tests.conftest import ROOT
from tests.convert.huggingface.directories import write_tokenizer
from tests.tolerances import FLOAT32

SIZES = dict(vocab_size=259, max_seq_len=80, model_dims=32, hidden_dims=64, num_layers=2, num_heads=4, num_kv_heads=2)
MODEL = LanguageModel(**SIZES)
TOKENIZER = ByteTokenizer()
# Of unequal length, more than a batch, with limits of their own: one long answer among short ones.
PROMPTS = [Prompt("def f(x):\n" * (i % 3) + "ab"[i % 2], max_tokens=40 if i == 1 else 3 + 2 * i) for i in range(8)]


def params_of(model):
    ones = jnp.ones((1, 4), jnp.int32)
    batch = NestedMap(ids=ones, labels=ones, weights=jnp.ones((1, 4)), segment_ids=ones, segment_pos=ones)
    return jax.tree.map(lambda p: 3 * p, nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), batch)["params"]))


@pytest.fixture(scope="module")
def params():
    return params_of(MODEL)


@pytest.fixture(scope="module")
def decode(params):
    """Decodes prompts. Each settings have one decoder, whose programs are compiled once."""

    @functools.cache
    def decoder(decoding: Decoding, seed: int) -> PromptDecoder:
        return PromptDecoder(MODEL, params, TOKENIZER, decoding, seed)

    def run(prompts=PROMPTS, decoding: Decoding = Sampling(), seed: int = 0, on_text=None):  # noqa: B008
        return decoder(decoding, seed).continue_prompts(prompts, on_text)

    return run


@pytest.fixture(scope="module")
def greedy(decode):
    return decode()


@jax.jit
def _forward(params, ids):
    logits, _ = MODEL.apply({"params": params}, ids, jnp.ones_like(ids), jnp.arange(80)[None], None, method="extend")
    return jax.nn.log_softmax(logits[0])


def full_pass(params, ids) -> np.ndarray:
    """Log-probabilities [T, V] after the BOS token and each of `ids` but the last, by one pass without a cache."""
    row = np.zeros((1, 80), np.int32)
    row[0, : len(ids) + 1] = [TOKENIZER.bos_id, *ids]
    return np.asarray(_forward(params, row)[: len(ids)])


def log_probs_of(params, ids) -> np.ndarray:
    return full_pass(params, ids)[np.arange(len(ids)), ids]


def test_greedy_is_the_argmax_of_full_passes(params, greedy):
    for prompt, output in zip(PROMPTS, greedy, strict=True):
        given = TOKENIZER.encode(prompt.prompt).tolist()
        log_probs = full_pass(params, [*given, *output["ids"]])[len(given) :]
        assert np.argmax(log_probs, axis=-1).tolist() == output["ids"]
        np.testing.assert_allclose(output["log_probs"], log_probs.max(axis=-1), **FLOAT32)
        np.testing.assert_allclose(output["score"], sum(output["log_probs"]), rtol=1e-5)
        assert output["finish_reason"] == "length" and len(output["ids"]) == prompt.max_tokens


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_any_batch_size_gives_the_same_text(decode, temperature):
    """Slots are refilled at different times, and sampling depends on the prompt's number alone."""
    together, few, alone = (decode(decoding=Sampling(temperature=temperature, batch_size=size)) for size in (16, 3, 1))
    assert [one["ids"] for one in together] == [one["ids"] for one in few] == [one["ids"] for one in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one["log_probs"], other["log_probs"], **FLOAT32)
    if temperature:
        other_seed = decode(decoding=Sampling(temperature=temperature), seed=1)
        assert [one["ids"] for one in together] != [one["ids"] for one in other_seed]


def test_experts_with_a_capacity_drop_nothing():
    """What they would drop depends on the padding of a row, so on the other prompts."""
    config = LanguageModel.config(**SIZES)
    config.stack.block.feed_forward = MoeFeedForward.partial(num_experts=4, capacity_factor=0.5)
    model = fdl.build(config)
    params = params_of(model)
    rows = [Prompt("def f(x):", continuation="\n    return x"), Prompt("ab" * 30, max_tokens=4)]
    decoder = PromptDecoder(model, params, TOKENIZER, Sampling(), 0)
    (alone,), (beside, _) = decoder.continue_prompts(rows[:1]), decoder.continue_prompts(rows)
    np.testing.assert_allclose(beside["log_probs"], alone["log_probs"], **FLOAT32)


def test_weights_are_in_parts_for_batches_only(params, greedy):
    """One decoder answers a lone prompt after a batch, and the other way round, each from weights stored for it."""
    decoder = PromptDecoder(MODEL, params, TOKENIZER, Sampling(), 0)
    for prompts, expected, parts in ((PROMPTS, greedy, 2), (PROMPTS[:1], greedy[:1], 1), (PROMPTS, greedy, 2)):
        found = decoder.continue_prompts(prompts)
        assert [one["ids"] for one in found] == [one["ids"] for one in expected]
        stored = jax.tree.leaves(decoder.generator._params, is_leaf=lambda one: isinstance(one, OutputFirst))
        assert max(len(one.parts) for one in stored if isinstance(one, OutputFirst)) == parts


def test_a_prompt_may_have_a_temperature_of_its_own(decode, greedy):
    hot = [
        Prompt(one.prompt, max_tokens=one.max_tokens, temperature=0.0 if i % 2 else 2.0)
        for i, one in enumerate(PROMPTS)
    ]
    found = decode(hot)
    same = [a["ids"] == b["ids"] for a, b in zip(found, greedy, strict=True)]
    assert same[1::2] == [True] * 4 and not all(same[::2])


def test_prompts_have_settings_of_their_own(decode, greedy):
    """In one batch, each answer is that of a call in which all prompts have its settings."""
    shared = Sampling(temperature=1.5, batch_size=3)
    prompts = [Prompt(PROMPTS[i % 4].prompt, max_tokens=20) for i in range(6)]
    free = decode(prompts, shared)
    own = [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}, {"temperature": 0.0}]
    own.append({"stop": [free[5]["text"][4:6]]})
    found = decode([dataclasses.replace(one, **more) for one, more in zip(prompts, own, strict=True)], shared)
    for number, more in enumerate(own):
        settings = {name: tuple(value) if name == "stop" else value for name, value in more.items()}
        expected = decode(prompts, dataclasses.replace(shared, **settings))[number]
        assert (found[number]["ids"], found[number]["finish_reason"]) == (expected["ids"], expected["finish_reason"])
    assert all(one["ids"] != other["ids"] for one, other in zip(found[1:], free[1:], strict=True))


def test_a_seed_of_its_own_gives_the_same_text_anywhere(decode):
    hot, row = Sampling(temperature=1.5, num_samples=2), Prompt("def ", max_tokens=12, seed=7)
    alone = decode([row], hot, seed=7)
    found = decode([*PROMPTS[:3], row], hot, seed=1)
    assert [one["ids"] for one in found[-2:]] == [one["ids"] for one in alone]
    other = decode([dataclasses.replace(row, seed=8)], hot, seed=7)
    assert alone[0]["ids"] != alone[1]["ids"] and alone[0]["ids"] != other[0]["ids"]
    # The seed of the call, for the first prompt.
    assert decode([dataclasses.replace(row, seed=None)], hot, seed=7) == alone


def test_samples_are_sorted_by_score(decode):
    found = decode(PROMPTS[:2], Sampling(temperature=1.5, num_samples=4))
    scores = [one["score"] for one in found]
    assert [one["prompt"] for one in found] == [PROMPTS[0].prompt] * 4 + [PROMPTS[1].prompt] * 4
    assert scores[:4] == sorted(scores[:4], reverse=True) and scores[4:] == sorted(scores[4:], reverse=True)
    assert len({tuple(one["ids"]) for one in found}) == 8


def test_a_continuation_is_scored(decode, params):
    rows = [Prompt("def ", continuation="main():"), Prompt("x"), Prompt(ids=[2, 103], continuation="bc")]
    scored, generated, by_ids = decode(rows)
    assert (scored["text"], scored["finish_reason"]) == ("main():", "given")
    expected = log_probs_of(params, TOKENIZER.encode("def main():"))[4:]
    np.testing.assert_allclose(scored["log_probs"], expected, **FLOAT32)
    assert generated["finish_reason"] == "length" and len(generated["ids"]) == 78  # as many as fit
    np.testing.assert_allclose(by_ids["log_probs"], log_probs_of(params, TOKENIZER.encode("dbc"))[1:], **FLOAT32)
    empty = Prompt("def ", max_tokens=3, continuation="")
    several = decode([rows[0], Prompt("x", max_tokens=3), empty], Sampling(num_samples=2, temperature=1.0))
    assert [one["finish_reason"] for one in several] == ["given", "length", "length", "given"]
    assert several[0] == scored and (several[3]["ids"], several[3]["log_probs"], several[3]["score"]) == ([], [], 0)


def test_rows_are_scored_as_by_full_passes(params):
    """Of unequal length, up to one token more than the model has positions, and in more than one batch."""
    decoder = PromptDecoder(MODEL, params, TOKENIZER, Sampling(batch_size=2), 0)
    texts = ["def f(x):\n    return x", "a", "xy" * 40, "class A: pass"]
    rows, starts = [[TOKENIZER.bos_id, *TOKENIZER.encode(text).tolist()] for text in texts], [5, 1, 70, 2]
    assert max(map(len, rows)) == 81
    found = decoder.generator.score(rows, starts)
    for row, start, (log_probs, is_best) in zip(rows, starts, found, strict=True):
        inputs = np.array([row[:-1] + [0] * (81 - len(row))], np.int32)
        expected = np.asarray(_forward(params, inputs))[start - 1 : len(row) - 1]
        np.testing.assert_allclose(log_probs, expected[np.arange(len(expected)), row[start:]], **FLOAT32)
        np.testing.assert_array_equal(is_best, expected.argmax(axis=-1) == row[start:])
    (greedy,) = decoder.continue_prompts([Prompt("def ", max_tokens=9)])
    row = [TOKENIZER.bos_id, *TOKENIZER.encode("def ").tolist(), *greedy["ids"]]
    assert decoder.generator.score([row], [5])[0][1].all()


def test_a_conversation_is_rendered_by_the_chat_template(decode, params):
    source = ChatInput(
        files=["none.jsonl"], chat_template="{{ start }}{% for m in messages %}[{{ m.content }}]{% endfor %}<bos>"
    )
    decoder = PromptDecoder(MODEL, params, TOKENIZER, Sampling(max_tokens=4), 0, source.prompt_template())
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ids = [*TOKENIZER.encode("[a][b][c]").tolist(), TOKENIZER.bos_id]
    chat, plain = decoder.continue_prompts([parse_prompt({"messages": messages}), Prompt(ids=ids)])
    assert chat == plain
    row = {"messages": messages, "chat_template_kwargs": {"start": "x"}}
    started, plain = decoder.continue_prompts([parse_prompt(row), Prompt(ids=[*TOKENIZER.encode("x").tolist(), *ids])])
    assert started == plain
    with pytest.raises(ConfigError, match="no chat template"):
        decode([parse_prompt({"messages": messages})])
    with pytest.raises(ConfigError, match="unknown role 'usr'"):
        parse_prompt({"messages": [{"role": "usr", "content": "a"}]})
    with pytest.raises(ConfigError, match="`tools` and `chat_template_kwargs` are for chats"):
        parse_prompt({"prompt": "a", "tools": [{"name": "add"}]})


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_stop_text_ends_the_text_before_it(decode, greedy, batch_size):
    answers = [TOKENIZER.decode(np.array(one["ids"])) for one in greedy]
    stop = answers[1][4:6]
    found = decode(decoding=Sampling(stop=(stop, "\0\0\0"), batch_size=batch_size))
    for one, text, whole in zip(found, answers, greedy, strict=True):
        before, cut, _ = text.partition(stop)
        assert one["text"] == before and one["finish_reason"] == ("stop" if cut else "length")
        assert one["ids"] == whole["ids"][: len(one["ids"])]
        assert not cut or TOKENIZER.decode(np.array(one["ids"])).endswith(stop)


def test_text_is_received_while_it_is_generated(decode, greedy):
    received: dict[int, list[tuple[str, bool]]] = {}
    decode(on_text=lambda number, prompt, text, done: received.setdefault(number, []).append((text, done)))
    for number, output in enumerate(greedy):
        texts = [text for text, _ in received[number]]
        assert len(texts) == len(output["ids"]) and texts[-1] == output["text"]
        assert all(len(text) <= i + 1 for i, text in enumerate(texts))
        assert [done for _, done in received[number]] == [False] * (len(texts) - 1) + [True]


def test_beam_search_of_text(decode, greedy):
    single = decode(decoding=BeamSearch(beam_size=1, batch_size=3, eos_ids=()))
    assert [one["ids"] for one in single] == [one["ids"] for one in greedy]  # nothing ends, so it is greedy
    several = decode(PROMPTS[:2], BeamSearch(beam_size=4, num_samples=2, eos_ids=()))
    assert [one["prompt"] for one in several] == [PROMPTS[0].prompt] * 2 + [PROMPTS[1].prompt] * 2
    assert several[0]["score"] >= several[1]["score"] and several[0]["score"] >= single[0]["score"]


def test_beams_end_at_a_stop_text(decode):
    """Several that only differ after it are one, and its score is that of the tokens before it."""
    free = BeamSearch(beam_size=4, num_samples=4, eos_ids=(), max_tokens=12)
    texts = [one["text"] for one in decode(PROMPTS[:2], free)]
    settings = dataclasses.replace(free, stop=(texts[0][2], texts[4][2]))
    found = decode([dataclasses.replace(one, max_tokens=12) for one in PROMPTS[:2]], settings)
    stopped = [one for one in found if one["finish_reason"] == "stop"]
    assert {one["prompt"] for one in stopped} == {one.prompt for one in PROMPTS[:2]}
    assert len({(one["prompt"], *one["ids"]) for one in found}) == len(found)
    for one in found:
        count = len(one["ids"])
        np.testing.assert_allclose(one["score"], sum(one["log_probs"]) / ((count + 5) / 5) ** 0.8, rtol=1e-4)
    for prompt in PROMPTS[:2]:
        ranks = [(one["finish_reason"] == "length", -one["score"]) for one in found if one["prompt"] == prompt.prompt]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("prompt", "decoding", "message"),
    [
        (Prompt("x" * 80), Sampling(), "has 81 tokens; with 1 more it is longer than max_seq_len=80"),
        (Prompt("x"), Sampling(max_tokens=79), "has 2 tokens; with 79 more"),
        (Prompt("x", continuation="y" * 79), Sampling(), "has 81 tokens"),
        (Prompt(ids=[3, 259]), Sampling(), "has id 259, but the model's vocab_size is 259"),
        (Prompt(ids=[]), Sampling(), "A prompt is empty"),
        (Prompt(ids=[], continuation="ab"), Sampling(), "A prompt is empty"),  # its first token has no probability
        (Prompt("x"), Sampling(eos_ids=(1, 300)), "`decoding.eos_ids` has id 300"),
        (Prompt("x", temperature=1.0), BeamSearch(), "with beam search it has no `temperature`"),
        (Prompt("x", stop=["\n", ""]), Sampling(), "An empty text in `stop`"),
        (Prompt("x" * 80, place="a.jsonl, line 3: "), Sampling(), "a.jsonl, line 3: Prompt 'x+… has 81 tokens"),
    ],
)
def test_mistakes_are_config_errors(decode, prompt, decoding, message):
    with pytest.raises(ConfigError, match=message):
        decode([prompt], decoding)


def test_settings_of_a_call_replace_the_recipes():
    assert override(Sampling(top_k=3), temperature=0.5, top_p=None) == Sampling(top_k=3, temperature=0.5)
    with pytest.raises(ConfigError, match="BeamSearch has no `temperature`"):
        override(BeamSearch(), temperature=0.5)
    with pytest.raises(ConfigError, match="top_p must be above 0"):
        override(Sampling(), top_p=0.0)
    with pytest.raises(ConfigError, match="An empty text in `stop`"):
        override(Sampling(), stop=["\n", ""])


def test_recipes_of_pax_select_the_nucleus_before_the_temperature():
    for name, before in {"c4-1b": True, "lm-cloud-2b": True, "c4-gpt3-175b": True, "tiny": False}.items():
        assert pax.load(name).config.decoding.truncate_before_temperature == before, name
    beams = pax.load("tiny", set={"decoding": "BeamSearch", "decoding.beam_size": 3, "decoding.stop": ["\n"]}).config
    assert fdl.build(beams.decoding) == BeamSearch(beam_size=3, stop=("\n",))


def test_a_prefix_lm_reads_the_prompt_in_both_directions(decode, params):
    """Decoding with the cache against full passes in which `inputs_indicator` marks the prompt."""
    config = LanguageModel.config(**SIZES)
    config.stack.block.attention.bidirectional_prefix = True
    model = fdl.build(config)
    assert (model.prompt_segment_id, MODEL.prompt_segment_id) == (-1, 1)
    decoder = PromptDecoder(model, params, TOKENIZER, Sampling(max_tokens=9, eos_ids=()), 0)

    @jax.jit
    def full_pass(ids, indicator):
        ones, positions = jnp.ones_like(ids), jnp.arange(80)[None]
        batch = NestedMap(ids=ids, segment_ids=ones, segment_pos=positions, inputs_indicator=indicator)
        return jax.nn.log_softmax(model.apply({"params": params}, batch, method="compute_predictions").logits[0])

    rows = [Prompt("def f(x)"), Prompt("a"), Prompt("def f", continuation="(x)")]
    found = decoder.continue_prompts(rows)
    for row, output in zip(rows, found, strict=True):
        given = 1 + len(row.prompt)
        ids = np.zeros((1, 80), np.int32)
        ids[0, : given + len(output["ids"])] = [TOKENIZER.bos_id, *TOKENIZER.encode(row.prompt), *output["ids"]]
        log_probs = np.asarray(full_pass(ids, (np.arange(80) < given)[None].astype(np.int32)))
        log_probs = log_probs[given - 1 : given - 1 + len(output["ids"])]
        if row.continuation is None:
            assert log_probs.argmax(axis=-1).tolist() == output["ids"]
        np.testing.assert_allclose(output["log_probs"], log_probs[np.arange(len(log_probs)), output["ids"]], **FLOAT32)
    causal = decode(rows[:1], Sampling(max_tokens=9, eos_ids=()))
    assert causal[0]["log_probs"] != found[0]["log_probs"]


@pytest.mark.slow
def test_eight_devices_equal_one():
    command = [sys.executable, "-m", "tests.inference.decode_on_eight_devices"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "temprature": 1.0}, "A prompt has no field `temprature`"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens: expected int or null, got True"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "x", "ids": [1]}, "exactly one|one of"),
        ({"ids": ["a"]}, "ids: expected int or null, got"),
        ({"prompt": "x", "stop": [1]}, "stop: expected str or null, got"),
        ({"prompt": "x", "top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"prompt": "x", "top_k": 0}, "top_k must be at least 1"),
        ({"prompt": "x", "top_k": 2**31}, "top_k must be at least 1 and at most 2147483647"),
        ({"prompt": "x", "seed": 2**32}, "seed must be at least 0"),
        ({}, "one of `prompt`"),
        ({"messages": ["hello"]}, "messages: expected dict or null, got"),
        ({"prompt": "x\ud800"}, "half a character"),
        ({"prompt": "x", "continuation": "\ud800"}, "half a character"),
    ],
)
def test_rows_of_a_prompts_file_are_checked(row, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n\n' + json.dumps(row), encoding="utf-8-sig")
    with pytest.raises(ConfigError, match=f"prompts.jsonl, line 3.*({message})"):
        read_prompts(file)


def test_prompts_are_separated_by_newlines_only(tmp_path):
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\x0cline\u2028here\r\ntwo\n", encoding="utf-8")
    objects.write_text(json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False), encoding="utf-8")
    assert [one.prompt for one in read_prompts(text)] == ["one\x0cline\u2028here", "two"]
    for name in ("prompts.jsonl", "prompts.json", "PROMPTS.JSONL", "prompts.ndjson"):
        assert [one.prompt for one in read_prompts(objects.rename(tmp_path / name))] == ["a\u2028b\u0085c"]
        objects = tmp_path / name


def test_a_stop_text_may_be_a_special_token(params):
    """No decoded text shows it, so its id is looked for."""
    bos, prompts = TOKENIZER.bos_id, [Prompt("a", max_tokens=60)] * 8
    likely = params | {"embedding": {"table": params["embedding"]["table"].at[bos].multiply(4.0)}}
    free = Sampling(eos_ids=(), temperature=2.0)
    drawn, stopped = (
        PromptDecoder(MODEL, likely, TOKENIZER, settings, 0).continue_prompts(prompts)
        for settings in (free, dataclasses.replace(free, stop=("<bos>",)))
    )
    assert any(bos in one["ids"] for one in drawn)
    for before, after in zip(drawn, stopped, strict=True):
        ids = before["ids"]
        cut = ids.index(bos) + 1 if bos in ids else None
        assert (after["ids"], after["finish_reason"]) == (ids[:cut], "stop" if cut else "length")


def test_a_stop_text_that_is_an_unknown_token_does_not_stop_at_other_unknown_ones(params, tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(path=f"{tmp_path}/tokenizer.json", eos_token="</s>")
    (unknown,) = tokenizer.encode("ü")
    likely = params | {"embedding": {"table": params["embedding"]["table"].at[unknown].multiply(4.0)}}
    free = Sampling(eos_ids=(), temperature=2.0, max_tokens=40)
    drawn, stopped, named = (
        PromptDecoder(MODEL, likely, tokenizer, settings, 0).continue_prompts([Prompt("a")] * 4)
        for settings in (free, dataclasses.replace(free, stop=("ü",)), dataclasses.replace(free, stop=("<unk>",)))
    )
    assert any(unknown in one["ids"] for one in drawn)
    assert stopped == drawn != named


class Words:
    """A tokenizer of words that, as SentencePiece, has the space before a word in its token, except for the first."""

    path, eos_id, bos_id, pad_id, special_tokens, special_tokens_by_id = None, 1, None, 0, {}, {}
    vocab_size = 259

    def __init__(self) -> None:
        self.words = ["<pad>", "</s>", "\u2581the", "\u2581cat", "s", "\u2581sat", "\u2581thes", "\u2581", ".", "0"]

    def encode(self, text: str) -> np.ndarray:
        left, ids = ("\u2581" + text.replace(" ", "\u2581")) if text else "", []
        while left:
            fitting = [i for i, word in enumerate(self.words) if i > 1 and left.startswith(word)]
            number = max(fitting, key=lambda i: len(self.words[i]))
            ids.append(number)
            left = left.removeprefix(self.words[number])
        return np.array(ids, np.int32)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: np.ndarray) -> str:
        text = "".join(self.words[i] if i < len(self.words) else "?" for i in ids if i > 1)
        return text.replace("\u2581", " ").removeprefix(" ")


def test_spaces_between_a_prompt_and_its_continuation(params):
    """A tokenizer adds a space before a text, and drops it when it decodes one."""
    decoder = PromptDecoder(MODEL, params, Words(), Sampling(), 0)
    rows = [
        Prompt("the cat", continuation=" sat"),
        Prompt("the", continuation=" cats"),
        Prompt("the", continuation="s"),  # a token spans both, and "s" alone is encoded as " s"
        Prompt(ids=[2, 3], continuation="s"),
        Prompt("the cat", max_tokens=9),
    ]
    first, second, within, after_ids, generated = decoder.continue_prompts(rows)
    assert (first["ids"], first["text"]) == ([5], " sat")
    assert (second["ids"], second["text"]) == ([3, 4], " cats")
    assert [(one["ids"], one["text"]) for one in (within, after_ids)] == [([4], "s")] * 2
    whole = Words().decode(np.array([2, 3, *generated["ids"]]))
    assert "the cat" + generated["text"] == whole


class Bytes(ByteTokenizer):
    """Bytes that, as with the byte fallback of `tokenizers`, are not decoded beside a part of a character."""

    def decode(self, ids: np.ndarray) -> str:
        text = super().decode(ids)
        return "\ufffd" * len(ids) if "\ufffd" in text else text


def test_text_of_several_bytes_per_character(params):
    """The tokens before an answer, with which it is decoded, may start within a character."""
    row = Prompt("ሰላምታ", continuation="ሰላም")
    assert PromptDecoder(MODEL, params, Bytes(), Sampling(), 0).continue_prompts([row])[0]["text"] == "ሰላም"


def test_text_is_received_without_an_end_that_may_change(capsys):
    """Parts of a character or of a stop text may not be part of the answer; what is printed remains."""
    tokenizer, printer = Bytes(), _Printer(shows_prompts=False)
    ids = tokenizer.encode("a😀😀 ENE, END")
    for count in range(1, len(ids)):
        printer(0, "", _lasting_part(tokenizer.decode(ids[:count]), ("END",)), False)
    assert capsys.readouterr().out == "a😀😀 ENE, "
