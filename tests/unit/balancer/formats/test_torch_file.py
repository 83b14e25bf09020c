"""torch.save files, read without torch."""

import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from eprt.balancer import read_load
from eprt.balancer.formats import torch_file

from tests.unit.balancer.formats.cases import stat_dump


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
    rng = np.random.default_rng(0)
    path = tmp_path / "dump.pt"
    stat_dump(path, rng.integers(0, 50, size=(4, 3, 64)).astype(np.int32))
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


def test_torch_files_are_read_without_torch(tmp_path):
    stat_dump(tmp_path / "a.pt", np.ones((1, 1, 2), dtype=np.int32))
    code = (
        "import sys; sys.modules['torch'] = None; from eprt.balancer import read_load; "
        f"assert read_load({str(tmp_path / 'a.pt')!r}).load_WLE.tolist() == [[[1.0, 1.0]]]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
