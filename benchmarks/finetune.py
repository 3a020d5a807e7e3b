"""Seconds per token of fine-tuning a Llama: pax against TRL's trainer with PEFT, as JSON.

    python benchmarks/finetune.py --peer-python PYTHON [--sizes A B] [--kinds lora full conversations] [--rounds 5]

`lora` and `full` (all parameters) train on random rows of full length. `conversations` trains all parameters on
conversations of 20 tokens to a row's length, half of them below 110: the same file, tokenizer, chat template and loss
on the assistant's turns. pax packs them into rows; TRL pads the conversations of a batch to the longest (`trl`), or
packs them as well (`trl_packed`). Tokens are counted without padding.

All are processes of their own that keep their compiled step; in each round, each takes a few steps while the others
wait: three times as many with conversations, as their batches differ. Float32, AdamW, clip 1.0, adapters of rank 8 on
every matrix of attention and feed-forward layers. On a busy machine, compare CPU seconds on one core: start it with
`taskset -c 0`. PYTHON has torch 2.13.0, transformers, peft and trl.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import tokenizers
from train_step import HUGE_PAGES, Peer, ratio

PEERS = pathlib.Path(__file__).parent / "peers"
RANK = 8
KINDS = ("lora", "full", "conversations")
SIZES = {
    "A": dict(num_layers=4, model_dims=256, hidden_dims=1024, num_heads=4, vocab_size=1024, seq_len=256, batch=8),
    "B": dict(num_layers=8, model_dims=512, hidden_dims=2048, num_heads=8, vocab_size=8192, seq_len=512, batch=4),
}


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }} <eos> {% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


def write_conversations(directory: pathlib.Path, vocab_size: int, longest: int, count: int = 4096) -> None:
    """Writes `chats.jsonl`, of a question and an answer each, and the files of a tokenizer of words."""
    words = ["<pad>", "<eos>", "<user>", "<assistant>"]
    words += [f"w{number}" for number in range(vocab_size - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    random = np.random.default_rng(0)
    with open(directory / "chats.jsonl", "w") as file:
        for length in np.clip(random.lognormal(np.log(110), 0.7, count), 20, longest).astype(int):
            text = [words[number] for number in random.integers(4, vocab_size, length - 3)]
            question = length // 3
            turns = {"user": text[:question], "assistant": text[question:]}
            messages = [{"role": role, "content": " ".join(turn)} for role, turn in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")


def pax_task(size: dict, kind: str, directory: pathlib.Path) -> dict:
    """The recipe of this size, for `peers/pax_step.py`."""
    sets = [f"task.model.{name}={size[name]}" for name in ("num_layers", "model_dims", "hidden_dims", "num_heads")]
    sets += [f"task.model.vocab_size={size['vocab_size']}", f"task.model.max_seq_len={size['seq_len']}"]
    sets += ["task.model.fprop_dtype=float32", f"task.train.global_batch_size={size['batch']}", "num_kv_heads=null"]
    sets += [f"stack.unroll={size['num_layers']}", "stack.remat_policy=everything"]
    if kind == "conversations":
        sets += [f"tokenizer=hf:{directory}", f"train_input.files=[{directory}/chats.jsonl]"]
        return {"recipe": "llama-1b", "overlays": ["sft"], "sets": sets}
    sets += [f"lora.rank={RANK}"] if kind == "lora" else []
    return {"recipe": "llama-1b", "overlays": ["lora"] if kind == "lora" else [], "sets": sets}


def trl_tasks(size: dict, kind: str, directory: pathlib.Path) -> dict[str, dict]:
    """Name of the peer → its task, for `peers/trl_sft.py`."""
    task = size | {"rank": RANK if kind == "lora" else None}
    if kind != "conversations":
        return {"trl": task}
    task |= {"files": str(directory / "chats.jsonl"), "tokenizer": str(directory)}
    return {"trl": task | {"packing": False}, "trl_packed": task | {"packing": True}}


def run(size: dict, kind: str, rounds: int, steps: int, peer_python: str) -> dict:
    """All peers at one size."""
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        if kind == "conversations":
            write_conversations(directory, size["vocab_size"], size["seq_len"])
        ours = Peer("pax", [sys.executable, str(PEERS / "pax_step.py")], pax_task(size, kind, directory), HUGE_PAGES)
        theirs = [
            Peer(name, [peer_python, str(PEERS / "trl_sft.py")], task, {})
            for name, task in trl_tasks(size, kind, directory).items()
        ]
    steps *= 3 if kind == "conversations" else 1
    for _ in range(rounds):
        for peer in (ours, *theirs):
            time.sleep(1)  # threads of the previous process spin for a while
            peer.steps(steps)
    closed = {peer.name: peer.close() for peer in (ours, *theirs)}
    facts = {"size": size, "rounds": rounds, "steps_a_round": steps, "cores": len(os.sched_getaffinity(0))}
    for peer in theirs:
        more_tokens = closed["pax"]["tokens_per_step"] / closed[peer.name]["tokens_per_step"]
        facts[f"pax_over_{peer.name}"] = more_tokens * ratio(peer.seconds, ours.seconds, steps)
        facts[f"pax_over_{peer.name}_cpu"] = more_tokens * ratio(peer.cpu_seconds, ours.cpu_seconds, steps)
    return facts | closed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer-python", required=True)
    options = parser.parse_args()
    results = {
        f"{size}/{kind}": run(SIZES[size], kind, options.rounds, options.steps, options.peer_python)
        for size in options.sizes
        for kind in options.kinds
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
