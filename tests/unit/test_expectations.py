"""A new user's expectations, and defects that one met: which test holds each of them.

A case of a parametrised test is named behind `#`, as a word that stands in its file.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EXPECTED = {
    "--version, -h": "unit/test_first_hour.py::test_a_program_has_the_options_that_every_program_has",
    "completion": "unit/test_first_hour.py::test_names_of_runs_are_completed",
    "list my runs": "unit/test_first_hour.py::test_my_runs_are_listed_with_state_step_reward_and_age",
    "typo in a key": "unit/test_bad_input.py::test_a_setting_that_cannot_work_is_answered_in_one_line#acount",
    "time = 30": "unit/test_site.py::test_requests_are_written_as_slurm_writes_them#--time=30",
    "UNLIMITED": "unit/test_site.py::test_requests_are_written_as_slurm_writes_them#UNLIMITED",
    "h100:4": "unit/test_site.py::test_requests_are_written_as_slurm_writes_them#h100:4",
    "account, partition, qos, constraint": "slurm/test_accounting.py::test_a_job_that_slurm_would_refuse_is_refused_by_its_key",
    "reservation, exclude": "unit/test_site.py::test_requests_are_written_as_slurm_writes_them#reservation",
    "mail, comment, dependency": "unit/test_site.py::test_what_is_of_the_whole_job_is_said_once_and_the_jobs_word_is_last",
    "default profile": "unit/test_site.py::test_the_profile_is_the_jobs_then_the_variables_then_the_users_default",
    "--profile, -A, -p, -t": "unit/test_site.py::test_account_partition_and_time_may_be_said_as_to_sbatch#--profile",
    "shared [resources]": "unit/test_site.py::test_what_components_share_is_between_the_site_and_their_own",
    "modules, conda": "unit/test_launch_options.py::test_a_failing_setup_line_ends_the_run_with_its_text#module load",
    "interpreter": "unit/test_site.py::test_an_interpreter_is_looked_at",
    "Apptainer": "unit/test_site.py::test_an_image_is_run_by_apptainer_which_sees_the_run_directory",
    "pyxis": "unit/test_site.py::test_an_image_of_enroot_is_run_by_srun",
    "--depend": "unit/test_first_hour.py::test_a_job_begins_after_another_or_after_a_run",
    "resume --set": "unit/test_first_hour.py::test_a_run_is_resumed_with_other_resources_and_more_steps_but_trains_the_same",
    "squeue": "e2e/test_slurm_job.py::test_submit_names_the_components_as_slurm_does_and_keeps_the_script",
    "progress in the comment": "unit/test_notify.py::test_the_jobs_comment_says_the_progress",
    "stdout": "slurm/test_hetjob.py::test_components_have_their_own_tasks_nodes_gpus_results_and_logs",
    "$HOME": "unit/test_first_hour.py::test_in_the_home_folder_a_run_leaves_a_link_and_nothing_else",
    "status pending": "unit/test_first_hour.py::test_of_a_run_that_waits_the_reason_and_the_expected_start_are_said",
    "status running": "unit/test_first_hour.py::test_of_a_run_that_runs_elapsed_and_remaining_time_reward_and_speed_are_said",
    "status failed": "unit/test_launch_messages.py::test_a_failed_run_says_which_component_failed_how_and_why_and_what_to_do",
    "--follow while pending": "unit/test_first_hour.py::test_following_says_why_the_job_waits_and_when_it_waits_no_more",
    "Ctrl-C in --follow": "unit/test_first_hour.py::test_ctrl_c_says_that_the_run_goes_on_and_how_to_look_again",
    "logs by time": "unit/test_first_hour.py::test_logs_are_in_order_of_time_without_the_warnings_of_libraries",
    "logs -n, -f": "unit/test_first_hour.py::test_the_last_lines_of_all_logs_can_be_had_alone_and_others_as_they_come",
    "logs at 80 columns": "unit/test_first_hour.py::test_a_step_is_one_line_at_80_columns",
    "peek at samples": "unit/test_viewer.py::test_for_the_newest_no_other_shard_is_opened",
    "live TensorBoard": "e2e/test_faults.py::test_a_killed_engine_rollout_and_actor_go_on_where_they_were#assert_newest_step_is_shown",
    "TensorBoard after cancel": "e2e/test_faults.py::test_cancel_ends_all_of_a_run_and_nothing_else#assert_drawn_to_the_end",
    "W&B": "unit/test_boards_export.py::test_w_and_b_has_the_curves_of_a_run_offline",
    "MLflow": "unit/test_boards_export.py::test_a_run_is_one_run_of_mlflow_over_restarts_and_resumes",
    "TensorBoard tags": "unit/test_tensorboard.py::test_every_tag_is_under_a_prefix_that_the_field_knows_reward_and_loss_come_first",
    "hparams, layout": "unit/test_tensorboard.py::test_settings_can_be_compared_and_the_first_charts_are_laid_out",
    "text samples": "unit/test_tensorboard.py::test_responses_of_an_evaluation_can_be_read_even_those_that_are_markup",
    "NO_COLOR": "unit/test_screens.py::test_without_colour_no_terminal_is_told_to_colour_anything",
    "all keys": "unit/test_docs.py::test_keys_lists_every_setting_and_names_the_nearest",
    "text of every key": "unit/test_docs.py::test_every_key_of_a_job_says_what_it_does",
    "JSON Schema": "unit/test_init.py::test_the_schema_knows_every_section_and_the_spellings_of_slurm",
    "hub id as model": "unit/test_bad_input.py::test_a_setting_that_cannot_work_is_answered_in_one_line#Qwen/Qwen3",
    "hub id as data set": "unit/prompts/test_files.py::test_a_set_of_a_hub_needs_the_library_and_is_read_by_row",
    "own reward": "unit/test_first_hour.py::test_a_reward_is_any_function_of_a_file",
    "own programs change": "unit/test_user_programs.py::test_a_copy_is_run_though_the_program_changed_and_finds_its_data_where_it_was",
    "status from any folder": "unit/test_first_hour.py::test_a_run_is_found_by_its_name_from_any_folder",
    "RELAX_RUN_ROOT": "unit/test_first_hour.py::test_a_job_without_a_run_root_takes_that_of_the_environment",
    "time limit": "unit/test_first_hour.py::test_restarts_of_several_steps_add_up_and_of_one_with_several_tasks_do_not",
    "the field's names of keys": "unit/test_moved_keys.py::test_the_names_of_other_trainers_are_answered_with_the_key_here",
    "pip install brings profiles and jobs": "unit/test_dist.py::test_the_wheel_has_every_file_of_the_package_and_no_other",
    "links of the docs": "unit/test_docs.py::test_every_relative_link_leads_to_a_file_and_a_heading",
    "screens": "unit/test_screens.py::test_a_screen_is_the_stored_one",
    "screen of watch": "unit/test_screens.py::test_watching_shows_a_screen_until_ctrl_c_and_leaves_the_last_one",
    "D1": "unit/test_launch_states.py::test_in_every_state_in_which_slurm_may_run_a_job_no_second_one_is_started#leaves(143)",
    "D1, Slurm silent": "unit/test_launch_states.py::test_a_job_lives_as_long_as_slurm_does_not_answer_whatever_an_attempt_left",
    "D2": "security/test_run.py::test_nobody_else_reads_or_writes_any_of_it",
    "D3": "unit/test_bad_folders.py::test_weights_to_begin_with_become_absolute_and_are_checked",
    "D4": "unit/test_launch_states.py::test_a_run_that_is_complete_is_not_cancelled",
    "D5": "unit/test_heldout_words.py::test_the_newest_evaluation_is_after_only_what_the_run_ends_with",
    "D6": "unit/test_heldout_words.py::test_the_last_task_of_an_evaluation_says_what_all_scored",
    "D7": "unit/test_launch_messages.py::test_logs_of_a_component_that_there_is_not_are_refused_and_the_scripts_can_be_had_alone",
    "D8": "unit/test_bad_input.py::test_a_setting_that_cannot_work_is_answered_in_one_line#actor.resources.x=1",
    "D9": "unit/test_screens.py::test_without_colour_no_terminal_is_told_to_colour_anything",
    "D10, pending": "unit/test_launch_messages.py::test_engines_of_a_run_that_waits_are_pending_and_its_idle_nodes_are_told",
    "D10, at the end": "unit/test_scaler.py::test_scaling_in_as_the_run_ends_tells_what_is_left_or_that_it_has_ended",
    "D11": "unit/test_viewer.py::test_deleted_shards_are_said#is deleted, since a checkpoint covers it",
    "D12, legend": "unit/test_heldout_words.py::test_no_legend_lies_on_a_curve",
    "D12, no steps": "unit/test_first_hour.py::test_a_failed_run_without_steps_has_no_curve_to_show",
    "D13": "unit/test_launch_messages.py::test_options_of_sbatch_with_spaces_are_quoted_as_it_reads_its_script",
    "D14": "unit/test_launch_states.py::test_what_sbatch_refused_can_be_resumed_again#submit where Slurm answers",
    "D14, cancel": "unit/test_launch_states.py::test_cancel_says_in_one_line_what_it_could_not_reach",
    "D15": "unit/test_first_hour.py::test_what_megatron_says_of_packages_that_are_not_there_is_left_out",
}  # fmt: skip
SCREENS = ("help", "logs", "ls", "status", "watch")


@pytest.mark.parametrize("row", EXPECTED)
def test_a_test_holds_it(row):
    file, _, rest = EXPECTED[row].partition("::")
    test, _, word = rest.partition("#")
    text = (TESTS / file).read_text()
    assert f"def {test}(" in text and word in text


def test_the_screens_are_stored():
    stored = {path.stem for path in (TESTS / "unit" / "golden").glob("screen-*.txt")}
    assert stored == {f"screen-{name}" for name in SCREENS}
