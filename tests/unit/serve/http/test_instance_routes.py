"""What operators ask of instances."""

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.http.instance_routes import parse_join, parse_start


def test_a_role_and_perhaps_a_number_of_ranks():
    assert parse_start(b'{"role": "prefill"}') == ("prefill", None)
    assert parse_start(b'{"role": "decode", "ranks": 4}') == ("decode", 4)


@pytest.mark.parametrize(
    "body, param, words",
    [
        (b"{}", "role", "role is missing; give prefill or decode"),
        (b'{"role": "chief"}', "role", 'role="chief": must be prefill or decode'),
        (b'{"role": "decode", "ranks": 0}', "ranks", "ranks=0: must be an integer in 1..1024"),
        (b'{"role": "decode", "ranks": true}', "ranks", "ranks=true: must be"),
        (b'{"role": "decode", "rank": 1}', "rank", 'unknown field "rank"; there are role and ranks'),
        (b"[]", None, "the body must be a JSON object"),
    ],
)
def test_what_cannot_be_started_is_named(body, param, words):
    with pytest.raises(ApiError) as caught:
        parse_start(body)
    assert caught.value.status == 400 and caught.value.param == param and words in caught.value.message


@pytest.mark.parametrize(
    "body, words",
    [
        (b"{}", "is not what `eprt join` sends: "),
        (b"[", "is not what `eprt join` sends: "),
        (b'{"role": "chief", "ranks": 1, "version": "1", "host": "h"}', 'role="chief": must be prefill or decode'),
        (b'{"role": "decode", "ranks": 0, "version": "1", "host": "h"}', "ranks=0: must be in 1..1024"),
        (b'{"role": "decode", "ranks": 1, "version": "1", "host": "h", "x": 1}', "unknown field"),
    ],
)
def test_what_cannot_join_is_named(body, words):
    with pytest.raises(ApiError) as caught:
        parse_join(body)
    assert caught.value.status == 400 and words in caught.value.message
