"""What is installed from a wheel or an sdist, away from the checkout: it serves, and it holds what it needs."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.serve.processes import PATIENCE_S, wait_until
from tests.unit.cases import MODEL, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built with the objects of the editable install, where there are some."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    (built,) = folder.glob("eprt-*.whl")
    return built


def test_a_wheel_has_the_packages_the_libraries_and_the_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "eprt/lib/eprt_ops.so",
        "eprt/lib/eprt_balancer.so",
        "eprt/lib/eprt_loopback.so",
        "eprt/balancer/plan.py",
        "eprt/diagnostics/__init__.py",
    }
    wanted |= {"eprt/diagnostics/page/web/index.html", "eprt/serve/frontend.py", "eprt/chat.py"}
    assert wanted <= names, wanted - names
    sources = {path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu*")}
    assert sources <= {Path(name).name for name in names if name.startswith("eprt/cuda_src/")}
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_wheel_serves(wheel, tmp_path):
    """In a fresh environment that finds the libraries of this one, and nothing of the checkout."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True, timeout=300)
    python, (site,) = fresh / "bin" / "python", (fresh / "lib").glob("python*/site-packages")
    # The libraries, but not the .pth files that lead into the checkout.
    (site / "libraries.py").write_text(
        f"import sys; sys.path += {[each for each in sys.path if 'site-packages' in each]!r}\n"
    )
    (site / "libraries.pth").write_text("import libraries\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=300)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [str(fresh / "bin" / "eprt"), "serve", "-n", "2", "--model", str(MODEL), "--port", "0"]
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path, env=variables)
    try:
        line = wait_until(lambda: server.poll() is not None or "eprt serving" in log.read_text(), "its announcement")
        assert line and server.poll() is None, log.read_text()
        url = re.findall(r"^eprt serving .* on (http://\S+),", log.read_text(), re.M)[0]
        body = {"prompt": "What is 17 + 25?", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        where = subprocess.run(
            [str(python), "-c", "import eprt; print(eprt.__file__)"], capture_output=True, text=True, cwd=tmp_path
        )
        assert where.stdout.startswith(str(fresh)), where
    finally:
        server.terminate()
        assert server.wait(200) == 0, log.read_text()


def test_an_sdist_has_all_that_a_wheel_is_built_from(tmp_path):
    code = "from scikit_build_core.build import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = [
        "git",
        "ls-files",
        "eprt",
        "balancer",
        "diagnostics",
        "csrc",
        "CMakeLists.txt",
        "pyproject.toml",
        "LICENSE",
    ]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert tracked and not set(tracked) - names
    assert max(len(name) for name in names) > 0 and not [name for name in names if name.startswith((".venv", "build/"))]


def test_what_cuda_needs_is_one_extra():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    assert "cuda13" in project["optional-dependencies"] and "'.[cuda13]'" in readme
    assert json.dumps(project["dependencies"]).count("nvidia") == 0
