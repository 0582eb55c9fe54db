"""The mesh: sizes, roles by use, ranks and islands."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.lowering.mesh import Mesh, build_mesh, solve_sizes
from pdsl.lowering.places import Coordinate, MeshAxis
from pdsl.lowering.spec import REST, AxisSpec, CallValue, ClusterSpec, LayoutCall, MeshSpec, PipelineSpec, ShardRule, SizeRange, Spec

ROLES = ("pipeline", "replica", "shard", "tensor")


def axes(*pairs):
    return tuple(AxisSpec(name, size) for name, size in pairs)


def spec(mesh, *terms, pipeline=None, cluster=None):
    rules = (ShardRule((), terms, span=None),) if terms else ()
    over = PipelineSpec(pipeline, CallValue("gpipe")) if pipeline else None
    return Spec("x", MeshSpec(axes(*mesh)), cluster or ClusterSpec(), shard=rules, pipeline=over)


def test_roles_follow_from_the_use_of_an_axis():
    mesh = build_mesh(
        spec([("a", 2), ("b", 3), ("c", 4), ("d", 5)], LayoutCall("colwise", ("d",)), LayoutCall("fsdp", ("b",)), pipeline="c")
    )
    assert [(a.name, a.role) for a in mesh.axes] == [("a", "replica"), ("b", "shard"), ("c", "pipeline"), ("d", "tensor")]
    assert (mesh.pipelines, mesh.positions, mesh.shard_size, mesh.tensor_size, mesh.world_size) == (2, 4, 3, 5, 120)
    assert mesh.batch_parts == 6


def test_islands_are_ordered_by_shard_then_tensor():
    mesh = Mesh((MeshAxis("dp", 2, "replica"), MeshAxis("pp", 2, "pipeline"), MeshAxis("fsdp", 2, "shard"), MeshAxis("tp", 2, "tensor")))
    assert [mesh.islands(p, s) for p in range(2) for s in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert mesh.coordinate(13) == Coordinate(pipeline=1, position=1, shard=0, tensor=1)


def test_the_place_of_an_axis_in_the_text_moves_ranks_and_not_roles():
    # the shard axis first, the replica axis last: a shard still holds a quarter, and islands are strided
    mesh = Mesh((MeshAxis("shard", 4, "shard"), MeshAxis("rep", 2, "replica")))
    assert (mesh.shard_size, mesh.pipelines) == (4, 2)
    assert mesh.islands(0, 0) == (0, 2, 4, 6)
    assert mesh.islands(1, 0) == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("mesh", "world", "sizes"),
    [
        ([("a", 2), ("b", 3)], None, (2, 3)),
        ([("a", 2), ("b", 3)], 6, (2, 3)),
        ([("a", 2), ("b", 3)], 8, None),
        ([("a", REST), ("b", 3)], 12, (4, 3)),
        ([("a", REST), ("b", 3)], 3, (1, 3)),
        ([("a", REST), ("b", 3)], 8, None),
        ([("a", REST), ("b", 3)], None, None),
        ([("a", REST), ("b", REST)], 4, None),
        ([("a", SizeRange(2, 4)), ("b", 2)], None, (2, 2)),
        ([("a", SizeRange(2, 4)), ("b", 2)], 6, (3, 2)),
        ([("a", SizeRange(2, 4)), ("b", 2)], 10, None),
        ([("a", REST), ("b", SizeRange(2, 4))], 6, (2, 3)),
        ([], 1, ()),
        ([], 2, None),
        ([("a", SizeRange(1, 10**15)), ("b", 10**15)], 10**15, (1, 10**15)),
    ],
)
def test_sizes_fit_the_world(mesh, world, sizes):
    assert solve_sizes(axes(*mesh), world) == sizes


def test_the_cluster_says_how_many_ranks_there_are():
    found = build_mesh(spec([("dp", REST), ("pp", 2)], cluster=ClusterSpec(nodes=3, ranks_per_node=4)))
    assert [a.size for a in found.axes] == [6, 2]
    assert build_mesh(spec([("dp", REST)], cluster=ClusterSpec(nodes=3))) is None


def test_ranks_outside_the_mesh_have_no_place():
    mesh = Mesh((MeshAxis("a", 2, "replica"),))
    with pytest.raises(IndexError, match="rank 2 is outside a mesh of 2 ranks"):
        mesh.coordinates(2)
    with pytest.raises(IndexError):
        mesh.rank((0, 0))


MESHES = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(ROLES)), max_size=4).map(
    lambda pairs: Mesh(tuple(MeshAxis(f"a{i}", size, role) for i, (size, role) in enumerate(pairs)))
)


@given(MESHES)
def test_every_rank_stands_in_exactly_one_island(mesh):
    places = [rank for p in range(mesh.pipelines) for s in range(mesh.positions) for rank in mesh.islands(p, s)]
    assert sorted(places) == list(range(mesh.world_size))
    assert mesh.world_size == math.prod((mesh.pipelines, mesh.positions, mesh.shard_size, mesh.tensor_size))
    for rank in range(mesh.world_size):
        assert mesh.rank(mesh.coordinates(rank)) == rank
        at = mesh.coordinate(rank)
        assert mesh.islands(at.pipeline, at.position)[at.shard * mesh.tensor_size + at.tensor] == rank
