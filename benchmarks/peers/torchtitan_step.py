"""torchtitan 0.2.2: its Llama 3, checkpointing, compiled blocks and loss, optimizer, schedule and clipping, on one GPU.

Parameters are cast to bfloat16 by FSDP on a mesh of one, as later versions do, or by autocast with `titan_autocast` in
the task. The task may also have `titan_ac` (`none`, `selective` or `full`) and `titan_float8` (dynamic tensorwise, by
torchao). The step is that of its `Trainer`, without the logs; tokens are drawn on the device, so that no step waits for
a copy.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from unittest import mock

from steps import serve


def job(size: dict):
    """torchtitan's configuration."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 1e-3, 2
    config.training.local_batch_size, config.training.seq_len = size["batch"], size["seq_len"]
    config.training.mixed_precision_param = "bfloat16" if size.get("dtype") == "bfloat16" else "float32"
    config.activation_checkpoint.mode = size.get("titan_ac", "none")
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable = bool(size.get("compile"))
    if size.get("titan_float8"):
        config.model.converters = ["quantize.linear.float8"]
        config.quantize.linear.float8.filter_fqns = ["output"]
    return config


def llama(size: dict, config):
    """torchtitan's model, without memory for its parameters."""
    import torch
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    dims, hidden, heads = size["model_dims"], size["hidden_dims"], size["num_heads"]
    arguments = TransformerModelArgs(
        dim=dims,
        n_layers=size["num_layers"],
        n_heads=heads,
        n_kv_heads=size.get("num_kv_heads") or heads,
        vocab_size=size["vocab_size"],
        multiple_of=hidden,  # the hidden dims are 8/3 dims by the multiplier, rounded up to a multiple of this
        ffn_dim_multiplier=hidden / (3 * dims),
        rope_theta=10_000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = Transformer(arguments)
    found, expected = sum(parameter.numel() for parameter in model.parameters()), num_parameters(size)
    assert found == expected, f"{found} parameters rather than {expected}"
    return model


def num_parameters(size: dict) -> int:
    """Of an untied Llama."""
    dims, heads = size["model_dims"], size["num_heads"]
    kv_dims = dims // heads * (size.get("num_kv_heads") or heads)
    layer = 2 * dims * dims + 2 * dims * kv_dims + 3 * dims * size["hidden_dims"] + 2 * dims
    return 2 * size["vocab_size"] * dims + size["num_layers"] * layer + dims


def make_step(size: dict):
    """A step of torchtitan."""
    import torch

    sys.modules["datasets"] = sys.modules["datasets.distributed"] = mock.MagicMock()  # imported, not used
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_, maybe_enable_amp
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp, parallelize_llama
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.tools.utils import GarbageCollection

    config = job(size)
    vocab, shape = size["vocab_size"], (size["batch"], size["seq_len"] + 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    one = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    model, converters = llama(size, config), build_model_converters(config, one)
    converters.convert(model)
    model = parallelize_llama(model, one, config)
    if size.get("titan_autocast"):
        in_low_precision = maybe_enable_amp(one, config.training.mixed_precision_param, device.type)
    else:
        store = torch.distributed.HashStore()
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        apply_fsdp(model, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False)
        in_low_precision = contextlib.nullcontext()
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    model.train()
    loss_of = build_cross_entropy_loss(config)
    optimizers = build_optimizers([model], config.optimizer, one)
    schedulers = build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps)
    optimizers.register_step_post_hook(lambda *_, **__: converters.post_optimizer_hook([model]))
    num_tokens = torch.tensor(float(size["batch"] * size["seq_len"]), device=device)
    collection, counter = GarbageCollection(config.training.gc_freq), itertools.count(1)

    def step() -> None:
        collection.run(next(counter))
        tokens = torch.randint(0, vocab, shape, device=device)
        optimizers.zero_grad()
        with in_low_precision:
            predictions = model(tokens[:, :-1].contiguous())
            loss = loss_of(predictions, tokens[:, 1:].contiguous()) / num_tokens
        del predictions
        loss.backward()
        clip_grad_norm_(model.parameters(), config.training.max_norm, foreach=True)
        optimizers.step()
        schedulers.step()

    return step, torch.cuda.synchronize if device.type == "cuda" else lambda: None


if __name__ == "__main__":
    serve(make_step)
