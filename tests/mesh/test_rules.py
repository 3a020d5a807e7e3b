"""Rules from logical axes to mesh axes."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from paxcli.errors import ConfigError
from paxcli.mesh.rules import merge_rules, spec


@pytest.mark.parametrize(
    ("logical_axes", "expected"),
    [
        (("embed", "mlp"), P("fsdp", "tensor")),  # Pax's FFN: [data, mdl]
        (("embed", "heads", "head_dim"), P("fsdp", "tensor", None)),
        (("vocab", "embed"), P("tensor", "fsdp")),
        (("layers", None, "norm"), P(None, None, None)),
        (("expert", "embed", "mlp"), P("expert", "fsdp", "tensor")),
        (
            ("activation_batch", "activation_length", "activation_embed"),
            P(("data", "fsdp", "expert", "stage"), "context", "tensor"),
        ),
        (("heads", "mlp"), P("tensor", None)),  # no mesh axis twice
        (("activation_expert", "activation_batch"), P("expert", ("data", "fsdp", "stage"))),
        (("activation_batch", "embed"), P(("data", "fsdp", "expert", "stage"), None)),
        (("activation_stage", "activation_microbatch"), P("stage", ("data", "fsdp", "expert"))),
    ],
)
def test_default_rules(logical_axes, expected):
    assert spec(logical_axes) == expected


def test_overrides_replace_single_rules():
    rules = merge_rules({"kv_heads": None, "mlp": ["fsdp", "tensor"], "embed": "context"})
    assert spec(("kv_heads",), rules) == P(None)
    followed = merge_rules({"activation_batch": ["data", "stage"], "activation_embed": None})
    assert spec(("activation_microbatch", "activation_residual"), followed) == P("data", None)
    assert spec(("embed", "mlp"), rules) == P("context", ("fsdp", "tensor"))
    assert spec(("vocab",), rules) == P("tensor")


def test_an_unknown_logical_axis_names_its_neighbours():
    with pytest.raises(ConfigError) as caught:
        spec(("head_dims",))
    assert "`head_dim`" in caught.value.hint
