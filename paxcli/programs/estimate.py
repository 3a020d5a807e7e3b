"""Estimates a train step's time and memory from its jaxpr, in seconds, to choose which variants are worth compiling.

Counted are matmuls, runs of attention kernels, activations that the forward pass saves or offloads to the host, the
all-gathers of FSDP, the activations that tensor parallelism exchanges, and the bubbles of pipelines. `search` corrects
the memory of the rest, from compiled programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

from paxcli.errors import ConfigError
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.mesh.axes import BATCH_AXES, Axis
from paxcli.metrics.peaks import peak_flops
from paxcli.programs import gpu_machine, tpu_machine
from paxcli.programs.ahead_of_time import interconnect_of
from paxcli.programs.chips import CHIPS
from paxcli.programs.topologies import CompileTarget
from paxcli.training.experiment import tokens_in
from paxcli.training.session import Session
from paxcli.training.state import bytes_per_device, count_parameters
from paxcli.training.step import make_train_step

_BYTES = 2  # of a weight or an activation in bfloat16
_GATHERS = 3  # of each weight: forward, backward, and the scatter of its gradient
_EXCHANGES = 8  # of the activations between layers, by tensor parallelism: four in each pass
_PIPELINE_EXCHANGES = 12  # as the backward pass runs each stage again
_BACKWARD_OVER_FORWARD = 2.5  # matmuls of attention kernels
# Shares of compute that hide transfers to the host, and back: half of each pass, since a layer sends what it has
# computed, and waits for what it needs.
_HIDING = (1 / 6, 1 / 3)
_CUDNN_RATE = gpu_machine.ATTENTION_RATES[256][1]  # of large heads; attention hardly differs between variants
_IN_FLIGHT = 2  # layers whose offloaded activations are in device memory: one computes, one is transferred


class Work(NamedTuple):
    """Matmuls and activations of a train step, over all devices, without a pipeline's bubble.

    Attributes:
      tokens: Tokens of a batch; its rows if it has none, such as images.
      flops: Of matmuls, those that remat repeats included, but those of attention kernels.
      attention_flops: Of attention by kernels; 0 without them.
      saved: Bytes of activations that the backward pass reads, in device memory.
      offloaded: Bytes of those that are in host memory meanwhile.
      between_layers: Bytes of all layers' inputs.
    """

    tokens: float
    flops: float
    attention_flops: float
    saved: float
    offloaded: float
    between_layers: float

    def times(self, rows: float) -> Work:
        """That of a batch so many times as large."""
        return Work(*(rows * part for part in self))

    def toward(self, other: Work, share: float) -> Work:
        """On the straight line through this and another: 0 = this, 1 = the other."""
        return Work(*(one + share * (two - one) for one, two in zip(self, other, strict=True)))


class Rates(NamedTuple):
    """Rates of a device.

    Attributes:
      matmul: Share of the peak that matmuls reach.
      kernel: Share of the peak that attention kernels reach.
      fp8_speed: FP8 peak over that in bfloat16.
      hbm: Bytes per second of its memory.
      pcie: Bytes per second between it and its host, in one direction.
      link: Bytes per second of an ICI link in one direction, or of all NVLinks of a GPU.
    """

    matmul: float
    kernel: float
    fp8_speed: float
    hbm: float
    pcie: float
    link: float


class MeshCosts(NamedTuple):
    """Costs of a mesh: memory, communication, and rates of its devices.

    Attributes:
      state: Bytes of the training state, the gradients, and weights that are gathered for a whole step, on one device.
      held: Part of all layers' inputs that a pipeline's device holds for a whole step: those of the first, and
        the outputs of the last.
      gather: Seconds of the communication of weights in a step.
      exchange: Seconds to exchange a byte of activations among the devices of the tensor axis.
      devices: Number of devices.
      peak: FLOP/s of a device.
      rates: Rates of a device.
      pipelines: The model's pipelined stacks.
      rows: Rows of a batch, or of the part of it that gradient accumulation takes at once.
      bubble: Work of the pipelines with their bubble, over that without; 1 without a pipeline.
    """

    state: float
    held: float
    gather: float
    exchange: float
    devices: int
    peak: float
    rates: Rates
    pipelines: list[PipelinedStack]
    rows: int
    bubble: float

    def seconds(self, work: Work) -> float:
        """Estimated time of a step. Compute hides the communication of weights, not that of activations.

        The forward pass hides transfers to the host, the backward pass those back, each as far as half of it takes.
        """
        traffic = 2 * self.memory(work) / self.rates.hbm  # written once, read once
        work = work.times(self.bubble)
        matmuls = work.flops / self.rates.matmul + work.attention_flops / self.rates.kernel
        compute = matmuls / self.devices / self.peak
        to_host = work.offloaded / self.devices / self.rates.pcie
        waiting = sum(max(0.0, to_host - share * compute) for share in _HIDING)
        return max(compute, self.gather) + waiting + work.between_layers * self.exchange + traffic

    def times(self, rows: float) -> MeshCosts:
        """Those with a batch so many times as large.

        Raises:
          ConfigError: It does not divide into a pipeline's microbatches.
        """
        count = math.ceil(rows * self.rows)
        return self._replace(rows=count, bubble=_bubble(self.pipelines, count))

    def memory(self, work: Work) -> float:
        """Estimated bytes of a device."""
        return self.state + self.bubble * work.saved / self.devices + self.held * work.between_layers

    def on_host(self, work: Work) -> float:
        """Estimated bytes of a device's activations in host memory."""
        return self.bubble * work.offloaded / self.devices

    @property
    def num_stages(self) -> int:
        """Stages of the longest pipeline; 1 without one."""
        return max((one.num_stages for one in self.pipelines), default=1)


