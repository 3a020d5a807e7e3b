"""Inputs that wrap Lingvo's input generators, as Pax's adaptors do (needs the extra `lingvo`).

The generator reads, shuffles, packs and batches the data according to its params. The adaptor adds host sharding, the
end of an epoch, and a position that can be saved.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from paxcli.config.fields import PositiveInt
from paxcli.errors import DataError
from paxcli.inputs.base_input import BaseInput, RandomAccessInput, StreamInput
from paxcli.inputs.lingvo_generator import LingvoGenerator, copy_params
from paxcli.log import log
from paxcli.nested_map import NestedMap, digest, num_rows


@dataclasses.dataclass(kw_only=True)
class _LingvoInput(BaseInput):
    """The base class of the adaptors.

    Args:
      input: Params of a Lingvo input generator, or a function that returns them, so that Lingvo is imported later.
      num_batches: Ends the data after this number of the generator's batches. None: where the generator ends.
      allow_fixed_file_random_seed: Accept a `file_random_seed` other than 0; host h then uses that seed plus h.
      cluster_do_eval: Outside training, sets `do_eval` of Lingvo's cluster, so that the generator reads files in order
        and ends.
    """

    input: Any = None
    num_batches: PositiveInt | None = None
    allow_fixed_file_random_seed: bool = False
    cluster_do_eval: bool = False

    def validate(self) -> None:
        super().validate()
        params = self._params
        if self._reads_files and params.repeat_count >= 0 and not self._in_order:  # Lingvo would abort the process
            hint = "Set cluster_do_eval=True in an evaluation; leave repeat_count at -1 in training."
            self.refuse(f"Lingvo supports repeat_count={params.repeat_count} only if it reads in order.", hint)
        if self._reads_files and params.repeat_count < 0:
            self._check_finite_epoch()

    def check_data(self) -> None:
        """Raises DataError if there are no files, and ConfigError if an epoch would not end."""
        assert self._generator  # which validates the settings first

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return self._generator.ids_to_strings(ids, lengths, key.partition(".")[0])

    def _check_finite_epoch(self) -> None:
        """Raises ConfigError for an infinite generator in an input that runs epochs."""
        if self.reset_for_eval and self.num_batches is None:
            hint = "Set cluster_do_eval=True (and repeat_count=1 for a generator that reads files), or num_batches."
            self.refuse("reset_for_eval=True needs finite data, but its Lingvo generator does not end.", hint)

    @property
    def _in_order(self) -> bool:
        return self.cluster_do_eval and not self.is_training

    @functools.cached_property
    def _params(self) -> Any:
        return copy_params(self.input, f"Input `{self.name}`")

    @property
    def _reads_files(self) -> bool:
        """Whether the generator uses Lingvo's record readers, rather than a `tf.data.Dataset`."""
        from lingvo.core.base_input_generator import TFDataSequenceInputGenerator

        return "repeat_count" in self._params and not issubclass(self._params.cls, TFDataSequenceInputGenerator)

    @functools.cached_property
    def _generator(self) -> LingvoGenerator:
        self.validate()
        params = self._params.Copy()
        self._set_seed(params)
        generator = LingvoGenerator(params, self.infeed_host_index, self.num_infeed_hosts, self._in_order)
        if generator.is_infinite_dataset():
            self._check_finite_epoch()
        return generator

    def _epoch(self) -> Iterator[NestedMap]:
        """The generator's batches from here to its end, or `num_batches` of them."""
        return itertools.islice(iter(self._generator.batch, None), self.num_batches)

    def _set_seed(self, params: Any) -> None:
        """Replaces the file seed 0 (any seed, in Lingvo) by one derived from this input's seed and host."""
        if "file_random_seed" not in params or params.use_per_host_infeed:
            return
        if params.file_random_seed:
            params.file_random_seed += self.infeed_host_index
        else:
            draw = np.random.SeedSequence([self.seed, self.infeed_host_index]).generate_state(1)[0]
            params.file_random_seed = 1 + int(draw) % (2**31 - 2)


