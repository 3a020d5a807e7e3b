"""Weights of Hugging Face: the logits are those of transformers, and the way back is the identity."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import resource
import shutil
from typing import BinaryIO

import fiddle as fdl
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paxcli as pax
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import named_leaves
from paxcli.config.assign import assign
from paxcli.convert.huggingface.config import FAMILIES, config_json, differing_fields, model_values, text_decoder
from paxcli.convert.huggingface.generation import decoding_values
from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.inputs.chat import ChatInput
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.models.sampling import Sampling
from paxcli.nested_map import NestedMap
from paxcli.training.progress import Reporter
from paxcli.training.run_dir import RunDir
from paxcli.training.session import state_shapes
from paxcli.training.start_from import write_run
from tests.convert.huggingface.directories import (
    CONFIGS,
    SIZES,
    WITH_IMAGES,
    arrays_of,
    tensors_of,
    write_directory,
    write_tokenizer,
)

LOGITS = dict(atol=1e-4, rtol=0)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


# Those whose tensors and layers others have too are left to the slow suite.
FAMILIES_HERE = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("llama2", "gemma", "deepseek_v2", "qwen2_moe") else name
    for name in CONFIGS
]


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_a_family_has_the_logits_of_transformers_and_is_exported_as_it_was(family, tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", family)
    done = pax.import_weights(source, tmp_path / "run")
    run = pax.Run(tmp_path / "run")
    assert (done.family, run.steps) == (CONFIGS[family]["model_type"], [0])
    assert done.num_bytes == sum(x.nbytes for x in tensors_of(family).values())
    arrays = arrays_of(family)
    np.testing.assert_allclose(_logits(run, arrays["in/ids"]), arrays["out/logits"], **LOGITS)
    assert np.abs(arrays["out/logits"]).max() > 1
    exported = pax.export_weights(run, tmp_path / "back")
    assert exported.dtype == "float32"
    assert json.loads((tmp_path / "back/config.json").read_text()) == CONFIGS[family]
    assert_same(load_file(tmp_path / "back/model.safetensors"), tensors_of(family))


def _logits(run: pax.Run, ids: np.ndarray) -> jax.Array:
    model, ids = fdl.build(run.config.task.model), jnp.asarray(ids, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=positions)
    return jax.jit(lambda v: model.apply(v, batch, method="compute_predictions"))({"params": run.params()}).logits


# As transformers writes them; as some versions did, before they wrote the first names again.
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_multimodal_model_the_text_decoder_is_imported(prefix, tmp_path: pathlib.Path):
    source, arrays = write_directory(tmp_path / "hf", "gemma3"), arrays_of("gemma3")
    tensors = load_file(source / "model.safetensors")
    of_text = {name.removeprefix("language_model."): x for name, x in tensors.items() if name.startswith("language_")}
    renamed = {name.replace("language_model.model.", prefix): np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    done = pax.import_weights(source, tmp_path / "run")
    assert (done.family, done.left_out) == ("gemma3_text", ["multi_modal_projector", "vision_tower"])
    assert done.num_bytes == sum(x.nbytes for x in of_text.values())
    run = pax.Run(tmp_path / "run")
    np.testing.assert_allclose(_logits(run, arrays["in/ids"]), arrays["out/logits"], **LOGITS)
    pax.export_weights(run, tmp_path / "back")
    assert_same(load_file(tmp_path / "back/model.safetensors"), of_text)
    content = json.loads((tmp_path / "back/config.json").read_text())
    assert content.items() >= WITH_IMAGES["text_config"].items()
    assert content["architectures"] == ["Gemma3ForCausalLM"]


def test_the_config_of_a_text_decoder():
    """Gemma 3 leaves out defaults of `Gemma3TextConfig`. Qwen3-VL has Qwen3's decoder, tied as its top level says."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    family, found = text_decoder({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    values = model_values(found)
    assert (family, found["torch_dtype"], values["vocab_size"]) == ("gemma3_text", "bfloat16", 262208)
    assert (values["num_heads"], values["num_kv_heads"], values["dims_per_head"]) == (8, 4, 256)
    vision = {"model_type": "qwen3_vl_text", **SIZES, "tie_word_embeddings": False}
    family, found = text_decoder({"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": vision})
    assert (family, found["model_type"], found["tie_word_embeddings"]) == ("qwen3", "qwen3", True)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_that_was_never_imported_gets_the_config_of_its_family(family, tmp_path: pathlib.Path):
    """Without the config.json that it came with: the keys that pax writes are those of the same model."""
    kind = CONFIGS[family]["model_type"]
    config = pax.load(FAMILIES[kind].recipe).config
    for path, value in model_values(CONFIGS[family]).items():
        assign(config, f"task.model.{path}", value)
    written = config_json(config, None, "float32")
    nearest = {"phi3": "mistral", "seed_oss": "qwen2"}.get(kind, kind)
    assert written["model_type"] == nearest and not differing_fields(config, written)


