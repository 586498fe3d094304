import pytest

from relax_hpc.environments.rewards.functions import boxed_number
from relax_hpc.environments.rewards.registry import REWARDS


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"\boxed{75}", 1),
        (r"17+58 is \boxed{ 75 }.", 1),
        (r"\boxed{74} no, \boxed{75}", 1),
        (r"\boxed{75} or \boxed{x}", 0),
        (r"\boxed{75} or \boxed{}", 0),
        (r"\boxed{75} and \boxed{7", 1),
        (r"\boxed{75", 0),
        (r"\boxed{-75}", 0),
        (r"\boxed{7 5}", 0),
        (r"\boxed{\boxed{75}}", 0),
        (r"\boxed{75} or \boxed{\frac{\text{1}}{2}}", 0),
        (r"\boxed{7,5}", 0),
        ("\\boxed{" * 100_000 + "75}", 1),
        (r"\boxed{nan}", 0),
        (r"<think>\boxed{75}</think>", 0),
        (r"<think>\boxed{74}</think>\boxed{75}", 1),
        ("", 0),
    ],
)
def test_only_the_last_box_with_the_right_number_is_rewarded(response, reward):
    assert boxed_number.score(response, "75") == reward


@pytest.mark.parametrize(
    ("box", "answer", "reward"),
    [("1,000", "1000", 1), ("-3", "-3", 1), ("3", "-3", 0), ("0.5", "0.50", 1), ("nan", "nan", 0)],
)
def test_numbers_are_compared_as_numbers(box, answer, reward):
    assert boxed_number.score(rf"\boxed{{{box}}}", answer) == reward


def test_every_reward_a_job_can_name_exists():
    for name, reward in REWARDS.items():
        assert callable(reward.import_module().score), name
