"""Metrics as text."""

from __future__ import annotations

from collections.abc import Mapping


def values_text(metrics: Mapping[str, float]) -> str:
    """Names and values on one line: `loss` only if it is not `log_pplx`, `data_share` below 1 as a remark."""
    shown = dict(metrics)
    share = shown.pop("data_share", 1.0)
    if shown.get("loss") == shown.get("log_pplx"):
        shown.pop("loss", None)
    parts = [f"{name} {value:{',' if isinstance(value, int) else '.4f'}}" for name, value in shown.items()]
    return " · ".join(parts if share >= 1 else [*parts, f"on {share:.2%} of its data"])
