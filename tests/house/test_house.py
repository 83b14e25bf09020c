"""The house: version, packaging, what make does, and links in the documentation."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import eprt

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_said_once_and_twice_the_same():
    assert PROJECT["project"]["version"] == eprt.__version__
    assert f"## {eprt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nvshmem_is_never_a_hard_dependency():
    """Its two wheels own the same files; torch's CUDA builds already bring the one they need."""
    assert not [r for r in PROJECT["project"]["dependencies"] if "nvshmem" in r or "nvidia" in r]
    extras = PROJECT["project"]["optional-dependencies"]
    assert any(r.startswith("nvidia-nvshmem-cu12") for r in extras["cuda12"])
    assert not any("cu12" in r for r in extras["cuda13"])
    assert {"build", "mpi", "test", "lint", "cuda12", "cuda13"} <= set(extras)


def test_everything_public_can_be_imported():
    for name in eprt.__all__:
        assert getattr(eprt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'EPMoe'"):
        eprt.EPMoe  # noqa: B018


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_what_the_documentation_tells_to_type():
    listed = {line.split()[0] for line in make("help").splitlines()}
    assert {"serve", "test", "bench", "lint", "fmt", "demo-model", "clean"} <= listed
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        told = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
        assert told <= listed, f"{path.name}: {told - listed}"


def test_make_serve_installs_no_test_tools():
    assert "test tools" not in make("-n", "serve", "VENV=no-such-venv")
    assert "test tools" in make("-n", "test", "VENV=no-such-venv")


def test_links_inside_the_documentation_lead_somewhere():
    dead = []
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                dead.append(f"{path.name}: {target}")
    assert not dead, dead


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_to_a_heading_lead_to_one():
    links, dead = 0, []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]*)\)", path.read_text()):
            page = path.parent / target if target else path
            links += 1
            if anchor not in anchors(page.read_text()):
                dead.append(f"{path.name}: {target}#{anchor}")
    assert links > 10 and not dead, dead


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [
        path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index and path.name != "index.md"
    ]
    assert not missing, f"list {', '.join(missing)} in docs/index.md"
