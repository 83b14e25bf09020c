"""A server that a test plays over HTTP, for the daemon and its client."""

import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from eprt.balancer import Placement

RATE_E = np.array([400, 300, 100, 100, 100])  # tokens per second
FIRST = Placement(np.array([[0, 1, 2, 3, 4, -1]]), num_gpus=2)


class PlayedServer:
    """Five seconds of load pass with each GET of the load."""

    def __init__(self):
        self.server_id, self.mode, self.speeds = "one", "off", [1.0, 1.0]
        self.serving, self.migration, self.state = FIRST, None, "idle"
        self.schema = "eprt.rebalance/1"
        self.seconds, self.posted, self.key = 0, [], None
        self.polls_until_done = 0  # 0: the migration never ends by itself
        self.failure: tuple[int, str] | None = None  # status and message that answer everything
        self.raw: bytes | None = None  # the body that answers everything
        self.other: dict[str, dict[str, Any]] = {}  # fields of documents, by name, that take the place of its own
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self, None)

            def do_POST(self):
                outer.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        status, document = 200, None
        name, _, query = handler.path.rpartition("/")[2].partition("?")
        if self.failure is not None:
            status, document = self.failure[0], {"error": {"message": self.failure[1]}}
        elif self.key is not None and handler.headers.get("authorization") != f"Bearer {self.key}":
            status, document = 401, {"error": {"message": "wrong or missing API key"}}
        elif not query and self.raw is None:
            document = getattr(self, name)(body) | self.other.get(name, {})
        data = json.dumps(document).encode()
        if document is None:
            data = self.sample_file() if self.raw is None else self.raw
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def load(self, body) -> dict[str, Any]:
        self.seconds += 5
        tokens = (RATE_E * self.seconds).tolist()
        layer = {"per_expert": tokens, "per_expert_prefill": [0] * 5}
        rows = sum(tokens)
        return {
            "server_id": self.server_id,
            "time_s": self.seconds,
            "layers": [layer],
            "num_steps": 10 * self.seconds,
            "expert_us": 20.0 * rows,
            "expert_rows": rows,
            "expert_bytes": 1000,
            "copied_bytes": 0,
            "copied_s": 0.0,
        }

    def sample_file(self) -> bytes:
        """Four tokens of the only layer, of both ranks and of steps 1 to 4."""
        buffer = io.BytesIO()
        topk_LTK = np.array([[[0, 1], [1, 2], [0, 4], [3, -1]]], dtype=np.int16)
        np.savez(buffer, topk_idx=topk_LTK, source_gpu=np.array([[0, 1, 0, 1]]), topk_step=np.array([[1, 2, 3, 4]]))
        return buffer.getvalue()

    def placement(self, body) -> dict[str, Any]:
        return self.serving.to_json()

    def diagnose(self, body) -> dict[str, Any]:
        return {"rank_speeds": self.speeds}

    def rebalance(self, body) -> dict[str, Any]:
        if body is not None:
            self.posted.append(Placement.from_json(body["placement"]))
            self.posted_speeds = body.get("rank_speeds")
            self.state = "migrating"
            self.migration = {
                "job_id": len(self.posted),
                "state": "running",
                "reason": "",
                "rounds_done": 0,
                "num_rounds": 1,
                "moves": {"local": 1},
                "seconds": 0.1,
            }
        elif self.state == "migrating" and self.polls_until_done:
            self.polls_until_done -= 1
            if not self.polls_until_done:
                self.end_migration()
        return {
            "schema": self.schema,
            "server_id": self.server_id,
            "mode": self.mode,
            "state": self.state,
            "epoch": self.serving.epoch,
            "migration": self.migration,
        }

    def end_migration(self, state: str = "done", reason: str = "") -> None:
        self.state, self.migration = "idle", {**(self.migration or {}), "state": state, "reason": reason}
        if state == "done":
            self.serving = replace(self.posted[-1], epoch=self.serving.epoch + 1)

    def restart(self) -> None:
        self.server_id, self.seconds, self.serving, self.state, self.migration = "two", 0, FIRST, "idle", None
