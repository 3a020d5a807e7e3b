"""Generates token sequences: continuous batching of samples, and batches of beam searches.

With continuous batching, the next prompt takes the place of a sequence that ends, and the others are not delayed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxcli.models.base import Seq2SeqModel
from paxcli.models.beam_search import Beams, BeamSearch, beam_search
from paxcli.models.decoding import DecodeState, advance, cache_axes, insert, prefill, score, unroll_layers
from paxcli.models.sampling import Decoding, Sampling, SequenceSettings, num_candidates, sequence_settings

_SCORED_TOKENS = 8192  # of a batch: their logits have to fit into memory
# Tokens between two checks for sequences that have ended: few while requests wait for their places.
_STEPS_WITH_WAITING, _STEPS = 8, 32


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence to generate.

    Attributes:
      ids: The prompt, and a given continuation; or the source of a target, [P].
      answer_start: Where the answer starts: P, or earlier with a given continuation; 1 in a target.
      max_tokens: The most tokens to generate; 0 = only compute log-probabilities.
      settings: Of its sampling.
      prompt: The text of the prompt or the source.
      stop: Texts that end the answer; `Generator` leaves it to a `Watch` to find them.
    """

    ids: np.ndarray
    answer_start: int
    max_tokens: int
    settings: SequenceSettings
    prompt: str = ""
    stop: tuple[str, ...] = ()


_FREE = Request(np.zeros(1, np.int32), 1, 0, sequence_settings(Sampling(), 0, 0))  # of a slot without a sequence


