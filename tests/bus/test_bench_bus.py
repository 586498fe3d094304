"""The benchmark runs and says what it says; its figures are nobody's business here."""

import json

import pytest
from rich.console import Console

from relax_hpc.cli.bench import bus, report


@pytest.fixture
def small(monkeypatch):
    for name, value in {"NUM_GROUPS": 10, "NUM_IMAGES": 80, "IMAGE_BYTES": 2000}.items():
        monkeypatch.setattr(bus, name, value)
    monkeypatch.setattr(bus, "MEAN_TOKENS", 100)


def test_bench_bus_compares_every_kind_on_every_file_system_with_raw(tmp_path, small):
    rows = list(bus.measure(tmp_path, 3))
    for kind in ("text", "images"):
        for place in bus.places(tmp_path):
            for what in (f"write {kind}, {place}", f"read {kind}, {place}, verified"):
                row = next(row for row in rows if row.name == what)
                assert row.against == "raw"
                assert row.value > 0 < row.ratio
    report.show(rows, Console(quiet=True), tmp_path / "rows.json", report.machine())
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [report.ReportRow(**row) for row in written["rows"]] == rows
    report.plot(rows, tmp_path / "rows.png", "here")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_a_ratio_is_the_median_of_ratios_within_a_repeat():
    row = report.compare("x", 10**9, [1.0, 2.0, 4.0], [2.0, 2.0, 2.0], "raw", 0.9)
    assert (row.value, row.baseline, row.ratio) == (0.5, 0.5, 1.0)
