"""Runs a Lingvo input generator with the cluster and infeed settings that Pax uses."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.nested_map import NestedMap


class LingvoGenerator:
    """Batches of numpy arrays from a Lingvo input generator.

    Args:
      params: The generator's params.
      infeed_host_index: Index of this host, for Lingvo's infeed context.
      num_infeed_hosts: Number of hosts.
      do_eval: `do_eval` of Lingvo's cluster: True reads files in order, and ends.
    """

    def __init__(self, params: Any, infeed_host_index: int, num_infeed_hosts: int, do_eval: bool):
        from lingvo.core import cluster_factory

        self._params, self._hosts = params, (infeed_host_index, num_infeed_hosts)
        self._cluster = copy.deepcopy(cluster_factory.Current())
        # As in Pax, the generator runs as if for a TPU, whatever the device is.
        self._cluster.params.xla_device = "tpu"
        self._cluster.params.enable_asserts = False
        self._cluster.params.do_eval = do_eval
        _check_files(params)
        self._start()

    def _start(self) -> None:
        import tensorflow as tf
        from lingvo.core import datasource

        with self._scope():
            self._lingvo = self._params.Instantiate()
        source = getattr(self._lingvo, "datasource", None)
        self._dataset = source if isinstance(source, datasource.TFDatasetSource) else None
        # Inside tf.function, a dataset would restart at each call; Lingvo's record readers work only inside one.
        self._get = self._lingvo_batch if self._dataset is not None else tf.function(self._lingvo_batch)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        from lingvo.core import cluster

        index, number = self._hosts
        with cluster.InfeedContextScope(infeed_host_index=index, num_infeed_hosts=number), self._cluster:
            yield

    def _lingvo_batch(self) -> Any:
        import tensorflow as tf

        with self._scope():
            batch = self._lingvo.GetPreprocessedInputBatch()
        return batch.Filter(lambda tensor: tensor.dtype != tf.string)

    def batch(self) -> NestedMap | None:
        """The next batch, without string fields; None at the end of the data.

        Raises:
          DataError: The generator cannot read or process its data.
        """
        import tensorflow as tf

        try:
            return _as_numpy(self._get())
        except tf.errors.OutOfRangeError:
            return None
        except tf.errors.OpError as error:
            lines = [line for line in error.message.splitlines() if line.strip()]
            cause = " ".join(lines[-2:] if lines else [type(error).__name__])
            hint = "Correct the generator, or its files."
            raise DataError(f"{self._params.cls.__name__} cannot read a batch: {cause}", hint) from error

    def reset(self) -> None:
        """Restarts the generator."""
        return self._start() if self._dataset is None else self._dataset.Reset()

    def is_infinite_dataset(self) -> bool:
        """Whether the generator is a `tf.data.Dataset` of infinite cardinality."""
        import tensorflow as tf

        if self._dataset is None:
            return False
        with self._scope():
            return int(self._dataset.GetDataset().cardinality()) == tf.data.INFINITE_CARDINALITY

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str) -> list[str]:
        """Decodes ids [B, T] with the tokenizer named `key`, or the only one."""
        if not (tokenizers := getattr(self._lingvo, "tokenizer_dict", {})):
            return [" ".join(map(str, row[:length])) for row, length in zip(ids, lengths, strict=True)]
        name = key if key in tokenizers else None
        texts = self._lingvo.IdsToStrings(np.asarray(ids, np.int32), np.asarray(lengths, np.int32), key=name)
        return [text.decode("utf-8", errors="replace") for text in np.asarray(texts).tolist()]


def copy_params(params_or_function: Any, owner: str) -> Any:
    """A copy of a generator's params, or of the params that a function returns.

    Raises:
      MissingError: Lingvo is not installed, or cannot be loaded.
      ConfigError: The value is not the params of a Lingvo generator.
    """
    _check_lingvo()
    params = params_or_function() if callable(params_or_function) else params_or_function
    if not hasattr(params, "Instantiate"):
        raise ConfigError(f"{owner}: input is {params!r}.", "Set it to the params of a Lingvo input generator.")
    return params.Copy()


def _check_lingvo() -> None:
    try:
        import tensorflow as tf
        from lingvo.core import ops  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingError(f"A Lingvo input needs the package `{error.name}`.", "pip install 'lingvo>=0.14'") from None
    except Exception as error:  # TensorFlow raises its own types for a shared library that cannot be loaded
        hint = "Its wheel needs glibc 2.38 or newer: Debian 13, Ubuntu 24.04."
        raise MissingError(f"Lingvo cannot be loaded: {error}", hint) from error
    with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
        tf.config.set_visible_devices([], "GPU")


def _check_files(params: Any) -> None:
    """Raises DataError for file patterns without a match, for which Lingvo would search forever."""
    import tensorflow as tf

    file_pattern = getattr(params, "file_pattern", "") if "file_pattern" in params else ""
    for entry in [file_pattern] if isinstance(file_pattern, str) else file_pattern:
        patterns = entry if isinstance(entry, str) else entry[0]
        for pattern in filter(None, re.sub(r"^\w+:(?!//)", "", patterns).split(",")):
            # In Lingvo, `name@8` is a file with 8 shards.
            if not tf.io.gfile.glob(re.sub(r"@(\d+|\*)$", "-*", pattern)):
                raise DataError(f"No file matches {pattern}.", "Correct the generator's file_pattern.")


def _as_numpy(tree: Any) -> Any:
    """Converts Lingvo's NestedMap to ours, and tensors to NumPy arrays with JAX's dtypes (at most 32 bits)."""
    if isinstance(tree, dict):
        batch = NestedMap({key: _as_numpy(value) for key, value in tree.items()})
        if "segment_ids" in batch:  # Lingvo's packing returns floats
            batch.segment_ids = batch.segment_ids.astype(np.int32)
        return batch
    if isinstance(tree, list | tuple):
        return [_as_numpy(value) for value in tree]
    array = tree.numpy()
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if np.issubdtype(array.dtype, np.integer) and (narrow != array).any():
        hint = "Return values of this range from the generator."
        raise DataError(f"The value {array[narrow != array][0]} does not fit into {narrow.dtype}.", hint)
    return narrow
