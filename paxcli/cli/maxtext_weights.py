"""The weights of `pax maxtext-convert`: from a MaxText checkpoint to a run, and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import fiddle as fdl

    from paxcli.convert.maxtext.checkpoint_layout import MaxTextLayout
    from paxcli.convert.maxtext.conversion import Converted


def stay_on_host() -> None:
    """Keeps JAX off accelerators: a checkpoint passes through host memory alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def layout_of(block: str, num_layers: int, **more: Any) -> MaxTextLayout:
    """How MaxText lays out a model of this block, by what the conversion of recipes knows of it."""
    from paxcli.convert.maxtext.checkpoint_layout import MaxTextLayout
    from paxcli.convert.maxtext.model_map import SCALES_QUERIES
    from paxcli.convert.maxtext.sizes import LOCAL_LAYERS

    in_one = len(LOCAL_LAYERS.get(block, (False,)))
    return MaxTextLayout(block, num_layers, block in SCALES_QUERIES, in_one, **more)


def import_weights(converted: Converted, checkpoint: str, out: str, result: dict[str, Any], dry_run: bool) -> str:
    """Begins the run `out`; adds what was done to `result`, and says it."""
    from paxcli.convert.maxtext.building import config_with
    from paxcli.convert.maxtext.weights import import_maxtext

    config = config_with(converted.values)
    layout = layout_of(
        converted.settings["decoder_block"],
        config.task.model.num_layers,
        scan_axis=converted.settings["param_scan_axis"],
    )
    done = import_maxtext(config, result["recipe"], checkpoint, out, layout, dry_run)
    what = f"the training state of step {done.step}" if done.with_optimizer else "parameters alone, for step 0"
    result |= {"run_dir": out, "step": done.step, "with_optimizer": done.with_optimizer, "checkpoint": done.source}
    text = f"{'Would carry' if dry_run else 'Carried'} {done.parameters:,} parameters over from {done.source}: {what}."
    if done.with_optimizer:
        text += " Its data starts from the beginning."
    return f"{text}\nTo train it: pax train {out}/recipe.yaml --run-dir {out}"


def export_weights(
    config: fdl.Config, run_dir: Path | None, recipe: str, checkpoint: str, result: dict[str, Any], dry_run: bool
) -> None:
    """Writes the run's newest checkpoint into `checkpoint`, and adds the key that loads it to the command's."""
    from paxcli.convert.maxtext.weights import export_maxtext
    from paxcli.training.run_dir import default_run_dir

    layout = layout_of(
        result["keys"]["decoder_block"],
        config.task.model.num_layers,
        scanned=result["keys"]["scan_layers"] == "true",
    )
    done = export_maxtext(config, run_dir or default_run_dir(recipe), checkpoint, layout, dry_run)
    result["keys"]["load_full_state_path" if done.with_optimizer else "load_parameters_path"] = done.target
    result |= {"step": done.step, "with_optimizer": done.with_optimizer, "checkpoint": done.target}
    what = f"the training state of step {done.step}" if done.with_optimizer else "the parameters"
    print(f"{'Would write' if dry_run else 'Wrote'} {what} to {done.target}", file=sys.stderr)
