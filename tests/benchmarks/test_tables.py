"""Tables of raw numbers: as Markdown, as data, and in their places in a page."""

from __future__ import annotations

import math

import pytest

from benchmarks.tables import Column, Table, put_into

TABLE = Table("speed", "How fast", [Column("name"), Column("share", "percent"), Column("ms", ".1f")])


def test_a_table_as_markdown_and_as_data():
    TABLE.rows[:] = [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, math.nan]]
    assert TABLE.markdown().splitlines()[2:] == ["| a | 1.234 % | 1.0 (2.5) |", "| b | 0.000 % |  |"]
    assert TABLE.record()["rows"] == [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, None]]


def test_a_table_is_put_between_its_comments_alone():
    page = "one\n<!-- table: speed -->\nold\n<!-- end of table: speed -->\ntwo\n"
    TABLE.rows[:] = [["a", 0.5, 1.0]]
    once = put_into(page, [TABLE])
    assert "| a | 50.000 % | 1.0 |" in once
    assert "old" not in once
    assert (once[:4], once[-4:]) == ("one\n", "two\n")
    assert put_into(once, [TABLE]) == once
    with pytest.raises(ValueError, match="no place for 'speed'"):
        put_into("nothing", [TABLE])
