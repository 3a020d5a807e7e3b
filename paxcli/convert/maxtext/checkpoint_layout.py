"""Where MaxText keeps each of our parameters, and how its array there differs from ours.

Names are dotted. What differs, always without a change of the numbers unless a scale or a shift is named:

- MaxText stacks layers along dimension `param_scan_axis`, the second by default; we along the first.
- `wo` is [F, D] there and [D, F] here; the table of relative positions [N, buckets] there and [buckets, N] here.
- With Llama 3.1's rotation, a pair is two neighbours of a head's features there, and (i, i + H/2) here.
- Gemma 2 has two of our layers in one of MaxText's, `…_local` and `…_global`; Gemma 3 six in one scanned block, and
  those that are left over apart.
- Query, key and value, or the two halves of a gated feed-forward, may be one array there.
- Of most blocks, queries are not multiplied by 1 / sqrt(H) there: their weights are smaller instead.
- An RMS norm's scale is the factor there; here it may be what is added to 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from paxcli.errors import ConfigError

Kind = Literal["params", "mu", "nu"]
Arrays = Sequence[np.ndarray]
Read = Callable[[str], np.ndarray]

_LLAMA = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm", "", "")
_GEMMA = ("pre_self_attention_norm", "pre_ffw_norm", "post_self_attention_norm", "post_ffw_norm")
_NORMS = {
    "default": ("pre_self_attention_norm", "", "", ""),
    "llama2": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt3": ("pre_self_attention_norm", "mlp.mlp_layer_norm", "", ""),
}
_OUR_NORMS = ("attention_norm", "feed_forward_norm", "attention_post_norm", "feed_forward_post_norm")


@dataclasses.dataclass(frozen=True)
class MaxTextLayout:
    """How a MaxText checkpoint holds a model.

    Attributes:
      block: MaxText's `decoder_block`.
      num_layers: L, as we count.
      scales_queries: Whether MaxText multiplies queries by 1 / sqrt(H), and not their weights when they start.
      layers_in_one: How many of our layers one of MaxText's is.
      scanned: Whether its layers are stacked (`scan_layers`).
      scan_axis: Along which dimension (`param_scan_axis`).
      fused_qkv: Whether query, key and value are one array.
      fused_mlp: Whether both halves of a gated feed-forward are.
    """

    block: str
    num_layers: int
    scales_queries: bool
    layers_in_one: int = 1
    scanned: bool = True
    scan_axis: int = 1
    fused_qkv: bool = False
    fused_mlp: bool = False


@dataclasses.dataclass(frozen=True)
class Differences:
    """What differs in the numbers: ours = theirs * scale + shift.

    Attributes:
      query_scale: Of query weights, or of the norm behind them if there is one.
      norm_shift: Of the scales of norms in layers.
      qk_norm_shift: Of those of queries and keys.
      final_norm_shift: Of that before the logits.
      neighbours: Whether rotated pairs are neighbours there.
    """

    query_scale: float = 1.0
    norm_shift: float = 0.0
    qk_norm_shift: float = 0.0
    final_norm_shift: float = 0.0
    neighbours: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """One array of MaxText's and what it is to us.

    Attributes:
      theirs: Its name, within a layer.
      ours: Our names for it, within a layer.
      to_ours: From their arrays [n, …] of n layers to ours, one for each name.
      to_theirs: The inverse.
      scale: See `Differences`.
      shift: See `Differences`.
    """

    theirs: str
    ours: tuple[str, ...]
    to_ours: Callable[[Arrays], Arrays]
    to_theirs: Callable[[Arrays], Arrays]
    scale: float = 1.0
    shift: float = 0.0

    def read(self, arrays: Arrays, kind: Kind) -> Arrays:
        """Ours of theirs. Of Adam's moments the first scales as a gradient does, and the second as its square."""
        scale, shift = self._numbers(kind)
        ours = self.to_ours(arrays)
        return ours if (scale, shift) == (1, 0) else [x.astype(np.float32) * scale + shift for x in ours]

    def write(self, arrays: Arrays, kind: Kind) -> Arrays:
        """Theirs of ours."""
        scale, shift = self._numbers(kind)
        return self.to_theirs(arrays if (scale, shift) == (1, 0) else [(x - shift) / scale for x in arrays])

    def _numbers(self, kind: Kind) -> tuple[float, float]:
        scale = {"params": self.scale, "mu": 1 / self.scale, "nu": self.scale**-2}[kind]
        return scale, self.shift if kind == "params" else 0.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the parameters of one layer are.

    Attributes:
      prefix: Before a name within the layer.
      suffix: After that name's first part.
      index: Which of the stacked layers it is; None = it has arrays of its own.
    """

    prefix: str
    suffix: str = ""
    index: int | None = None

    def name(self, within: str) -> str:
        """The whole name."""
        first, dot, rest = within.partition(".")
        return f"{self.prefix}{first}{self.suffix}{dot}{rest}"


@dataclasses.dataclass(frozen=True)
class Shelf:
    """All layers of one side: a place for each, and the dimension along which arrays stack them."""

    places: tuple[Place, ...]
    axis: int = 0

    def layers(self, read: Read, within: str, numbers: Sequence[int]) -> np.ndarray:
        """One parameter of these layers, [n, …]; a view, where they are all of a stack."""
        places = [self.places[number] for number in numbers]
        names = {place.name(within) for place in places}
        if len(names) == 1 and places[0].index is not None:
            stack = np.moveaxis(read(*names), self.axis, 0)
            indices = [place.index or 0 for place in places]
            return stack if indices == list(range(len(stack))) else stack[indices]
        return np.stack([self._layer(read(place.name(within)), place) for place in places])

    def arrays(self, within: str) -> dict[str, list[int]]:
        """The names of the arrays that hold a parameter -> the layers in each, in order."""
        found: dict[str, list[int]] = {}
        for number, place in enumerate(self.places):
            found.setdefault(place.name(within), []).append(number)
        return found

    def laid_out(self, numbers: Sequence[int], x: np.ndarray) -> np.ndarray:
        """`x` [n, …] as the array that holds these layers."""
        return x[0] if self.places[numbers[0]].index is None else np.moveaxis(x, 0, self.axis)

    def _layer(self, x: np.ndarray, place: Place) -> np.ndarray:
        return x if place.index is None else np.moveaxis(x, self.axis, 0)[place.index]


def their_shelf(layout: MaxTextLayout) -> Shelf:
    """MaxText's layers."""
    count = layout.layers_in_one
    whole = layout.num_layers // count * count
    places = []
    for layer in range(layout.num_layers):
        group, within = divmod(layer, count)
        if layout.block == "gemma2":
            one = Place("decoder.layers.", index=group) if layout.scanned else Place(f"decoder.layers_{group}.")
            places.append(dataclasses.replace(one, suffix=("_local", "_global")[within]))
        elif not layout.scanned:
            places.append(Place(f"decoder.layers_{layer}."))
        elif layout.block != "gemma3":
            places.append(Place("decoder.layers.", index=layer))
        elif layer < whole:
            places.append(Place(f"decoder.layers.layers_{within}.", index=group))
        else:
            places.append(Place(f"decoder.layers_remainder.layers_{within}."))
    return Shelf(tuple(places), layout.scan_axis)


