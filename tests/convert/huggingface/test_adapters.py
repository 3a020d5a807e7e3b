"""Adapters of PEFT: their logits, the files that an export writes, and imports that merge them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paxcli as pax
from paxcli.checkpoint.reading import named_leaves
from paxcli.errors import ConfigError, DataError
from paxcli.nested_map import NestedMap
from paxcli.training.session import state_shapes
from paxcli.training.start_from import write_run
from tests.convert.huggingface.directories import arrays_of, tensors_of, write_directory, write_tokenizer

DATA = pathlib.Path(__file__).parents[2] / "data/peft_lora.npz"
MODULES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "post"}
MODULES |= {"gate_proj": "w_gate", "up_proj": "w_in", "down_proj": "w_out"}


def peft_of(kind: str) -> tuple[dict[str, np.ndarray], dict, np.ndarray]:
    """The tensors that PEFT saved, its adapter_config.json, and the logits that it computes."""
    with np.load(DATA) as file:
        arrays = {name.removeprefix(f"{kind}/"): file[name] for name in file if name.startswith(f"{kind}/")}
    tensors = {name.removeprefix("tensor/"): x for name, x in arrays.items() if name.startswith("tensor/")}
    return tensors, json.loads(str(arrays["config"])), arrays["logits"]


def adapters_in_pax(tensors: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PEFT's tensors as pax's parameters of stacked layers."""
    found: dict[str, list[np.ndarray]] = {}
    for name, x in sorted(tensors.items()):
        *_, group, module, kind = name.replace(".weight", "").split(".")
        base = f"stack.layers.{'attention' if group == 'self_attn' else 'feed_forward'}.{MODULES[module]}"
        if kind == "lora_magnitude_vector":
            axes = {"post": (0, 1), "w_out": 1}.get(MODULES[module], 0)
            layer = len(found.get(f"{base}_lora_magnitude", []))
            x = x.ravel() - np.sqrt(np.square(params[base][layer]).sum(axes)).ravel()
        suffix = {"lora_A": "_lora_a", "lora_B": "_lora_b", "lora_magnitude_vector": "_lora_magnitude"}[kind]
        found.setdefault(base + suffix, []).append(x.T)
    return {name: np.stack(x) for name, x in found.items()}


def logits_of(run: pax.Run, family: str = "llama31") -> np.ndarray:
    ids = jnp.asarray(arrays_of(family)["in/ids"][:1], jnp.int32)
    batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=jnp.arange(ids.shape[1])[None])
    model = fdl.build(run.config.task.model)
    return jax.jit(lambda v: model.apply(v, batch, method="compute_predictions"))({"params": run.params()}).logits


def write_adapter(path: pathlib.Path, kind: str, **more: Any) -> pathlib.Path:
    """A directory as PEFT saved it; `more`: other values of its adapter_config.json."""
    tensors, content, _ = peft_of(kind)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(content | more))
    return path


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "dora"])
def test_logits_and_files_are_those_of_peft(kind: str, tmp_path: pathlib.Path) -> None:
    pax.import_weights(write_directory(tmp_path / "hf", "llama31"), tmp_path / "base")
    fields = {"rank": 4, "alpha": 6, "targets": "attention/|feed_forward/", "use_dora": kind == "dora"}
    recipe = pax.load(
        f"{tmp_path}/base", set={"task.model.lora": "Lora", **{f"lora.{k}": v for k, v in fields.items()}}
    )
    tensors, peft_config, logits = peft_of(kind)
    params = {name: np.asarray(x) for name, x in named_leaves(pax.Run(tmp_path / "base").params()).items()}
    params |= adapters_in_pax(tensors, params)
    shapes = state_shapes(recipe.config)
    expected = named_leaves(shapes.params)
    assert params.keys() == expected.keys()
    params = {name: params[name].reshape(x.shape) for name, x in expected.items()}
    write_run(recipe.config, recipe.yaml(), tmp_path / "run", shapes, {f"params.{n}": x for n, x in params.items()})

    run = pax.Run(tmp_path / "run")
    np.testing.assert_allclose(logits_of(run), logits, rtol=0, atol=1e-5)
    assert np.abs(logits - arrays_of("llama31")["out/logits"][:1]).max() > 0.1

    done = pax.export_weights(run, tmp_path / "adapter", adapter=True)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(done.files)
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_allclose(saved[name], x, rtol=1e-6, atol=1e-6, err_msg=name)
    content = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    assert content.pop("target_modules") == sorted(names)  # PEFT's file has only the last part of each
    assert content == {name: peft_config[name] for name in content}

    pax.import_weights(tmp_path / "hf", tmp_path / "from_adapter", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(pax.Run(tmp_path / "from_adapter")), logits, rtol=0, atol=1e-5)

    others = pax.load(f"{tmp_path}/run", set={"bprop_variable_inclusion": ["lora", "final_norm"]})
    with pytest.raises(ConfigError, match="The run trains `final_norm.scale` too"):
        pax.export_weights(pax.Run(tmp_path / "run", others), tmp_path / "adapters", adapter=True)
    pax.export_weights(run, tmp_path / "merged")
    pax.import_weights(tmp_path / "merged", tmp_path / "again")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == tensors_of("llama31").keys()
    np.testing.assert_allclose(logits_of(pax.Run(tmp_path / "again")), logits, rtol=0, atol=1e-5)


