"""Rates of TPU chips, one set of constants for each generation, from which the time of a step is predicted.

Sources: clocks, HBM and links are published, on Google Cloud's pages of each generation and in chapter 2 of "How to
Scale Your Model" (Austin et al., 2025). What matmuls reach of the peak is fitted to the steps that MaxText's
maintainers measured, one constant for all rows of a generation: `benchmarks/calibration.py`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of one generation.

    Attributes:
      clock: Hz: the published peak divided by the FLOPs of a cycle, MXUs × 2 × the 128² or 256² cells of each.
      hbm: Bytes per second of its memory.
      ici_link: Bytes per second of an ICI link in one direction.
      dcn: Bytes per second of its share of its host's network cards.
      pcie: Bytes per second between it and its host, in one direction.
      matmul_rate: Share of the peak that matmuls reach where HBM does not bound them.
      fp8_speed: FP8 peak over that in bfloat16; 1 where FP8 operands are converted to bfloat16.
      error: The largest error of the predicted speed in the measured rows of the generation; None = there are none.
    """

    clock: float
    hbm: float
    ici_link: float
    dcn: float
    pcie: float
    matmul_rate: float
    fp8_speed: float
    error: float | None


CHIPS = {
    "v4": Chip(1.05e9, 1.2e12, 45e9, 6.25e9, 15e9, 0.79, 1, 0.07),
    "v5e": Chip(1.5e9, 0.82e12, 45e9, 3.125e9, 15e9, 0.89, 1, 0.03),
    "v5p": Chip(1.75e9, 2.765e12, 90e9, 6.25e9, 15e9, 0.91, 1, 0.17),
    "v6e": Chip(1.75e9, 1.64e12, 90e9, 12.5e9, 32e9, 0.9, 1, 0.1),
    "tpu7x": Chip(2.2e9, 3.7e12, 90e9, 6.25e9, 32e9, 0.9, 2, None),  # half a chip, but for its links
}
