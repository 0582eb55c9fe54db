from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.batches import BatchError, distribute, divisors, split_batch, valid_microbatches


def test_a_batch_divides_into_its_divisors():
    assert valid_microbatches(8) == (1, 2, 4, 8)
    assert valid_microbatches(12, shards=2) == (1, 2, 3, 6)
    assert valid_microbatches(9, shards=2) == ()
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)


def test_samples_of_one_microbatch_on_one_shard():
    assert split_batch(24, 3, shards=2) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3), "a batch of 8 does not divide into 3 microbatches: 8 % 3 = 2; valid: 1, 2, 4, 8"),
        ((12, 4, 2), "a batch of 6 (12 over 2 shards) does not divide into 4 microbatches: 6 % 4 = 2; valid: 1, 2, 3, 6"),
        ((10, 1, 4), "a batch of 10 does not divide over 4 shards: 10 % 4 = 2; the nearest that do are 8 and 12"),
        ((3, 1, 4), "a batch of 3 does not divide over 4 shards: 3 % 4 = 3; the nearest that do are 4"),
        ((0, 1), "samples must be at least 1, not 0"),
    ],
)
def test_what_does_not_divide_is_told_with_remainder_and_valid_counts(arguments, message):
    with pytest.raises(BatchError) as caught:
        split_batch(*arguments)
    assert str(caught.value) == message


def test_equal_pipelines_get_equal_shares_and_slow_ones_fewer():
    assert distribute(8, (1, 1)) == (4, 4)
    assert distribute(9, (1, 1)) == (5, 4)
    assert distribute(9, (1, 2)) == (6, 3)
    assert distribute(8, (Fraction(1, 2), Fraction(1, 3))) == (3, 5)
    assert distribute(6, (1, 1), fill=(4, 0)) == (1, 5)
    assert distribute(3, (1, 100, 100)) == (1, 1, 1)


@given(st.integers(1, 4), st.data())
def test_the_slowest_pipeline_is_as_fast_as_any_split_allows(pipelines, data):
    weights = data.draw(st.lists(st.integers(1, 7), min_size=pipelines, max_size=pipelines))
    fill = data.draw(st.lists(st.integers(0, 9), min_size=pipelines, max_size=pipelines))
    total = data.draw(st.integers(pipelines, 12))

    def slowest(shares):
        return max(w * n + f for w, n, f in zip(weights, shares, fill, strict=True))

    shares = distribute(total, weights, fill)
    assert sum(shares) == total
    assert min(shares) >= 1
    others = (s for s in product(range(1, total + 1), repeat=pipelines) if sum(s) == total)
    assert slowest(shares) == min(map(slowest, others))


def test_impossible_splits_are_told_with_their_numbers():
    with pytest.raises(BatchError, match="3 pipelines need at least 3 microbatches, but there are 2"):
        distribute(2, (1, 1, 1))
    with pytest.raises(BatchError, match="must be positive"):
        distribute(2, (1, 0))
    with pytest.raises(BatchError, match="1 fill times for 2 pipelines"):
        distribute(2, (1, 1), fill=(0,))
    with pytest.raises(BatchError, match="no pipeline"):
        distribute(2, ())
