"""Foreign tensors as pax's parameters, where no model gives their shapes."""

from __future__ import annotations

import numpy as np

from paxcli.convert.layout import Kind, Layout, Source, fill_pax


def to_pax(layout: Layout, tensors: Source, kind: Kind = "params") -> dict[str, np.ndarray]:
    """Name -> array of each pax parameter; shapes are those of the first layer that a rule converts."""
    params: dict[str, np.ndarray] = {}
    for rule in layout.rules:
        first = [layout.layers(name, "foreign").read(tensors, name, [0]) for name in rule.names("foreign")]
        for name, x in zip(rule.names("pax"), rule.to_pax(first, kind), strict=True):
            layers = layout.layers(name, "pax")
            for numbers in layers.tensors(name).values():
                stacked = np.broadcast_to(x, (len(numbers), *x.shape[1:]))
                params[name.format_map(layers.slots[numbers[0]].fields)] = layers.arrange(numbers, stacked).copy()
    fill_pax(layout, tensors, params, kind)
    return params
