"""`bench modes`: the same lengths in each mode."""

import pytest

from relax_hpc.cli.bench.long_tail import LengthDistribution


def test_lengths_belong_to_the_mean_and_the_percentile_and_follow_from_the_seed_of_an_episode():
    lengths = LengthDistribution(768.0, 4096)
    # z = 2.326348; sigma = z - sqrt(z^2 - 2 ln(16/3)) = 2.326348 - sqrt(5.411894 - 3.347953)
    assert lengths.sigma == pytest.approx(0.889706, abs=1e-5)
    # the median: 768 exp(-0.889706^2 / 2) = 768 x 0.67314; one sigma above: x exp(0.889706)
    assert [lengths.quantile(share) for share in (0.5, 0.8413447)] == [517, 1259]
    assert [lengths.quantile(share) for share in (0.99, 0.9999, 1e-15)] == [4096, 4096, 1]
    # sha256("length/7") = 7f3ec4f9...: 0x7f3ec4f9 / 2^32 = 0.497051, z = -0.007392
    # 517 x exp(0.889706 x -0.007392) = 513.6
    assert lengths.draw(7) == 514
