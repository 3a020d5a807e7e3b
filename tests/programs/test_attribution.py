"""Kinds of work and layers of the instructions of real programs, and of lines of XLA's text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paxcli.config.resolve import resolve
from paxcli.layers.scopes import (
    ATTENTION,
    ATTENTION_CORE,
    ATTENTION_PROJECTION,
    CAST,
    GRADIENT_ACCUMULATION,
    LOSS,
    METRICS,
    OPTIMIZER,
)
from paxcli.programs.attribution import attribute_instructions, attribute_name, is_attention, layer_of
from paxcli.programs.hlo import read_program
from paxcli.training.instrument import step_of
from paxcli.training.session import build_session

# Lines that XLA:GPU and libtpu print, shortened.
TEXT = """HloModule jit_train_step, is_scheduled=true

%fused (param: bf16[8,8]) -> bf16[8,8] {
  %param = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.3 = bf16[8,8]{1,0} dot(%param, %param), metadata={op_name="jit(f)/jvp(M)/stack/layers/mlp/dot_general"}
}

ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %fusion.1 = bf16[8,8]{1,0} fusion(%a), kind=kOutput, calls=%fused
  %all-gather-start.2 = (bf16[8,8]{1,0}, /*index=1*/bf16[64,8]{1,0}) all-gather-start(%a), dimensions={0}
  %cublas-gemm.4 = (bf16[8,8]{1,0}, s8[33554432]{0}) custom-call(%a), custom_call_target="__cublas$gemm"
  %fmha.5 = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  %splash.6 = bf16[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/M/stack/attention/pallas_call"}
  %norm.7 = bf16[8,8]{1,0} multiply(%a, %a), metadata={op_name="jit(f)/transpose(jvp(M))/stack/layers/attention_norm/mul"}
  ROOT %while.8 = bf16[8,8]{1,0} while(%a), condition=%fused, body=%fused
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "category", "layer"),
    [
        ("fusion.1", "matmul", "stack/layers/mlp"),
        ("all-gather-start.2", "collective", ""),
        ("cublas-gemm.4", "matmul", ""),
        ("fmha.5", "attention", ""),
        ("splash.6", "attention", "stack/attention"),
        ("norm.7", "norm", "stack/layers/attention_norm"),
        ("while.8", "control", ""),
    ],
)
def test_instructions_of_accelerators(name, category, layer):
    found = attribute_instructions(read_program(TEXT))[name]
    assert (found.category, found.layer) == (category, layer)


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(s)/jvp(Lm.measured)/Lm/Lm.extend/stack/stack._run/while/body/closed_call/layers/add", "stack/layers"),
        ("jit(s)/transpose(jvp(Lm.measured))/Lm/loss/Lm.compute_loss/neg", "loss"),
        ("jit(s)/jvp(Lm)/stack/checkpoint/rematted_computation/mlp/mlp._in/btd,df->btf/dot", "stack/mlp"),
        ("jit(s)/(optimizer/sum:transpose(jvp(Lm.f))/Lm/stack/norm/sum:jvp(Lm.f)/Lm/stack/norm/sum)", "stack/norm"),
        ("jit(s)/jvp(cast)/convert_element_type", "cast"),
        ("jit(s)/optimizer/cond/branch_1_fun/jit(_where)/select_n", "optimizer"),
        ("reduce_sum", ""),
    ],
)
def test_the_layer_of_an_operation(op_name, layer):
    assert layer_of(op_name) == layer


def test_a_real_program():
    @jax.jit
    def forward(x):
        with jax.named_scope("hidden"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("final_norm"):
            return x / jnp.linalg.norm(x)

    program = read_program(forward.lower(jnp.ones((256, 256))).compile().as_text())
    found = attribute_instructions(program).values()
    assert {"hidden", "final_norm"} <= {one.layer for one in found}
    assert {one.category for one in found if one.layer == "hidden"} >= {"matmul"}
    assert {one.category for one in found if one.layer == "final_norm"} == {"norm"}


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "collective"),
        ("nvjet_tst_128x256_64x4", "matmul"),
        ("sm90_xmma_gemm_bf16", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("all-reduce.3", "collective"),
        ("MemcpyD2D", "other"),
        ("while.8", "control"),
    ],
)
def test_kernels_without_a_program(kernel, category):
    assert attribute_name(kernel).category == category


@pytest.fixture(scope="module")
def train_step():
    sets = [
        "train_input=SyntheticInput",
        "num_layers=2",
        "num_microbatches=2",
        "fprop_dtype=bfloat16",
        "attention.rotary=Rotary",
    ]
    with build_session(resolve("tiny", (), sets).config).active() as session:
        compiled = step_of(session).lower(session.abstract, session.batch).compile()
    return read_program(compiled.as_text())


def test_every_part_of_a_compiled_transformer_is_attributed(train_step):
    """Profiles and predictions depend on these names: a renamed module or a lost scope fails here."""
    found = attribute_instructions(train_step)
    categories = {}
    for one in found.values():
        categories.setdefault(one.layer, set()).add(one.category)
    layer = f"stack/layers/{ATTENTION}"
    assert "attention" in categories[f"{layer}/{ATTENTION_CORE}"]
    assert "matmul" in categories[f"{layer}/{ATTENTION_PROJECTION}"]
    assert "matmul" in categories["stack/layers/feed_forward"]
    assert "norm" in categories["stack/layers/attention_norm"]
    assert {"embedding", LOSS, OPTIMIZER, CAST, METRICS, GRADIENT_ACCUMULATION} <= categories.keys()


def test_every_matmul_of_attention_is_in_its_core_or_a_projection(train_step):
    """Predictions count an attention layer without the scope of its projections as attention."""
    names = {
        one.op_name
        for computation in train_step.computations.values()
        for one in computation
        if one.opcode in ("dot", "convolution") and ATTENTION in layer_of(one.op_name).split("/")
    }
    scopes = {layer_of(name).rpartition("/")[2] for name in names}
    assert scopes == {ATTENTION_CORE, ATTENTION_PROJECTION}
    assert all(is_attention(name) == (ATTENTION_PROJECTION not in layer_of(name)) for name in names)