def test_a_tied_llama_trains_decodes_and_is_exported_with_its_tokenizer(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama31", tie_word_embeddings=True)
    write_tokenizer(source)
    tensors = tensors_of("llama31")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    save_file(tensors | copy, source / "model.safetensors", metadata={"format": "pt"})
    done = pax.import_weights(source, tmp_path / "run")  # the file has a copy of the table, which is not read
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < set(done.carried)
    small = {"global_batch_size": 2, "num_train_steps": 2, "max_seq_len": 32, "eval_inputs": []}
    small |= {"train_input": "SyntheticInput", "summary_interval_steps": 1}
    trained = pax.train(pax.load(f"{tmp_path}/run", set=small), tmp_path / "run", progress=Reporter())
    assert trained.steps == [0, 2]
    pax.export_weights(tmp_path / "run", tmp_path / "back", step=0)
    assert_same(
        load_file(tmp_path / "back/model.safetensors"),
        {name: x for name, x in tensors_of("llama31").items() if name != "lm_head.weight"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    pax.export_weights(trained, tmp_path / "trained", dtype="bfloat16")
    assert json.loads((tmp_path / "trained/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {x.dtype.name for x in load_file(tmp_path / "trained/model.safetensors").values()} == {"bfloat16"}


def test_generation_config_comes_in_and_goes_out(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5], "repetition_penalty": 1.1}
    given |= {"max_new_tokens": 7, "bos_token_id": 1, "num_beams": 1, "no_repeat_ngram_size": 3, "typical_p": 0.9}
    (source / "generation_config.json").write_text(json.dumps(given))
    assert pax.import_weights(source, tmp_path / "run").not_imported == ["typical_p"]
    run = pax.Run(tmp_path / "run")
    # Without `top_k`, transformers sample from the 50 most likely tokens.
    assert fdl.build(run.config.decoding) == Sampling(
        temperature=0.6,
        top_k=50,
        top_p=0.9,
        eos_ids=(2, 5),
        max_tokens=7,
        repetition_penalty=1.1,
        no_repeat_ngram_size=3,
    )
    pax.export_weights(run, tmp_path / "same")
    assert (tmp_path / "same/generation_config.json").read_text() == json.dumps(given)
    other = {"decoding.temperature": 0.0, "decoding.top_k": None, "decoding.top_p": None, "decoding.stop": ["."]}
    other["decoding.repetition_penalty"] = 1.3
    pax.export_weights(pax.Run(run.path, pax.load(f"{run.path}/", set=other)), tmp_path / "other")
    written = json.loads((tmp_path / "other/generation_config.json").read_text())
    assert (written["do_sample"], written["stop_strings"], written["typical_p"]) == (False, ["."], 0.9)
    values = {"eos_ids": [2, 5], "max_tokens": 7, "stop": ["."], "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    assert decoding_values(written)[0] == values
    without = pax.load(f"{run.path}/", set={"decoding.repetition_penalty": None})
    pax.export_weights(pax.Run(run.path, without), tmp_path / "without")
    assert "repetition_penalty" not in json.loads((tmp_path / "without/generation_config.json").read_text())


@pytest.mark.parametrize(
    ("content", "values", "others"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {}, []),  # greedy
        ({"do_sample": True, "top_k": 0, "top_p": 1.0}, {"temperature": 1.0}, []),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
            [],
        ),  # greedy decoding has it too
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 2}, {}, ["min_length"]),
        ({"eos_token_id": 2, "num_beams": 4, "min_length": 0}, {"eos_ids": [2]}, ["num_beams"]),
        ({"do_sample": True, "epsilon_cutoff": 0.1, "top_k": 9}, {"temperature": 1.0, "top_k": 9, "epsilon": 0.1}, []),
    ],
)
def test_values_of_generation_config(content, values, others):
    assert decoding_values(content) == (values, others)


def test_an_imported_run_decodes_with_its_tokenizer(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    write_tokenizer(source)
    pax.import_weights(source, tmp_path / "run")
    (one,) = pax.Run(tmp_path / "run").generate("abc", max_tokens=4, temperature=0)
    assert len(one.ids) == 4 or one.finish_reason == "eos"
    tokenizer = pax.load(f"{tmp_path}/run").config.train_input.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    tuned = pax.load(f"{tmp_path}/run", overlays=["sft"], set={"eval_inputs": ["ChatInput"]}).config
    for data in (tuned.train_input, *tuned.eval_inputs):
        assert fdl.get_callable(data) is ChatInput and data.tokenizer == tokenizer and data.files is None


def test_a_recipe_that_was_never_imported_is_exported(tmp_path: pathlib.Path):
    small = {"num_layers": 2, "model_dims": 16, "hidden_dims": 24, "num_heads": 4, "num_kv_heads": 2}
    recipe = pax.load("llama-1b", set=small | {"task.model.vocab_size": 32, "max_seq_len": 16})
    shapes, random = state_shapes(recipe.config), np.random.default_rng(0)
    params = {name: random.normal(size=x.shape).astype(np.float32) for name, x in named_leaves(shapes.params).items()}
    arrays = {f"params.{name}": x for name, x in params.items()}
    write_run(recipe.config, recipe.yaml(), tmp_path / "run", shapes, arrays)
    pax.export_weights(tmp_path / "run", tmp_path / "hf")
    content = json.loads((tmp_path / "hf/config.json").read_text())
    assert (content["model_type"], content["num_key_value_heads"], content["head_dim"]) == ("llama", 2, 4)
    assert content["pad_token_id"] is None  # that of SmolLM3 in transformers, for one, is beyond most vocabularies
    tensors = load_file(tmp_path / "hf/model.safetensors")
    np.testing.assert_array_equal(tensors["model.norm.weight"], params["final_norm.scale"] + 1)
    query = params["stack.layers.attention.query"][1].reshape(16, 16)
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.q_proj.weight"], query.T)
    assert not pax.import_weights(tmp_path / "hf", tmp_path / "again", dry_run=True).tensors


def test_an_import_that_ends_early_leaves_no_run_and_can_be_repeated(tmp_path: pathlib.Path, monkeypatch):
    """Without its checkpoint, a run would start from random parameters; without its tokenizer, not at all."""
    write_tokenizer(source := write_directory(tmp_path / "hf", "gpt2"))
    run = tmp_path / "run"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            pax.import_weights(source, run)
    assert (run / "huggingface/tokenizer.json").exists() and not (run / "recipe.yaml").exists()
    pax.import_weights(source, run)
    assert pax.Run(run).steps == [0] and (run / "recipe.yaml").exists()


def test_an_export_that_ends_early_can_be_repeated(tmp_path: pathlib.Path, monkeypatch):
    write_tokenizer(source := write_directory(tmp_path / "hf", "gpt2"))
    pax.import_weights(source, tmp_path / "run")
    target = tmp_path / "out"
    (target / ".pax-export").mkdir(parents=True)
    (target / ".pax-export/model-00001-of-00009.safetensors").write_bytes(b"of an export that was killed")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", _fill_disk)
        with pytest.raises(MissingError, match="No space left on device"):
            pax.export_weights(tmp_path / "run", target)
    assert not list(target.iterdir())
    files = pax.export_weights(tmp_path / "run", target).files
    assert sorted(files) == sorted(path.name for path in target.iterdir())
    assert len({(target / name).stat().st_mode for name in files}) == 1


def _fill_disk(source: BinaryIO, target: BinaryIO, length: int) -> None:
    target.write(source.read(10))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target.name)


@pytest.mark.parametrize("circular_repeat", [1, 2])
def test_pipelined_layers_are_exported_as_those_of_a_stack(circular_repeat: int, tmp_path: pathlib.Path):
    """Random numbers fill both in the same order of layers. Adapters are merged, or written as PEFT's files."""
    small = {"num_layers": 4, "model_dims": 16, "hidden_dims": 24, "num_heads": 4, "task.model.vocab_size": 32}
    small |= {"max_seq_len": 16, "task.model.lora": "Lora", "train_input": "SyntheticInput", "eval_inputs": []}
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in ("stack", "pipeline"):
        recipe = pax.load("llama-1b", set=small)
        if name == "pipeline":
            stack = {"block": recipe.config.task.model.stack.block, "num_stages": 2, "num_microbatches": 2}
            recipe.config.task.model.stack = PipelinedStack.partial(circular_repeat=circular_repeat, **stack)
        shapes, random = state_shapes(recipe.config), np.random.default_rng(0)
        named = {f"params.{name}": x for name, x in named_leaves(shapes.params).items()}
        arrays = {key: random.normal(size=x.shape).astype(np.float32) for key, x in named.items()}
        write_run(recipe.config, recipe.yaml(), tmp_path / name, shapes, arrays)
        for file, is_adapter in (("model", False), ("adapter_model", True)):
            pax.export_weights(pax.Run(tmp_path / name, recipe), tmp_path / name / file, adapter=is_adapter)
            found.setdefault(name, {}).update(load_file(tmp_path / name / file / f"{file}.safetensors"))
    assert_same(found["pipeline"], found["stack"])


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-1b"])
@pytest.mark.parametrize(("field", "value"), [("logit_cap", 2.0), ("scale_logits_sqrt_depth", True)])
def test_other_logits_of_a_tied_table_are_refused(name: str, field: str, value: float | bool):
    """Hugging Face's models compute the logits without these."""
    recipe = pax.load(name, set={"task.model.head": None, f"task.model.embedding.{field}": value})
    with pytest.raises(ConfigError, match=f"embedding.{field} is {value}"):
        config_json(recipe.config, None, "float32")


def test_a_model_that_no_family_computes_is_refused_with_its_fields():
    message = r"GPTNeoXForCausalLM.*differs from this model: embedding.logit_cap is 30.0, .*SinusoidPositions"
    with pytest.raises(ConfigError, match=message):
        config_json(pax.load("c4-1b").config, None, "float32")


def test_a_dry_run_lists_what_differs_and_writes_nothing(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2", num_hidden_layers=3, vocab_size=60)
    found = pax.import_weights(source, tmp_path / "run", dry_run=True).tensors
    assert set(found.mismatched) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(found.missing) == 9 and all(".layers.2." in name for name in found.missing)
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"embed_tokens.weight` is \[61, 32\] there, \[60, 32\] here"):
        pax.import_weights(source, tmp_path / "run")
    source = write_directory(tmp_path / "more", "llama2", num_hidden_layers=1)
    assert len(pax.import_weights(source, tmp_path / "run", dry_run=True).tensors.unexpected) == 9


def test_a_hugging_face_directory_in_place_of_a_run_is_named(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    with pytest.raises(DataError, match="not a run directory") as caught:
        RunDir(source).require_recipe()
    assert f"`pax import {source} --out RUN_DIR`" in str(caught.value.hint)


def test_weights_that_are_not_finite_are_refused(tmp_path: pathlib.Path):
    source, tensors = write_directory(tmp_path / "hf", "llama2"), dict(tensors_of("llama2"))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.where(np.arange(tensors[name].size).reshape(tensors[name].shape) == 5, np.nan, tensors[name])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"hf has NaN or infinity in `stack.layers.feed_forward.w_in`"):
        pax.import_weights(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_would_be_lost_are_named(tmp_path: pathlib.Path):
    with pytest.raises(
        DataError, match="ties `lm_head.weight` to `model.embed_tokens.weight`, and the file has another"
    ):
        pax.import_weights(write_directory(tmp_path / "tied", "llama2", tie_word_embeddings=True), tmp_path / "run")
    source = write_directory(tmp_path / "hf", "llama2")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has an adapter of PEFT"):
        pax.import_weights(source, tmp_path / "run")


@pytest.mark.parametrize("keys", [{"num_attention_heads": 0}, {"hidden_size": "x"}, {"rope_scaling": 3}], ids=str)
def test_a_damaged_config_is_refused(keys, tmp_path: pathlib.Path):
    with pytest.raises((ConfigError, DataError)):
        pax.import_weights(write_directory(tmp_path / "hf", "llama2", **keys), tmp_path / "run")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM: it lacks gat"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax' is not supported in deeps"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias=False is not supported in gpt_oss"),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM: it lacks a conversion for it",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported in llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported in llama"),
        ({"model_type": "gpt2", "activation_function": "tanh"}, "activation_function='tanh' is not supported in gpt2"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm=True is not supported in phi"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm=True is not supported in stablelm"),
        ({"is_causal": False}, "is_causal=False is not supported in llama"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "it lacks a conversion for it"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope is not supported"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "ignores partial_rotary_factor=0.5 in llama"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "quantized .mxfp4.*bfloat16"),
    ],
)
def test_another_architecture_is_refused_by_name(keys, message, tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match=message):
        pax.import_weights(write_directory(tmp_path / "hf", "llama2", **keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_starts_from_an_imported_one_is_exported_like_it(tmp_path: pathlib.Path):
    """Config, tokenizer files and each tensor's dtype are those of the import; the values are the moving averages."""
    source = write_directory(tmp_path / "hf", "llama31", max_position_embeddings=4096, torch_dtype="bfloat16")
    write_tokenizer(source)
    (source / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors_of("llama31").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + 1e-4
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    pax.import_weights(source, tmp_path / "run")
    pax.export_weights(tmp_path / "run", tmp_path / "same")
    same = load_file(tmp_path / "same/model.safetensors")
    assert_same(same, tensors)
    assert {name: x.dtype for name, x in same.items()} == {name: x.dtype for name, x in tensors.items()}

    small = {"global_batch_size": 2, "num_train_steps": 2, "max_seq_len": 32, "eval_inputs": [], "ema_decay": 0.5}
    small |= {"train_input": "SyntheticInput", "learning_rate": 0.1, "warmup_steps": 0}
    tuned = pax.train(
        pax.load(f"{tmp_path}/run", set=small), tmp_path / "tuned", init_from=tmp_path / "run", progress=Reporter()
    )
    pax.export_weights(tuned, tmp_path / "out")
    config, special = (
        json.loads((tmp_path / "out" / f"{x}.json").read_text()) for x in ("config", "special_tokens_map")
    )
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (4096, "bfloat16")
    assert special == {"eos_token": "</s>"} and (tmp_path / "out/tokenizer.json").exists()
    out = load_file(tmp_path / "out/model.safetensors")
    assert {name: x.dtype for name, x in out.items()} == {name: x.dtype for name, x in tensors.items()}
    expected = np.asarray(tuned.params()["final_norm"]["scale"])
    np.testing.assert_array_equal(out["model.norm.weight"], expected)
    assert np.abs(expected - tensors["model.norm.weight"]).max() > 1e-3

    with pytest.raises(DataError, match="`model.norm.weight` has values beyond float16"):
        tensors["model.norm.weight"][0] = 1e5
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        pax.import_weights(source, tmp_path / "large")
        pax.export_weights(tmp_path / "large", tmp_path / "half", dtype="float16")


def test_sampling_from_all_tokens_is_not_exported_as_from_fifty(tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    assert pax.import_weights(source, tmp_path / "run").not_imported == []  # config.json has no settings of generation
    recipe = pax.load(f"{tmp_path}/run", set={"decoding.temperature": 0.7})
    pax.export_weights(pax.Run(tmp_path / "run", recipe), tmp_path / "out")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (written["do_sample"], written["temperature"], written["top_k"]) == (True, 0.7, 0)


@pytest.mark.parametrize("field", ["ewc_regularizer_weight", "optimizer"])
def test_an_optimizer_that_does_not_start_from_zero_is_refused(field, tmp_path: pathlib.Path):
    source = write_directory(tmp_path / "hf", "llama2")
    pax.import_weights(source, tmp_path / "run")
    other = pax.load(f"{tmp_path}/run", set={field: 0.5 if "ewc" in field else "Adagrad"})
    with pytest.raises(
        ConfigError, match=r"The first `.*(anchor|sum_of_squares).*` of the recipe's optimizer is not 0"
    ):
        pax.import_weights(source, tmp_path / "other", recipe=other)
    averaged = pax.load(f"{tmp_path}/run", set={"ema_decay": 0.9})
    pax.import_weights(source, tmp_path / "averaged", recipe=averaged)


def test_a_full_disk_is_named(tmp_path: pathlib.Path):
    pax.import_weights(write_directory(tmp_path / "hf", "llama2"), tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file may be larger
    try:
        with pytest.raises(MissingError, match=r"out cannot be written: .*File too large"):
            pax.export_weights(tmp_path / "run", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_of_several_tokenizers_that_of_training_is_exported(tmp_path: pathlib.Path):
    source, run = write_directory(tmp_path / "hf", "llama2"), tmp_path / "run"
    write_tokenizer(source)
    pax.import_weights(source, run)
    paths = {name: str(tmp_path / name / "tokenizer.json") for name in ("train", "eval")}
    for name, path in paths.items():
        (run / "tokenizers" / name).mkdir(parents=True)
        (run / "tokenizers" / name / "tokenizer.json").write_text(json.dumps(path))
    (run / "tokenizers.json").write_text(
        json.dumps({path: f"tokenizers/{x}/tokenizer.json" for x, path in paths.items()})
    )
    sets = {"train_input.tokenizer.path": paths["train"], "eval_inputs.0.tokenizer.path": paths["eval"]}
    pax.export_weights(pax.Run(run, pax.load(f"{run}/", set=sets)), tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == paths["train"]

    shutil.rmtree(run / "huggingface")  # a model that was never imported
    (run / "tokenizers.json").unlink()
    (source / "tokenizer_config.json").unlink()
    sets = {"train_input.tokenizer.path": str(source / "tokenizer.json")}
    for token, number in (("<s>", 1), ("</s>", 2)):  # the recipe alone names it
        sets["train_input.tokenizer.eos_token"] = token
        pax.export_weights(pax.Run(run, pax.load(f"{run}/", set=sets)), tmp_path / str(number))
        content = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert content["eos_token_id"] == number
