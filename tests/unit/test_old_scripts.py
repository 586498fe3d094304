"""A job that was queued before relax-hpc was upgraded: it runs, or one line refuses it."""

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launch import entry


def test_a_script_of_before_the_modules_moved_is_refused_by_one_line(tmp_path):
    script = tmp_path / "7_submission.sh"
    script.write_text(
        "srun python -u -P -m relax_hpc.launch.entry run rollout --start 1 &\n"
        "python -P -m relax_hpc.scale.scaler_main run &\n"
    )
    with pytest.raises(ConfigError) as error:
        entry.check_script(script, tmp_path)
    said = str(error.value)
    assert "\n" not in said and "starts relax_hpc.scale.scaler_main," in said
    assert said.endswith(f"relax-hpc resume {tmp_path}") and error.value.is_final
