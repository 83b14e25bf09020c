import eprt
from eprt.native_library import find_native_library


def test_a_library_is_found_in_whichever_root_of_the_package_it_lies(tmp_path, monkeypatch):
    built = tmp_path / "second" / "lib" / "one.so"
    built.parent.mkdir(parents=True)
    built.touch()
    monkeypatch.setattr(eprt, "__path__", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert find_native_library("one.so") == built
    assert find_native_library("two.so") is None
