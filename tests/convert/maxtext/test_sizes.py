"""The same keys mean different models at different dates; sizes against published ones and MaxText's printed FLOPs."""

from __future__ import annotations

import datetime
import pathlib

import pytest

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.settings import Settings, settings_of
from paxcli.convert.maxtext.sizes import flops, num_parameters, sizes_of
from paxcli.convert.maxtext.source import read_file
from paxcli.errors import ConfigError

SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def launch_with_bucket(name: str) -> Launch:
    """The launch of a script, with a bucket in the variables that it asks for."""
    path = SCRIPTS / name
    asked = [variable for variable in ("OUTPUT_PATH", "BASE") if variable in path.read_text(encoding="utf-8")]
    (launch,) = read_file(path, dict.fromkeys(asked, "gs://b")).launches
    return launch


def of(date: str, **keys: object) -> Settings:
    launch = Launch(1, pairs=[Pair(key, str(value), 1) for key, value in keys.items()])
    return settings_of(launch, datetime.date.fromisoformat(date))


def of_script(name: str, date: str | None = None) -> Settings:
    return settings_of(launch_with_bucket(name), datetime.date.fromisoformat(date) if date else None)


@pytest.mark.parametrize(
    ("scale", "emb", "mlp", "heads", "layers", "now", "before"),
    [
        (1, 2048, 7168, 16, 16, 1.10, 1.09),
        (2, 2048, 14336, 32, 16, 2.08, 2.10),
        (4, 4096, 14336, 32, 16, 4.15, 4.19),
        (8, 4096, 14336, 32, 32, 8.05, 8.22),
        (16, 4096, 28672, 64, 32, 15.8, 16.3),
        (32, 8192, 28672, 64, 32, 31.7, 32.6),
        (64, 8192, 28672, 64, 64, 62.8, 64.8),
        (128, 8192, 57344, 128, 64, 125, 129),
        (256, 16384, 57344, 128, 64, 250, 258),
        (512, 16384, 57344, 128, 128, 499, 516),
        (1024, 16384, 114688, 256, 128, 997, 1031),
    ],
)
def test_a_power_of_two_scales_by_the_rule_of_the_day(scale, emb, mlp, heads, layers, now, before) -> None:
    settings = of("2025-01-01", global_parameter_scale=scale)
    s = sizes_of(settings)
    assert (s.emb, s.mlp, s.heads, s.kv_heads, s.layers, s.head_dim) == (emb, mlp, heads, heads, layers, 128)
    assert num_parameters(settings) / 1e9 == pytest.approx(now, rel=5e-3)
    assert num_parameters(of("2023-11-15", global_parameter_scale=scale)) / 1e9 == pytest.approx(before, rel=5e-3)


def test_the_first_rules_of_scaling() -> None:
    assert sizes_of(of("2023-08-15", global_parameter_scale=2)).emb == 4096
    assert sizes_of(of("2023-08-15", global_parameter_scale=2)).heads == 8
    assert sizes_of(of("2023-07-25", global_parameter_scale=64)).layers == 20 * 3
    with pytest.raises(ConfigError, match="not a power of two"):
        sizes_of(of("2025-01-01", global_parameter_scale=3))


@pytest.mark.parametrize("name", ["2xv4-128.scale.sh", "2xv4-128.named.sh", "2xv4-128.base.sh"])
def test_22b_of_2023(name: str) -> None:
    settings = of_script(name, "2023-07-20" if name != "2xv4-128.base.sh" else "2023-07-21")
    assert sizes_of(settings).layers == 48 and sizes_of(settings).head_dim == 256
    assert num_parameters(settings) / 1e9 == pytest.approx(21.94, abs=0.01)
    assert flops(settings).total == pytest.approx(2157.2 + (29.7 * 2 if settings.date.month > 7 else 59.4), abs=0.6)


def test_22b_since_2024_is_another_model_of_the_same_keys() -> None:
    assert num_parameters(of_script("22b.sh", "2023-12-15")) / 1e9 == pytest.approx(21.94, abs=0.01)
    assert num_parameters(of_script("22b.sh")) / 1e9 == pytest.approx(25.8, abs=0.05)


def test_a_date_is_inferred_from_the_keys() -> None:
    era = of_script("2xv4-128.scale.sh").era
    assert era.last == datetime.date(2023, 7, 20) and "`scale`" in era.text and "adam_b2" in era.open_keys
    assert of_script("22b.sh").era.first == datetime.date(2024, 5, 29)
    assert of_script("22b.sh").undecided == []
    (asked,) = of_script("2xv4-128.base.sh").undecided
    assert "--date" in asked and "_position" in asked


MODELS = {name: model["published"] for name, model in tables.table("models").items() if model.get("published")}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_large_as_published(name: str) -> None:
    assert num_parameters(of("2026-01-01", model_name=name)) == pytest.approx(MODELS[name], rel=5e-3)


