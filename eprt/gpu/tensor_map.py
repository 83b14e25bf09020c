"""Tensor maps: descriptions of a matrix from which the GPU's bulk copies take boxes (cuTensorMapEncodeTiled)."""

import ctypes
import functools

from eprt.gpu.driver import CudaError, api

BOX_BYTES = 128  # of each row of a box: the width of the swizzle
# CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
_UINT8, _NO_INTERLEAVE, _NO_SWIZZLE, _SWIZZLE_128B, _FILL_WITH_ZEROS = 0, 0, 0, 3, 0
_PROMOTE_TO_128B, _PROMOTE_TO_256B = 2, 3
_ALIGNMENT = 64

TensorMap = ctypes.c_uint64 * 16


@functools.lru_cache(maxsize=4096)
def byte_matrix(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:  # type: ignore[valid-type]
    """The map of a contiguous matrix of [rows, columns] bytes, in boxes of box_rows x 128, swizzled as tensor cores
    read them. What a box holds beyond the matrix is 0.

    address, columns: multiples of 16.
    box_rows: at most 256.
    """
    return _tensor_map(address, (columns, rows), (columns,), (BOX_BYTES, box_rows))


@functools.lru_cache(maxsize=4096)
def byte_tiles(address: int, rows: int, columns: int, box_rows: int, box_tiles: int) -> TensorMap:  # type: ignore[valid-type]
    """The same matrix as [columns / 128, rows, 128]: a box holds box_tiles tiles of box_rows x 128.

    columns: a multiple of 128.
    """
    sizes, box = (BOX_BYTES, rows, columns // BOX_BYTES), (BOX_BYTES, box_rows, box_tiles)
    return _tensor_map(address, sizes, (columns, BOX_BYTES), box, _PROMOTE_TO_128B)


@functools.lru_cache(maxsize=4096)
def strided_tiles(address: int, rows: int, row_bytes: int, tiles: int, box_rows: int, box_tiles: int) -> TensorMap:  # type: ignore[valid-type]
    """Rows that are row_bytes apart, of each the first `tiles` tiles of 128 bytes; otherwise as byte_tiles.

    row_bytes: a multiple of 16.
    """
    return _tensor_map(address, (BOX_BYTES, rows, tiles), (row_bytes, BOX_BYTES), (BOX_BYTES, box_rows, box_tiles))


@functools.lru_cache(maxsize=4096)
def partial_tiles(address: int, rows: int, row_bytes: int, tiles: int, box_rows: int, box_tiles: int) -> TensorMap:  # type: ignore[valid-type]
    """As strided_tiles, for boxes of which only the first so many rows are wanted: [tiles, rows, box_rows, 128].

    The box that begins at (tile, row + known, box_rows - known, 0) holds rows row .. row + known - 1, then zeros: both
    dimensions of rows add up, and the inner one ends after box_rows.
    """
    sizes, box = (BOX_BYTES, box_rows, rows + 1, tiles), (BOX_BYTES, box_rows, 1, box_tiles)
    return _tensor_map(address - box_rows * row_bytes, sizes, (row_bytes, row_bytes, BOX_BYTES), box)


@functools.lru_cache(maxsize=4096)
def strided_pieces(address: int, rows: int, row_bytes: int, piece_bytes: int, box_rows: int) -> TensorMap:  # type: ignore[valid-type]
    """piece_bytes from `address` on and from every row_bytes later on, in boxes of box_rows pieces, not swizzled.

    row_bytes, piece_bytes: multiples of 16.
    """
    sizes, box = (piece_bytes, rows, 1), (piece_bytes, box_rows, 1)
    return _tensor_map(address, sizes, (row_bytes, row_bytes), box, _PROMOTE_TO_128B, _NO_SWIZZLE)


def _tensor_map(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = _PROMOTE_TO_256B,
    swizzle: int = _SWIZZLE_128B,
) -> TensorMap:  # type: ignore[valid-type]
    """sizes, box: bytes, then rows and so on; strides: bytes, of all dimensions but the first.

    promotion: a load of 128 bytes brings 256 into L2, where the tile that follows soon needs them.
    """
    memory = (ctypes.c_uint8 * (ctypes.sizeof(TensorMap) + _ALIGNMENT))()
    at, rank = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT, len(sizes)
    status = _encode()(
        at,
        _UINT8,
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        swizzle,
        promotion,
        _FILL_WITH_ZEROS,
    )
    if status:
        _, text = api().cuGetErrorString(api().CUresult(status))
        shape = " x ".join(map(str, sizes[::-1]))
        raise CudaError(f"a tensor map of {shape} bytes: {text.decode() if text else status}")
    return TensorMap.from_buffer_copy((ctypes.c_uint8 * ctypes.sizeof(TensorMap)).from_address(at))


@functools.cache
def _encode():
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, integer, ctypes.c_uint32, *[pointer] * 5, *[integer] * 4]
    function.restype = integer
    return function
