"""Saves as many bytes as asked for with `torch.distributed.checkpoint`, restores them, and prints seconds as JSON.

python peers/torch_checkpoint.py DIRECTORY BYTES
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

PARTS = 24


def main() -> None:
    directory, size = sys.argv[1], int(sys.argv[2])
    state = {str(number): torch.randn(size // PARTS // 4) for number in range(PARTS)}
    os.sync()
    began = time.perf_counter()
    dcp.save(state, checkpoint_id=directory)
    os.sync()
    saved = time.perf_counter()
    dcp.load(state, checkpoint_id=directory)
    print(json.dumps({"save_seconds": saved - began, "restore_seconds": time.perf_counter() - saved}))


if __name__ == "__main__":
    main()
