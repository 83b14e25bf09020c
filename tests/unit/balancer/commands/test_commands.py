"""eprt balance plan, replay, compare, show and record, as a user types them."""

import http.server
import io
import json
import re
import sys
import threading

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace, plan, read_load, traffic_per_token
from eprt.balancer.__main__ import main
from eprt.balancer.formats import eprt_npz
from eprt.balancer.loads import LoadFile
from eprt.balancer.replay import PolicyInput, TraceSplit, policies, replay
from eprt.balancer.synthetic import drifting_load, topic_trace

CLUSTER = ["--num-gpus", "8", "--num-nodes", "4", "--num-slots", "40"]
OPTIONS = {"num_gpus": 8, "num_nodes": 4, "num_slots": 40, "num_groups": 1}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """32 experts, 6 windows that drift, tokens of a few topics."""
    trace = topic_trace(2, 1024, 32, 4, strength=1.5, num_topics=8, skew=0.3)
    load_WLE = np.floor(drifting_load(6, 2, 32, sigma=0.4, step=0.15) * trace.load(32))
    path = tmp_path_factory.mktemp("balance") / "load.npz"
    eprt_npz.write(path, load_WLE, trace)
    return path


def test_plan_uses_the_traces_when_told(load, tmp_path, capsys):
    out = tmp_path / "placement.json"
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out)]) == 0
    assert "also holds routing traces; --coactivation uses them" in capsys.readouterr().err
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out), "--coactivation"]) == 0
    assert "node_copies per token" in capsys.readouterr().err
    file = read_load(load)
    want = plan(file.total(), coactivation=file.trace, balance_allowance=0.02, num_gpus=8, num_nodes=4, num_slots=40)
    np.testing.assert_array_equal(Placement.load(out).physical_to_logical_map, want.physical_to_logical_map)


