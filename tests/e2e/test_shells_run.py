"""A whole run on a real Slurm, submitted from shells that export what ended jobs once."""

import pytest
from e2e_runs import cli, console, is_over, submit, wait_until
from shells import SHELLS, export

pytestmark = [pytest.mark.usefixtures("slurm_cluster"), pytest.mark.long]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_run_completes_whatever_its_submitters_shell_has_exported(
    tiny, tmp_path, monkeypatch, shell
):
    """O2."""
    with monkeypatch.context() as exported:
        export(shell, tmp_path, exported)
        run_dir = submit(
            "tiny/arithmetic",
            tiny,
            local=False,
            run=console,
            run_root=tmp_path,
            launch__profile="local",
            launch__bootstrap="files",
            schedule__num_steps=2,
            schedule__prompts_per_step=4,
            rollout__samples_per_prompt=4,
            eval__heldout__every=0,
            eval__heldout__num_prompts=8,
            actor__resources__setup='["set -e; export MINE=1"]',
        ).run_dir
    try:
        assert wait_until(run_dir, is_over, 300)["state"] == "COMPLETED"
    finally:
        cli("cancel", run_dir)
