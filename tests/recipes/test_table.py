"""Every recipe of Pax's against the numbers of Pax's own, typed in."""

from __future__ import annotations

import json
import subprocess
import sys

import fiddle as fdl
import pytest

from paxcli.config.index import find_recipes
from paxcli.config.load import load
from paxcli.config.resolve import resolve
from paxcli.training.experiment import num_devices
from paxcli.training.validate import validate

# Pax's class, parameters, global batch, tokens in a step, devices.
TABLE = [
    ("C4Spmd1BAdam4Replicas", 1_104_619_904, 128, 131_072, 4),
    ("C4Spmd1BAdam4ReplicasLimitSteps", 1_104_619_904, 128, 131_072, 4),
    ("C4Spmd2BAdam4Replicas", 2_137_273_856, 128, 131_072, 4),
    ("C4Spmd16BAdam32Replicas", 16_506_101_504, 512, 524_288, 32),
    ("C4Spmd32BAdam64Replicas", 32_477_401_344, 512, 524_288, 64),
    ("C4Spmd22BAdamMaxText", 21_947_310_080, 128, 131_072, 8),
    ("C4Spmd22BAdam1xv4_128", 21_947_310_080, 1024, 1_048_576, 64),
    ("C4Spmd22BAdam1xv4_128LimitSteps", 21_947_310_080, 1024, 1_048_576, 64),
    ("C4Spmd22BAdam2xv4_128", 21_947_310_080, 2048, 2_097_152, 128),
    ("C4Spmd22BAdam2xv4_128LimitSteps", 21_947_310_080, 2048, 2_097_152, 128),
    ("C4Spmd22BAdam4xv4_128", 21_947_310_080, 4096, 4_194_304, 256),
    ("C4Spmd22BAdam4xv4_128LimitSteps", 21_947_310_080, 4096, 4_194_304, 256),
    ("C4Spmd22BAdam1xv4_384", 24_765_221_888, 1920, 1_966_080, 192),
    ("C4Spmd22BAdam2xv4_384", 24_765_221_888, 3840, 3_932_160, 384),
    ("C4Spmd22BAdam1xv4_8", 872_751_104, 64, 65_536, 4),
    ("C4Spmd22BAdam1xv4_8LimitSteps", 872_751_104, 64, 65_536, 4),
    ("C4Spmd22BAdam2xv4_8", 872_751_104, 128, 131_072, 8),
    ("C4Spmd22BAdam2xv4_8LimitSteps", 872_751_104, 128, 131_072, 8),
    ("C4Spmd22BAdam4xv4_8", 872_751_104, 256, 262_144, 16),
    ("C4Spmd22BAdam4xv4_8LimitSteps", 872_751_104, 256, 262_144, 16),
    ("C4Spmd32BAdam1xv5_256", 32_483_698_688, 256, 524_288, 128),
    ("C4Spmd32BAdam2xv5_256", 32_483_698_688, 512, 1_048_576, 256),
    ("C4SpmdAdam", 1_274_237_824, 8, 8_192, 8),
    ("C4SpmdPipelineAdam", 1_274_237_824, 8, 8_192, 8),
    ("LmCloudSpmdAdam", 166_272_512, 128, 131_072, 8),
    ("LmCloudSpmdAdamLimitSteps", 166_272_512, 128, 131_072, 8),
    ("LmCloudSpmdTest", 2_179_600, 4, 4_096, 1),
    ("LmCloudSpmd2B", 2_137_273_856, 32, 32_768, 4),
    ("LmCloudSpmd2BLimitSteps", 2_137_273_856, 32, 32_768, 4),
    ("LmCloudSpmd32B", 32_477_401_344, 512, 524_288, 64),
    ("LmCloudSpmd64B", 64_505_290_368, 512, 524_288, 128),
    ("LmCloudSpmd128B", 129_048_825_984, 1024, 1_048_576, 256),
    ("LmCloudSpmd256B", 258_234_197_248, 2048, 2_097_152, 512),
    ("LmCloudSpmd512B", 514_057_056_256, 4096, 4_194_304, 1024),
    ("LmCloudSpmd1024B", 1_029_999_477_760, 4096, 4_194_304, 2048),
    ("LmCloudSpmdMultislice2B", 2_137_273_856, 128, 131_072, 8),
    ("LmCloudSpmdPipelineMultislice2B", 2_137_273_856, 128, 131_072, 8),
    ("LmCloudSpmdPipelineMultislice2BCircular", 2_137_273_856, 128, 131_072, 8),
    ("LmCloudSpmdPipeline9B", 9_796_564_224, 512, 524_288, 64),
    ("LmCloudSpmdPipeline175B", 174_350_077_184, 96, 196_608, 128),
    ("OptimalScaling2x2x1", 4_431_572_736, 64, 65_536, 4),
    ("OptimalScaling2x2x2", 6_574_746_880, 64, 65_536, 8),
    ("OptimalScaling2x2x4", 9_321_937_664, 128, 131_072, 16),
    ("OptimalScaling2x4x4", 12_748_642_560, 256, 262_144, 32),
    ("OptimalScaling4x4x4", 18_102_606_080, 512, 524_288, 64),
    ("OptimalScaling4x4x8", 24_783_731_200, 512, 524_288, 128),
    ("OptimalScaling4x8x8", 34_760_552_704, 512, 524_288, 256),
    ("OptimalScaling4x8x16", 51_806_526_720, 1024, 1_048_576, 512),
    ("OptimalScaling4x16x16", 51_806_526_720, 1024, 1_048_576, 1024),
    ("OptimalScaling4x16x32", 51_806_526_720, 2048, 2_097_152, 2048),
    ("OptimalScaling4x24x32", 51_806_526_720, 3072, 3_145_728, 3072),
    ("LmCloudTransformerAdam", 435_752_192, 64, 65_536, 4),
    ("LmCloudTransformerAdamTest", 57_986_432, 64, 65_536, 4),
    ("LmCloudTransformerAdamLimitSteps", 158_723_968, 64, 65_536, 4),
    ("C4SpmdGpt3AdamOrgHP", 174_780_420_096, 8, 16_384, 8),
    ("C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas", 174_792_007_680, 1536, 3_145_728, 1536),
    ("C4SpmdGpt3L16AdamOrgHP", 29_812_494_336, 192, 393_216, 64),
    ("C4SpmdGpt3AdamDataParallel2x16x16", 174_780_420_096, 256, 524_288, 512),
    ("C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas", 174_792_007_680, 1536, 3_145_728, 768),
    ("C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas", 174_792_007_680, 1536, 3_145_728, 768),
    ("C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas", 174_792_007_680, 2048, 4_194_304, 512),
    ("C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas", 174_792_007_680, 3072, 6_291_456, 768),
    ("C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas", 174_792_007_680, 4096, 8_388_608, 1024),
    ("C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas", 174_792_007_680, 8192, 16_777_216, 1024),
    ("C4SpmdPipelineGpt3SmallAdam8Replicas", 2_926_491_648, 512, 1_048_576, 8),
    # As Pax described it: it misspelt the field and ran a batch of 64.
    ("C4SpmdPipelineGpt3SmallAdam64Replicas", 2_923_594_752, 512, 1_048_576, 64),
    ("BertAdamL4H128", 4_919_360, 64, 64 * 512, 8),
    ("BertSpmdL4H128", 4_919_360, 32, 32 * 512, 8),
    ("BertSpmdL33H12kBiggerBatch", 100_055_210_336, 2048, 2048 * 512, 512),
    ("BertSpmdL33H12kBiggerBatch8x8x16", 100_055_210_336, 4096, 4096 * 512, 1024),
    ("BertSpmdL66H12kBiggerBatch8x8x16", 199_717_148_096, 4096, 4096 * 512, 1024),
    ("BertSpmdL66H12kBiggerBatch8x8x8", 199_717_148_096, 512, 512 * 512, 512),
    # Pax states no sizes of these: from its widths.
    ("SmallMlp", 9 * (1024**2 + 1024), 128, 128 * 1024, 8),
    ("LargeMlp", 4096**2 + 4096 + 2 * 4096 * 7168 + 7168 + 4096 + 6 * (7168**2 + 7168), 128, 128 * 1024, 8),
]

