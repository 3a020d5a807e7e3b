"""SeqIO tasks for tests, registered on import, and generated C4 files."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import random
from typing import Any

from paxcli.inputs.seqio_library import load

NUM_EXAMPLES = 101
SPLITS = ("train", "validation")


def examples(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    """Pairs of 1 to 5 and 2 to 8 ids; all examples are different."""
    tf = load("tensorflow")

    def example(i: Any) -> dict[str, Any]:
        inputs = 3 + tf.range(1 + i % 5) * 7 + i % 3
        targets = tf.concat([[3 + i, 104 + i % 20], 3 + tf.range(i % 7), [1]], axis=0)
        return {"inputs": tf.cast(inputs, tf.int32), "targets": tf.cast(targets, tf.int32)}

    return tf.data.Dataset.range(NUM_EXAMPLES).map(tf.autograph.experimental.do_not_convert(example))


def overlap(targets: list[str], predictions: list[str]) -> dict[str, float]:
    """Prediction metrics whose value depends on which prediction meets which target."""
    pairs = list(zip(targets, predictions, strict=True))
    same = [len({*t.split()} & {*p.split()}) / len(t.split()) for t, p in pairs]
    return {"overlap": 100 * sum(same) / len(same), "weighted": sum(i * value for i, value in enumerate(same))}


def likelihood(targets: list[str], scores: list[float]) -> dict[str, float]:
    """Score metrics whose value depends on which score meets which target."""
    assert len(targets) == len(scores)
    return {"mean_score": sum(scores) / len(scores), "by_place": sum(i * s for i, s in enumerate(scores)) / 1e4}


def register() -> Any:
    """SeqIO, with the tasks `pax_toy` and `pax_toy_lm`, and the mixture `pax_mixture` of them."""
    seqio = load("seqio")
    if "pax_toy" in seqio.TaskRegistry.names():
        return seqio

    class Numbers(seqio.PassThroughVocabulary):
        def decode(self, ids: Any) -> str:
            return " ".join(str(int(i)) for i in ids if i)

    feature = seqio.Feature(Numbers(size=300, eos_id=1), add_eos=False)
    for name, features in {"pax_toy": ("inputs", "targets"), "pax_toy_lm": ("targets",)}.items():
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(examples, splits=SPLITS),
            preprocessors=[],
            output_features={feature_name: feature for feature_name in features},
            metric_fns=[overlap, likelihood] if "inputs" in features else [],
            shuffle_buffer_size=1000,
        )
    seqio.MixtureRegistry.add("pax_mixture", [("pax_toy_lm", 1.0)])
    return seqio


def write_c4(directory: pathlib.Path, tokenized: bool = False) -> list[str]:
    """Makes `c4-train…` and `c4-validation…` of 200 documents as C4 has them, and `c4.model`.

    Returns:
      The documents of the validation split.
    """
    import sentencepiece

    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choice(letters) for _ in range(chance.randrange(2, 9))) for _ in range(200)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(20, 120))) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=260,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (directory / "c4.model").write_bytes(model.getvalue())
    encode = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode
    for split, files in {"validation": [texts[:40]], "train": [texts[40 + i :: 4] for i in range(4)]}.items():
        for i, lines in enumerate(files):
            with gzip.open(directory / f"c4-{split}.{i:05d}-of-{len(files):05d}.json.gz", "wt") as file:
                for text in lines:
                    content = {"ids": encode(text)} if tokenized else {"text": text}
                    record = {**content, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.com"}
                    file.write(json.dumps(record) + "\n")
    return texts[:40]
