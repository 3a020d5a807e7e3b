"""Layers that read a whole row at once, in both directions."""

from __future__ import annotations

import functools

from paxcli.config.configurable import template
from paxcli.layers.attention import Attention
from paxcli.layers.block import TransformerBlock
from paxcli.layers.stack import Stack


class EncoderBlock(TransformerBlock):
    """A block whose positions see all of their segment (Devlin et al., 2019; Pax: `mask_self_attention=False`)."""

    attention: functools.partial = template(Attention, causal=False)


class Encoder(Stack):
    """A stack of such blocks."""

    block: functools.partial = template(EncoderBlock)
