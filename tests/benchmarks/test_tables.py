"""Tables of raw numbers: as Markdown, as data, and in their places in a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.tables import Column, Table, put_into, write_into

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


def test_each_table_goes_to_the_page_that_has_its_place(tmp_path: Path):
    other = Table("other", "Another", [Column("name")], [["b"]])
    TABLE.rows[:] = [["a", 0.5, 1.0]]
    pages = [tmp_path / "one.md", tmp_path / "two.md"]
    for page, table in zip(pages, (other, TABLE), strict=True):
        page.write_text(f"<!-- table: {table.name} -->\n<!-- end of table: {table.name} -->\n")
    write_into(pages, [TABLE, other])
    one, two = (page.read_text() for page in pages)
    assert ("| b |" in one, "| a |" in one) == (True, False)
    assert ("| b |" in two, "| a |" in two) == (False, True)
    TABLE.rows[:] = [["c", 0.5, 1.0]]
    with pytest.raises(ValueError, match="no place for 'nowhere'"):
        write_into(pages, [TABLE, Table("nowhere", "", [Column("name")])])
    assert [page.read_text() for page in pages] == [one, two]
