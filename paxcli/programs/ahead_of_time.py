"""Compiles a recipe's step ahead of time, for devices that this machine need not have, and reports on the program.

The report has the memory that the step needs, what it communicates, and its predicted time.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from paxcli.errors import ConfigError, PaxError
from paxcli.mesh.mesh import axis_sizes, describe, libtpu_arguments
from paxcli.mesh.sharding import global_spec
from paxcli.mesh.startup import set_libtpu_arguments
from paxcli.metrics.peaks import mfu, peak_flops
from paxcli.models.base import CausalModel
from paxcli.models.decoding import DecodeState, generate, unroll_layers
from paxcli.models.sampling import Sampling
from paxcli.nested_map import num_rows
from paxcli.programs import gpu_machine, tpu_machine
from paxcli.programs.chips import CHIPS
from paxcli.programs.collectives import Interconnect, count_collectives, count_host_transfers, find_all_gathers
from paxcli.programs.executable import save_executable
from paxcli.programs.hlo import Program, read_program
from paxcli.programs.topologies import CompileTarget, find_compile_target, slice_name
from paxcli.training.experiment import Experiment, tokens_in
from paxcli.training.session import Session, build_session
from paxcli.training.state import bytes_per_device, count_parameters
from paxcli.training.step import make_eval_step, make_train_step

Step = Literal["train", "eval", "decode"]

_PROMPTS_AT_ONCE = 16  # batch size of the decode step
_UNITS = ("", "K", "M", "G", "T")
_NUMBER = r"([\d.]+)([KMGT]?)"
_OUT_OF_MEMORY = rf"(?:temporaries \(|Used ){_NUMBER}(?:\) exceeds available HBM \(| of ){_NUMBER}(?:\)| hbm)"


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
      report: What `pax compile --json` prints.
      text: Optimized HLO; empty if the step does not fit.
      unsaved: The error that kept it from being saved, if any.
    """

    report: dict[str, Any]
    text: str
    unsaved: PaxError | None = None


