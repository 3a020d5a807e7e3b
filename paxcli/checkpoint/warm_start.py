"""Initializes parameters from another run's checkpoint: `--from RUN_DIR[@STEP]`."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from paxcli.checkpoint.array_differences import ArrayDifferences, Arrays, compare_arrays
from paxcli.checkpoint.manager import CheckpointStore, find_step, format_steps
from paxcli.checkpoint.reading import listing, read_arrays, read_manifest
from paxcli.errors import ConfigError, DataError, did_you_mean
from paxcli.mesh.startup import agree
from paxcli.mesh.weights import match_parameters, parameter_names

What = Literal["params", "all"]


class Rules(NamedTuple):
    r"""The array of a checkpoint that initializes each parameter: the one of the same name, but for these rules.

    Names are paths, such as `stack/layers/attention/query`.

    Args:
      rename: Regular expression of a parameter's full name → its name in the checkpoint, where `\1` is a group.
      ignore: Regular expressions, found anywhere in a name, of the parameters that keep their random values.
    """

    rename: Mapping[str, str]
    ignore: Sequence[str]

    def find_sources(self, names: list[str]) -> dict[str, str]:
        """The name of each parameter that is not ignored → its name in the checkpoint.

        Raises:
          ConfigError: A rule is malformed or matches no parameter, or two of them rename the same one.
        """
        ignored = [match_parameters("init_ignore", regex, names) for regex in self.ignore]
        sources = {name: name for name, *matches in zip(names, *ignored, strict=True) if not any(matches)}
        renamed: dict[str, str] = {}
        for regex, template in self.rename.items():
            for match in filter(None, match_parameters("init_rename (full names)", regex, [*sources], re.fullmatch)):
                if (other := renamed.setdefault(match.string, regex)) != regex:
                    problem = f"Two rules of `init_rename` match `{match.string}`: {other!r} and {regex!r}."
                    raise ConfigError(problem, "Change one of the expressions.")
                try:
                    sources[match.string] = match.expand(template)
                except re.error as error:
                    hint = r"Write the name in the checkpoint, with `\1` for the first group of the expression."
                    raise ConfigError(f"init_rename: {template!r} is not a template: {error}.", hint) from None
        return sources


NO_RULES = Rules({}, ())


class Report(NamedTuple):
    """The result of a warm start. Names are paths, such as `stack/layers/attention/query`.

    Args:
      source: The checkpoint's directory.
      arrays: Its arrays compared with the model's. Those that match were loaded.
      cast: Of these, the ones that have another dtype in the checkpoint.
      ignored: Those that `Rules.ignore` left at their random values.
    """

    source: epath.Path
    arrays: ArrayDifferences
    cast: list[str]
    ignored: list[str]

    def text(self) -> str:
        """A summary of several lines, without empty categories."""
        arrays = self.arrays
        categories = {
            "Cast to the dtype of the model": listing(self.cast, 20),
            "Not in the checkpoint, randomly initialized": listing(arrays.missing, 20),
            "Another shape or dtype, randomly initialized": "; ".join(arrays.mismatched.values()),
            "Matched by `init_ignore`, randomly initialized": listing(self.ignored, 20),
            "In the checkpoint, not used": listing(arrays.unexpected),
        }
        lines = [f"{category}: {text}." for category, text in categories.items() if text]
        return "\n".join([f"Loaded {len(arrays.matched)} arrays from {self.source}.", *lines])


def parse_source(text: str) -> tuple[str, int | None]:
    """Parses `RUN_DIR` or `RUN_DIR@STEP` into a directory and a step, if any."""
    run_dir, at, step = text.rpartition("@")
    if not at or "/" in step:
        return text, None
    if not step.isdigit():
        raise ConfigError(f"`{text}`: `{step}` is not a step.", "Write --from RUN_DIR or --from RUN_DIR@STEP.")
    return run_dir, int(step)


def load_params(
    run_dir: str, step: int | None, state: Any, what: What = "params", rules: Rules = NO_RULES, dry_run: bool = False
) -> tuple[Any, Report]:
    """Replaces the arrays of `state` by those of the same name and shape in another run's checkpoint.

    Args:
      run_dir: The other run's directory.
      step: One of its steps; None: the latest.
      state: The initialized parameters ("params") or the full train state ("all"), sharded over the mesh.
      what: Which part of the checkpoint `state` is.
      rules: Other names of parameters in the checkpoint, and parameters that are not loaded.
      dry_run: Whether to check all but the arrays' values, and return `state`, which may be abstract.

    Returns:
      A tree like `state`, and a report. Floats of another dtype are cast. Arrays are never reshaped; those that do not
      match are left unchanged.

    Raises:
      DataError: The checkpoint does not exist or is damaged, or none of its arrays match.
      ConfigError: A rule is malformed or has no effect, or names an array that the checkpoint lacks or that differs.
    """
    store = CheckpointStore(epath.Path(run_dir) / "checkpoints")
    step_dir = store.directory / str(agree(find_step(run_dir, step)))  # the run may save another one meanwhile
    prefix = "params." if what == "params" else ""
    leaves = dict(zip(parameter_names(state), jax.tree.leaves(state), strict=True))
    sources = rules.find_sources([*leaves])
    try:
        manifest = read_manifest(step_dir)
        names = {x.removeprefix(prefix).replace(".", "/"): x for x in manifest.arrays if x.startswith(prefix)}
        report = _compare(step_dir, leaves, {path: manifest.arrays[x] for path, x in names.items()}, sources)
        matched = {path: names[sources[path]] for path in report.arrays.matched}
        wanted = {name: manifest.arrays[name].abstract(leaves[path].sharding) for path, name in matched.items()}
        loaded = read_arrays(step_dir, manifest, wanted) if wanted and not dry_run else {}
    except DataError as error:
        others = format_steps([other for other in store.steps() if str(other) != step_dir.name])
        hint = f"Its other checkpoints: {others}. `--step`, or `--from {run_dir}@STEP`, names one."
        raise DataError(f"The checkpoint {step_dir} is unusable: {error.message}.", hint) from error
    if not matched:
        raise DataError(f"No array in {step_dir} matches this model.", report.text())
    uses = Counter(matched.values())
    for path, name in matched.items() if loaded else ():
        x, leaf = loaded[name], leaves[path]
        if x.dtype != leaf.dtype or uses[name] > 1:  # one buffer cannot be donated twice
            x = jax.device_put(x.astype(leaf.dtype), leaf.sharding, may_alias=False)
        leaves[path] = x
    return jax.tree.unflatten(jax.tree.structure(state), leaves.values()), report


def _compare(step_dir: epath.Path, leaves: Arrays, saved: Arrays, sources: Mapping[str, str]) -> Report:
    """Compares the model's arrays with those of a checkpoint that `sources` names for them.

    Raises:
      ConfigError: The array that a rule names does not exist, or has another shape.
    """
    found = {path: saved[source] for path, source in sources.items() if source in saved}
    arrays = compare_arrays({path: leaves[path] for path in sources}, found, casts=True)
    arrays = dataclasses.replace(arrays, unexpected=sorted(saved.keys() - sources.values()))
    for path in (*arrays.missing, *arrays.mismatched):
        if (source := sources[path]) != path:
            near = did_you_mean(source, saved) or f"It has {listing([*saved])}."
            problem = arrays.mismatched.get(path, f"{step_dir} lacks it. {near}").removesuffix(".")
            hint = "Correct the rule, or add the parameter to `init_ignore`."
            raise ConfigError(f"init_rename: `{path}` cannot be loaded from `{source}`: {problem}.", hint)
    cast = [path for path in arrays.matched if found[path].dtype != str(leaves[path].dtype)]
    return Report(step_dir, arrays, cast, [path for path in leaves if path not in sources])
