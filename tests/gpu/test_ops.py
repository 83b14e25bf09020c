"""The GPU operators on a GPU, against the slow oracles."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.one_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

if torch.cuda.is_available():
    from tests.gpu import (
        cases_bf16_experts,
        cases_cluster_product,
        cases_expert_ops,
        cases_grouped,
        cases_int8,
        cases_latent_attention,
        cases_many_rows,
        cases_mla,
        cases_mla_fp8,
        cases_ops,
        cases_products,
        cases_prompt_attention,
        cases_token_mask,
    )
    from tests.gpu.draw import Draw

    ALL = (*cases_ops.ALL, *cases_products.ALL, *cases_latent_attention.ALL, *cases_expert_ops.ALL)
    ALL = (*ALL, *cases_grouped.ALL, *cases_int8.ALL, *cases_many_rows.ALL)
    ALL = (*ALL, *cases_cluster_product.ALL, *cases_mla.ALL, *cases_mla_fp8.ALL)
    ALL = (*ALL, *cases_bf16_experts.ALL, *cases_prompt_attention.ALL, *cases_token_mask.ALL)
else:
    ALL, Draw = (), None


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
def test_operator_matches_the_oracle(case):
    assert Draw is not None
    case(Draw("cuda"))
