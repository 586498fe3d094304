"""Placement and site profiles: pure functions of what the user wrote."""

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.job_file import validate
from relax_hpc.launch import profiles
from relax_hpc.launch.placement import place
from relax_hpc.launch.submit import resolve
from relax_hpc.sections import Resources, SharedResources


def config(rollout=None, actor=None, **launch):
    return validate(
        {
            "name": "run",
            "model": {"path": "m"},
            "prompts": {"train": "t"},
            "schedule": {"num_steps": 1},
            "engines": {"rollout": {"count": 4, "resources": rollout or {}}},
            "actor": {"layout": {"tensor_parallel": 2}, "resources": actor or {}},
            "launch": launch,
        },
        source="test",
    )


@pytest.fixture
def profile(tmp_path):
    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return str(path)

    return write


def test_rollout_is_component_0_because_its_time_limit_ends_the_job():
    components = place(config(rollout={"nodes": 2}))
    assert [(c.name, c.tasks, c.nodes, c.tasks_per_node) for c in components] == [
        ("rollout", 4, 2, 2),
        ("actor", 2, 1, 2),
    ]


def test_the_job_overrides_the_role_and_the_role_overrides_the_site(profile):
    site = profile(
        'partition = "a"\nqos = "site"\ngpus_per_node = 1\n'
        '[actor]\nqos = "role"\ngpus_per_node = 2\n'
    )
    rollout, actor = place(config(actor={"gpus_per_node": 8}, profile=site))
    assert rollout.resources == Resources(partition="a", qos="site", gpus_per_node=1)
    assert actor.resources == Resources(partition="a", qos="role", gpus_per_node=8)


def test_a_default_the_job_states_beats_the_profile(profile):
    rollout, _ = place(config(rollout={"nodes": 1}, profile=profile("[rollout]\nnodes = 2\n")))
    assert rollout.nodes == 1


def test_nodes_from_a_profile_must_divide_the_tasks_too(profile):
    with pytest.raises(
        ConfigError, match=r"engines.rollout.resources.nodes = 3: 4 tasks do not divide"
    ):
        place(config(profile=profile("[rollout]\nnodes = 3\n")))


@pytest.mark.parametrize(
    ("mpi", "wanted", "rollout", "actor"),
    [("pmix", "auto", "files", "mpi"), ("pmix", "mpi", "mpi", "mpi"),
     ("pmix", "files", "files", "files"), (None, "auto", "files", "files"),
     (None, "files", "files", "files")],
)  # fmt: skip
def test_mpi_joins_the_ranks_where_it_is_set_and_not_declined(mpi, wanted, rollout, actor):
    """Tasks of engines know nothing of each other and are not joined unless somebody says so."""
    asked = {"mpi": mpi} if mpi else {}
    placed = place(config(asked, asked, bootstrap=wanted))
    assert [component.bootstrap for component in placed] == [rollout, actor]


def test_wanting_mpi_without_saying_which_is_an_error_with_the_remedy():
    with pytest.raises(
        ConfigError, match=r"engines.rollout.resources.mpi is not set; use pmix for Open"
    ):
        place(config(bootstrap="mpi"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partion = "gpu"', "partion = 'gpu': unknown key; did you mean partition?"),
        ("[actor]\ngpu_per_node = 4", "actor.gpu_per_node = 4: unknown key; did you mean gpus_per"),
        ("gpus_per_node = -1", "gpus_per_node = -1: input should be greater than or equal to 0"),
        ("xyz = 1", "xyz = 1: unknown key; a profile takes partition, account"),
    ],
)
def test_a_mistake_in_a_profile_names_key_value_and_remedy(profile, text, message):
    with pytest.raises(ConfigError) as error:
        profiles.load(profile(text))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_profile_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"launch.profile = 'exmaple'.*did you mean example"):
        profiles.load("exmaple")


@pytest.mark.parametrize("name", [path.stem for path in profiles.PROFILES.glob("*.toml")])
def test_the_profiles_that_come_along_are_valid(name):
    profiles.load(name)


def test_a_type_of_gpus_of_which_nobody_says_a_number_is_refused(profile):
    said = "rollout.resources.gpu_type = 'h100': nobody says how many; set "
    shared = {"resources": SharedResources(gpu_type="h100")}
    for job in (config(rollout={"gpu_type": "h100"}), config().model_copy(update=shared)):
        with pytest.raises(ConfigError, match=said):
            place(job)
    for count in (0, 4):
        asked = {"gpu_type": "h100", "gpus_per_node": count}
        assert place(config(rollout=asked))[0].resources.gpus_per_node == count
    path = profile("gpus_per_node = 4")
    assert place(config({"gpu_type": "h100"}, profile=path))[0].resources.gpus_per_node == 4
    job = config(profile=profile('gpu_type = "h100"'))  # for jobs that ask for some
    resolved, [rollout, _] = resolve(job)
    assert (rollout.resources.gpu_type, rollout.resources.gpus_per_node) == ("h100", 0)
    again = validate(resolved.model_dump(mode="json"), source="of a run")
    assert place(again)[0].resources == rollout.resources