# Recipes that Pax did not have: parameters, global batch, tokens in a step.
OURS = {
    # 47 ids more than Hugging Face's count of 124,439,808 and 1,557,611,200 parameters, to a multiple of 128.
    "gpt2-124m": (124_439_808 + 47 * 768, 64, 65_536),
    "gpt2-1.5b": (1_557_611_200 + 47 * 1600, 16, 16_384),
    # As their authors count them.
    "llama-1b": (1_100_048_384, 16, 32_768),
    "llama2-7b": (6_738_415_616, 2, 8_192),
    "llama3-8b": (8_030_261_248, 1, 8_192),
    "maxtext-base": None,
    "tiny": None,
    "tiny-synthetic": None,
    "vit-synthetic": (213_066, 64, None),
    "sequence-synthetic": (927_232, 64, 64 * 16),
}

# Pax's class: learning rate; warm-up, start and end of the decay; stages, rows of a microbatch; and steps between
# evaluations, between checkpoints and between reports, and checkpoints kept. Two are as Pax meant them and misspelt
# them: the microbatches of 8 in the first pipeline, and the 20 checkpoints of the last.
GPT3 = {
    "C4SpmdGpt3AdamOrgHP": (6e-5, (265, 266, 108_600), None, (100, 100, 10, 10)),
    "C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas": (6e-5, (265, 266, 108_600), None, (25, 100, 1, 100)),
    "C4SpmdGpt3L16AdamOrgHP": (6e-5, (265, 266, 108_600), None, (25_000, 100, 10, 10)),
    "C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas": (6e-5, (265, 266, 108_600), (8, 8), (25, 50, 1, 100)),
    "C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas": (2e-5, (265, 266, 108_600), (8, 8), (16, 32, 1, 100)),
    "C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas": (2e-5, (199, 200, 81_450), (8, 8), (12, 24, 1, 100)),
    "C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas": (2e-5, (133, 134, 54_300), (4, 16), (8, 16, 1, 100)),
    "C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas": (3e-5, (100, 101, 40_725), (8, 8), (6, 12, 1, 100)),
    "C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas": (3e-5, (50, 51, 20_363), (4, 16), (3, 6, 1, 100)),
    "C4SpmdPipelineGpt3SmallAdam8Replicas": (2e-4, (265, 266, 108_600), (2, 8), (10, 200, 5, 1000)),
    "C4SpmdPipelineGpt3SmallAdam64Replicas": (2e-4, (265, 266, 108_600), (4, 16), (100, 200, 1, 1000)),
    "C4SpmdGpt3AdamDataParallel2x16x16": (6e-5, (265, 266, 108_600), None, (100, 2000, 10, 20)),
}

