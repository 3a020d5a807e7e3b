"""The repetition penalty and `no_repeat_ngram_size`, against HF `transformers` (tests/data/hf_generate.py)."""

from __future__ import annotations

import itertools
import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.inference.decode import PromptDecoder
from paxcli.inference.prompts import Prompt, parse_prompt
from paxcli.inputs.tokenizers import ByteTokenizer
from paxcli.models.beam_search import BeamSearch
from paxcli.models.sampling import Sampling, SequenceSettings, adjust, choose
from tests.models import hf_families
from tests.tolerances import FLOAT32

DATA = json.loads(hf_families.DATA.with_name("hf_generate.json").read_text())
PROMPTS, OUTPUTS = DATA["prompts"], {float(penalty): found for penalty, found in DATA["outputs"].items()}
FIELDS = {"max_tokens": 24, "eos_ids": ()}


def decode(prompts: list[Prompt], decoding: Sampling | BeamSearch) -> list[dict]:
    params = hf_families.params_of("llama2", hf_families.arrays_of("llama2"))
    decoder = PromptDecoder(fdl.build(hf_families.llama2()), params, ByteTokenizer(), decoding, 0)
    return decoder.continue_prompts(prompts)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_decoding_with_a_penalty_is_that_of_transformers(batch_size):
    """Of prompts of unequal length, in slots that are used again, and in one batch."""
    for penalty in (1.3, 0.8) if batch_size == 3 else (1.3,):
        settings = Sampling(repetition_penalty=penalty, batch_size=batch_size, **FIELDS)
        found = decode([Prompt(ids=row) for row in PROMPTS], settings)
        assert [one["ids"] for one in found] == OUTPUTS[penalty]["ids"]
        for one, log_probs in zip(found, OUTPUTS[penalty]["log_probs"], strict=True):
            np.testing.assert_allclose(one["log_probs"], log_probs, **FLOAT32)  # the model's, without the penalty
    assert OUTPUTS[1.3]["ids"] != OUTPUTS[1.0]["ids"] != OUTPUTS[0.8]["ids"]


def test_prompts_have_penalties_of_their_own():
    """Beside prompts that have none, and over that of the recipe."""
    own = [None, 1.3, 0.8, 1.0]
    rows = [{"ids": row, "repetition_penalty": x} for row, x in zip(PROMPTS, own, strict=True)]
    for recipe, of_first in ((None, 1.0), (1.3, 1.3)):
        found = decode([*map(parse_prompt, rows)], Sampling(repetition_penalty=recipe, batch_size=2, **FIELDS))
        used = [of_first, *own[1:]]
        assert [one["ids"] for one in found] == [OUTPUTS[x]["ids"][number] for number, x in enumerate(used)]


def test_sampling_draws_from_penalized_logits():
    """With `top_k=1` it takes the token that greedy decoding takes."""
    settings = Sampling(temperature=0.7, top_k=1, repetition_penalty=1.3, **FIELDS)
    assert [one["ids"] for one in decode([Prompt(ids=row) for row in PROMPTS], settings)] == OUTPUTS[1.3]["ids"]


def test_end_tokens_are_excluded_with_a_penalty():
    """At a logit above 0 or below: minus infinity stays so."""
    first = OUTPUTS[1.3]["ids"][1]
    settings = Sampling(repetition_penalty=1.3, min_tokens=24, max_tokens=24, eos_ids=(first[0],))
    (found,) = decode([Prompt(ids=PROMPTS[1])], settings)
    assert len(found["ids"]) == 24 and first[0] not in found["ids"]
    ids, length = jnp.array([[0, 1, 2, 0]]), jnp.array([3])
    logits = adjust(jnp.array([[-jnp.inf, 2.0, -2.0]]), ids, length, length, jnp.array([1.3]), Sampling())
    np.testing.assert_allclose(logits, [[-np.inf, 2 / 1.3, -2.6]], **FLOAT32)
    row = SequenceSettings(*(jnp.array([x]) for x in (0.0, 0, 1.0, 1.3, 0, 0)))
    assert choose(logits, lambda: jax.random.split(jax.random.key(0), 1), row, 0, Sampling()).tolist() == [1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sequence_of_n_tokens_comes_twice(size):
    found = decode([Prompt(ids=row) for row in PROMPTS], Sampling(no_repeat_ngram_size=size, **FIELDS))
    assert [one["ids"] for one in found] == DATA["ngrams"][str(size)]
    for row, one in zip(PROMPTS, found, strict=True):
        text = [*row, *one["ids"]]
        ngrams = [tuple(text[start : start + size]) for start in range(len(text) - size + 1)]
        assert all(ngrams.index(ngrams[at]) == at for at in range(len(row), len(ngrams)))


def test_n_may_exceed_the_length():
    found = decode([Prompt(ids=row) for row in PROMPTS], Sampling(no_repeat_ngram_size=500, **FIELDS))
    assert [one["ids"] for one in found] == OUTPUTS[1.0]["ids"]


@pytest.mark.parametrize("size", [None, 2, 3])
def test_beams_are_those_of_transformers(size):
    """Their scores too, which have the penalty; the log-probabilities are the model's."""
    wanted = [one for one in DATA["beams"] if one["ngram_size"] == (size or 0)]
    of_beams = BeamSearch(beam_size=3, num_samples=3, length_norm_alpha=0.0, no_repeat_ngram_size=size, **FIELDS)
    prompts = [parse_prompt({"ids": one["prompt"], "repetition_penalty": one["penalty"]}) for one in wanted]
    found = iter(decode(prompts, of_beams))
    for one in wanted:
        beams = list(itertools.islice(found, 3))
        assert [beam["ids"] for beam in beams] == one["ids"]
        np.testing.assert_allclose([beam["score"] for beam in beams], one["scores"], atol=3e-4)
        for beam in beams:
            before = [{*one["prompt"], *beam["ids"][:count]} for count in range(len(beam["ids"]))]
            factors = [one["penalty"] if x in seen else 1 for x, seen in zip(beam["ids"], before, strict=True)]
            np.testing.assert_allclose(np.dot(beam["log_probs"], factors), beam["score"], **FLOAT32)
    assert len({one["penalty"] for one in wanted}) == {None: 3, 2: 1, 3: 1}[size]


def test_mistakes_name_the_field():
    with pytest.raises(ConfigError, match="repetition_penalty must be above 0"):
        Sampling(repetition_penalty=0.0)
    with pytest.raises(ConfigError, match="repetition_penalty must be above 0"):
        parse_prompt({"prompt": "a", "repetition_penalty": -1.0})
    with pytest.raises(ConfigError, match="no_repeat_ngram_size must be"):
        Sampling(no_repeat_ngram_size=0)
