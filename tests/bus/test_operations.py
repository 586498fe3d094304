"""The simulation reckons with the operations of the code as built: counted with strace."""

from collections import Counter

import pytest
from bus_simulation import BASE, READ, SIDECAR

from relax_hpc.bench import bus_operations

SHARDS = 10


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """phase -> operations of all shards, their sidecars included."""
    if missing := bus_operations.missing():
        pytest.skip(missing)
    return bus_operations.count(tmp_path_factory.mktemp("life"), SHARDS)


def per_shard(counts):
    return {name: count / SHARDS for name, count in counts.items()}


def test_a_base_shard_costs_what_the_simulation_says(counted):
    assert per_shard(counted["publish"]) == BASE - Counter(unlink=1)


def test_a_sidecar_costs_what_the_simulation_says(counted):
    assert per_shard(counted["widen"]) == SIDECAR - Counter(unlink=1)


def test_admission_and_reading_open_each_file_once(counted):
    both = READ + READ  # the base shard and its sidecar
    assert per_shard(counted["read"]) == both
    assert per_shard(counted["admit"]) == {"open": both["open"]}  # closed after their step


def test_deleting_costs_an_unlink_each(counted):
    assert counted["delete"] == {"unlink": 2 * (SHARDS + 1)}  # one was published before


def test_grants_and_fence_checks_cost_no_metadata_operation(counted):
    assert counted["grant"] == {}


def test_no_name_is_looked_up_before_it_exists_and_no_folder_is_listed(counted):
    assert all("readdir" not in counts for counts in counted.values())
