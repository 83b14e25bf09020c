"""Which key opens what."""

from eprt.serve.keys import NO_KEYS, ServerKeys


def test_keys_of_clients_and_of_administrators():
    keys = ServerKeys(("a", "b"), ("root",))
    assert all(keys.opens_v1(key) for key in ("a", "b", "root")) and not any(map(keys.opens_v1, ("", "c", "ab", "é")))
    assert keys.opens_admin("root") and not any(map(keys.opens_admin, ("", "a", "roo", "root ")))


def test_without_client_keys_everybody_is_a_client_and_nobody_an_administrator():
    assert NO_KEYS.opens_v1("") and NO_KEYS.opens_v1("x") and not NO_KEYS.opens_admin("")
    assert ServerKeys(admins=("root",)).opens_v1("")


def test_keys_may_have_a_tier_but_not_those_of_administrators():
    keys = ServerKeys(("a", "b", "root"), ("root",), {"a": "max", "root": "base"})
    assert [keys.tier_name(key) for key in ("a", "b", "root", "")] == ["max", None, None, None]
    assert keys.opens_v1("a")
