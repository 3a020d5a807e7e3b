"""HLO texts whose communication and time are known by construction, and the devices that they are for."""

from __future__ import annotations

from paxcli.programs.collectives import Interconnect

# As XLA writes it: a loop of five iterations that gathers and reduces, then an asynchronous permute.
COLLECTIVES = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%product (a: bf16[512,1024], b: bf16[1024,1024]) -> bf16[512,1024] {
  %a = bf16[512,1024]{1,0} parameter(0)
  %b = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot = bf16[512,1024]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (s: (s32[], bf16[256,1024])) -> (s32[], bf16[256,1024]) {
  %s = (s32[], /*index=1*/bf16[256,1024]{1,0}) parameter(0)
  %w = bf16[256,1024]{1,0} get-tuple-element(%s), index=1
  %whole = bf16[1024,1024]{1,0} all-gather(%w), channel_id=1, replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}
  %fused = bf16[512,1024]{1,0} fusion(%w, %whole), kind=kOutput, calls=%product, metadata={op_name="jit(step)/mlp/dot"}, backend_config={"window_config":{"estimated_cycles":"1050000"}}
  %g = bf16[1024,1024]{1,0} all-reduce(%whole), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  ROOT %out = (s32[], bf16[256,1024]{1,0}) tuple(%i, %w)
}

