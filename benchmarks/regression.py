"""Compares the training step of this tree with another tree's, interleaved in one run, as JSON; exits with 1 if slower.

    python benchmarks/regression.py OTHER_TREE [--size A] [--rounds 7] [--limit 0.15]

On a CPU, CPU seconds on one core are compared (`taskset -c 0`, the default); use `--limit 0.05 --wall` on a GPU. Each
tree runs its own `benchmarks/peers/pax_step.py` with its own `paxcli`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile

from train_step import HERE, HUGE_PAGES, SIZES, Peer, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="A")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--wall", action="store_true", help="compare seconds, not CPU seconds")
    options = parser.parse_args()
    peers = []
    with tempfile.TemporaryDirectory() as directory:
        for name, tree in (("other", options.other.resolve()), ("this", HERE.parent)):
            path = pathlib.Path(directory, name)
            path.mkdir()
            (path / "pax_recipes").symlink_to(tree / "recipes")
            env = {
                **HUGE_PAGES,
                "PYTHONPATH": os.pathsep.join((str(tree), str(path), os.environ.get("PYTHONPATH", ""))),
            }
            script = str(tree / "benchmarks" / "peers" / "pax_step.py")
            peers.append(Peer(name, [sys.executable, script], SIZES[options.size], env))
        for _ in range(options.rounds):
            for peer in peers:
                peer.steps(options.steps)
        kind = "seconds" if options.wall else "cpu_seconds"
        found = ratio(*(getattr(peer, kind) for peer in reversed(peers)), options.steps)
        result = {"this_over_other": found, "limit": 1 + options.limit, "slower": found > 1 + options.limit}
        print(json.dumps(result | {peer.name: peer.close() for peer in peers}))
    sys.exit(result["slower"])


if __name__ == "__main__":
    main()
