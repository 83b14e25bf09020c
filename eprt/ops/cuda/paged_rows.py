"""Rows copied between tensors, chosen by number on both sides: one program per row and piece of it.

Rows travel as whole words of the largest size in which both tensors can be read. Knows nothing of what rows mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def row_offset(row, PAGE_ROWS, page_stride, row_stride):
    """Of row page * PAGE_ROWS + place."""
    return row // PAGE_ROWS * page_stride + row % PAGE_ROWS * row_stride


@triton.jit
def _copy_rows(
    to,
    to_row,
    source,
    source_row,
    to_page_rows,
    to_page,
    to_place,
    source_page_rows,
    source_page,
    source_place,
    size,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    written, read = i, i
    if to_row is not None:
        written = tl.load(to_row + i)
    if source_row is not None:
        read = tl.load(source_row + i)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) & (written >= 0) & (read >= 0)
    value = tl.load(source + row_offset(read, source_page_rows, source_page, source_place) + at, mask=inside)
    tl.store(to + row_offset(written, to_page_rows, to_page, to_place) + at, value, mask=inside)


def copy_rows(to: Tensor, to_row_Y: Tensor | None, source: Tensor, source_row_Y: Tensor | None) -> None:
    """As eprt.ops.paged_rows.copy_rows. Rows are not checked."""
    row_Y = to_row_Y if to_row_Y is not None else source_row_Y
    if to.dtype != source.dtype or to.shape[-1] != source.shape[-1] or row_Y is None:
        raise ValueError(
            f"rows of {source.shape[-1]} values of {source.dtype} do not become rows of {to.shape[-1]} values of "
            f"{to.dtype}" + ("" if row_Y is not None else ", and none are named")
        )
    if not len(row_Y) or not to.shape[-1]:
        return
    to_PSX, source_PSX = _in_words(_paged(to), _paged(source))
    size = to_PSX.shape[2]
    block = min(_BLOCK, triton.next_power_of_2(size))
    _copy_rows[(len(row_Y), triton.cdiv(size, block))](
        to_PSX,
        None if to_row_Y is None else to_row_Y.contiguous(),
        source_PSX,
        None if source_row_Y is None else source_row_Y.contiguous(),
        to_PSX.shape[1],
        *to_PSX.stride()[:2],
        source_PSX.shape[1],
        *source_PSX.stride()[:2],
        size,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )


def _paged(rows: Tensor) -> Tensor:
    paged = rows.unsqueeze(1) if rows.dim() == 2 else rows
    if paged.dim() != 3 or paged.stride(2) != 1:
        raise ValueError(f"rows of shape {tuple(rows.shape)}: must be [X, D] or [P, S, D], each row contiguous")
    return paged


def _in_words(*tensors: Tensor) -> list[Tensor]:
    """Views of the same memory in the largest words that divide every row and every distance between rows."""
    size = tensors[0].element_size()
    for word in _WORDS:
        step = word.itemsize // size
        if word.itemsize >= size and all(_divides(step, word.itemsize, tensor) for tensor in tensors):
            return [tensor.view(word) for tensor in tensors]
    return list(tensors)


def _divides(step: int, num_bytes: int, rows_PSX: Tensor) -> bool:
    lengths = rows_PSX.shape[2], *rows_PSX.stride()[:2], rows_PSX.storage_offset()
    return all(length % step == 0 for length in lengths) and rows_PSX.data_ptr() % num_bytes == 0
