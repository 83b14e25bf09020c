"""eprt balance record, against a server that this test plays."""

import http.server
import io
import json
import threading

import numpy as np
from eprt.balancer import read_load
from eprt.balancer.__main__ import main


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Counters that grow by 1, 2, 3, ... with each look, and a routing sample, for who has the key."""

    looks = 0

    def do_GET(self):
        if self.headers["Authorization"] != "Bearer secret":
            return self.answer(b'{"error": {"message": "wrong or missing API key"}}', 401)
        if "npz" in self.path:
            buffer = io.BytesIO()
            steps = np.tile([0, 1, 2, 3, 4], (2, 1))  # two steps in each window
            chosen = np.stack((steps, steps), axis=2) % 2
            np.savez(buffer, topk_idx=chosen, source_gpu=np.zeros((2, 5), int), topk_step=steps)
            return self.answer(buffer.getvalue())
        FakeServer.looks += 1
        total = FakeServer.looks * (FakeServer.looks + 1) // 2
        layers = [{"per_expert": row, "per_expert_prefill": [0, 0]} for row in ([total, 0], [0, total])]
        counters = dict.fromkeys(("time_s", "expert_us", "expert_rows", "expert_bytes", "copied_bytes", "copied_s"), 0)
        counters |= {"server_id": "a", "num_steps": 2 * FakeServer.looks - 2}
        return self.answer(json.dumps({"schema": "eprt.load/1", "layers": layers, **counters}).encode())

    def answer(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_record_takes_differences(tmp_path, capsys):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        out = tmp_path / "recorded.npz"
        record = ["record", "--url", url, "--out", str(out), "--windows", "3", "--window-s", "0.01"]
        assert main(record) == 2
        assert "401: wrong or missing API key; --api-key gives the server's key" in capsys.readouterr().err
        assert main([*record, "--api-key", "secret"]) == 0
        server.shutdown()
    file = read_load(out)
    assert file.load_WLE[:, 0, 0].tolist() == [2, 3, 4] and file.load_WLE[:, 1, 1].tolist() == [2, 3, 4]
    assert file.trace is not None and file.trace.window[1].tolist() == [0, 0, 1, 1]
    assert file.trace.topk_idx[1][:, 0].tolist() == [1, 0, 1, 0], "every token once, in the window of its step"
    assert main(["record", "--url", url, "--out", str(out)]) == 2
    assert "is a server running there?" in capsys.readouterr().err


def test_where_the_recording_goes_is_checked_before_it(tmp_path, capsys):
    for out in (tmp_path, tmp_path / "missing" / "a.npz"):
        assert main(["record", "--url", "http://127.0.0.1:9", "--out", str(out)]) == 2
        assert f"--out {out}: must name a file in a directory that can be written" in capsys.readouterr().err
    assert main(["record", "--url", "http://127.0.0.1:9", "--out", "a.npz", "--window-s", "nan"]) == 2
    assert "--window-s nan: must be above 0" in capsys.readouterr().err
    assert main(["record", "--url", "http://127.0.0.1:9", "--out", "a.npz", "--window-s", "1e10"]) == 2
    assert "--window-s 10000000000.0: must be above 0 and below 2^30" in capsys.readouterr().err
    assert main(["record", "--url", "http://127.0.0.1:9", "--out", "a.npz", "--api-key", "a\nb"]) == 2
    assert "EPRT_API_KEY: a key must be printable ASCII" in capsys.readouterr().err
