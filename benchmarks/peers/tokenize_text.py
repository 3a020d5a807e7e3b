"""Tokenizes JSON lines into files of ids, as one library does it, and prints tokens and seconds as JSON.

    python peers/tokenize_text.py LIBRARY FILE TOKENIZER OUT

TOKENIZER is a directory of a `tokenizer.json` for transformers, whose end token follows each document. The time is
from opening FILE to the last written id; imports and reading the tokenizer are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable


def pax(path: str, tokenizer: str, out: str) -> Callable[[], int]:
    """`pax data tokenize` in one process, which encodes with all cores."""
    from etils import epath

    from paxcli.inputs.documents import Reading
    from paxcli.inputs.files import find_files
    from paxcli.inputs.tokenizers import HuggingFaceTokenizer
    from paxcli.inputs.tokenizing import Tokenizing, plan_parts

    encode = HuggingFaceTokenizer(path=f"{tokenizer}/tokenizer.json", eos_token="<|endoftext|>")
    assert encode.eos_id == 0  # which reads it
    tokenizing = Tokenizing(Reading(), lambda: encode)

    def tokenize() -> int:
        parts = plan_parts(find_files([path]), epath.Path(out))
        return sum(info.num_tokens for _, info in tokenizing.write_all(parts, num_workers=0))

    return tokenize


def hf_datasets(path: str, tokenizer: str, out: str, num_proc: int | None = None) -> Callable[[], int]:
    """`datasets.map` with the tokenizer of transformers in one process, which encodes with all cores."""
    import datasets
    import transformers

    encode = transformers.AutoTokenizer.from_pretrained(tokenizer)

    def to_ids(examples: dict) -> dict:
        ids = encode(examples["text"], return_attention_mask=False, add_special_tokens=False)["input_ids"]
        return {"ids": [[*one, encode.eos_token_id] for one in ids], "length": [len(one) + 1 for one in ids]}

    def tokenize() -> int:
        texts = datasets.load_dataset("json", data_files=path, split="train", cache_dir=out)
        rows = texts.map(to_ids, batched=True, remove_columns=["text"], num_proc=num_proc)
        return sum(rows["length"])

    return tokenize


def hf_datasets_processes(path: str, tokenizer: str, out: str) -> Callable[[], int]:
    """The same in a process for each core."""
    return hf_datasets(path, tokenizer, out, len(os.sched_getaffinity(0)))


def main() -> None:
    library, path, tokenizer, out = sys.argv[1:]
    libraries = {"pax": pax, "hf_datasets": hf_datasets, "hf_datasets_processes": hf_datasets_processes}
    tokenize = libraries[library](path, tokenizer, out)
    began = time.perf_counter()
    tokens = tokenize()
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
