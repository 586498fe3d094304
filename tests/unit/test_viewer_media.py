"""Text with media in it, as it is looked at: a few words for what stands for a medium."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from viewer_runs import empty_run, put, said

from relax_hpc.cli.main import app
from relax_hpc.schema import MediaKind, Medium
from relax_hpc.viewer.stretches import Stretch, cut


@pytest.fixture
def run(tmp_path, tiny_model):
    return empty_run(tmp_path / "run", tiny_model)


def printed(run, *options, columns="80"):
    answer = CliRunner(env={"COLUMNS": columns}).invoke(app, [*options, str(run.root)])
    assert answer.exit_code == 0, answer.output
    return answer.output


def page_of(run, *options):
    printed(run, "view", *options)
    return run.view.read_text()


def test_tokens_that_stand_for_media_are_a_few_words(run):
    """A prompt of two images, then a video and its sound; an image that a tool shows."""
    data = np.arange(9, dtype=np.uint8)
    media = (
        Medium(MediaKind.PNG, data, (1, 4, 4)),
        Medium(MediaKind.JPEG, data, (1, 2, 2)),
        Medium(MediaKind.MP4, data, (2, 2, 2), frames=(0, 3), seconds_per_grid=0.5),
        Medium(MediaKind.MP4, data),
    )
    prompt = f"a{'~' * 300}b{'~' * 7}, {'~' * 50} how many?"
    spans = [(0, 1, 300), (1, 302, 7), (2, 311, 20), (3, 331, 10), (2, 341, 20)]
    row = said(f"1+{'~' * 40}2~", prompt=prompt)
    first = row.prompt_len + 2
    mask = row.loss_mask.copy()
    mask[first : first + 40] = 0
    row = row._replace(
        media=media, media_spans=np.array([*spans, (0, first, 40)], np.int32), loss_mask=mask
    )
    put(run, [row, said("d", 0, 1, prompt=prompt)])
    shown = (
        "a[image 1: 300 tokens]b[image 2: 7 tokens], "
        "[video 1: 40 tokens; audio 1: 10 tokens] how many?"
    )
    out = printed(run, "peek")
    assert f"\n{shown}\n" in out, "all of it, though --tokens 200 is less than it has"
    assert "\n1+[image 1: 40 tokens]2~\n" in out
    assert f"{len(prompt)} + 44 tokens" in out
    found = page_of(run)
    assert f">\n{shown}</pre>" in found
    assert '<b class="m0">[image 1: 40 tokens]</b>' in found
    # a, image, b, image, comma, space, video are 7, and " how many?" is 10
    short = page_of(run, "--tokens", "4")
    assert "a[image 1: 300 tokens] [... 68 tokens ...] y?</pre>" in short
    out = printed(run, "view", "--text", "--tokens", "4")
    assert "\n1+ [... 40 tokens ...] 2~\n" in out
    out = printed(run, "view", "--text", "--tokens", "5")
    assert "\n1+[image 1: 40 tokens]2~\n" in out


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6),
    st.integers(0, 5),
    st.integers(2, 30),
)
def test_a_stretch_is_shown_whole_or_not_at_all(gaps, rest, cap):
    found, size = [], 0
    for gap, length in gaps:
        found.append(Stretch(size + gap, size + gap + length, "x"))
        size += gap + length
    size += rest
    units = size - sum(each.hi - each.lo - 1 for each in found)
    head, tail = cut(size, found, cap)
    shown = [range(head), range(tail, size)]
    assert 0 <= head <= tail <= size
    for each in found:
        overlaps = [len(set(part) & set(range(each.lo, each.hi))) for part in shown]
        assert sorted(overlaps) in ([0, 0], [0, each.hi - each.lo]) or head == tail
    left = sum(1 for each in found if head <= each.lo < tail)
    hidden = (tail - head) - sum(e.hi - e.lo - 1 for e in found if head <= e.lo < tail)
    assert units - hidden == min(cap, units) and left <= hidden


def test_a_line_that_is_longer_than_a_pipe_is_wide_is_not_broken(run):
    text = "word " * 60
    put(run, [said(text, prompt=text), said("d", 0, 1, prompt=text)])
    for options in (("peek", "--tokens", "999"), ("view", "--text")):
        lines = printed(run, *options).splitlines()
        assert lines.count(text) == 2, "prompt and response, each as it is"
        assert any(line.startswith("sibling 1: ") and line.endswith(" tokens") for line in lines)