# Pax's class: steps of those that end.
STEPS = {
    "C4Spmd1BAdam4ReplicasLimitSteps": 15_000,
    "C4Spmd22BAdam1xv4_128LimitSteps": 300,
    "C4Spmd22BAdam4xv4_8LimitSteps": 300,
    "LmCloudSpmd2BLimitSteps": 300,
    "LmCloudSpmdAdamLimitSteps": 4000,
    "LmCloudTransformerAdamLimitSteps": 2000,
    "C4SpmdGpt3AdamDataParallel2x16x16": 100,
    "C4Spmd1BAdam4Replicas": 10_000_000,
}


# In a process of its own, where nothing checks the shapes in signatures: that is other tests' matter, and slow.
# A model is built once for all recipes that have it.
_SIZES = """
import json, sys
from fiddle import printing
from paxcli.config.index import find_recipes
from paxcli.config.load import load
from paxcli.training import experiment

devices, found, models = json.loads(sys.argv[1]), {}, {}
abstract_params = experiment.abstract_params

def build_once(task, spec):
    model = printing.as_str_flattened(config.task.model)
    if model not in models:
        models[model] = abstract_params(task, spec)
    return models[model]

experiment.abstract_params = build_once
for name, entry in find_recipes().items():
    config = load(name).config
    if entry.pax_name and config.mesh.ici_mesh_shape is None:  # Pax's pmap: all devices there are
        config.mesh.ici_mesh_shape = [devices[entry.pax_name], 1, 1]
    sizes = experiment.summarize(config)
    columns = ("parameters", "global_batch_size", "tokens_per_step", "num_devices")
    found[entry.pax_name or name] = [sizes[column] for column in columns]
print(json.dumps(found))
"""


