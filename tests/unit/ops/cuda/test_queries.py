"""Joined queries and the plans of a step."""

import pytest
import torch

pytest.importorskip("triton")
from eprt.ops.cuda.queries import join, prepare


def test_queries_that_lie_together_are_not_copied():
    q = torch.randn(2, 3, 24)
    together, apart = join(q[..., :16], q[..., 16:]), join(q[..., :16], q[..., 16:].clone())
    assert together.data_ptr() == q.data_ptr() and torch.equal(together, q) and torch.equal(apart, q)
    wide = torch.randn(2, 3, 32)
    assert torch.equal(join(wide[..., :16], wide[..., 16:24]), wide[..., :24].contiguous())


def test_a_step_has_one_plan_per_kernel():
    q, plans, made = torch.randn(2, 3, 24), {}, []

    def make_plan(q_TND):
        made.append(q_TND.shape)
        return len(made)

    for kernel, plan in (("a", 1), ("a", 1), ("b", 2), ("a", 1)):
        joined, got = prepare(q[..., :16], q[..., 16:], plans, kernel, make_plan)
        assert torch.equal(joined, q) and got == plan
    assert plans == {"a": 1, "b": 2}
    assert prepare(q[..., :16], q[..., 16:], None, "a", make_plan)[1] == 3 and plans["a"] == 1
    assert made == [q.shape] * 3
