"""Whole, tagged lines out of a byte stream, however it is cut."""

from __future__ import annotations

import os

import pytest

from hvdx.launch.lines import LineBuffer, atomic_pieces, write_all

TEXT = b"one\ntwo\r\n 5%\r 10%\rend\n\nhalf"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_any_cut_gives_the_same_lines(step: int) -> None:
    buffer = LineBuffer(b"[1] ")
    out = b"".join(buffer.feed(TEXT[at : at + step]) for at in range(0, len(TEXT), step))
    out += buffer.flush(end_line=True)
    assert out == b"[1] one\n[1] two\r\n[1]  5%\r[1]  10%\r[1] end\n[1] \n[1] half\n"


def test_a_line_shown_in_two_parts_is_tagged_once() -> None:
    buffer = LineBuffer(b"[1] ")
    assert buffer.feed(b"name? ") == b""
    assert buffer.flush() == b"[1] name? "
    assert buffer.feed(b"yes\nnext\n") == b"yes\n[1] next\n"


def test_no_tag_leaves_bytes_as_they_are() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"\xff\x00a\n") + buffer.flush(end_line=True) == b"\xff\x00a\n"


def test_pieces_are_whole_lines_within_the_limit() -> None:
    text = b"aaa\nbb\ncccccccccccc\nd\ne\n"
    assert atomic_pieces(text, limit=8) == [b"aaa\nbb\n", b"cccccccccccc\n", b"d\ne\n"]
    assert atomic_pieces(b"") == []


def test_write_all_gives_up_on_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert not write_all(writer, b"text")
    os.close(writer)