@pytest.mark.parametrize(
    ("model", "batch", "length", "weights", "attention", "now", "before"),
    [
        ("llama2-7b", 12, 2048, 974.25, 39.58, 1013.84, 1053.42),
        ("llama2-7b", 4, 8192, 1299.00, 211.11, 1510.11, 1721.22),
        ("llama2-7b", 1, 2048, 81.19, 3.30, 84.49, 87.78),
        ("llama3.1-8b", 1, 2048, 92.22, 3.30, 95.52, 98.81),
        ("llama2-70b", 1, 2048, 844.35, 16.49, 860.84, 877.33),
        ("llama3.1-405b", 1, 2048, 4961.25, 51.95, 5013.21, 5065.16),
        ("gpt3-175b", 1, 2048, 2145.05, 29.69, 2174.73, 2204.42),
        ("gemma-2b", 1, 2048, 30.80, 0.93, 31.73, 32.65),
    ],
)
def test_flops_are_those_that_maxtext_prints(model, batch, length, weights, attention, now, before) -> None:
    settings = of("2026-01-01", model_name=model, per_device_batch_size=batch, max_target_length=length)
    counted = flops(settings)
    assert [round(x, 2) for x in (counted.weights, counted.attention, counted.total)] == [weights, attention, now]
    settings = of("2025-01-01", model_name=model, per_device_batch_size=batch, max_target_length=length)
    assert round(flops(settings).total, 2) == before


@pytest.mark.parametrize(
    ("model", "batch", "length", "weights", "attention", "total"),
    [
        ("deepseek2-16b", 24, 2048, 722.92, 41.75, 764.67),  # the total is in MaxText's documentation
        ("deepseek3-671b", 4, 4096, 3600.34, 503.03, 4103.37),
        ("kimi-k2-1t", 1, 8192, 1557.43, 251.51, 1808.95),
        ("gpt-oss-20b", 8, 4096, 709.19, 42.02, 751.21),
        ("envy-switch-base", 16, 2048, 99.42, 7.42, 106.84),  # counted as if all layers had experts
    ],
)
def test_flops_of_mixtures_are_those_of_maxtexts_own_function(model, batch, length, weights, attention, total) -> None:
    counted = flops(of("2026-08-22", model_name=model, per_device_batch_size=batch, max_target_length=length))
    assert [round(x, 2) for x in (counted.weights, counted.attention, counted.total)] == [weights, attention, total]


def test_the_formulas_of_22b() -> None:
    keys = dict(scale=3, per_device_batch_size=16)
    assert round(flops(of("2023-03-08", **keys)).total) == 2157 and flops(of("2023-03-08", **keys)).attention == 0
    assert round(flops(of("2023-07-01", **keys)).total, 1) == 2216.6
    shape = dict(base_emb_dim=6144, base_num_query_heads=24, base_num_kv_heads=24, base_mlp_dim=24576, head_dim=256)
    shape |= dict(base_num_decoder_layers=48, vocab_size=32768, mlp_activations="relu", max_target_length=1024)
    counted = flops(of("2026-01-01", **shape, per_device_batch_size=16))
    assert [round(x, 1) for x in (counted.weights, counted.attention, counted.total)] == [2157.2, 29.7, 2186.9]
    assert round(flops(of("2025-01-01", **shape, per_device_batch_size=16)).total, 1) == 2216.6


def test_a_model_wins_over_defaults_and_a_contradiction_is_said() -> None:
    settings = of("2025-01-01", model_name="llama2-7b", base_emb_dim=1024)
    assert "contradicts" in settings.warnings[0] and settings["base_emb_dim"] == 1024
    assert of("2025-01-01", model_name="llama2-7b", base_emb_dim=4096).warnings == []
    freed = of("2025-01-01", model_name="llama2-7b", base_emb_dim=1024, override_model_config="true")
    assert freed.warnings == [] and freed["base_emb_dim"] == 1024
    with pytest.raises(ConfigError, match="no model") as raised:
        of("2025-01-01", model_name="lama2-7b")
    assert "llama2-7b" in str(raised.value.hint)


def test_old_names_duplicates_unknown_keys_and_values() -> None:
    launch = Launch(
        1, pairs=[Pair("base_num_heads", "4", 2), Pair("enable_profiler", "True", 2), Pair("stepz", "1", 3)]
    )
    launch.pairs += [Pair("run_name", "a", 4), Pair("run_name", "b", 5), Pair("gcs_metrics", "true", 5)]
    launch.overrides = [Pair("STEPS", "7", 6), Pair("Steps", "7", 6), Pair("STEPZ", "7", 6), Pair("RUN_NAME", "c", 6)]
    settings = settings_of(launch, datetime.date(2025, 1, 1))
    assert settings["base_num_query_heads"] == settings["base_num_kv_heads"] == 4
    assert settings["profiler"] == "xplane" and settings["run_name"] == "b" and settings["steps"] == 7
    assert [(d.key, d.line) for d in settings.dropped] == [("stepz", 3), ("gcs_metrics", 5)]
    assert "steps" in settings.dropped[0].why and len(settings.warnings) == 4
    with pytest.raises(ConfigError, match="Line 1: steps=ten is not an integer"):
        of("2025-01-01", steps="ten")
    assert of("2025-01-01", steps="150_001", learning_rate="3.e-5", quantization="")["steps"] == 150_001


def test_a_value_that_the_script_lacks_is_asked_for() -> None:
    (launch,) = read_file(SCRIPTS / "128b.sh").launches
    (asked,) = settings_of(launch, datetime.date(2024, 3, 1)).undecided
    assert "--arg OUTPUT_PATH=" in asked
