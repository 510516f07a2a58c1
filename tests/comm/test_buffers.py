"""Fusion buffers: lent while somebody looks at them, used again afterwards."""

from __future__ import annotations

import numpy as np

from hvdx.comm.buffers import BufferPool
from hvdx.fusion import ALIGNMENT


def test_buffers_are_aligned_and_of_the_size_asked() -> None:
    pool = BufferPool()
    held = []
    for nbytes in (0, 1, 63, 64, 100_000) * 8:  # many, kept: malloc's blocks begin at 16 modulo 64 or elsewhere
        held.append(pool.take(nbytes))
        assert held[-1].nbytes == nbytes
        assert held[-1].ctypes.data % ALIGNMENT == 0


def test_a_buffer_somebody_sees_is_not_lent_again() -> None:
    pool = BufferPool()
    view = pool.take(1 << 16).view(np.float32)[10:20].reshape(5, 2)
    view[:] = 7
    pool.take(1 << 16)[:] = 0
    assert (view == 7).all()


def test_an_idle_buffer_is_lent_again() -> None:
    pool = BufferPool()
    address = pool.take(1 << 16).ctypes.data
    for _ in range(5):
        assert pool.take(1 << 16).ctypes.data == address
    assert pool.nbytes < 1 << 17


def test_changing_sizes_do_not_pile_up() -> None:
    pool = BufferPool()
    for nbytes in range(1 << 20, 1 << 22, 1 << 18):
        pool.take(nbytes)
    assert pool.nbytes < 1 << 23
