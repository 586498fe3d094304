"""Data as a job names it: files, folders, patterns, slices; what cannot be read is named."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_hpc.data import rows
from relax_hpc.data.rows import open_rows, paths_of
from relax_hpc.errors import ConfigError


def lines(path, numbers, **more):
    path.write_text("".join(json.dumps({"n": n} | more) + "\n" for n in numbers))
    return path


def table(path, numbers, group=4, **more):
    records = [{"n": n} | more for n in numbers]
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=group)
    return path


def numbers(found):
    return [found[index].fields["n"] for index in range(len(found))]


@pytest.fixture
def folder(tmp_path):
    """0 to 9 in two files of a folder, beside one that is none of it."""
    lines(tmp_path / "b.jsonl", range(6, 10))
    table(tmp_path / "a.parquet", range(6))
    (tmp_path / "README.md").write_text("nothing")
    return tmp_path


def test_a_folder_is_its_files_by_name_and_a_pattern_those_that_fit(folder):
    assert numbers(open_rows(folder)) == list(range(10))
    assert numbers(open_rows(folder / "*.jsonl")) == [6, 7, 8, 9]
    assert numbers(open_rows(folder / "[ab].*")) == list(range(10))
    both = folder / "b.jsonl", folder / "a.parquet"
    assert numbers(open_rows(*both)) == [*range(6, 10), *range(6)]
    assert paths_of(folder / "b.jsonl[1:2]", folder / "a*") == [*both]


@pytest.mark.parametrize(
    ("slice_", "expected"),
    [("[2:5]", [2, 3, 4]), ("[8:]", [8, 9]), ("[-3:-1]", [7, 8]), ("[:]", list(range(10)))],
)
def test_a_slice_is_cut_as_python_does_and_keeps_the_place_of_its_rows(folder, slice_, expected):
    found = open_rows(folder.with_name(f"{folder.name}{slice_}"))
    assert numbers(found) == expected
    assert sum(found.blocks.sizes) == len(found)
    place = f"a.parquet, row {expected[0]}" if expected[0] < 6 else f"line {expected[0] - 5}"
    assert found.where(0) == found[0].where and found.where(0).endswith(place)


@pytest.mark.parametrize(
    ("slice_", "message"),
    [("[2:11]", "reaches beyond"), ("[-11:]", "reaches beyond"), ("[7:3]", "holds none of them")],
)
def test_a_slice_outside_or_empty_is_refused(folder, slice_, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_rows(folder.with_name(f"{folder.name}{slice_}"))
    assert f"{folder}{slice_}: " in str(error.value)


def test_a_file_whose_name_looks_like_a_slice_or_a_pattern_is_that_file(tmp_path):
    lines(tmp_path / "x[1:2]", [5, 6, 7])
    lines(tmp_path / "x[12].jsonl", [8])
    assert numbers(open_rows(tmp_path / "x[1:2]")) == [5, 6, 7]
    assert numbers(open_rows(tmp_path / "x[12].jsonl")) == [8]


def test_blocks_are_the_row_groups_and_runs_of_lines_and_a_slice_cuts_them(folder):
    assert list(open_rows(folder / "a.parquet").blocks.sizes) == [4, 2]
    assert list(open_rows(folder).blocks.sizes) == [4, 2, 4]
    cut = open_rows(folder.with_name(f"{folder.name}[1:8]"))
    assert list(cut.blocks.sizes) == [3, 2, 2]
    assert list(open_rows(lines(folder / "c.jsonl", range(600))).blocks.sizes) == [256, 256, 88]


def test_what_is_not_there_or_empty_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n \n")
    table(tmp_path / "empty.parquet", [])
    for name, message in {
        "empty": "is a folder; name one that holds",
        "no*.jsonl": "no file is called so",
        "none.parquet": "no such file",
        "empty.jsonl": "is empty",
        "empty.parquet": "is empty",
    }.items():
        with pytest.raises(ConfigError, match=message) as error:
            open_rows(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: ")


def test_files_in_which_a_column_holds_something_else_are_refused(tmp_path):
    table(tmp_path / "a.parquet", [1], answer="x", level=1, tools=None)
    table(tmp_path / "b.parquet", [2], answer="y", level=1.5, tools=["z"])
    assert numbers(open_rows(tmp_path)) == [1, 2]
    table(tmp_path / "c.parquet", [3], answer=["y"])
    with pytest.raises(ConfigError) as error:
        open_rows(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/c.parquet: column answer is list<")


def test_parquet_that_was_cut_short_is_refused_and_a_damaged_row_group_is_named(tmp_path):
    path = table(tmp_path / "x.parquet", range(4000), group=1000)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"x.parquet: is not Parquet, or cut short"):
        open_rows(path)
    about = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(2).column(0)
    start = about.dictionary_page_offset or about.data_page_offset
    path.write_bytes(whole[:start] + b"\xff" * 200 + whole[start + 200 :])
    found = open_rows(path)
    assert found[0].fields == {"n": 0}
    with pytest.raises(ConfigError, match=r"x.parquet: row group 2 is damaged or cut short"):
        found[2000]


def test_a_row_group_above_the_budget_is_refused_by_size_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_GROUP_BYTES", 2**20)
    path = tmp_path / "x.parquet"
    texts = [f"{n}" * 300 for n in range(5000)]
    pq.write_table(pa.table({"n": texts}), path, row_group_size=4000, use_dictionary=False)
    with pytest.raises(ConfigError, match=r"row group 0 has 4 MiB or more .* 1 are the most; .*="):
        open_rows(path)
    pq.write_table(pa.table({"n": ["x" * 4000] * 5000}), path)  # a few bytes in the file
    found = open_rows(path)
    with pytest.raises(ConfigError, match=r"has 3 MiB or more in memory, .* row_group_size=32\)"):
        found[0]


def test_row_groups_are_held_within_bounds_and_the_last_ones_longest(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    texts = [f"{n:05}" * 200 for n in range(800)]
    pq.write_table(pa.table({"n": texts}), path, row_group_size=100, use_dictionary=False)
    size = sum(map(len, texts)) // 8
    cache = rows.GroupCache(int(3.5 * size))
    monkeypatch.setattr(rows, "_CACHE", cache)
    found, read = open_rows(path), []
    plain = found.read
    monkeypatch.setattr(found, "read", lambda number: read.append(number) or plain(number))
    for row in (0, 150, 50, 250, 199, 0, 350, 99, 250):
        assert found[row].fields["n"] == texts[row]
        assert sum(group.num_bytes for group in cache._groups.values()) < 3.5 * size
    assert read == [0, 1, 2, 3, 2]
    assert found.blocks.window == 256  # small ones: many are mixed


def test_rows_that_are_not_text_are_named_and_marks_and_line_ends_of_windows_are_not_seen(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": "\xff"}\r\n{"n": 3}')
    found = open_rows(path)
    assert len(found) == 3 and found[0].fields == {"n": 1} and found[2].fields == {"n": 3}
    with pytest.raises(ConfigError, match=r"x.jsonl, line 3: is not UTF-8 text"):
        found[1]
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"n": texts}), tmp_path / "x.parquet")
    found = open_rows(tmp_path / "x.parquet")
    assert found[0].fields == {"n": "a"}
    with pytest.raises(ConfigError, match=r"x.parquet, row 1: is not UTF-8 text"):
        found[1]


@pytest.mark.parametrize("most_marks", [1, 3, 1000])
def test_of_a_long_file_few_places_are_kept_and_every_line_is_found(
    tmp_path, monkeypatch, most_marks
):
    monkeypatch.setattr(rows, "_MOST_MARKS", most_marks)
    path = tmp_path / "x.jsonl"
    blank = {3, 4, 11, 29}
    path.write_text("".join("\n" if n in blank else f'{{"n": {n}}}\n' for n in range(1, 38)) + "{}")
    found = open_rows(path)
    expected = [n for n in range(1, 38) if n not in blank]
    assert len(found._starts) <= max(most_marks, 1) and len(found) == len(expected) + 1
    for index, number in enumerate(expected):
        assert found[index] == rows.DataRow(f"{path}, line {number}", {"n": number}, tmp_path)
        assert found.where(index) == f"{path}, line {number}"
    assert found.where(len(expected)) == f"{path}, line 38"
    assert sum(found.blocks.sizes) == len(found)


def test_a_line_without_an_end_is_refused_before_it_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_LINE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n' + "x" * 1000)
    with pytest.raises(ConfigError, match=r"x.jsonl, line 2: has more than 0 MiB; name a file"):
        open_rows(path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = lines(tmp_path / "x.jsonl", range(10))
    found = open_rows(path)
    path.write_text('{"n": 0}\n')
    with pytest.raises(ConfigError, match=r"x.jsonl: was changed while it was read"):
        found[5]


def test_of_a_folder_of_many_files_few_are_open(tmp_path):
    for number in range(150):
        make = table if number % 2 else lines
        make(tmp_path / f"{number:03}.{'parquet' if number % 2 else 'jsonl'}", [number])
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = open_rows(tmp_path)
    assert numbers(found) == numbers(found) == list(range(150))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 64 + 8


def test_a_set_of_a_hub_needs_the_library_and_is_read_by_row(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if name == "no/where":
            raise ConnectionError("offline\nand more")
        return [{"n": n, "none": None} for n in range(300)]

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"hf:a/b/train: needs the library datasets; pip install"):
        open_rows(Path("hf:a/b/train"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = open_rows(Path("hf:a/b:main/train[5:]"), Path("hf:gsm8k/test[:1]"))
    assert asked == [("a/b", "main", "train"), ("gsm8k", None, "test")]
    fields, given = {"n": 5}, {"n": 5, "none": None}
    assert len(found) == 296
    assert found[0] == rows.DataRow("hf:a/b:main/train, row 5", fields, given=given)
    assert list(found.blocks.sizes) == [251, 44, 1]
    assert paths_of(Path("hf:a/b/train")) == []
    with pytest.raises(ConfigError, match=r"hf:no/where/x: cannot be loaded: offline; correct"):
        open_rows(Path("hf:no/where/x"))
