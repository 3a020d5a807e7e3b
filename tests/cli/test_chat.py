"""`pax decode --interactive`."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys


def test_lines_are_answered_on_a_terminal(trained, pax):
    """The tokenizer of `tiny` has no chat template, so each line is a prompt of its own."""
    run_dir, *_ = trained
    options = ("--max-tokens=5", "--temperature=0")
    terminal, screen = pty.openpty()
    command = [sys.executable, "-m", "paxcli", "decode", str(run_dir), "--interactive", *options]
    done = subprocess.run(command, input=b"import\n\nx\n", stdout=screen, stderr=subprocess.PIPE, timeout=600)
    os.close(screen)
    assert done.returncode == 0, done.stderr
    shown = os.read(terminal, 10_000).decode(errors="replace").replace("\r\n", "\n")
    os.close(terminal)
    written = json.loads((run_dir / "decoded" / "20.jsonl").read_text())  # the last answer
    assert written["prompt"] == "x" and shown.endswith("\n" + written["text"] + "\n") and "import" not in shown


def test_a_line_that_is_too_long_does_not_end_a_conversation(trained):
    run_dir, *_ = trained
    command = [sys.executable, "-m", "paxcli", "decode", str(run_dir), "--interactive", "--max-tokens=5"]
    too_long = b"x" * 600 + b"\n"
    terminal, screen = pty.openpty()
    os.write(terminal, too_long + b"import\n\x04")
    done = subprocess.run(command, stdin=screen, capture_output=True, text=True, timeout=600)
    os.close(screen)
    os.close(terminal)
    assert done.returncode == 0 and done.stderr.count("has 601 tokens") == 1, done.stderr
    assert json.loads((run_dir / "decoded" / "20.jsonl").read_text())["prompt"] == "import"
    assert subprocess.run(command, input=too_long, capture_output=True, timeout=600).returncode == 2  # not a terminal


def test_an_interrupt_stops_an_answer_and_at_the_prompt_the_chat(trained):
    run_dir, *_ = trained
    endless = ("--max-tokens=8000", "--temperature=1", "--set=max_seq_len=8192", "--set=decoding.eos_ids=[]")
    command = [sys.executable, "-m", "paxcli", "decode", str(run_dir), "--interactive", *endless]
    terminal, screen = pty.openpty()
    shown = ""

    def read_until(pattern: str) -> None:
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            shown += os.read(terminal, 10_000).decode(errors="replace")
        shown = shown[found.end() :]

    with subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen) as process:
        os.close(screen)  # or the end of the process would not end its output
        for line in ("import", "def "):
            read_until("\n> ")
            os.write(terminal, f"{line}\n".encode())
            read_until(rf"{line}\r?\n(?s:.{{20}})")  # the answer has begun
            process.send_signal(signal.SIGINT)
        read_until("\n> ")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        read_until("Interrupted")
        assert process.wait(timeout=60) == 130
    os.close(terminal)


def chat(run_dir: pathlib.Path, lines: str, *sets: str) -> str:
    """The last prompt of a conversation."""
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    sets = ("train_input=ChatInput", "train_input.files=[none.jsonl]", f"train_input.chat_template={template}", *sets)
    options = [word for value in sets for word in ("--set", value)]
    command = [sys.executable, "-m", "paxcli", "decode", str(run_dir), "--interactive", "--max-tokens=2", *options]
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads((run_dir / "decoded" / "20.jsonl").read_text())["prompt"]


def test_a_new_conversation_leaves_out_the_one_before(trained):
    run_dir, *_ = trained
    assert chat(run_dir, "one\ntwo\n").startswith("one|")
    assert chat(run_dir, "one\n/new\ntwo\n") == "two|"


def test_an_empty_answer_does_not_end_a_conversation(trained):
    run_dir, *_ = trained
    any_text = json.dumps([*map(chr, range(32, 127))])  # ends the answer before its first character
    assert chat(run_dir, "one\ntwo\n", f"decoding.stop={any_text}") == "two|"
