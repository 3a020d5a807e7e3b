"""Simulates `gcloud` and the cloud: every worker is a directory, in which remote commands really run.

The state is a JSON file, `$FAKE_CLOUD/cloud.json`:
  resources: name → {kind, slices, states}; each `describe` returns the next of `states`, and then always the last one.
  states: `states` of the resources created next. workers: number of workers per slice.
  plays: [{match, stderr, code, times}]: a call that contains `match` fails, before or (`late`) after it has run.
`$FAKE_CLOUD/calls.jsonl` logs every call.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ["FAKE_CLOUD"])
ARGV = sys.argv[1:]
WORDS = [word for word in ARGV if not word.startswith("--")]
FLAGS = dict(word[2:].partition("=")[::2] for word in ARGV if word.startswith("--") and word != "--")


@contextlib.contextmanager
def cloud():
    """Locks and loads the state, then writes it back atomically, since a caller may be killed."""
    with open(ROOT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads((ROOT / "cloud.json").read_text())
        yield state
        (ROOT / "written.json").write_text(json.dumps(state))
        (ROOT / "written.json").replace(ROOT / "cloud.json")


def fail(message: str, code: int = 1):
    print(message, file=sys.stderr)
    sys.exit(code)


def not_found(name: str):
    fail(f"ERROR: (gcloud.{'.'.join(WORDS[:4])}) NOT_FOUND: Resource '{name}' was not found")


def play(late: bool) -> None:
    """Fails if the state's `plays` match this call."""
    with cloud() as state:
        for item in state["plays"]:
            if item["match"] in " ".join(ARGV) and bool(item.get("late")) is late and item["times"] > 0:
                item["times"] -= 1
                found = item
                break
        else:
            return
    fail(found["stderr"], found["code"])


def nodes(name: str, resource: dict) -> list[str]:
    return [f"{name}-{index}" for index in range(resource["slices"])] if resource["slices"] > 1 else [name]


def create(name: str, kind: str) -> None:
    with cloud() as state:
        if name in state["resources"]:
            fail(f"ERROR: (gcloud) ALREADY_EXISTS: {name} already exists")
        slices = int(FLAGS.get("node-count", 1))
        states = state["states"].pop(0) if state["states"] else ["ACTIVE" if kind == "queued-resources" else "READY"]
        state["resources"][name] = {"kind": kind, "slices": slices, "states": states, "type": FLAGS["accelerator-type"]}


def node_answer(state: dict, node_state: str, accelerator: str) -> dict:
    endpoints = [{"ipAddress": f"10.0.0.{index}"} for index in range(state["workers"])]
    return {"state": node_state, "health": "HEALTHY", "networkEndpoints": endpoints, "acceleratorType": accelerator}


def describe(name: str, kind: str) -> None:
    with cloud() as state:
        resource = state["resources"].get(name)
        owner = next((r for n, r in state["resources"].items() if kind == "tpu-vm" and name in nodes(n, r)), None)
        if resource and resource["kind"] == kind:
            now = resource["states"].pop(0) if len(resource["states"]) > 1 else resource["states"][0]
            if now == "GONE":
                del state["resources"][name]
                now = None
            answer = (
                node_answer(state, str(now), resource["type"])
                if kind == "tpu-vm"
                else {
                    "state": {
                        "state": now,
                        "stateInitiator": "SERVICE",
                        "failedData": {"error": {"message": "no quota"}},
                    },
                    "tpu": {
                        "nodeSpec": [
                            {"nodeId": node, "node": {"acceleratorType": resource["type"]}}
                            for node in nodes(name, resource)
                        ]
                    },
                }
            )
        elif owner:
            now, answer = "READY", node_answer(state, "READY", owner["type"])
        else:
            now = answer = None
    if now is None:
        not_found(name)
    print(json.dumps(answer))


def worker_home(node: str, index: int) -> Path:
    home = ROOT / "workers" / f"{node}-w{index}"
    if not home.exists():
        home.mkdir(parents=True)
        # A login shell starts from the system's PATH; this is how a machine gets a Python of its own.
        (home / ".profile").write_text(f'export PATH="{ROOT}/remote-bin:$PATH"\n')
    return home


def places() -> list[tuple[str, int, int, int]]:
    """Node, index, process and process count of the workers that a call is for."""
    name = next(word for word in WORDS[4:] if ":" in word).partition(":")[0] if WORDS[3] == "scp" else WORDS[4]
    with cloud() as state:
        resource = state["resources"].get(name) or not_found(name)
        count, every = state["workers"], nodes(name, resource)
    flags = FLAGS.get("node", "0"), FLAGS["worker"]
    return [
        (node, index, number * count + index, len(every) * count)
        for number, node in enumerate(every)
        for index in range(count)
        if flags[0] in ("all", str(number)) and flags[1] in ("all", str(index))
    ]


def ssh() -> int:
    code = 0
    for node, index, process, processes in places():
        home = worker_home(node, index)
        env = {
            "HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "JAX_PLATFORMS": "cpu",
            **json.loads(os.environ.get("FAKE_ENV", "{}")),
        }
        if processes > 1:  # as the platform tells each process of a job
            env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{(ROOT / 'port').read_text()}"}
            env |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(process)}
        if "command" in FLAGS:
            code = (
                subprocess.run(["sh", "-c", FLAGS["command"]], cwd=home, env=env, stdin=subprocess.DEVNULL).returncode
                or code
            )
    if code:
        print(
            f"ERROR: (gcloud.{'.'.join(WORDS[:4])}) [/usr/bin/ssh] exited with return code [{code}].", file=sys.stderr
        )
    return code


def scp() -> None:
    *sources, destination = WORDS[4:]
    for node, index, _, _ in places():
        home = worker_home(node, index)
        paths = [home / path.partition(":")[2] if ":" in path else Path(path) for path in (*sources, destination)]
        if destination.endswith("/") and ":" in destination:
            paths[-1].mkdir(parents=True, exist_ok=True)
        for source in paths[:-1]:
            shutil.copy(source, paths[-1])


def main() -> int:
    with open(ROOT / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(ARGV) + "\n")
    if WORDS[0] == "config":
        print({"compute/zone": "us-central2-b", "core/project": "my-project"}.get(WORDS[2], ""))
        return 0
    play(late=False)
    kind, verb = WORDS[2:4]
    code = 0
    if verb == "create":
        create(WORDS[4], kind)
    elif verb == "describe":
        describe(WORDS[4], kind)
    elif verb == "delete":
        with cloud() as state:
            state["resources"].pop(WORDS[4], None) or not_found(WORDS[4])
    elif verb == "list":
        with cloud() as state:
            found = [(n, r) for n, r in state["resources"].items() if r["kind"] == kind]
        print(json.dumps([{"name": f"projects/p/{n}", "state": {"state": r["states"][0]}} for n, r in found]))
    elif verb == "ssh":
        code = ssh()
    elif verb == "scp":
        scp()
    play(late=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
