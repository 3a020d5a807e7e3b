"""Tokens/s from opening JSON lines to the last batch of an epoch: pax, grain, tf.data, HF datasets, as JSON.

    python benchmarks/input_peers.py [--tokens 20000000] [--rounds 3] [--peer-python PYTHON]

Each library reads the same file in a process of its own, alternating (`peers/input_rows.py`), with all cores that it
cares to use. PYTHON has datasets and torch 2.13.0; without it, HF datasets is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np

SCRIPT = pathlib.Path(__file__).parent / "peers" / "input_rows.py"


def write_lines(path: pathlib.Path, tokens: int) -> None:
    """Documents of words, of some 500 bytes."""
    generator = np.random.default_rng(0)
    words = np.array(["a", "line", "of", "text", "with", "some", "words", "in", "it", "training", "language", "models"])
    with path.open("w") as file:
        written = 0
        while written < tokens:
            text = " ".join(generator.choice(words, generator.integers(10, 190)))
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text) + 1


def read(python: str, library: str, path: pathlib.Path) -> float:
    """Tokens/s of one pass.

    Raises:
      CalledProcessError: The process failed; its error is on stderr.
    """
    command = [python, str(SCRIPT), library, str(path)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)
    return answer["tokens"] / answer["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    pythons = dict.fromkeys(("pax", "grain", "tf_data"), sys.executable)
    if options.peer_python:
        pythons["hf_datasets"] = options.peer_python
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "text.jsonl")
        write_lines(path, options.tokens)
        rounds = [{name: read(python, name, path) for name, python in pythons.items()} for _ in range(options.rounds)]
    result = {"tokens": options.tokens, "rounds": options.rounds, "cores": len(os.sched_getaffinity(0))}
    result["tokens_per_second"] = {name: statistics.median(one[name] for one in rounds) for name in pythons}
    for name in list(pythons)[1:]:
        result[f"pax_over_{name}"] = statistics.median(one["pax"] / one[name] for one in rounds)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
