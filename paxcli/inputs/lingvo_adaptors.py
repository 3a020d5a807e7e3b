"""Inputs around the input generators of Lingvo, which Pax's inputs once were (the extra `lingvo`).

A generator's params say what is read, and how it is shuffled, packed and batched; an adaptor gives it its share of the
hosts, an end, and a position.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from paxcli.config.fields import PositiveInt
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.base_input import BaseInput, RandomAccessInput
from paxcli.inputs.lingvo_generator import LingvoGenerator, copied_params
from paxcli.log import log
from paxcli.nested_map import NestedMap, num_rows


@dataclasses.dataclass(kw_only=True)
class _LingvoInput(BaseInput):
    """What the adaptors share.

    Args:
      input: Params of a Lingvo input generator, or a function that returns them, which spares its module the import.
      num_batches: The data ends after this many of the generator's batches. None: where the generator ends.
      allow_fixed_file_random_seed: Takes a `file_random_seed` that is not 0; host h then uses that number plus h.
      cluster_do_eval: Outside training, tells the generator that it is an evaluation: it reads in order, and ends.
    """

    input: Any = None
    num_batches: PositiveInt | None = None
    allow_fixed_file_random_seed: bool = False
    cluster_do_eval: bool = False

    def validate(self) -> None:
        super().validate()
        params = self._params
        if self._reads_files and params.repeat_count >= 0 and not self._in_order:  # Lingvo would end the process.
            raise ConfigError(
                f"Input `{self.name}`: Lingvo repeats files repeat_count={params.repeat_count} times only in order.",
                "Set cluster_do_eval=True in an evaluation; leave repeat_count at -1 in training.",
            )
        if self._reads_files and params.repeat_count < 0:
            self._refuse_no_end()

    def check_data(self) -> None:
        """Raises DataError where there is no file to read; ConfigError where an epoch would not end."""
        self.validate()
        assert self._generator

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self._generator.ids_to_strings(ids, lengths, key.partition(".")[0])

    def _refuse_no_end(self) -> None:
        if self.reset_for_eval and self.num_batches is None:
            raise ConfigError(
                f"Input `{self.name}`: reset_for_eval=True waits for an end that its Lingvo generator does not have.",
                "Set cluster_do_eval=True (and repeat_count=1 of a generator that reads files), or num_batches.",
            )

    @property
    def _in_order(self) -> bool:
        return self.cluster_do_eval and not self.is_training

    @functools.cached_property
    def _params(self) -> Any:
        return copied_params(self.input, f"Input `{self.name}`")

    @property
    def _reads_files(self) -> bool:
        """Whether the generator is one of Lingvo's record readers, rather than a `tf.data.Dataset`."""
        from lingvo.core.base_input_generator import TFDataSequenceInputGenerator

        return "repeat_count" in self._params and not issubclass(self._params.cls, TFDataSequenceInputGenerator)

    @functools.cached_property
    def _generator(self) -> LingvoGenerator:
        self.validate()
        params = self._params.Copy()
        self._set_seed(params)
        generator = LingvoGenerator(params, self.infeed_host_index, self.num_infeed_hosts, self._in_order)
        if generator.is_endless_dataset():
            self._refuse_no_end()
        return generator

    def _set_seed(self, params: Any) -> None:
        """Turns the files' seed 0, Lingvo's word for any, into one that follows from this input's and its host."""
        if "file_random_seed" not in params or params.use_per_host_infeed:
            return
        if params.file_random_seed:
            params.file_random_seed += self.infeed_host_index
        else:
            draw = np.random.SeedSequence([self.seed, self.infeed_host_index]).generate_state(1)[0]
            params.file_random_seed = 1 + int(draw) % (2**31 - 2)


