"""Digests do not depend on the split, and tell what a move can do wrong."""

from __future__ import annotations

from itertools import product
from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.boxes import chunk
from pdsl.runtime.digest import WORD, checksum, digest
from tests.moving import part

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def whole_box(tensor):
    return tuple((0, n) for n in tensor.shape)


def of(tensor):
    return digest(tensor, whole_box(tensor), tuple(tensor.shape))


def made(shape, dtype):
    generator = torch.Generator().manual_seed(7)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (70_000,), (3, 4, 5), (1,), (), (3, 70_000)])
def test_parts_add_up_whatever_the_split(shape, dtype):
    tensor = made(shape, dtype)
    expected = of(tensor)
    for parts in product((1, 2, 3), repeat=len(shape)):
        boxes = product(*[[chunk(n, p, i) for i in range(p)] for n, p in zip(shape, parts, strict=True)])
        assert sum(digest(part(tensor, box), box, shape) for box in boxes) & WORD == expected


def test_the_value_is_what_the_formula_says():
    step, factor = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    tensor = torch.tensor([[3, 0], [-2, 5]])
    total = 0
    for index, bits in enumerate((3, 0, -2, 5)):
        place = (index + 1) * step & WORD
        place = (place ^ place >> 32) * factor & WORD
        total += place * (bits + 1)
    assert of(tensor) == total & WORD


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12), st.data())
def test_two_elements_that_change_places_change_it(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert (of(swapped) == of(tensor)) == torch.equal(swapped, tensor)


def test_every_bit_counts_and_so_do_zeros():
    tensor = made((33,), torch.float32)
    found = {of(tensor)}
    for element in (0, 16, 32):
        for bit in range(32):
            changed = tensor.clone()
            changed.view(torch.int32)[element] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            found.add(of(changed))
    assert len(found) == 97
    assert of(torch.zeros(4)) != of(torch.zeros(5))
    assert of(torch.zeros(4)) != of(-torch.zeros(4))


def test_where_a_part_lies_counts():
    tensor = made((4, 6), torch.float32)
    assert digest(tensor[:2], ((0, 2), (0, 6)), (4, 6)) != digest(tensor[:2], ((2, 4), (0, 6)), (4, 6))
    assert digest(tensor[:2], ((0, 2), (0, 6)), (4, 6)) != digest(tensor[:2], ((0, 2), (0, 6)), (4, 7))


def test_strides_do_not_count_and_empty_parts_add_nothing():
    tensor = made((6, 4), torch.float32)
    assert of(tensor.t().contiguous().t()) == of(tensor)
    assert digest(tensor[:0], ((6, 6), (0, 4)), (6, 4)) == 0


def test_a_part_that_is_not_its_box_is_refused():
    with pytest.raises(ValueError, match="is not the box"):
        digest(torch.zeros(3), ((0, 4),), (8,))
    with pytest.raises(ValueError, match="is not the box"):
        digest(torch.zeros(4), ((6, 10),), (8,))
    with pytest.raises(ValueError, match="is not the box"):
        digest(torch.zeros(4), ((0, 4),), (8, 1))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000])
def test_a_checksum_tells_a_changed_byte_an_exchange_and_a_missing_tail(size):
    data = (torch.arange(size) % 251).to(torch.uint8)
    assert checksum(data) == checksum(data.clone())
    assert checksum(data[: size - 1]) != checksum(data) or size == 0
    assert checksum(torch.cat([data, torch.zeros(1, dtype=torch.uint8)])) != checksum(data)
    for at in {0, size // 2, size - 1} if size else ():
        changed = data.clone()
        changed[at] ^= 1
        assert checksum(changed) != checksum(data)
    if size > 1:
        assert checksum(torch.cat([data[size // 2 :], data[: size // 2]])) != checksum(data)


def test_a_checksum_depends_on_bytes_alone():
    tensor = made((5, 3), torch.float32)
    raw = tensor.reshape(-1).view(torch.uint8)
    assert checksum(tensor) == checksum(raw) == checksum(torch.cat([raw[:0], raw]))
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), raw])[3:]
    assert checksum(shifted) == checksum(raw)
    assert checksum(torch.zeros(())) != checksum(torch.zeros(2))


def test_a_digest_of_sixteen_megabytes_takes_a_fraction_of_a_second():
    tensor = torch.zeros(1 << 22)
    took = []
    for _ in range(3):
        begin = perf_counter()
        of(tensor)
        took.append(perf_counter() - begin)
    assert min(took) < 0.3