def our_shelf(names: Sequence[str], num_layers: int) -> Shelf:
    """Our layers, told from the names of all parameters.

    Raises:
      ConfigError: The layers are those of a pipeline.
    """
    turns = {name.split(".")[2] for name in names if name.startswith("stack.layers.turn_")}
    if turns:
        places = [Place(f"stack.layers.turn_{i % len(turns)}.", index=i // len(turns)) for i in range(num_layers)]
    elif any(name.startswith("stack.layers_0.") for name in names):
        places = [Place(f"stack.layers_{i}.") for i in range(num_layers)]
    elif any(name.startswith("stack.layers.attention.") for name in names):
        places = [Place("stack.layers.", index=i) for i in range(num_layers)]
    else:
        raise ConfigError(
            "The layers of this recipe are cut into the stages of a pipeline, which no MaxText checkpoint is read as.",
            "Convert it with ici_pipeline_parallelism=1 and dcn_pipeline_parallelism=1.",
        )
    return Shelf(tuple(places))


TOP = Shelf((Place(""),))
"""What is in no layer."""


def top_rules(differences: Differences) -> list[Rule]:
    """Tables, the head and the last norm."""
    return [
        _rule("token_embedder.embedding", "embedding.table"),
        _rule("decoder.position_embedder.embedding", "position.table"),
        _rule("decoder.logits_dense.kernel", "head.w"),
        _rule("decoder.decoder_norm.scale", "final_norm.scale", shift=differences.final_norm_shift),
        _rule("decoder.decoder_norm.bias", "final_norm.bias"),
    ]


def layer_rules(layout: MaxTextLayout, within: set[str], differences: Differences) -> list[Rule]:
    """The parameters of a layer.

    Args:
      layout: MaxText's side.
      within: Our names in a layer, which say what kind of layer it is.
      differences: In the numbers.

    Raises:
      ConfigError: MaxText's layers of this block have no such parameter.
    """
    rules = [
        _rule(f"{theirs}.{part}", f"{ours}.{part}", shift=differences.norm_shift if part == "scale" else 0.0)
        for ours, theirs in zip(_OUR_NORMS, _NORMS[layout.block], strict=True)
        for part in ("scale", "bias")
        if theirs
    ]
    rules += _attention_rules(layout, within, differences) + _feed_forward_rules(layout, within)
    rules = [rule for rule in rules if within.issuperset(rule.ours)]
    left = within.difference(*(rule.ours for rule in rules))
    if left:
        names = ", ".join(f"`{name}`" for name in sorted(left))
        raise ConfigError(
            f"MaxText's layers of decoder_block={layout.block} have nothing for {names}.",
            f"Blocks whose parameters are carried over: {', '.join(_NORMS)}.",
        )
    return rules


def _attention_rules(layout: MaxTextLayout, within: set[str], differences: Differences) -> list[Rule]:
    heads = _HALVES if differences.neighbours else _SAME
    normed = "attention.query_norm.scale" in within
    scale, shift = differences.query_scale, differences.qk_norm_shift
    if layout.fused_qkv and scale != 1:
        raise ConfigError(
            f"MaxText's queries are {1 / scale:g} times ours, and lie in one array with keys and values.",
            f"Set the recipe's `query_scale` to {'null' if layout.scales_queries else '1.0'}.",
        )
    rules = [
        _rule("self_attention.out.kernel", "attention.post"),
        _rule("self_attention.out.bias", "attention.post_bias"),
        _rule("relative_posemb.rel_embedding", "attention.relative_bias.table", _SWAPPED),
        _rule("self_attention.query_norm.scale", "attention.query_norm.scale", heads, scale, shift),
        _rule("self_attention.key_norm.scale", "attention.key_norm.scale", heads, shift=shift),
    ]
    for part, ending in (("kernel", ""), ("bias", "_bias")):
        names = [f"attention.{name}{ending}" for name in ("query", "key", "value")]
        if layout.fused_qkv:
            rules.append(_fused_qkv(f"self_attention.qkv_proj.{part}", tuple(names), heads))
            continue
        theirs = [f"self_attention.{name}.{part}" for name in ("query", "key", "value")]
        rules += [
            _rule(theirs[0], names[0], heads, 1.0 if normed else scale),
            _rule(theirs[1], names[1], heads),
            _rule(theirs[2], names[2]),
        ]
    return rules


def _feed_forward_rules(layout: MaxTextLayout, within: set[str]) -> list[Rule]:
    ours, gated = "feed_forward", "feed_forward.w_gate" in within
    if f"{ours}.router" in within:
        theirs = "moe_block" if layout.block == "qwen3_moe" else "MoeBlock_0"
        names = {"gate.kernel": "router", "wi_0": "w_gate", "wi_1": "w_in", "wo": "w_out"}
        return [_rule(f"{theirs}.{name}", f"{ours}.{ours_}") for name, ours_ in names.items()]
    rules = [_rule("mlp.wo.kernel", f"{ours}.w_out", _SWAPPED), _rule("mlp.wo.bias", f"{ours}.b_out")]
    if not gated:
        return [*rules, _rule("mlp.wi.kernel", f"{ours}.w_in"), _rule("mlp.wi.bias", f"{ours}.b_in")]
    halves = (f"{ours}.w_gate", f"{ours}.w_in")
    if layout.fused_mlp:
        return [*rules, Rule("mlp.wi.kernel", halves, lambda x: _split(x, -2), lambda x: _joined(x, -2))]
    return [*rules, *(_rule(f"mlp.wi_{i}.kernel", half) for i, half in enumerate(halves))]


def moved(
    rules: Sequence[Rule], theirs: Shelf, ours: Shelf, read: Read, kind: Kind, to: Literal["ours", "theirs"]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of everything that the rules name, on the side `to`; `read` has those of the other."""
    source, target = (theirs, ours) if to == "ours" else (ours, theirs)
    for rule in rules:
        from_names, to_names = ((rule.theirs,), rule.ours) if to == "ours" else (rule.ours, (rule.theirs,))
        for numbers in target.arrays(to_names[0]).values():
            arrays = [source.layers(read, within, numbers) for within in from_names]
            arrays = rule.read(arrays, kind) if to == "ours" else rule.write(arrays, kind)
            for within, x in zip(to_names, arrays, strict=True):
                yield target.places[numbers[0]].name(within), target.laid_out(numbers, x)


def their_shapes(
    rules: Sequence[Rule], theirs: Shelf, ours: Shelf, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The names and shapes that MaxText's arrays have to have for our `shapes`."""
    found = {}
    for rule in rules:
        one = [ours.layers(lambda name: np.broadcast_to(np.bool_(0), shapes[name]), x, [0]) for x in rule.ours]
        (layer,) = rule.to_theirs(one)
        for name, numbers in theirs.arrays(rule.theirs).items():
            stack = np.broadcast_to(layer, (len(numbers), *layer.shape[1:]))
            found[name] = theirs.laid_out(numbers, stack).shape
    return found


Move = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def _halves(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _neighbours(x: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


def _swapped(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


_SAME: Move = (lambda x: x, lambda x: x)
_SWAPPED: Move = (_swapped, _swapped)
_HALVES: Move = (_halves, _neighbours)


def _rule(theirs: str, ours: str, move: Move = _SAME, scale: float = 1.0, shift: float = 0.0) -> Rule:
    to_ours, to_theirs = move
    return Rule(theirs, (ours,), lambda x: [to_ours(x[0])], lambda x: [to_theirs(x[0])], scale, shift)


def _fused_qkv(theirs: str, ours: tuple[str, ...], heads: Move) -> Rule:
    to_ours, to_theirs = heads

    def parts(arrays: Arrays) -> Arrays:
        query, key, value = _split(arrays, -3)
        return [to_ours(query), to_ours(key), value]

    def whole(arrays: Arrays) -> Arrays:
        query, key, value = arrays
        return _joined([to_theirs(query), to_theirs(key), value], -3)

    return Rule(theirs, ours, parts, whole)


def _split(arrays: Arrays, axis: int) -> Arrays:
    """One array as several, along a dimension that it loses."""
    return list(np.moveaxis(arrays[0], axis, 0))


def _joined(arrays: Arrays, axis: int) -> Arrays:
    return [np.stack(arrays, axis=axis)]
