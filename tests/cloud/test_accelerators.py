from __future__ import annotations

import pytest

from paxcli.cloud.accelerators import find_accelerator
from paxcli.errors import ConfigError

# Name, as Google's tables have it: chips, JAX devices, hosts, topology.
KNOWN = {
    "v2-8": (4, 8, 1, "2x2"),
    "v3-32": (16, 32, 4, "4x4"),
    "v4-8": (4, 4, 1, "2x2x1"),
    "v4-64": (32, 32, 8, "2x4x4"),
    "v4-128": (64, 64, 16, "4x4x4"),
    "v4-384": (192, 192, 48, "4x4x12"),
    "v4-4096": (2048, 2048, 512, "8x16x16"),
    "v5litepod-1": (1, 1, 1, "1x1"),
    "v5litepod-256": (256, 256, 64, "16x16"),
    "v5p-12288": (6144, 6144, 1536, "16x16x24"),
    "v6e-8": (8, 8, 1, "2x4"),
    "tpu7x-128": (64, 128, 16, "4x4x4"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_slice_is_what_googles_tables_say(name):
    found = find_accelerator(name)
    sizes = (found.chips, found.devices, found.hosts, found.topology)
    assert sizes == KNOWN[name] and found.alias is None


@pytest.mark.parametrize(("typed", "official"), [("v5e-16", "v5litepod-16"), ("V4-8", "v4-8"), ("trillium-8", "v6e-8")])
def test_another_name_is_rewritten_and_kept_to_be_said(typed, official):
    found = find_accelerator(typed)
    assert (found.type, found.alias) == (official, typed)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("v5e-7", "v5litepod-8"),
        ("v4-24", "v4-16, v4-32"),
        ("v4-9", "v4-8"),
        ("v5-8", "v5p"),
        ("v4", "v4-128"),
        ("", "v4"),
    ],
)
def test_what_there_is_not_names_what_is_near(typed, hint):
    with pytest.raises(ConfigError) as error:
        find_accelerator(typed)
    assert hint in error.value.hint