def target_of(config: fdl.Config[Experiment], topology: str | None, num_slices: int | None) -> CompileTarget:
    """The target to compile a recipe for.

    Args:
      config: The recipe.
      topology: Name of a slice; None = the TPU v4 slice with as many devices as the recipe's mesh.
      num_slices: Number of slices; None = as in the recipe's mesh.

    Raises:
      ConfigError: There is no such slice, or it does not match the recipe's mesh.
    """
    mesh = fdl.build(config.mesh)
    devices, slices = mesh.num_devices(), mesh.num_slices()
    if num_slices is not None and num_slices != slices:
        hint = f"Change the mesh, such as `--set mesh.dcn_mesh_shape=[{num_slices},1,1]`, or leave out `--slices`."
        raise ConfigError(f"The recipe's mesh has {slices} slice{'s' * (slices > 1)}, not {num_slices}.", hint)
    if devices is None:
        if topology is None:
            raise ConfigError("The recipe's mesh has no fixed size.", "Choose the devices: `--topology v4-8`.")
        return find_compile_target(topology, slices)
    target = find_compile_target(topology or slice_name(devices // slices), slices)
    if (target.platform == "tpu" or target.gpu) and target.devices_per_slice * slices != devices:
        raise ConfigError(
            f"{target.name} has {target.devices_per_slice} devices; the recipe's mesh has {devices // slices} a slice "
            f"({describe(axis_sizes(mesh.ici_mesh_shape, None))}).",
            "Change `--topology`, or the mesh: `--set mesh.ici_mesh_shape=…`.",
        )
    return target


def compile_ahead(
    config: fdl.Config[Experiment], target: CompileTarget, step: Step = "train", save: Path | None = None
) -> Compiled:
    """Compiles a recipe's step for a target, and reports on the program, also if it does not fit in memory.

    Args:
      config: The recipe.
      target: What to compile for.
      step: Which step.
      save: File to save the executable of a train step to.

    Raises:
      ConfigError: The recipe cannot be sharded over the target's devices, or has no such step to compile or save.
      MissingError: This machine lacks what compiling for the target needs.
    """
    if save is not None and step != "train":
        raise ConfigError("--save saves train steps only.", "Leave out `--step`.")
    if save is not None and target.gpu is not None:
        hint = f"Compile it there, with `--topology gpu:{target.shape[0]}`."
        raise ConfigError("--save needs the GPUs: only on a machine with them does XLA autotune its kernels.", hint)
    with _no_compilation_cache(), open_on_target(config, target) as session:
        options: dict[str, Any] = session.compiler_options if step == "train" else {}  # the others run without
        began = time.perf_counter()
        lowered = _lower(session, step)
        try:
            compiled = lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            needed, available = _parse_out_of_memory(str(error))
            report = _sizes(session, target, step) | {
                "fits": False,
                "hbm_needed_bytes": needed,
                "hbm_available_bytes": target.hbm_bytes or available,
                "compile_seconds": time.perf_counter() - began,
                **dict.fromkeys(("predicted_step_seconds", "predicted_mfu", "collectives")),  # not known
            }
            return Compiled(report, "")
        report = {"compiler_options": options, "compile_seconds": time.perf_counter() - began}
        text = compiled.as_text() or ""
        report |= _sizes(session, target, step) | _memory(session, compiled, target)
        report |= _costs(session, compiled, read_program(text), target, step)
        unsaved = None
        try:
            if save is not None:
                save_executable(save, session, compiled)
        except PaxError as error:  # the report is worth more
            unsaved = error
    return Compiled(report, text, unsaved)


def open_on_target(config: fdl.Config[Experiment], target: CompileTarget) -> contextlib.AbstractContextManager[Session]:
    """A session (`build_session`) on a target's devices. libtpu reads its options once, when it describes the first.

    Raises:
      ConfigError: It has read others.
    """
    before = os.environ.get("LIBTPU_INIT_ARGS", "")
    set_libtpu_arguments(libtpu_arguments(config.mesh.libtpu_options))
    try:
        return build_session(config, target.devices()).active()
    finally:
        os.environ["LIBTPU_INIT_ARGS"] = before


def describe_shortage(report: dict[str, Any]) -> str:
    """The reason why a program does not fit: `it needs 31.50 GiB of each device's 30.75 GiB, 0.75 GiB too much`."""
    needed, available, of = report["hbm_needed_bytes"], report["hbm_available_bytes"], ""
    if "memory" in report and needed <= available:
        needed, available, of = report["memory"]["host_bytes"], report["host_available_bytes"], " of host memory"
    if not (needed and available and needed > available):  # the compiler's message rounds both
        return "it needs more memory than a device has"
    needed, available, more = (f"{size / 2**30:.2f} GiB" for size in (needed, available, needed - available))
    return f"it needs {needed} of each device's {available}{of}, {more} too much"


def _lower(session: Session, step: Step) -> jax.stages.Lowered:
    task, params = session.experiment.task, session.abstract.params
    if step == "train":
        return make_train_step(task, session.abstract).lower(session.abstract, session.batch)
    if step == "eval":
        if not session.experiment.eval_inputs:
            raise ConfigError("The recipe has no evaluation input.", "Set `eval_inputs`.")
        source = session.experiment.eval_inputs[0]
        spec = source.element_spec()
        batch = global_spec(spec, num_rows(spec) * source.num_infeed_hosts, session.mesh)
        return make_eval_step(task).lower(params, batch)
    model = task.model
    if not isinstance(model, CausalModel):
        raise ConfigError(f"{type(model).__name__} has no decode of prompts.", "Compile another step: train or eval.")
    half = model.max_decode_len // 2
    cast = jax.eval_shape(model.cast, params)
    placed = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at.sharding), cast, params)
    prompts = jax.ShapeDtypeStruct((_PROMPTS_AT_ONCE, half), jnp.int32)
    lengths = jax.ShapeDtypeStruct((_PROMPTS_AT_ONCE,), jnp.int32)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    unrolled, convert = unroll_layers(model)

    def decode(params: dict, *inputs: jax.Array) -> DecodeState:
        return generate(unrolled, convert(params, True), *inputs, sampling=Sampling(max_tokens=half, eos_ids=()))

    return jax.jit(decode).lower(placed, prompts, lengths, seed)


def _parse_out_of_memory(message: str) -> tuple[int | None, int | None]:
    """Bytes that the step needs and bytes that a device has, as far as the compiler's message states them.

    Raises:
      ConfigError: The message is about something else than memory.
    """
    if found := re.search(_OUT_OF_MEMORY, message):
        needed, unit, available, other = found.groups()
        return int(float(needed) * 1024 ** _UNITS.index(unit)), int(float(available) * 1024 ** _UNITS.index(other))
    if "RESOURCE_EXHAUSTED" in message and "memory space vmem" not in message:
        return None, None
    hint = "Try other `mesh.compiler_options`; where VMEM ran out, a larger `xla_tpu_scoped_vmem_limit_kib`."
    raise ConfigError(f"The compiler rejects the program: {' '.join(message.split())[:300]}", hint)