def find_rates(target: CompileTarget) -> Rates:
    """Rates of a target's devices.

    Raises:
      ConfigError: They are not known.
    """
    if (gpu := target.gpu) is not None:
        memory, link = gpu_machine.MEMORY_RATE * gpu.hbm, gpu_machine.NVLINK_RATE * gpu.nvlink
        return Rates(gpu_machine.MATMUL_RATE, _CUDNN_RATE, gpu.fp8_speed, memory, gpu_machine.PCIE, link)
    if target.generation not in CHIPS:
        hint = "Choose a TPU slice or a GPU: `--topology v4-8` or `--topology h200:1`."
        raise ConfigError(f"There is no step-time prediction for {target.name}.", hint)
    chip = CHIPS[target.generation]
    return Rates(chip.matmul_rate, tpu_machine.KERNEL_RATE, chip.fp8_speed, chip.hbm, chip.pcie, chip.ici_link)


def count_work(session: Session, fp8_speed: float = 1.0) -> Work:
    """Traces the train step, and counts. Matmuls of two FP8 operands count divided by `fp8_speed`."""
    task, state = session.experiment.task, session.abstract
    traced = make_train_step(task, state).trace(state, session.batch)
    found: defaultdict[str, float] = defaultdict(float)
    for equation, times in _equations(traced.jaxpr.jaxpr, 1, session.mesh.size):
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            in_fp8 = all(str(one.aval.dtype).startswith("float8") for one in equation.invars)
            found["flops"] += times * _dot_flops(equation) / (fp8_speed if in_fp8 else 1.0)
        elif name == "pallas_call":
            kernel, operands = params["name"] or "", [one.aval for one in equation.invars]
            shapes = [one.shape for one in operands if jnp.issubdtype(one.dtype, jnp.floating)]
            found["forward"] += times * ("_fwd" in kernel)
            found["backward"] += times * ("_dkv" in kernel)
            found["flops"] += times * (tpu_machine.grouped_matmul_flops(shapes) or 0.0)
        elif name.startswith("dot_product_attention"):  # cuDNN's
            found["backward" if "_bwd" in name else "forward"] += times
        elif name == "scan" and not params["reverse"]:
            inner = params["jaxpr"].out_avals  # stacked outputs have one axis less here
            carried = [out for out, one in zip(equation.outvars, inner, strict=True) if out.aval.ndim == one.ndim]
            for out in equation.outvars[len(carried) :]:
                on_host = out.aval.memory_space == jax.memory.Space.Host
                found["offloaded"] += times * on_host * _bytes(out)
                found["saved"] += times * (_IN_FLIGHT / params["length"] if on_host else 1) * _bytes(out)
            found["between_layers"] += times * params["length"] * sum(map(_bytes, carried))
    found["tokens"] = tokens_in(session.spec) or session.global_batch_size
    forward = task.model.forward_flops(session.spec)
    if forward is not None and found["backward"]:
        runs = found["forward"] / found["backward"] + _BACKWARD_OVER_FORWARD
        found["attention_flops"] = forward.attention * runs
    stacks = _pipelines(session)
    bubble = _bubble(stacks, _rows(session))
    for name in ("flops", "saved", "offloaded"):
        found[name] /= bubble
    if stacks:  # their scans carry whole batches
        dims = sum(stack.num_layers * stack.model_dims for stack in stacks)
        found["between_layers"] = _BYTES * found["tokens"] * dims
    return Work(*(found[name] for name in Work._fields))


