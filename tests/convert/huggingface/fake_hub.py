"""A hub on this machine: what `huggingface_hub` asks of huggingface.co, for the models in a directory."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

COMMIT = "0" * 39 + "1"


@contextlib.contextmanager
def fake_hub(models: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Serves `models/ORGANIZATION/NAME/…`; a model with a file `gated` is, and files of one with `cut` come in half.

    One with `moved` has a branch `main` until its `config.json` is sent.

    Yields its address, and the names of the files that it sent.
    """
    sent: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            parts = parts[1:] if parts[0] == "datasets" else parts
            if parts[:2] in (["api", "models"], ["api", "datasets"]):
                self._describe(models.joinpath(*parts[2:4]), parts[4:])
            else:
                self._send_file(models.joinpath(*parts[:2], *parts[4:]))

        do_HEAD = do_GET

        def _describe(self, folder: pathlib.Path, what: list[str]) -> None:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if not files:
                return self._fail(404, "RepoNotFound")
            if (folder / "gated").exists():
                return self._fail(403, "GatedRepo")
            has_main = not (folder / "moved").exists() or "config.json" not in sent
            if what[:1] == ["revision"] and what[1] not in (COMMIT, *["main"] * has_main):
                return self._fail(404, "RevisionNotFound")
            if what[:1] == ["tree"]:
                below = files if "recursive=True" in self.path else folder.joinpath(*what[2:]).glob("*")
                return self._send(json.dumps([self._entry(path, folder) for path in below]))
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
            found = {"id": "/".join(folder.parts[-2:]), "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(found))

        def _entry(self, path: pathlib.Path, folder: pathlib.Path) -> dict[str, object]:
            name = str(path.relative_to(folder))
            kind = "directory" if path.is_dir() else "file"
            return {"type": kind, "path": name, "size": path.stat().st_size, "oid": name}

        def _send_file(self, path: pathlib.Path) -> None:
            if not path.is_file():
                return self._fail(404, "EntryNotFound")
            content = path.read_bytes()
            if self.command == "GET":
                sent.append(path.name)
            self._send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def _send(self, content: str | bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
            body = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                is_cut = (models / self.path.strip("/").partition("/resolve/")[0] / "cut").exists()
                self.wfile.write(body[: len(body) // 2] if is_cut else body)

        def _fail(self, status: int, code: str) -> None:
            self._send("{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
