"""Load files of eprt and of other programs, written here as those programs write them, whole and damaged."""

import json
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from eprt.balancer import RoutingTrace, read_load
from eprt.balancer.__main__ import main
from eprt.balancer.formats import eprt_npz, torch_file
from safetensors.numpy import save_file

RNG = np.random.default_rng(0)


# ---- eprt ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(5, 5), (5, 3)], ids=["equal layers", "unequal layers"])
def test_npz_with_traces(tmp_path, tokens):
    topk = tuple(RNG.integers(-1, 4, size=(count, 2)).astype(np.int32) for count in tokens)
    sources = tuple(RNG.integers(3, size=count).astype(np.int32) for count in tokens)
    load_WLE = RNG.integers(0, 9, size=(3, 2, 4))
    windows = tuple(RNG.integers(-1, 3, size=count).astype(np.int32) for count in tokens)
    eprt_npz.write(tmp_path / "a.npz", load_WLE, RoutingTrace(topk, sources, windows))
    file = read_load(tmp_path / "a.npz")
    np.testing.assert_array_equal(file.load_WLE, load_WLE)
    trace = file.trace
    for got, want in zip((*trace.topk_idx, *trace.source_gpu, *trace.window), (*topk, *sources, *windows), strict=True):
        np.testing.assert_array_equal(got, want)
    eprt_npz.write(tmp_path / "a.npz", load_WLE[:2], RoutingTrace(topk, sources, (windows[0] * 0, windows[1] * 0 + 2)))
    with pytest.raises(ValueError, match=r"topk_window\[layer 1, token 0\] = 2: load has windows 0 to 1"):
        read_load(tmp_path / "a.npz")


def test_windows_regroup_without_losing_load(tmp_path):
    load_WLE = np.arange(7.0 * 2 * 3).reshape(7, 2, 3)
    np.savez(tmp_path / "a.npz", load=load_WLE)
    file = read_load(tmp_path / "a.npz")
    assert [file.regrouped(n).num_windows for n in (1, 3, 7)] == [1, 3, 7]
    np.testing.assert_array_equal(file.regrouped(3).load_WLE.sum(0), load_WLE.sum(0))
    np.testing.assert_array_equal(file.regrouped(7).load_WLE, load_WLE)
    with pytest.raises(ValueError, match="num_windows=8: the file holds 7 windows"):
        file.regrouped(8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"topk_idx": np.zeros((1, 2, 2))}, "no array 'load'; it has topk_idx"),
        ({"load": np.ones((2, 3)), "topk_idx": np.zeros((1, 4, 2), int)}, "topk_idx has 1 layers, load has 2"),
        ({"load": np.ones((1, 3)), "topk_idx": np.full((1, 4, 2), 3)}, r"token 0, choice 0\] = 3: .*experts 0 to 2"),
        (
            {"load": np.ones((1, 3)), "topk_idx_0": np.zeros((4, 2), int), "topk_idx_2": np.zeros((4, 2), int)},
            "topk_idx_1",
        ),
        ({"load": np.array([[[1.0, np.nan]]])}, r"window 0: load\[layer 0, expert 1\] = nan"),
        ({"load": np.ones((1, 3)), "topk_idx": np.full((1, 1, 1), 2**32)}, r"topk_idx\[layer 0, .*= 4294967296"),
        (
            {"load": np.ones((1, 3)), "topk_idx": np.zeros((1, 1, 1), int), "source_gpu": np.full((1, 1), np.nan)},
            r"source_gpu\[layer 0\] has dtype float64; it must hold integers",
        ),
    ],
)
def test_a_bad_npz_is_named(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=f"a.npz: .*{message}"):
        read_load(tmp_path / "a.npz")


def server(load, server_id="a"):
    return {"schema": "eprt.load/1", "server_id": server_id, "layers": [{"per_expert": row} for row in load]}


def test_answers_of_a_server_are_differences(tmp_path):
    answers = [
        server([[1, 2]]),
        server([[4, 2]]),
        server([[4, 2]]),
        server([[0, 5]], "restarted"),
        server([[1, 5]], "restarted"),
    ]
    path = tmp_path / "load.jsonl"
    path.write_text("\n".join(map(json.dumps, answers)) + "\n\n")
    assert read_load(path).load_WLE[:, 0].tolist() == [[1, 2], [3, 0], [0, 5], [1, 0]]


