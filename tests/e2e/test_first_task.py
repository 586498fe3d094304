"""The page for who brings a task of one's own, followed to the letter."""

import re
import shutil
import subprocess
import sys

import pytest
from e2e_runs import REPOSITORY, cli, events_of, wait_until_over

pytestmark = pytest.mark.long

PAGE = (REPOSITORY / "docs" / "tutorials" / "first-task.md").read_text()
STEPS = 20


def test_who_follows_the_page_gets_a_rising_curve(tiny, tmp_path, monkeypatch):
    """Two thirds of the steps, to save time."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny / "model", "models/mine")
    files = re.findall(r"^`([\w/.]+)`:\n\n```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(files) == 4
    for name, content in files:
        (tmp_path / name).write_text(content)
    subprocess.run([sys.executable, "make_data.py"], check=True)
    said = cli("check", "rounding.toml", "--local")
    assert "prompts" in said
    cli("submit", "rounding.toml", "--local", f"--set=schedule.num_steps={STEPS}")
    run_dir = tmp_path / "runs" / "rounding"
    now = wait_until_over(run_dir, 300)
    progress = now["progress"]
    assert (now["state"], progress["steps_done"]) == ("COMPLETED", STEPS)
    curve = [event["reward/mean"] for event in events_of(run_dir, "actor", "step")]
    first, last = sum(curve[:3]) / 3, sum(curve[-3:]) / 3
    assert last > first + 0.1, curve
    assert progress["heldout_after"] > progress["heldout_before"] + 0.1
    peeked = cli("peek", run_dir)
    assert "\\boxed{" in peeked and "<think>" not in peeked