%condition (s.1: (s32[], bf16[256,1024])) -> pred[] {
  %s.1 = (s32[], bf16[256,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (p: bf16[256,1024]) -> bf16[256,1024] {
  %p = bf16[256,1024]{1,0} parameter(0)
  %loop = (s32[], bf16[256,1024]{1,0}) while(%p), condition=%condition, body=%body
  %on = (bf16[256,1024]{1,0}, bf16[256,1024]{1,0}, u32[]) collective-permute-start(%p), channel_id=3, source_target_pairs={{0,4},{4,0}}
  %meanwhile = bf16[512,1024]{1,0} fusion(%p, %p), kind=kLoop, calls=%product, metadata={op_name="jit(step)/attention/dot"}, backend_config={"window_config":{"estimated_cycles":"10500"}}
  ROOT %off = bf16[256,1024]{1,0} collective-permute-done(%on)
}
"""  # noqa: E501

# Two rows of four chips, a v4:4x2x1 that is open at its ends.
V4 = Interconnect("v4", [(0, x, y, 0) for y in range(2) for x in range(4)], (4, 2, 1), (False,) * 3)
MIB = 1 << 20

# As XLA:GPU combines the weights of a layer, and their gradients.
COMBINED = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (p: bf16[128,4096], q: bf16[128,1024]) -> bf16[128,4096] {
  %p = bf16[128,4096]{1,0} parameter(0)
  %q = bf16[128,1024]{1,0} parameter(1)
  %gather = ((bf16[128,4096]{1,0}, bf16[128,1024]{1,0}), (bf16[1024,4096]{1,0}, bf16[1024,1024]{1,0})) all-gather-start(%p, %q), channel_id=1, replica_groups=mesh['x'=8] {'x'}, dimensions={0}
  %gathered = (bf16[1024,4096]{1,0}, bf16[1024,1024]{1,0}) all-gather-done(%gather)
  %a = bf16[1024,4096]{1,0} get-tuple-element(%gathered), index=0
  %b = bf16[1024,1024]{1,0} get-tuple-element(%gathered), index=1
  %scatter = ((bf16[1024,4096]{1,0}, bf16[1024,1024]{1,0}), (bf16[128,4096]{1,0}, bf16[128,1024]{1,0})) reduce-scatter-start(%a, %b), channel_id=2, replica_groups=mesh['x'=8] {'x'}, dimensions={0}, to_apply=%add
  %scattered = (bf16[128,4096]{1,0}, bf16[128,1024]{1,0}) reduce-scatter-done(%scatter)
  %reduce = (bf16[1024,4096]{1,0}, bf16[1024,1024]{1,0}) all-reduce-start(%a, %b), channel_id=3, replica_groups=mesh['x'=8] {'x'}, to_apply=%add
  %reduced = (bf16[1024,4096]{1,0}, bf16[1024,1024]{1,0}) all-reduce-done(%reduce)
  ROOT %out = bf16[128,4096]{1,0} get-tuple-element(%scattered), index=0
}
"""  # noqa: E501

# As XLA:TPU writes a windowed einsum: an unsigned counter, two windows an iteration.
WINDOWED = """\
HloModule jit_step, is_scheduled=true

%body (s: (bf16[8], u32[])) -> (bf16[8], u32[]) {
  %s = (bf16[8]{0}, u32[]) parameter(0)
  %n = u32[] get-tuple-element(%s), index=1
  %x = bf16[8]{0} get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%n, %two)
  %done = bf16[8]{0} negate(%x)
  ROOT %out = (bf16[8]{0}, u32[]) tuple(%done, %next)
}

%condition (s.1: (bf16[8], u32[])) -> pred[] {
  %s.1 = (bf16[8]{0}, u32[]) parameter(0)
  %eight = u32[]{:T(128)} constant(8)
  %n.1 = u32[]{:T(128)} get-tuple-element(%s.1), index=1
  ROOT %lt = pred[] compare(%n.1, %eight), direction=LT
}

ENTRY %main (p: (bf16[8], u32[])) -> (bf16[8], u32[]) {
  %p = (bf16[8]{0}, u32[]) parameter(0)
  ROOT %loop = (bf16[8]{0}, u32[]) while(%p), condition=%condition, body=%body
}
"""

# As XLA writes an all-gather on SparseCores, on TPU7x: its computations name their thread after the closing brace. The
# matmul beside it has FP8 operands, the one after it bfloat16.
SPARSE_CORE = """\
HloModule jit_step, is_scheduled=true

%gathered (w: f8e4m3fn[256,1024], t: token[]) -> f8e4m3fn[1024,1024] {
  %w = f8e4m3fn[256,1024]{1,0} parameter(0)
  %t = token[] parameter(1)
  ROOT %all-gather.1 = f8e4m3fn[1024,1024]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}, execution_thread="sparsecore"

%product (a: f8e5m2[512,1024], b: f8e4m3fn[1024,1024]) -> bf16[512,1024] {
  %a = f8e5m2[512,1024]{1,0} parameter(0)
  %b = f8e4m3fn[1024,1024]{1,0} parameter(1)
  ROOT %dot = bf16[512,1024]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%converted (a.1: f8e5m2[512,1024], b.1: bf16[1024,1024]) -> bf16[512,1024] {
  %a.1 = f8e5m2[512,1024]{1,0} parameter(0)
  %b.1 = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,1024]{1,0} convolution(%a.1, %b.1), dim_labels=bf_io->bf
}

ENTRY %main (p: f8e4m3fn[256,1024], x: f8e5m2[512,1024], v: f8e4m3fn[1024,1024], u: bf16[1024,1024]) -> bf16[512,1024] {
  %p = f8e4m3fn[256,1024]{1,0} parameter(0)
  %x = f8e5m2[512,1024]{1,0:S(1)} parameter(1)
  %v = f8e4m3fn[1024,1024]{1,0:S(1)} parameter(2)
  %u = bf16[1024,1024]{1,0:S(1)} parameter(3)
  %ready = token[] custom-call(), custom_call_target="PrepareAsyncCallDone"
  %all-gather.1.call-start = ((f8e4m3fn[256,1024]{1,0}, token[]), f8e4m3fn[1024,1024]{1,0}) call-start(%p, %ready), async_execution_thread="sparsecore", to_apply=%gathered
  %meanwhile = bf16[512,1024]{1,0:S(1)} fusion(%x, %v), kind=kOutput, calls=%product
  %all-gather.1.call-done = f8e4m3fn[1024,1024]{1,0} call-done(%all-gather.1.call-start)
  ROOT %last = bf16[512,1024]{1,0:S(1)} fusion(%x, %u), kind=kOutput, calls=%converted
}
"""  # noqa: E501

# The eight devices of four chips in a row, first one of each chip, then the other.
TPU7X = Interconnect("tpu7x", [(0, x, 0, 0) for _ in range(2) for x in range(4)], (4, 1, 1), (False,) * 3)

# An attention kernel on 2 heads × 512 × 128, with queries from host memory and its result to host memory.
ON_HOST = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (p: bf16[8,2,512,128]) -> bf16[8,2,512,128] {
  %p = bf16[8,2,512,128]{3,2,1,0:T(8,128)(2,1)S(5)} parameter(0)
  %i = s32[] constant(3)
  %in = ((bf16[8,2,512,128]{3,2,1,0:T(8,128)(2,1)S(5)}, s32[]), bf16[1,2,512,128]{3,2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) dynamic-slice-start(%p, %i), dynamic_slice_sizes={1,2,512,128}
  %q = bf16[1,2,512,128]{3,2,1,0:T(8,128)(2,1)} dynamic-slice-done(%in)
  %splash_mha_fwd.3 = (f32[512,128]{1,0}, bf16[2,512,128]{2,1,0}) custom-call(%q, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, bf16[2,512,128]{2,1,0}, bf16[2,512,128]{2,1,0}, s32[512,128]{1,0}}, metadata={}
  %near = (bf16[2,512]{1,0:S(1)}, bf16[2,512]{1,0}, u32[]{:S(2)}) copy-start(%splash_mha_fwd.3)
  %nearer = bf16[2,512]{1,0:S(1)} copy-done(%near)
  %out = ((bf16[8,2,512,128]{3,2,1,0:S(5)}, bf16[1,2,512,128]{3,2,1,0}, s32[]), bf16[8,2,512,128]{3,2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%p, %splash_mha_fwd.3, %i)
  ROOT %done = bf16[8,2,512,128]{3,2,1,0:S(5)} dynamic-update-slice-done(%out)
}
"""  # noqa: E501

# As libtpu writes what the hosts of two slices exchange: the shards of an all-gather, then a reduce-scatter.
BETWEEN_SLICES = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[4,256,256]) -> f32[4,256,256] {
  %p = f32[4,256,256]{2,1,0} parameter(0)
  %ready = token[] after-all()
  %send = (f32[4,256,256]{2,1,0}, u32[], token[]) send(%p, %ready), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-gather.5_0",_xla_megascale_transfer_type="ALL_GATHER"}
  %recv = (f32[8,256,256]{2,1,0}, u32[], token[]) recv(%ready), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-gather.5_0",_xla_megascale_transfer_type="ALL_GATHER"}
  %recv-done = (f32[8,256,256]{2,1,0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  %full = f32[8,256,256]{2,1,0} get-tuple-element(%recv-done), index=0
  %send.1 = (f32[8,256,256]{2,1,0}, u32[], token[]) send(%full, %ready), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="reduce-scatter.5_0",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  %recv.1 = (f32[4,256,256]{2,1,0}, u32[], token[]) recv(%ready), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="reduce-scatter.5_0",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  %recv-done.1 = (f32[4,256,256]{2,1,0}, token[]) recv-done(%recv.1), channel_id=4, is_host_transfer=true
  ROOT %out = f32[4,256,256]{2,1,0} get-tuple-element(%recv-done.1), index=0
}
"""  # noqa: E501
