"""Synthetic images: a fixed pattern per class, with noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paxcli.config.fields import Derived, Examples, NonNegativeFloat, Pixels, PositiveInt
from paxcli.inputs.base_input import RandomAccessInput
from paxcli.inputs.synthetic import check_sizes
from paxcli.nested_map import NestedMap


@dataclasses.dataclass(kw_only=True)
class SyntheticImages(RandomAccessInput):
    """Batches of `image` [B, size, size, C], `labels` [B] and `weights` [B].

    Args:
      image_size: Height and width.
      num_channels: C.
      num_classes: Number of classes. None: the trainer sets it to the model's.
      noise: Standard deviation of the noise; a pattern's is 1.
      num_examples: Number of images in an epoch. None: infinite.
    """

    image_size: Pixels = 32
    num_channels: PositiveInt = 3
    num_classes: Derived[PositiveInt | None] = None
    noise: NonNegativeFloat = 2.0
    num_examples: Examples | None = None

    def validate(self) -> None:
        super().validate()
        check_sizes(self, "image_size", "num_channels", "num_classes")

    def num_rows(self) -> int | None:
        return self.num_examples

    def data_fingerprint(self) -> Any:
        return self.num_examples

    def rows(self, numbers: np.ndarray) -> NestedMap:
        assert self.num_classes is not None
        shape = (self.image_size, self.image_size, self.num_channels)
        patterns = np.random.RandomState(0).standard_normal((self.num_classes, *shape)).astype(np.float32)
        labels, images = np.zeros(len(numbers), np.int32), np.zeros((len(numbers), *shape), np.float32)
        for index, number in enumerate(numbers):
            if number >= 0:
                random = np.random.default_rng([self.seed, self.is_training, number])
                labels[index] = random.integers(self.num_classes)
                images[index] = patterns[labels[index]] + self.noise * random.standard_normal(shape, np.float32)
        return NestedMap(image=images, labels=labels, weights=(numbers >= 0).astype(np.float32))