def test_every_recipe_builds_with_the_sizes_it_had_in_pax() -> None:
    devices = json.dumps({row[0]: row[-1] for row in TABLE})
    done = subprocess.run([sys.executable, "-c", _SIZES, devices], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found = {name: tuple(sizes) for name, sizes in json.loads(done.stdout).items()}
    assert len(TABLE) == 74 and found.keys() == {*(row[0] for row in TABLE), *OURS}
    assert [(name, *found[name]) for name, *_ in TABLE] == TABLE
    assert all(found[name][:3] == expected for name, expected in OURS.items() if expected)


@pytest.mark.parametrize(
    "overlays",
    [[], *(pytest.param(o, marks=pytest.mark.slow) for o in (["synthetic-data"], ["cpu"], ["cpu", "synthetic-data"]))],
)
def test_every_recipe_fits_its_mesh_and_shrinks_to_a_cpu(overlays: list[str]) -> None:
    for name in find_recipes():
        needs_data = name.startswith("c4-") and "synthetic-data" not in overlays
        not_language = (
            name in ("vit-synthetic", "sequence-synthetic", "small-mlp", "large-mlp") and "synthetic-data" in overlays
        )
        if needs_data or not_language:
            continue
        resolved = resolve(name, overlays)
        validate(resolved.config)
        if "cpu" in overlays:
            assert num_devices(resolved.config) == 1


@pytest.mark.parametrize("pax_name", GPT3)
def test_how_the_gpt3_family_is_trained(pax_name: str) -> None:
    config = load(pax_name).config
    train, checkpoint, stack = config.task.train, config.checkpoint, config.task.model.stack
    schedule = train.learner.schedule
    pipeline = (stack.num_stages, stack.microbatch_size) if "Pipeline" in pax_name else None
    assert GPT3[pax_name] == (
        train.learner.learning_rate,
        (schedule.warmup_steps, schedule.decay_start, schedule.decay_end),
        pipeline,
        (
            train.eval_interval_steps,
            checkpoint.save_interval_steps,
            train.summary_interval_steps,
            checkpoint.save_max_to_keep,
        ),
    )


def test_those_that_end() -> None:
    assert {name: load(name).config.task.train.num_train_steps for name in STEPS} == STEPS


def test_what_the_two_families_are() -> None:
    g, m = (fdl.build(load(name).config).task for name in ("c4-1b", "c4-gpt3-175b"))
    norms = [(t.model.final_norm.keywords["epsilon"], t.train.learner.clip_gradient_norm_to_value) for t in (g, m)]
    assert norms == [(1e-6, 5.0), (1e-5, 1.0)]
    adams = [t.train.learner.optimizer for t in (g, m)]
    assert [(a.beta1, a.beta2, a.epsilon, a.clip_threshold, a.weight_decay) for a in adams] == [
        (0.9, 0.99, 1e-6, 1.0, 1e-3),
        (0.9, 0.95, 1e-8, None, 0.1),
    ]
    attentions = [t.model.stack.keywords["block"].keywords["attention"].keywords for t in (g, m)]
    terms = ("use_bias", "per_dim_scale", "logit_cap")
    assert [tuple(a.get(term) or False for term in terms) for a in attentions] == [
        (False, True, 50.0),
        (True, False, False),
    ]