def test_plan_from_the_placement_in_force(load, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main(["plan", "--load", str(load), "--last", "1", *CLUSTER, "--out", str(first)]) == 0
    more = ["--current", str(first), "--max-moves-per-layer", "2", "--out", str(second)]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", "--num-nodes", "4", *more]) == 0
    moved = (Placement.load(first).physical_to_logical_map != Placement.load(second).physical_to_logical_map).sum(1)
    assert (moved <= 2).all() and moved.any()
    assert "slots move" in capsys.readouterr().err
    # SGLang's file says nothing of the cluster: the arguments do.
    slots = json.loads(first.read_text())["physical_to_logical_map"]
    (tmp_path / "sglang.json").write_text(json.dumps({"physical_to_logical_map": slots}))
    more = ["--current", str(tmp_path / "sglang.json"), "--out", str(second)]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", "--num-nodes", "4", *more]) == 0


def test_constraints_reach_the_plan(load, tmp_path):
    out = tmp_path / "placement.json"
    more = ["--masked-gpus", "2", "--num-slots", "80", "--min-gpus-per-expert", "2"]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", *more, "--out", str(out)]) == 0
    placement = Placement.load(out)
    slots_LGS = placement.physical_to_logical_map.reshape(2, 8, 10)
    assert (slots_LGS[:, 2] == -1).all() and placement.replica_count.min() >= 2
    more = ["--usable-slots", "4", "--gpu-speed", "1,1,1,1,2,2,2,2"]
    assert main(["plan", "--load", str(load), *CLUSTER, *more, "--out", str(out)]) == 0
    slots_LGS = Placement.load(out).physical_to_logical_map.reshape(2, 8, 5)
    assert ((slots_LGS == -1).sum(2) == 1).all(), "a slot of each GPU stays empty"
    load_LG = Placement.load(out).gpu_load(read_load(load).total())
    assert (load_LG[:, 4:].mean(1) > 1.4 * load_LG[:, :4].mean(1)).all(), "twice as fast, more to do"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", *CLUSTER, "--current", "OTHER"],
            "current has 16 experts, load and arguments say 32: it belongs to another",
        ),
        (["plan", *CLUSTER, "--masked-gpus", "8"], "--masked-gpus: 8 is not one of the GPUs 0 to 7"),
        (
            ["plan", "--num-gpus", "8", "--num-slots", "41"],
            "num_slots=41 is not a multiple of num_gpus=8; use 40 or 48",
        ),
        (["plan", "--num-gpus", "8", "--num-slots", "0"], "num_slots=0: must be an integer of at least 1"),
        (["plan", *CLUSTER, "--coactivation", "OTHER"], "none of the fields 'load'"),
        (["plan", *CLUSTER, "--max-moves-per-layer", "3"], "they need current"),
        (["replay", *CLUSTER, "--policies", "magic"], "unknown policy 'magic'; known are none, eplb"),
        (["replay", "--num-gpus", "8", "--policies", "affinity"], "affinity needs routing traces"),
        (["replay", *CLUSTER, "--windows", "1"], "1 window: a replay needs two or more"),
        (["replay", *CLUSTER, "--masked-gpus", "7"], "gpu_speed: EPLB does not support it; leave out the policy eplb"),
        (["compare", *CLUSTER, "OTHER"], "other: load_LE has shape .*a placement of another model"),
    ],
)
def test_what_cannot_be_is_said(load, tmp_path, capsys, words, message):
    other = tmp_path / "other.json"
    plan(np.ones((2, 16)), num_gpus=8, num_nodes=4, num_slots=40).save(other)
    words = [str(other) if word == "OTHER" else word for word in words]
    assert main([words[0], "--load", str(load), *words[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_replay_counts_what_it_says(load):
    """Recounted by hand: the policy's own plans, judged on the windows after them."""
    file = read_load(load)
    tokens = TraceSplit(file.trace)
    start = Placement.contiguous(2, 32, 8, 40, 4)
    goal = {"balance_allowance": 0.1}
    made = {}
    for name, policy in policies(OPTIONS, goal, 4, ["none", "eplb", "incremental", "affinity"]).items():
        made[name] = replay(name, policy, file.load_WLE, start, tokens=tokens)
        assert made[name].load_VLG.shape == (5, 2, 8) and len(made[name].moves_V) == 5
        np.testing.assert_allclose(made[name].load_VLG.sum(2), file.load_WLE[1:].sum(2))
    assert made["none"].moves_V.tolist() == [0] * 5
    first = plan(file.load_WLE[0], **OPTIONS)
    second = plan(file.load_WLE[1], current=first, max_moves_per_layer=4, **OPTIONS)
    np.testing.assert_array_equal(made["incremental"].load_VLG[1], second.gpu_load(file.load_WLE[2]))
    assert (made["incremental"].moves_V[1:] <= 8).all() and made["eplb"].later_moves > 3 * made[
        "incremental"
    ].later_moves
    assert made["affinity"].traffic_V.mean() < 0.9 * made["eplb"].traffic_V.mean()
    for one in made.values():
        np.testing.assert_allclose(one.max_over_mean_V[0], (one.load_VLG[0].max(1) / one.load_VLG[0].mean(1)).mean())
        assert (one.balance_ratio_V <= 1).all()
    rare = replay("rare", policies(OPTIONS, None, 4, ["eplb"])["eplb"], file.load_WLE, start, every=2, memory=2)
    assert rare.moves_V[1] == rare.moves_V[3] == 0 < rare.moves_V[2]


def test_a_replay_looks_at_no_token_before_its_window(load):
    """A trace that knows its windows: planned with what came before, counted on the window judged."""
    file = read_load(load)
    rng = np.random.default_rng(0)
    window_LT = [rng.integers(-1, 6, len(topk_TK)) for topk_TK in file.trace.topk_idx]
    window_LT[0][window_LT[0] == 4] = window_LT[1][window_LT[1] == 4] = 3  # nothing was sampled in window 4
    trace = RoutingTrace(file.trace.topk_idx, None, tuple(window_LT))
    start, looked = Placement.contiguous(2, 32, 8, 40, 4), []

    def affinity(seen: PolicyInput) -> Placement:
        looked.append(seen.trace)
        return plan(seen.load_LE, coactivation=seen.trace, **OPTIONS)

    made = replay("affinity", affinity, file.load_WLE, start, tokens=TraceSplit(trace))
    for window, seen in enumerate(looked, start=1):
        placement = plan(file.load_WLE[window - 1], coactivation=seen, **OPTIONS)
        for layer in range(2):
            np.testing.assert_array_equal(
                seen.topk_idx[layer], trace.topk_idx[layer][window_LT[layer] < window], f"window {window}"
            )
        if window != 4:
            want = traffic_per_token(placement, trace.in_windows(window, window + 1)).mean()
            assert made.traffic_V[window - 1] == pytest.approx(want)
    assert made.traffic_V[3] == made.traffic_V[2]
    grouped = LoadFile(file.load_WLE, trace).regrouped(3).trace
    np.testing.assert_array_equal(grouped.window[0], np.where(window_LT[0] < 0, -1, window_LT[0] // 2))


def test_replay_prints_tables_json_and_plots(load, tmp_path, capsys):
    assert main(["replay", "--load", str(load), *CLUSTER, "--windows", "4", "--plots", str(tmp_path / "plots")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["policy", "max/mean"] and lines[0].split()[-1] == "traffic/token"
    assert [line.split()[0] for line in lines[1:]] == ["none", "eplb", "incremental", "affinity"]
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"balance.png", "gpu_load.png", "moves.png", "traffic.png", "report.html"}
    html = (tmp_path / "plots" / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 4 and "max/mean" in html
    assert main(["replay", "--load", str(load), *CLUSTER, "--policies", "none,aligned", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in document["policies"]] == ["none", "aligned"]
    assert len(document["policies"][0]["max_over_mean"]) == 5


def test_compare_prints_tables_and_plots(load, tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out)]) == 0
    assert main(["compare", "--load", str(load), *CLUSTER, str(out), "--plots", str(tmp_path / "plots")]) == 0
    rows = {line[:14].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert {"none", "eplb", "plan", "affinity 0", "affinity 0.2", "mine"} <= set(rows)
    assert rows["mine"][1:] == rows["plan"][1:]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "balance.png", "gpu_load.png", "trade.png", "report.html",
    }  # fmt: skip


def test_compare_loses_no_placement_of_an_equal_name(load, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "plan.json", tmp_path / "mine.json", tmp_path / "other" / "mine.json"]
    for seed, path in enumerate(paths):
        assert main(["plan", "--load", str(load), *CLUSTER, "--seed", str(seed), "--out", str(path)]) == 0
    assert main(["compare", "--load", str(load), *CLUSTER, *map(str, paths), "--json"]) == 0
    names = [row["plan"] for row in json.loads(capsys.readouterr().out)["plans"]]
    assert {"plan", str(paths[0]), "mine", str(paths[2])} <= set(names) and len(names) == len(set(names))


def test_show(load, tmp_path, capsys):
    assert main(["show", str(load)]) == 0
    text = capsys.readouterr().out
    assert "6 windows, 2 layers, 32 experts" in text and "1024 tokens of each layer" in text and "drift" in text
    out = tmp_path / "p.json"
    plan(np.ones((20, 32)), num_gpus=8, num_slots=40).save(out)
    assert main(["show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "40 slots on 8 GPUs" in text and "8 more layers; --all-layers shows them" in text
    assert main(["show", str(out), "--plots", str(tmp_path)]) == 2
    assert "--plots needs a placement and --load" in capsys.readouterr().err


def test_plots_without_matplotlib_say_what_to_install(load, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["replay", "--load", str(load), *CLUSTER, "--plots", str(tmp_path / "plots")]) == 2
    assert "pip install 'eprt[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists(), "it says so before the work, not after it"


# ---- record ----------------------------------------------------------------------------------------------------------


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
