"""Metrics as text."""

from __future__ import annotations

from collections.abc import Mapping


def values_text(metrics: Mapping[str, float]) -> str:
    """Names and values on one line; `data_share` below 1 as a remark that only a part of the data was read."""
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
        for name, value in metrics.items()
        if name != "data_share"
    ]
    share = metrics.get("data_share", 1.0)
    return " · ".join(shown if share >= 1 else [*shown, f"on {share:.2%} of its data"])