def measure_mesh(session: Session, target: CompileTarget) -> MeshCosts:
    """Costs of the mesh of a session on a target."""
    mesh, state, rates = session.mesh, session.abstract, find_rates(target)
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    assert peak is not None  # known wherever the rates are
    connected = interconnect_of(list(mesh.devices.flat), target)
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)

    def seconds_a_byte(axis: str) -> float:
        """Time of an all-gather inside a slice, over the group of the first device."""
        inside = [slice(None) if one == axis else 0 for one in mesh.axis_names]
        group, links = positions[tuple(inside)].ravel().tolist(), 1.0
        if connected is not None:
            group = [one for one in group if connected.coordinates[one][0] == 0]
            links = connected.links(group)
        return (1 - 1 / len(group)) / (rates.link * links)

    weights = _BYTES * count_parameters(state.params) / mesh.shape[Axis.TENSOR] / mesh.shape[Axis.STAGE]
    stacks, parts = _pipelines(session), math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, Axis.CONTEXT))
    # A pipeline that gathers its weights once holds them, and their gradients, for the whole step.
    is_gathered = any(stack.gather_weights_once for stack in stacks)
    # It also holds what goes into its layers, and what comes out, of all microbatches.
    held = sum(2 / stack.num_layers / (stack.num_stages if stack.stream_io else 1) for stack in stacks)
    exchanges = _PIPELINE_EXCHANGES if stacks else _EXCHANGES
    rows = _rows(session)
    return MeshCosts(
        state=bytes_per_device(state) + (2 * weights if is_gathered else bytes_per_device(state.params)),
        held=held / parts / mesh.shape[Axis.TENSOR],
        gather=_GATHERS * weights * seconds_a_byte(Axis.FSDP),
        exchange=exchanges * seconds_a_byte(Axis.TENSOR) / parts / mesh.shape[Axis.STAGE],
        devices=mesh.size,
        peak=peak,
        rates=rates,
        pipelines=stacks,
        rows=rows,
        bubble=_bubble(stacks, rows),
    )


def _pipelines(session: Session) -> list[PipelinedStack]:
    return [stack for stack in session.experiment.task.model.stacks().values() if isinstance(stack, PipelinedStack)]


def _rows(session: Session) -> int:
    return session.global_batch_size // session.experiment.task.train.num_microbatches


def _bubble(stacks: list[PipelinedStack], rows: int) -> float:
    return max((stack.pipeline.work_with_bubble(rows) for stack in stacks), default=1.0)


def _equations(jaxpr: Jaxpr, times: int, devices: int) -> Iterator[tuple[Any, int]]:
    """The equations whose results are used, inner ones included, and how often each runs over all devices."""
    used = {out for out in jaxpr.outvars if isinstance(out, Var)}
    for equation in reversed(jaxpr.eqns):
        if not (equation.effects or used.intersection(equation.outvars)):
            continue
        used.update(one for one in equation.invars if isinstance(one, Var))
        yield equation, times
        name, params = equation.primitive.name, equation.params
        runs = times * {"scan": params.get("length", 1), "shard_map": devices}.get(name, 1)
        for inner in () if name == "pallas_call" else jaxprs_in_params(params):
            yield from _equations(inner, runs, devices)


def _dot_flops(dot: JaxprEqn) -> float:
    (contracted, _), _ = dot.params["dimension_numbers"]
    left: Any = dot.invars[0].aval
    out: Any = dot.outvars[0].aval
    return 2.0 * out.size * math.prod(left.shape[axis] for axis in contracted)


def _bytes(variable: Any) -> int:
    return variable.aval.size * getattr(variable.aval.dtype, "itemsize", 4)  # the state of FP8 matmuls has none