@dataclasses.dataclass(kw_only=True)
class LingvoInputAdaptor(_LingvoInput):
    """A Lingvo input generator as it is: its batches, in its order.

    Its batch size is the generator's own (`bucket_batch_limit`, `batch_size`, `args`). A shorter last batch is filled
    up with copies of its first row, of weight 0. Every batch has `eval_sample_weights` [B].

    Hosts read the same files, each in another order. An epoch on several hosts is `LingvoEvalAdaptor`'s.

    Lingvo cannot save a position. A resumed run makes the batches again that it already took, which is exact for a
    generator with file_parallelism=1 and num_batcher_threads=1; of others it says so where it is not.
    """

    sizes_own_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._forget()

    def _forget(self) -> None:
        """As before the first batch."""
        self._num_taken = self._num_generated = 0
        self._last: NestedMap | None = None
        self._pending: NestedMap | None = None
        self._num_rows: int | None = None

    def validate(self) -> None:
        super().validate()
        seed = self._params.file_random_seed if "file_random_seed" in self._params else 0
        if seed and not self.allow_fixed_file_random_seed:
            raise ConfigError(
                f"Input `{self.name}`: its generator has file_random_seed={seed}.",
                "Set it to 0, and the seed follows from input_random_seed and the host; or "
                "allow_fixed_file_random_seed=True.",
            )
        if self.reset_for_eval and self.num_infeed_hosts > 1 and self.num_batches is None:
            raise ConfigError(
                f"Input `{self.name}`: its {self.num_infeed_hosts} hosts may have epochs of different lengths.",
                "Use LingvoEvalAdaptor, or set num_batches.",
            )

    def get_next(self) -> NestedMap:
        self._last, self._pending = self._pending or self._made(), None
        self._num_taken += 1
        return jax.tree.map(lambda array: array, self._last)

    def peek(self) -> NestedMap | None:
        try:
            batch = self.get_next()
        except StopIteration:
            return None
        self._pending = self._last
        self._num_taken -= 1
        return batch

    def reset(self) -> None:
        self._generator.reset()
        self._forget()

    def get_state(self) -> dict[str, Any]:
        shown = self._last if self._pending is None else None
        return {
            "num_taken": self._num_taken,
            "host": [self.infeed_host_index, self.num_infeed_hosts],
            "last": None if shown is None else _digest(shown),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        index, num_hosts = state["host"]
        if num_hosts != self.num_infeed_hosts:
            raise DataError(
                f"Input `{self.name}` was read by {num_hosts} hosts, and cannot go on with {self.num_infeed_hosts}.",
                "Resume on as many hosts as before.",
            )
        self.reset()
        for _ in range(state["num_taken"]):
            self.get_next()
        if index == self.infeed_host_index and self._last and state["last"] not in (None, _digest(self._last)):
            log.warning(
                "Input %s goes on in another order than it was stopped in: Lingvo reads several files at once. "
                "With file_parallelism=1 and num_batcher_threads=1 it would not.",
                self.name,
            )

    def _made(self) -> NestedMap:
        """The next batch."""
        batch = self._generated()
        rows = num_rows(batch)
        self._num_rows = self._num_rows or rows
        if rows > self._num_rows:
            raise DataError(f"Input `{self.name}`: a batch of {rows} rows after one of {self._num_rows}.")
        return _rows(batch, np.where(np.arange(self._num_rows) < rows, np.arange(self._num_rows), -1))

    def _generated(self) -> NestedMap:
        """The generator's next batch, from its start again where the stream repeats."""
        while True:
            if self.num_batches is None or self._num_generated < self.num_batches:
                batch = self._generator.batch()
                if batch is not None:
                    self._num_generated += 1
                    return batch
                if self.num_batches is not None and self.num_infeed_hosts > 1:
                    raise DataError(
                        f"Input `{self.name}` has {self._num_generated} batches, fewer than num_batches="
                        f"{self.num_batches}, and other hosts would wait for the rest."
                    )
            if not self._num_generated:
                raise DataError(f"Input `{self.name}`: its Lingvo generator makes no batch.")
            if not self.repeats:
                raise StopIteration
            self._generator.reset()
            self._num_generated = 0


@dataclasses.dataclass(kw_only=True)
class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
    """A Lingvo input generator whose batches are cut into smaller ones of `batch_size` rows.

    For a generator that packs better the more it has to choose from: with packing_factor=3.5 and
    bucket_batch_limit=[4096], say. Its batch must be a multiple of `batch_size`.
    """

    sizes_own_batches: ClassVar[bool] = False

    def _forget(self) -> None:
        super()._forget()
        self._slices: Iterator[NestedMap] = iter(())

    def _made(self) -> NestedMap:
        batch = next(self._slices, None)
        if batch is None:
            self._slices = self._cut(super()._made())
            batch = next(self._slices)
        return batch

    def _cut(self, large: NestedMap) -> Iterator[NestedMap]:
        rows, size = num_rows(large), self.batch_size
        assert size is not None
        if rows % size:
            raise ConfigError(
                f"Input `{self.name}`: the Lingvo batch of {rows} rows is no multiple of batch_size={size}.",
                "Change the generator's bucket_batch_limit, or batch_size.",
            )
        return (_rows(large, np.arange(start, start + size)) for start in range(0, rows, size))


@dataclasses.dataclass(kw_only=True)
class LingvoEvalAdaptor(RandomAccessInput, _LingvoInput):
    """An epoch of a finite Lingvo input generator, shared out over hosts in batches of `batch_size`.

    Each host reads all of the data, once, and keeps it in memory; so every host must read it in the same order. The
    last global batch is filled up with copies of the first row, of weight 0, so no host has more batches than another.
    Every batch has `eval_sample_weights` [B]. The generator's own batch size changes nothing; 1 is always right.
    """

    def validate(self) -> None:
        super().validate()
        if self.is_training or not self.reset_for_eval:
            raise ConfigError(
                f"Input `{self.name}`: LingvoEvalAdaptor is for epochs of an evaluation.",
                "Set reset_for_eval=True and eval_loop_num_batches=None; train on LingvoInputAdaptor.",
            )

    def num_rows(self) -> int:
        return num_rows(self._data)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return _rows(self._data, numbers)

    def _set_seed(self, params: Any) -> None:
        # The same order on every host: one seed, one thread.
        if "file_random_seed" in params and not params.use_per_host_infeed:
            params.file_random_seed = params.file_random_seed or self.seed
            params.file_parallelism = params.num_batcher_threads = 1

    @functools.cached_property
    def _data(self) -> NestedMap:
        batches = list(iter(self._generator.batch, None)) if self.num_batches is None else []
        while len(batches) < (self.num_batches or 0) and (batch := self._generator.batch()) is not None:
            batches.append(batch)
        if not batches:
            raise DataError(f"Input `{self.name}`: its Lingvo generator makes no batch.")
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def _rows(batch: NestedMap, numbers: np.ndarray) -> NestedMap:
    """The rows of these numbers [B]; for -1 a copy of the first row, of weight 0."""
    is_row = numbers >= 0

    def field(path: Any, array: np.ndarray) -> np.ndarray:
        taken = array[np.maximum(numbers, 0)]
        name = path[-1].key
        if name in ("weights", "paddings"):
            taken[~is_row] = name == "paddings"
        return taken

    taken = jax.tree_util.tree_map_with_path(field, batch)
    given = batch.get("eval_sample_weights")
    weights = np.ones(len(numbers)) if given is None else given[np.maximum(numbers, 0)]
    taken.eval_sample_weights = (weights * is_row).astype(np.float32)
    return taken


def _digest(batch: NestedMap) -> str:
    digest = hashlib.sha256()
    for array in jax.tree.leaves(batch):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