def test_json_lines_are_windows(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text('{"load": [[1, 2]]}\n{"load": [[3, 4]]}\n')
    assert read_load(path).load_WLE.tolist() == [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"load": [[1]]}\n{"load": [[1', r"line 2: not JSON: .*\(the file is cut off\?\)"),
        ('{"load": [[1]]}\n{"load": [[1, 2]]}', r"line 2: load has shape \(1, 2\), the first line has \(1, 1\)"),
        ('{"load": [[1]]}\n{"log_stats": [[1]]}', "lines of different kinds: JSON, RTP-LLM"),
        ('{"load": [[1]]}\n{"load": [[-1]]}', r"window 1: load\[layer 0, expert 0\] = -1.0"),
        (json.dumps(server([[2]])) + "\n" + json.dumps(server([[1]])), "line 2: the counters are smaller"),
        ('{"weight": [[1]]}', "none of the fields 'load', .*it has 'weight'"),
        ('{"load": [["a"]]}', "equally long lists of numbers"),
        ('{"schema": "eprt.load/1", "layers": [3]}', "'layers' must be a list of objects with a field 'per_expert'"),
        ("", "not JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_load(tmp_path / "a.jsonl")


# ---- SGLang ----------------------------------------------------------------------------------------------------------


def stat_dump(path, count):
    torch.save({"rank": 0, "logical_count": torch.tensor(count), "average_utilization_rate_over_window": None}, path)


def test_sglang_stat(tmp_path):
    count = RNG.integers(0, 50, size=(4, 3, 8)).astype(np.int32)
    count[1] = 0
    stat_dump(tmp_path / "expert_distribution_recorder_1.0.pt", count)
    file = read_load(tmp_path / "expert_distribution_recorder_1.0.pt")
    np.testing.assert_array_equal(file.load_WLE, count[[0, 2, 3]])
    assert file.format == "SGLang" and file.trace is None and "1 of 4 steps are empty" in file.notes[0]
    stat_dump(tmp_path / "expert_distribution_recorder_2.0.pt", count)
    assert read_load(tmp_path).num_windows == 6, "a directory is read in order"


def test_sglang_json_counts(tmp_path):
    count = RNG.integers(0, 50, size=(2, 3, 8))
    (tmp_path / "decode.json").write_text(json.dumps({"logical_count": count.tolist()}))
    np.testing.assert_array_equal(read_load(tmp_path / "decode.json").load_WLE, count)


def records(rank, physical_LTK, forward_pass_id=0, counts=True):
    slots = torch.tensor(physical_LTK)
    record = {"forward_pass_id": forward_pass_id, "rank": rank, "gatherer_key": "primary", "topk_ids_of_layer": slots}
    if not counts:
        return record
    count = torch.stack([torch.bincount(layer[layer >= 0], minlength=6) for layer in slots])
    return {**record, "global_physical_count": count}


SLOTS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]


PASS = {"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(2, 6, dtype=torch.int32)}


@pytest.mark.parametrize("counts", [True, False], ids=["with counts", "ids only"])
def test_sglang_per_token(tmp_path, counts):
    physical = [RNG.integers(-1, 6, size=(2, 7, 3)) for _ in range(4)]
    for rank in (0, 1):
        dump = {
            "records": [records(rank, physical[2 * at + rank], at, counts) for at in (0, 1)],
            "last_physical_to_logical_map": torch.tensor(SLOTS),
        }
        torch.save(dump, tmp_path / f"expert_distribution_recorder_1.5_{rank}.pt")
    file = read_load(tmp_path)
    assert file.load_WLE.shape == (2, 2, 4) and file.trace.num_tokens == 28
    for layer in range(2):
        logical = np.array([*SLOTS[layer], -1])
        want = [logical[one[layer]] for one in (physical[0], physical[2], physical[1], physical[3])]
        np.testing.assert_array_equal(file.trace.topk_idx[layer], np.concatenate(want))
        assert file.trace.source_gpu[layer].tolist() == [0] * 14 + [1] * 14
        assert file.trace.window[layer].tolist() == ([0] * 7 + [1] * 7) * 2
    np.testing.assert_array_equal(file.load_WLE.sum(0), file.trace.load(4))


def test_sglang_per_pass_sums_ranks(tmp_path):
    for rank in (0, 1):
        count = torch.full((2, 6), rank + 1)
        record = {"forward_pass_id": 7, "rank": rank, "gatherer_key": "primary", "global_physical_count": count}
        dump = {"records": [record], "last_physical_to_logical_map": torch.tensor(SLOTS)}
        torch.save(dump, tmp_path / f"expert_distribution_recorder_1.5_{rank}.pt")
    assert read_load(tmp_path).load_WLE.tolist() == [[[6.0, 6.0, 3.0, 3.0], [3.0, 3.0, 3.0, 9.0]]]


def test_tensors_of_every_kind_are_read_as_torch_does(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "part": base[1:3, 2:],
        "bf16": torch.tensor([1.5, -2.0, 3e10], dtype=torch.bfloat16),
        "half": torch.tensor([0.5], dtype=torch.float16),
        "bool": torch.tensor([True, False]),
        "byte": torch.tensor([255], dtype=torch.uint8),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
        "parameterless": {"list": [1, "two", None, 3.5], "tuple": (True,)},
    }
    torch.save(tensors, tmp_path / "a.pt")
    read = torch_file.load(tmp_path / "a.pt")
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            want = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
            np.testing.assert_array_equal(read[name], want)
            assert read[name].shape == want.shape
        else:
            assert read[name] == tensor


def test_a_pickle_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",))

    torch.save({"logical_count": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil.pt: it asks for __builtin__.exec, .*refused"):
        read_load(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_damaged_sglang_dumps_are_named(tmp_path):
    path = tmp_path / "dump.pt"
    stat_dump(path, RNG.integers(0, 50, size=(4, 3, 64)).astype(np.int32))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"dump.pt: not a complete torch.save file: .*cut off"):
        read_load(path)
    with zipfile.ZipFile(tmp_path / "short.pt", "w") as short, zipfile.ZipFile(tmp_path / "x.zip", "w") as _:
        path.write_bytes(whole)
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                data = archive.read(name)
                short.writestr(name, data[:-4] if "/data/" in name else data)
    with pytest.raises(ValueError, match=r"storage 0 has 3068 bytes, 768 x 4 are needed"):
        read_load(tmp_path / "short.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"logical_count": 1}))
    with pytest.raises(ValueError, match=r"torch before 1\.6"):
        read_load(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("dump", "message"),
    [
        ({"state": 1}, "neither 'logical_count' nor 'records'; it has 'state'"),
        ({"logical_count": torch.zeros(2, 3, 4)}, "logical_count is 0 everywhere"),
        ({"logical_count": torch.zeros(4)}, r"logical_count has shape \(4,\)"),
        ({"logical_count": torch.tensor([[[1, -1]]])}, r"load\[layer 0, expert 1\] = -1"),
        ({"records": []}, "no field 'last_physical_to_logical_map'"),
        ({"records": [], "last_physical_to_logical_map": torch.tensor(SLOTS)}, "records is empty"),
        (
            {
                "records": [records(0, [[[6, 0]], [[0, 1]]], counts=False)],
                "last_physical_to_logical_map": torch.tensor(SLOTS),
            },
            r"records\[0\].topk_ids_of_layer\[layer 0, token 0, choice 0\] = 6: must be a slot from 0 to 5",
        ),
        (
            {"records": [records(0, [[[0, 1]]])], "last_physical_to_logical_map": torch.tensor(SLOTS)},
            r"topk_ids_of_layer has shape \(1, 1, 2\) and dtype int64; it must be integers \[2, tokens, choices\]",
        ),
        ({"records": 3, "last_physical_to_logical_map": torch.tensor(SLOTS)}, "'records' must be a list with a dict"),
        *(
            ({"records": [{**PASS, **change}], "last_physical_to_logical_map": torch.tensor(SLOTS)}, message)
            for change, message in [
                ({"rank": None}, r"records\[0\].rank = None: must be an integer"),
                ({"forward_pass_id": -1}, r"records\[0\].forward_pass_id = -1: must be an integer of at least 0"),
                ({"topk_ids_of_layer": torch.zeros(2, 3, 2)}, "topk_ids_of_layer .*dtype float32; it must be integers"),
                ({"global_physical_count": "many"}, "global_physical_count .*must be numbers of shape"),
            ]
        ),
    ],
)
def test_bad_sglang_dumps_are_named(tmp_path, dump, message):
    path = tmp_path / "dump.pt"
    torch.save(dump, path)
    with pytest.raises(ValueError, match=message):
        read_load(path)


# ---- RTP-LLM, TensorRT-LLM -------------------------------------------------------------------------------------------


def test_rtp_llm(tmp_path):
    path = tmp_path / "gpu_load_20260101-000000.json"
    lines = [
        {
            "update_cnt": n,
            "gpu_loads": [[1, 2]],
            "log_stats": [[n, 2, 3]],
            "layer": 0,
            "plan": [[0, 1, 2, 0]],
            "phy2log": [],
        }
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = read_load(path)
    assert file.format == "RTP-LLM" and file.load_WLE.tolist() == [[[1, 2, 3]], [[2, 2, 3]]]
    assert "moving sums" in file.notes[0]


def tensorrt_dump(folder, ranks=2, num_experts=4, iterations=(5, 6), layers=(3, 4)):
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": num_experts, "num_experts_per_token": 2}))
    counts = RNG.integers(0, 9, size=(ranks, len(iterations), len(layers), num_experts))
    for rank in range(ranks):
        tensors = {
            f"{i}_{layer}": counts[rank, a, b] for a, i in enumerate(iterations) for b, layer in enumerate(layers)
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return counts


def test_tensorrt_llm(tmp_path):
    counts = tensorrt_dump(tmp_path / "expert_statistic")
    for path in (tmp_path / "expert_statistic", tmp_path / "expert_statistic" / "meta_info.json"):
        file = read_load(path)
        np.testing.assert_array_equal(file.load_WLE, counts.sum(0))
        assert file.format == "TensorRT-LLM" and "layers with experts, 3 to 4" in file.notes[0]


def test_damaged_tensorrt_llm_dumps_are_named(tmp_path):
    tensorrt_dump(tmp_path)
    whole = (tmp_path / "rank1.safetensors").read_bytes()
    (tmp_path / "rank1.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"rank1.safetensors: cut off: \w+ ends at byte \d+, the file has \d+"):
        read_load(tmp_path)
    for rank in (0, 1):
        save_file({"5_3": np.ones(4), "5_4": np.ones(4), "6_3": np.ones(4)}, tmp_path / f"rank{rank}.safetensors")
    with pytest.raises(ValueError, match="no counts of iteration 6, layer 4"):
        read_load(tmp_path)
    save_file({"5_3": np.ones(5)}, tmp_path / "rank0.safetensors")
    with pytest.raises(ValueError, match=r"rank0.safetensors: 5_3 has shape \(5,\); meta_info.json says 4 experts"):
        read_load(tmp_path)
    save_file({"layer": np.ones(4)}, tmp_path / "rank0.safetensors")
    with pytest.raises(ValueError, match="a tensor named 'layer'; expected ITERATION_LAYER"):
        read_load(tmp_path)
    (tmp_path / "meta_info.json").write_text("{}")
    with pytest.raises(ValueError, match="no JSON object with a field 'num_experts'"):
        read_load(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "meta_info.json").write_text('{"num_experts": 4}')
    with pytest.raises(ValueError, match="no rank"):
        read_load(tmp_path)


def test_damaged_bytes_are_refused_or_read_and_nothing_else(tmp_path):
    """One byte changed or the end cut off, anywhere: never another error than the one that names the file."""
    np.savez_compressed(tmp_path / "a.npz", load=RNG.integers(0, 9, (2, 3, 4)), topk_idx=RNG.integers(0, 4, (3, 5, 2)))
    stat_dump(tmp_path / "b.pt", RNG.integers(0, 50, size=(2, 3, 4)).astype(np.int32))
    torch.save({"records": [PASS], "last_physical_to_logical_map": torch.tensor(SLOTS)}, tmp_path / "c.pt")
    (tmp_path / "d.jsonl").write_text(json.dumps(server([[1, 2]])) + "\n" + json.dumps(server([[3, 4]])))
    tensorrt_dump(tmp_path / "e")
    refused = 0
    for path in (*tmp_path.glob("*.*"), tmp_path / "e" / "rank0.safetensors", tmp_path / "e" / "meta_info.json"):
        whole = path.read_bytes()
        for _ in range(60):
            at = int(RNG.integers(len(whole)))
            path.write_bytes(whole[:at] + (b"" if RNG.random() < 0.3 else bytes([RNG.integers(256)]) + whole[at + 1 :]))
            try:
                read_load(path)
            except ValueError as error:
                assert str(error).startswith(str(path))
                refused += 1
        path.write_bytes(whole)
        read_load(path)
    assert refused > 100


def test_what_cannot_be_read_says_what_can(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(ValueError, match=r"cannot read .csv; use .npz, .pt, .json"):
        read_load(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"neither meta_info.json \(TensorRT-LLM\) nor \*.pt \(SGLang\)"):
        read_load(tmp_path)
    assert main(["show", str(tmp_path / "missing.npz")]) == 2
    assert "missing.npz: no such file" in capsys.readouterr().err


def test_torch_files_are_read_without_torch(tmp_path):
    stat_dump(tmp_path / "a.pt", np.ones((1, 1, 2), dtype=np.int32))
    code = (
        "import sys; sys.modules['torch'] = None; from eprt.balancer import read_load; "
        f"assert read_load({str(tmp_path / 'a.pt')!r}).load_WLE.tolist() == [[[1.0, 1.0]]]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
