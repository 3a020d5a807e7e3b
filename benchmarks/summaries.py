"""The cost of `summary_verbosity`: a step of `tiny` at each level against one without summaries, as JSON.

    python benchmarks/summaries.py [--steps 20] [--levels 1 2 3]

The steps of all levels are interleaved in one process, so that other load slows each of them; `overhead` is the median
over the rounds of how much longer a level's step took than the step without summaries of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time


def measure(levels: list[int], rounds: int) -> dict[int, list[float]]:
    """Level → seconds of each of its steps, level 0 included."""
    from paxcli.jax_defaults import configure_jax

    configure_jax()
    import jax

    from paxcli.config.resolve import resolve
    from paxcli.mesh.sharding import put_batch
    from paxcli.training.instrument import step_of
    from paxcli.training.session import build_session

    seconds: dict[int, list[float]] = {level: [] for level in (0, *levels)}
    steps, states = {}, {}
    for level in seconds:
        config = resolve("tiny-synthetic", (), [f"summary_verbosity={level}"]).config
        with build_session(config).active() as session:
            source = session.experiment.train_input
            steps[level] = step_of(session).lower(session.abstract, session.batch).compile()
            states[level] = session.new_state()
    with build_session(config).active() as session:
        batch = put_batch(source.get_next(), session.mesh)
        for number in range(rounds + 1):
            for level in seconds:
                began = time.perf_counter()
                states[level], metrics = steps[level](states[level], batch)
                jax.block_until_ready((states[level], metrics))
                if number:  # the first round warms up
                    seconds[level].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    seconds = measure(arguments.levels, arguments.steps)
    print(
        json.dumps(
            {
                "step_seconds": {level: statistics.median(times) for level, times in seconds.items()},
                "overhead": {
                    level: statistics.median(one / none - 1 for one, none in zip(times, seconds[0], strict=True))
                    for level, times in seconds.items()
                    if level
                },
            }
        )
    )


if __name__ == "__main__":
    main()
