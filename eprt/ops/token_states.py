"""What DeepSeek-V4's compressors keep of each token, and where: its values, and its gates plus those of its place.

T tokens, C values and as many gates of each, R places of a window, P pages of S slots. Knows nothing of who owns pages.
"""

from torch import Tensor

from eprt.ops.paged_rows import copy_rows


def token_states(product_TC: Tensor, place_RC: Tensor, position_T: Tensor) -> Tensor:
    """fp32 [T, 2, C]: values and gates, in the product's memory. product_TC: values, then gates, [T, 2 * C]."""
    states_T2C = product_TC.unflatten(1, (2, product_TC.shape[1] // 2))
    states_T2C[:, 1] += place_RC[position_T % len(place_RC)]
    return states_T2C


def insert_states(slots_PSX: Tensor, slot_T: Tensor, product_TC: Tensor, place_RC: Tensor, position_T: Tensor) -> None:
    """Puts token_states into slots, page * S + place; of negative slots nowhere. The product may change.

    slots_PSX: fp32, pages may lie apart; X = 2 * C, values and gates of a slot side by side.
    """
    copy_rows(slots_PSX, slot_T, token_states(product_TC, place_RC, position_T).flatten(1), None)
