"""The overlays `sft`, `lora` and `dpo` on a recipe, one run after the other."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import paxcli as pax
from paxcli.checkpoint.reading import named_leaves
from paxcli.training.progress import Reporter

SMALL = {"num_layers": 1, "model_dims": 32, "hidden_dims": 64, "max_seq_len": 64, "num_train_steps": 2}
SMALL |= {"global_batch_size": 2, "summary_interval_steps": 1, "learning_rate": 0.01, "schedule": "Constant"}
SMALL |= {"eval_inputs": ["SyntheticInput"]}


def params(run: pax.Run) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in named_leaves(run.params()).items()}


@pytest.mark.slow
def test_sft_then_dpo_with_and_without_adapters(tmp_path: pathlib.Path) -> None:
    chats = [{"prompt": f"{i} + 1?", "response": f"{i + 1}"} for i in range(4)]
    pairs = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(4)]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(name: str, overlays: list[str], data: str, start: str | None = None) -> pax.Run:
        more = {"train_input.files": [str(tmp_path / data)], "train_input.format": "jsonl"}
        recipe = pax.load("tiny", overlays=overlays, set={**SMALL, **more})
        init_from = None if start is None else str(tmp_path / start)
        return pax.train(recipe, tmp_path / name, init_from=init_from, progress=Reporter())

    sft = train("sft", ["sft"], "chats")
    dpo = train("dpo", ["dpo"], "pairs", "sft")
    lines = [json.loads(line) for line in (tmp_path / "dpo/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5) and losses[1] != losses[0]
    assert "log_pplx" in lines[-1]  # the evaluation is on tokens
    start, found = params(sft), params(dpo)
    for name, x in start.items():
        np.testing.assert_array_equal(found[f"reference.{name}"], x)  # frozen, and that of the other run
        assert not np.array_equal(found[name], x), name

    adapted = train("lora", ["dpo", "lora"], "pairs", "sft")
    found = params(adapted)
    assert not any("reference" in name for name in found) and any(name.endswith("w_in_lora_b") for name in found)
    for name, x in start.items():
        np.testing.assert_array_equal(found[name], x)