@dataclasses.dataclass(kw_only=True)
class LingvoInputAdaptor(_LingvoInput, StreamInput):
    """The batches of a Lingvo input generator, in its order (Pax: `LingvoInputAdaptor`).

    The generator determines the batch size (`bucket_batch_limit`, `batch_size`, `args`). A shorter last batch is padded
    with copies of its first row, of weight 0. Every batch has `eval_sample_weights` [B].

    All hosts read the same files, each in a different order. For an epoch on several hosts, use `LingvoEvalAdaptor`.

    Lingvo cannot save its position. A resumed run reads again the batches that it has already seen. This is exact for a
    generator with file_parallelism=1 and num_batcher_threads=1; otherwise, a difference is logged.
    """

    sizes_own_batches: ClassVar[bool] = True
    START: ClassVar[Any] = (0, None)  # number of batches read, and the last one

    def validate(self) -> None:
        super().validate()
        seed = self._params.file_random_seed if "file_random_seed" in self._params else 0
        if seed and not self.allow_fixed_file_random_seed:
            hint = "Set it to 0 (a seed from input_random_seed and the host), or set allow_fixed_file_random_seed=True."
            self.refuse(f"its generator has file_random_seed={seed}.", hint)
        if self.reset_for_eval and self.num_infeed_hosts > 1 and self.num_batches is None:
            hint = "Use LingvoEvalAdaptor, or set num_batches."
            self.refuse(f"its {self.num_infeed_hosts} hosts may have epochs of different lengths.", hint)

    def reset(self) -> None:
        self._generator.reset()
        super().reset()

    def get_state(self) -> dict[str, Any]:
        host = [self.infeed_host_index, self.num_infeed_hosts]
        return {"num_taken": self.position[0], "host": host, "last": self._digest_last()}

    def set_state(self, state: dict[str, Any]) -> None:
        index, num_hosts = state["host"]
        if num_hosts != self.num_infeed_hosts:
            hint = "Resume on the same number of hosts."
            self.refuse(f"read by {num_hosts} hosts, it cannot resume on {self.num_infeed_hosts}.", hint, DataError)
        self.reset()
        for _ in range(state["num_taken"]):
            self.get_next()
        if index == self.infeed_host_index and state["last"] not in (None, self._digest_last()):
            exact = "Set file_parallelism=1 and num_batcher_threads=1 for an exact resume."
            log.warning("Input %s resumes in a different order: Lingvo reads files in parallel. %s", self.name, exact)

    def _digest_last(self) -> str | None:
        """A hash of the batch before this position; None at the start."""
        last = self.position[1]
        return None if last is None else digest(jax.tree.leaves(last))

    def read_batches(self, position: tuple[int, NestedMap | None]) -> Iterator[tuple[NestedMap, Any]]:
        for number, batch in enumerate(self._batches(), start=position[0] + 1):
            yield batch, (number, jax.tree.map(lambda array: array, batch))

    def _batches(self) -> Iterator[NestedMap]:
        """The generator's batches, padded to the size of its first one."""
        size = None
        for batch in self._generator_batches():
            rows = num_rows(batch)
            size = size or rows
            if rows > size:
                hint = "Return batches of one size, but for the last."
                self.refuse(f"a batch of {rows} rows follows one of {size}.", hint, DataError)
            yield _select_rows(batch, np.where(np.arange(size) < rows, np.arange(size), -1))

    def _generator_batches(self) -> Iterator[NestedMap]:
        """The generator's batches. Restarts the generator at its end if the stream repeats."""
        while True:
            count = 0
            for batch in self._epoch():
                count += 1
                yield batch
            if self.num_batches is not None and count < self.num_batches and self.num_infeed_hosts > 1:
                problem = f"{count} batches, but num_batches={self.num_batches}: other hosts would wait for the rest."
                self.refuse(problem, "Lower `num_batches` to the batches of the host that has fewest.", DataError)
            if not count:
                self.refuse("its Lingvo generator has no batches.", "Check its files.", DataError)
            if not self.repeats:
                return
            self._generator.reset()


@dataclasses.dataclass(kw_only=True)
class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
    """Splits the batches of a Lingvo input generator into batches of `batch_size` rows.

    For generators that pack better with large batches, such as packing_factor=3.5 and bucket_batch_limit=[4096]. The
    generator's batch size must be a multiple of `batch_size`.
    """

    sizes_own_batches: ClassVar[bool] = False

    def _batches(self) -> Iterator[NestedMap]:
        size = self.batch_size
        assert size is not None
        for large in super()._batches():
            rows = num_rows(large)
            if rows % size:
                hint = "Change the generator's bucket_batch_limit, or batch_size."
                self.refuse(f"the Lingvo batch of {rows} rows is not a multiple of batch_size={size}.", hint)
            for start in range(0, rows, size):
                yield _select_rows(large, np.arange(start, start + size))


@dataclasses.dataclass(kw_only=True)
class LingvoEvalAdaptor(RandomAccessInput, _LingvoInput):
    """An epoch of a finite Lingvo input generator, sharded over hosts in batches of `batch_size`.

    Each host reads all data once, in the same order, and keeps it in memory. The last global batch is padded with
    copies of the first row, of weight 0, so that all hosts have the same number of batches. Every batch has
    `eval_sample_weights` [B]. The generator's own batch size has no effect; 1 always works.
    """

    def validate(self) -> None:
        super().validate()
        if self.is_training or not self.reset_for_eval:
            hint = "Set reset_for_eval=True and eval_loop_num_batches=None; to train, use LingvoInputAdaptor."
            self.refuse("LingvoEvalAdaptor only supports evaluation epochs.", hint)

    def num_rows(self) -> int:
        return num_rows(self._data)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return _select_rows(self._data, numbers)

    def _set_seed(self, params: Any) -> None:
        # The same order on every host: one seed, one thread.
        if "file_random_seed" in params and not params.use_per_host_infeed:
            params.file_random_seed = params.file_random_seed or self.seed
            params.file_parallelism = params.num_batcher_threads = 1

    @functools.cached_property
    def _data(self) -> NestedMap:
        if not (batches := list(self._epoch())):
            self.refuse("its Lingvo generator has no batches.", "Check its files.", DataError)
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def _select_rows(batch: NestedMap, numbers: np.ndarray) -> NestedMap:
    """The rows with these numbers [B]; for -1, a copy of the first row, of weight 0."""
    is_row = numbers >= 0

    def select(path: Any, array: np.ndarray) -> np.ndarray:
        selected = array[np.maximum(numbers, 0)]
        name = path[-1].key
        if name in ("weights", "paddings"):
            selected[~is_row] = name == "paddings"
        return selected

    rows = jax.tree_util.tree_map_with_path(select, batch)
    rows.eval_sample_weights = (rows.get("eval_sample_weights", 1.0) * is_row).astype(np.float32)
    return rows
