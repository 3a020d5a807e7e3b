"""MaxText's own training step, as its trainer jits it, on its synthetic data and one device.

The task has the sizes, and may have `maxtext`: a list of settings that are added last. `XLA_FLAGS` of the environment
override MaxText's flags for GPUs. Written for maxtext 0.2.5 with jax 0.11.2, where `remat_policy=none` means `full` and
`minimal_with_context` recomputes cuDNN's attention as `minimal` does.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types

from steps import serve

UNUSED = ("datasets", "drjax", "google.cloud", "grain", "ml_collections", "pathwaysutils", "tensorboardX", "tokamax")

# Of maxtext/configs/gpu/a3/llama_2_7b/1vm.sh, those that matter to one GPU.
GPU_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_highest_priority_async_stream=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_disable_hlo_passes=rematerialization",
)


class _Anything(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stub(types.ModuleType):
    __getattr__ = _Anything.__getattr__


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of `UNUSED` that are not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if not any(f"{fullname}.".startswith(f"{name}.") for name in UNUSED):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def settings(size: dict) -> list[str]:
    """The task in MaxText's names."""
    on_cpu, heads = size.get("platform") == "cpu", size["num_heads"]
    values = {
        "run_name": "unused",
        "base_output_directory": "/tmp/maxtext",
        "hardware": "cpu" if on_cpu else "gpu",
        "attention": "dot_product" if on_cpu else "cudnn_flash_jax",
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",  # leaves it to JAX's own variable
        "log_config": False,
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "dataset_type": "synthetic",
        "packing": False,
        "decoder_block": "llama2",
        "base_emb_dim": size["model_dims"],
        "base_mlp_dim": size["hidden_dims"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": size.get("num_kv_heads") or heads,
        "base_num_decoder_layers": size["num_layers"],
        "head_dim": size["model_dims"] // heads,
        "vocab_size": size["vocab_size"],
        "mlp_activations": "['silu','linear']",
        "enable_dropout": False,
        "max_target_length": size["seq_len"],
        "per_device_batch_size": size["batch"],
        "dtype": size.get("dtype") or "float32",
        "weight_dtype": "float32",
        "opt_type": "adamw",
        "learning_rate": 1e-3,
        "steps": 10**6,
        "warmup_steps_fraction": 0.0,
        "gradient_clipping_threshold": 1.0,
        "remat_policy": "minimal",  # keeps matmul outputs; the most that fits, and the fastest
        "scan_layers": False,  # as in its own settings for GPUs
    }
    return [f"{name}={value}" for name, value in values.items()] + list(size.get("maxtext", ()))


def make_step(size: dict):
    """A training step of MaxText."""
    if size.get("kind") != "llama":
        sys.exit("This peer has only Llama models.")
    if size.get("platform") != "cpu":
        os.environ["XLA_FLAGS"] = " ".join([*GPU_FLAGS, os.environ.get("XLA_FLAGS", "")])
    sys.meta_path.append(_Stubs())
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answers
        return _make_step(settings(size))


def _make_step(values: list[str]):
    import jax
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils

    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config, recorder = train.initialize(["", str(base), *values])
    setup = train_utils.setup_train_loop(config, recorder)
    _, _, shardings, _, mesh, _, _, loader, rampup, _, state = setup
    # As in `train.train_loop`.
    model, state = nnx.split(state)
    params_shardings, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    train_step, _ = train_utils.jit_train_and_eval_step(
        config, model, mesh, state, shardings, train.train_step, train.eval_step, None, params_shardings
    )
    num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(state.model, nnx.Param)))
    print(f"MaxText on {mesh.devices.size} {jax.devices()[0].device_kind}: {num_params} parameters", file=sys.stderr)
    metrics = {}

    def step() -> None:
        nonlocal state, metrics
        batch = loader.load_next_batch(rampup_manager=rampup)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            state, metrics = train_step(state, batch)

    def wait() -> None:
        jax.block_until_ready(state)
        print(f"Loss: {float(metrics['scalar']['learning/loss']):.4f}", file=sys.stderr)

    return step, wait


if __name__ == "__main__":
    serve(make_step)