def _sizes(session: Session, target: CompileTarget, step: Step) -> dict[str, Any]:
    state, model = session.abstract, session.experiment.task.model
    policies = {stack.remat_policy for stack in model.stacks().values()}
    sizes = {
        "topology": target.name,
        "num_slices": target.num_slices,
        "num_devices": session.mesh.size,
        "device_kind": session.mesh.devices.flat[0].device_kind,
        "mesh": describe(session.mesh.shape),
        "step": step,
        "global_batch_size": session.global_batch_size,
        "remat_policy": policies.pop() if len(policies) == 1 else None,
        "parameters": count_parameters(state.params),
        "parameters_bytes_per_device": bytes_per_device(state.params),
        "optimizer_bytes_per_device": bytes_per_device(state.opt_state),
    }
    if step == "decode" and isinstance(model, CausalModel):
        sizes["cache_bytes"] = model.cache_bytes(_PROMPTS_AT_ONCE, 2 * (model.max_decode_len // 2))  # unsharded
    return sizes


def _memory(session: Session, compiled: jax.stages.Compiled, target: CompileTarget) -> dict[str, Any]:
    stats: Any = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    sizes = {f"{name}_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    needed, available = stats.peak_memory_in_bytes, target.hbm_bytes
    # With host memory, the peak counts that too. On a CPU it leaves temporaries out.
    if not needed or stats.host_temp_size_in_bytes or target.platform == "cpu":
        needed = sizes["argument_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"] + sizes["temp_bytes"]
        # An upper bound: temporaries reuse the memory of dead arguments. libtpu rejects a program that does not fit.
        needed = min(needed, available) if available and target.platform == "tpu" else needed
    fits_host = target.host_bytes is None or stats.host_temp_size_in_bytes <= target.host_bytes
    return {
        "fits": fits_host and (available is None or needed <= available),
        "hbm_needed_bytes": needed,
        "hbm_available_bytes": available,
        "host_available_bytes": target.host_bytes,
        "memory": sizes | {"host_bytes": stats.host_temp_size_in_bytes},
        "state_bytes_per_device": bytes_per_device(session.abstract),
    }


def _costs(
    session: Session, compiled: jax.stages.Compiled, program: Program, target: CompileTarget, step: Step
) -> dict[str, Any]:
    costs: Any = compiled.cost_analysis() or {}
    flops = _model_flops(session, step)
    stack = jax.tree.leaves(session.abstract.params.get("stack", {}))
    # A stack of one layer is gathered like a layer.
    stacked_matrices = {leaf.shape for leaf in stack if leaf.ndim >= 3 and leaf.shape[0] > 1}
    found = read_step(program, target, list(session.mesh.devices.flat), session.peak_flops, flops)
    tokens, seconds = tokens_in(session.spec) if step == "train" else None, found["predicted_step_seconds"]
    return {
        "flops_per_step": flops,
        "compiler_flops_per_device": costs.get("flops"),
        "stacked_all_gathers": find_all_gathers(program, stacked_matrices),
        **found,
        "predicted_tokens_per_second": tokens / seconds if tokens and seconds else None,
    }


def read_step(
    program: Program, target: CompileTarget, devices: Sequence[jax.Device], peak: float | None, flops: float | None
) -> dict[str, Any]:
    """Communication and predicted time of a compiled step. The program may be another trainer's.

    Args:
      program: Compiled for the target.
      target: The devices that it was compiled for.
      devices: In mesh order.
      peak: FLOP/s of each device for MFU, such as the recipe's; None = the published ones.
      flops: Model FLOPs of the step over all devices; None = unknown, and no MFU is predicted.
    """
    interconnect = interconnect_of(devices, target)
    found: dict[str, Any] = {
        "collectives": count_collectives(program, interconnect),
        "host_transfers": count_host_transfers(program),
        "predicted_step_seconds": None,
        "predicted_mfu": None,
        "prediction_error": prediction_error(target),
    }
    if (published := peak_flops(devices[0].device_kind)) is None:
        return found
    if target.gpu is not None:
        prediction = gpu_machine.predict(program, target.gpu, len(devices), published)
    elif interconnect is not None and target.generation in CHIPS:
        prediction = tpu_machine.predict(program, interconnect, published)
    else:
        return found
    seconds = prediction.seconds
    return found | {
        "predicted_step_seconds": seconds,
        "predicted_mfu": mfu(flops / seconds if flops and seconds else None, (peak or published) * len(devices)),
        "shares": prediction.shares(),
        "communication_seconds": dict(prediction.communication),
        "kernels": dict(prediction.kernel_calls),
        "left_out": [f"kernel {name}, {count} runs" for name, count in prediction.unknown_kernels.items()],
        **prediction.explain(),
    }


def prediction_error(target: CompileTarget) -> float | None:
    """The largest error of the predicted speed in the measured steps on such devices; None = there are none."""
    device = target.gpu or CHIPS.get(target.generation or "")
    return None if device is None else device.error


def interconnect_of(devices: Sequence[Any], target: CompileTarget) -> Interconnect | None:
    """How a target's devices, in mesh order, are connected; None unless they are TPUs."""
    if target.generation is None:
        return None
    shape, wraps = (*target.shape, 1)[:3], (*target.wraps, False)[:3]
    coordinates = [(getattr(device, "slice_index", None) or 0, *device.coords) for device in devices]
    return Interconnect(target.generation, coordinates, shape, wraps)


def _model_flops(session: Session, step: Step) -> float | None:
    """Model FLOPs of a training step; a third of that for an evaluation (forward only); None for decoding."""
    model, flops = session.experiment.task.model, None
    if step == "train":
        flops = model.step_flops(session.spec)
    elif step == "eval":
        flops = model.forward_flops(session.experiment.eval_inputs[0].element_spec())
    return None if flops is None else float(flops.total)


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Disables the cache: a CPU program from the cache cannot be saved again, and its compile time would be wrong."""
    enabled = jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        reset_cache()