def test_a_run_without_adapters_has_none_to_export(tmp_path: pathlib.Path) -> None:
    pax.import_weights(write_directory(tmp_path / "hf", "llama2"), tmp_path / "run")
    with pytest.raises(ConfigError, match="has no adapters"):
        pax.export_weights(tmp_path / "run", tmp_path / "adapter", adapter=True)


@pytest.mark.parametrize("kind", ["patterns", "gpt2"])
def test_an_import_merges_an_adapter(kind: str, tmp_path: pathlib.Path) -> None:
    family = "gpt2" if kind == "gpt2" else "llama31"
    base = write_directory(tmp_path / "hf", family)
    adapter = write_adapter(tmp_path / "adapter", kind, fan_in_fan_out=False)  # PEFT's file has that of one module
    write_tokenizer(base)
    if has_tokenizer := kind == "patterns":
        write_tokenizer(adapter)
        (adapter / "chat_template.jinja").write_text("the adapter's")
    done = pax.import_weights(base, tmp_path / "run", adapter=adapter)
    assert not done.tensors and "tokenizer.json" in done.carried
    assert (tmp_path / "run/huggingface/chat_template.jinja").exists() == has_tokenizer
    assert "HuggingFaceTokenizer" in done.recipe
    np.testing.assert_allclose(logits_of(pax.Run(tmp_path / "run"), family), peft_of(kind)[2], rtol=0, atol=1e-5)


def test_an_adapter_changes_a_table_only_where_the_model_has_it_apart(tmp_path: pathlib.Path) -> None:
    base, adapter = write_directory(tmp_path / "hf", "llama31"), write_adapter(tmp_path / "adapter", "lora")
    tensors = tensors_of("llama31")
    table = tensors["model.embed_tokens.weight"]
    save_file({name: x for name, x in tensors.items() if name != "lm_head.weight"}, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    name = "base_model.model.model.embed_tokens.weight"
    save_file({name: table + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        DataError, match=r"ties `lm_head.weight` to .*, and the adapter in .* changes one of them"
    ) as error:
        pax.import_weights(base, tmp_path / "run", adapter=adapter)
    assert "set `tie_word_embeddings` to false" in str(error.value.hint)

    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    pax.import_weights(base, tmp_path / "run", adapter=adapter)
    params = named_leaves(pax.Run(tmp_path / "run").params())
    np.testing.assert_array_equal(params["embedding.table"], table + 1)
    np.testing.assert_array_equal(params["head.w"], table.T)


def test_adapters_of_images_are_left_out_with_their_modules(tmp_path: pathlib.Path) -> None:
    base, adapter = write_directory(tmp_path / "hf", "gemma3"), write_adapter(tmp_path / "adapter", "lora")
    name = "base_model.model.model.vision_tower.encoder.layers.0.mlp.fc1"
    parts = {f"{name}.lora_A.weight": np.ones((4, 2), np.float32), f"{name}.lora_B.weight": np.ones((3, 4), np.float32)}
    save_file(parts, adapter / "adapter_model.safetensors")
    done = pax.import_weights(base, tmp_path / "run", dry_run=True, adapter=adapter)
    assert not done.tensors
    assert "vision_tower" in done.left_out


def test_adapters_that_cannot_be_merged(tmp_path: pathlib.Path) -> None:
    base, adapter = write_directory(tmp_path / "hf", "llama31"), write_adapter(tmp_path / "adapter", "lora")
    with pytest.raises(ConfigError, match="has an adapter of PEFT, not a model") as error:
        pax.import_weights(adapter, tmp_path / "run")
    assert f"pax import BASE --adapter {adapter}" in str(error.value.hint)
    for fields, kind in (
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"use_qalora": True}, "use_qalora"),
        ({"lora_bias": True}, "lora_bias"),
    ):
        other = write_adapter(tmp_path / kind, "lora", **fields)
        with pytest.raises(ConfigError, match=f"that pax does not import: {kind}"):
            pax.import_weights(base, tmp_path / "run", adapter=other)
    with pytest.raises(
        DataError, match=r"does not fit `model.layers.0.self_attn.k_proj.weight`.*\(16, 32\).*\(32, 32\)"
    ) as error:
        pax.import_weights(write_directory(tmp_path / "other", "llama2"), tmp_path / "run", adapter=adapter)
    assert str(error.value.hint).startswith("Merge it into its base")  # its name is null in the adapter's config
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(DataError, match="does not fit `model.layers.0.mlp.up_proj.weight`: its parts"):
        pax.import_weights(base, tmp_path / "run", adapter=adapter)
    save_file({"prompt_embeddings": np.zeros(2, np.float32)}, adapter / "adapter_model.safetensors")
    with pytest.raises(DataError, match="`prompt_embeddings` in .* is not a part of LoRA"):
        pax.import_weights(base, tmp_path / "run", adapter=adapter)
    with pytest.raises(ConfigError, match="is of maxtext, and adapters are of Hugging Face"):
        pax.import_weights(base, tmp_path / "run", recipe=pax.load("tiny"), format="maxtext", adapter=adapter)
    assert not (tmp_path / "run").exists()