class Answer(NamedTuple):
    """Generated tokens.

    Attributes:
      ids: The tokens, [T].
      log_probs: Their log-probabilities, [T].
      finish_reason: `eos`, `stop` or `length`; `given` for a given continuation.
      score: The log-probability of all, or the score of beam search.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    score: float


# Receives a request's index, its answer so far, and whether it is complete. Returns the number of tokens to end it at.
Watch = Callable[[int, np.ndarray, bool], int | None]


class Generator:
    """A decoding model with its parameters and settings. Each shape of inputs is compiled once.

    Args:
      model: The model.
      params: Its parameters.
      decoding: The settings, with the end tokens. Without beam search, answers do not depend on their `batch_size`.
      bos_id: The first token of a target.
    """

    def __init__(self, model: Any, params: dict, decoding: Decoding, bos_id: int):
        model, convert = unroll_layers(model)
        settings: Any = decoding  # Sampling or BeamSearch
        self._model, self._decoding = model, settings
        self._prepare = jax.jit(lambda params, is_batch: convert(model.cast(params), is_batch), static_argnums=1)
        self.set_params(params)
        prefill_rows = functools.partial(prefill, model, bos_id=bos_id)
        self._prefill = jax.jit(prefill_rows, static_argnames="size")
        self._insert = jax.jit(self._insert_rows, donate_argnames="state")
        advance_all = functools.partial(advance, model, sampling=settings)
        self._advance = jax.jit(advance_all, donate_argnames="state", static_argnames="candidates")
        self._search = jax.jit(self._search_beams, static_argnames="max_tokens")
        self._scores = jax.jit(functools.partial(score, model))

    def set_params(self, params: dict) -> None:
        """Replaces the parameters, by others of the same shapes."""
        self._loaded, self._params, self._is_for_batches = params, {}, None

    def _store_params(self, is_batch: bool) -> None:
        """Stores the parameters as a batch, or one sequence, decodes fastest on a CPU; elsewhere once, for both."""
        is_batch = is_batch or jax.default_backend() != "cpu"
        if self._is_for_batches != is_batch:
            self._is_for_batches, self._params = is_batch, {}  # frees their memory first
            self._params = self._prepare(self._loaded, is_batch)

    def answer(self, requests: Sequence[Request], watch: Watch, stream: bool = False) -> list[list[Answer]]:
        """The samples of each request, best first.

        `watch` is called every few tokens; with `stream`, at each token; with beam search, for complete answers only.
        """
        if isinstance(self._decoding, BeamSearch):
            size = self._decoding.batch_size
            batches = [requests[start : start + size] for start in range(0, len(requests), size)]
            beams = (row for batch in batches for row in self._beams(batch))
            return [self._best(row, functools.partial(watch, number)) for number, row in enumerate(beams)]
        count, given = self._decoding.num_samples, {i: one for i, one in enumerate(requests) if not one.max_tokens}

        def sample_of(one: Request, sample: int) -> Request:
            number = one.settings.number * count + sample
            return dataclasses.replace(one, settings=one.settings._replace(number=number))

        samples = [(i, sample_of(one, n)) for i, one in enumerate(requests) if one.max_tokens for n in range(count)]
        answers = self._samples(samples, watch, stream) if samples else {}
        if given:
            rows, starts = zip(*((one.ids.tolist(), one.answer_start) for one in given.values()), strict=True)
            for (index, one), (log_probs, _) in zip(given.items(), self.score(rows, starts), strict=True):
                answers[index] = [Answer(one.ids[one.answer_start :], log_probs, "given", float(log_probs.sum()))]
        return [sorted(answers[index], key=lambda one: one.score, reverse=True) for index in range(len(requests))]

    def score(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores the tokens of rows, of up to one token more than the model has positions, from `starts` on.

        Returns:
          For each row, the log-probabilities of its tokens, and whether each is the most likely one.
        """
        self._store_params(is_batch=True)
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        while longest_first:
            width = min(max(_power_of_two(len(rows[longest_first[0]]) - 1), 32), self._model.max_decode_len)
            count = max(min(self._decoding.batch_size, _power_of_two(len(rows)), _SCORED_TOKENS // width), 1)
            batch, longest_first = longest_first[:count], longest_first[count:]
            ids, begin = np.zeros((count, width + 1), np.int32), np.ones(count, np.int32)
            for row, number in enumerate(batch):
                ids[row, : len(rows[number])], begin[row] = rows[number], starts[number]
            scores, is_best = _fetch(self._scores(self._params, ids, begin))
            for row, number in enumerate(batch):
                part = slice(starts[number] - 1, len(rows[number]) - 1)
                found[number] = scores[row, part], is_best[row, part]
        return [found[number] for number in range(len(rows))]

    def _samples(self, samples: Sequence[tuple[int, Request]], watch: Watch, stream: bool) -> dict[int, list[Answer]]:
        """Generates samples: pairs of a request's index and the request. Returns index → answers."""
        requests, answers = [request for _, request in samples], collections.defaultdict(list)
        slots, size = min(self._decoding.batch_size, _power_of_two(len(requests))), self._size(requests)
        self._store_params(is_batch=slots > 1)
        waiting, active, state = collections.deque(samples), {}, None
        candidates = num_candidates(_stack([one.settings for one in requests]))
        while waiting or active:
            free = [slot for slot in range(slots) if slot not in active]
            if new := {slot: waiting.popleft() for slot in free[: len(waiting)]}:
                rows = slots if state is None else _power_of_two(len(new))
                found = self._start([request for _, request in new.values()], requests, rows, size)
                at = np.array([*new, *[slots] * (rows - len(new))])
                state = found if state is None else self._insert(self._params, state, found, at)
                active |= new
            steps = 1 if stream else _STEPS_WITH_WAITING if waiting else _STEPS
            state = self._advance(self._params, state, steps, candidates=candidates)
            ids, log_probs, lengths, ended, done = _fetch((*state[:4], state.done))
            for slot, (index, request) in list(active.items()):
                part = slice(request.answer_start, int(lengths[slot]))
                cut = watch(index, ids[slot, part], bool(done[slot]))
                if cut is not None or done[slot]:
                    answers[index].append(_answer(ids[slot, part], log_probs[slot, part], cut, ended[slot]))
                    del active[slot]
        return answers

    def _beams(self, requests: Sequence[Request]) -> Iterable[tuple[np.ndarray, ...]]:
        """The fields of `Beams` for each request."""
        self._store_params(is_batch=True)
        prompts = self._start(requests, requests, len(requests), self._size(requests))
        max_tokens = max(one.max_tokens for one in requests)
        return zip(*_fetch(self._search(self._params, prompts, max_tokens=max_tokens)), strict=True)

    def _best(self, beams: tuple[np.ndarray, ...], watch: Callable[..., int | None]) -> list[Answer]:
        """The best sequences of a search, which continues after a stop text: those that are equal up to it are one."""
        answers = {}
        for ids, log_probs, adjusted, length, ended, final in zip(*beams, strict=True):
            if np.isfinite(final):
                answer = _answer(ids[:length], log_probs[:length], watch(ids[:length], True), ended)
                normalized = self._decoding.normalize(float(adjusted[: len(answer.ids)].sum()), len(answer.ids))
                answers[answer.ids.tobytes()] = answer._replace(score=normalized)
        ranked = sorted(answers.values(), key=lambda one: (one.finish_reason == "length", -one.score))
        return ranked[: self._decoding.num_samples]

    def _size(self, requests: Sequence[Request]) -> int:
        """The length of the sequences."""
        starts = [1 if isinstance(self._model, Seq2SeqModel) else len(one.ids) for one in requests]
        return self._round_up(max(start + one.max_tokens for start, one in zip(starts, requests, strict=True)))

    def _round_up(self, length: int) -> int:
        """A multiple of 32, so that few shapes are compiled."""
        return min(-(-length // 32) * 32, self._model.max_decode_len)

    def _start(self, new: Sequence[Request], requests: Sequence[Request], rows: int, size: int) -> DecodeState:
        """The prefilled sequences of some of the requests. Sources are as long as the longest of all."""
        padded = requests if isinstance(self._model, Seq2SeqModel) else new
        ids = np.zeros((rows, self._round_up(max(len(one.ids) for one in padded))), np.int32)
        new = [*new, *[_FREE] * (rows - len(new))]
        for row, one in zip(ids, new, strict=True):
            row[: len(one.ids)] = one.ids
        columns = np.array([(len(one.ids), one.max_tokens) for one in new], np.int32).T
        settings = _stack([one.settings for one in new])
        if all(one.settings.repetition_penalty == 1 for one in requests):
            settings = settings._replace(repetition_penalty=None)  # its program does not look for earlier tokens
        return self._prefill(self._params, ids, *columns, settings, size=size)

    def _insert_rows(self, params: dict, state: DecodeState, new: DecodeState, slots: jax.Array) -> DecodeState:
        return insert(state, new, slots, cache_axes(self._model, params, state.ids.shape[1]))

    def _search_beams(self, params: dict, prompts: DecodeState, max_tokens: int) -> Beams:
        axes = cache_axes(self._model, params, prompts.ids.shape[1])
        return beam_search(self._model, params, prompts, axes, max_tokens, self._decoding)


def _answer(ids: np.ndarray, log_probs: np.ndarray, cut: int | None, ended: bool) -> Answer:
    """An answer of these tokens, up to `cut`, with its log-probability as the score."""
    reason = "stop" if cut is not None else "eos" if ended else "length"
    return Answer(ids[:cut], log_probs[:cut], reason, float(log_probs[:cut].sum()))


def _fetch(arrays: Any) -> Any:
    """Arrays as NumPy arrays, in full on each process of a job."""
    several = jax.process_count() > 1
    return multihost_utils.process_allgather(arrays, tiled=True) if several else jax.device_get(arrays)


def _stack(settings: Sequence[SequenceSettings]) -> SequenceSettings:
    """Settings of sequences as arrays [B]."""
    dtypes = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
    columns = zip(*settings, strict=True)
    return SequenceSettings(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
