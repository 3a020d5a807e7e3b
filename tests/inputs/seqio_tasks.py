"""SeqIO tasks for tests, registered on import, and generated C4 files."""

from __future__ import annotations

import difflib
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


def questions(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    """Sums of unequal length as text, such as `3 + 16 =` and its answer, ` Nineteen: 19 `."""
    words = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
    numbers = [(7 * i % 23, i) for i in range(10)]
    rows = {
        "inputs": [f"{a} + {b} =" for a, b in numbers],
        "targets": [f" {words[(a + b) % 10]}: {a + b} " for a, b in numbers],
    }
    return load("tensorflow").data.Dataset.from_tensor_slices(rows)


def likeness(targets: list[str], predictions: list[str]) -> dict[str, float]:
    """A prediction metric of texts: the share of equal characters, weighted by place."""
    shares = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(targets, predictions, strict=True)]
    return {"likeness": sum(i * share for i, share in enumerate(shares))}


def stripped(text: str, example: Any = None, is_target: bool = False) -> str:
    """A postprocessor: what the metrics compare."""
    return text.strip().lower() if is_target else text.strip()


def register() -> Any:
    """SeqIO, with the tasks `pax_toy`, `pax_toy_lm` and `pax_sums`, and the mixture `pax_mixture` of the first two."""
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
    text = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
    seqio.TaskRegistry.add(
        "pax_sums",
        source=seqio.FunctionDataSource(questions, splits=SPLITS),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": text, "targets": text},
        postprocess_fn=stripped,
        metric_fns=[likeness, likelihood],
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
