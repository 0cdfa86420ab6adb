from __future__ import annotations

import numpy as np
import pytest

from banyan.mem_cache.req_to_token import ReqToTokenPool


def test_rows_are_handed_out_once_and_never_row_zero() -> None:
    pool = ReqToTokenPool(3, 8)
    assert (pool.table.shape, pool.table.dtype, pool.available) == ((4, 8), np.int32, 3)
    assert sorted(pool.alloc() or 0 for _ in range(3)) == [1, 2, 3]
    assert pool.alloc() is None
    pool.free(2)
    assert pool.available == 1
    assert pool.alloc() == 2


@pytest.mark.parametrize("row", [0, 2, 4, -1])
def test_a_row_that_is_not_in_use_cannot_be_freed(row: int) -> None:
    pool = ReqToTokenPool(3, 8)
    assert pool.alloc() == 1
    with pytest.raises(RuntimeError, match="not in use"):
        pool.free(row)
    pool.free(1)
    with pytest.raises(RuntimeError, match="not in use"):
        pool.free(1)
    assert pool.available == 3


def test_write_sets_cells_and_stays_inside_the_row() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(1, 1, np.array([5, 6, 7]))
    pool.write(1, 4, np.array([], np.int32))
    assert pool.table.tolist() == [[0] * 4, [0, 5, 6, 7], [0] * 4]
    for start, slots in ((4, [1]), (3, [1, 2]), (-1, [1])):
        with pytest.raises(ValueError, match="outside"):
            pool.write(1, start, np.array(slots))
    assert pool.table.tolist() == [[0] * 4, [0, 5, 6, 7], [0] * 4]


def test_an_empty_pool_is_refused() -> None:
    for num_rows, width in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="needs rows"):
            ReqToTokenPool(num_rows, width)
