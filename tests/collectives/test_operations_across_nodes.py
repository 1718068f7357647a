"""Every collective call where ranks are on nodes of their own, and where two of them share one."""

from __future__ import annotations

import pytest
import test_operations as inside

from harness.cases import each

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]


class Apart:
    """The ranks of a test, as if they were on these nodes.

    Args:
        per_node: ranks of a node.
    """

    real, sums_in_rank_order = True, False

    def __init__(self, ranks, per_node: int):
        self._ranks, self.size, self._per_node = ranks, ranks.size, per_node

    def __call__(self, body):
        def on_nodes(comm):
            apart = comm.apart(nodes=tuple(rank // self._per_node for rank in range(comm.size)))
            result = body(apart)
            apart.close()
            return result

        return self._ranks(on_nodes)


TESTS = (
    inside.test_reductions_to_a_root_and_in_parts,
    inside.test_results_in_the_memory_of_what_is_given,
    inside.test_a_factor_is_of_each_rank,
    inside.test_shapes_and_strides,
    inside.test_works_are_done_in_their_order,
    inside.test_calls_that_are_made_again,
    inside.test_calls_on_the_same_tensors_as_before_on_one_rank_only,
    inside.test_what_differs_in_a_call_that_is_made_again_is_refused,
    inside.test_what_differs_is_refused_on_all_ranks_before_anything_is_changed,
)


@pytest.mark.sizes(2, 4)
@each("per_node", [1, 2])
def test_calls_do_there_what_they_do_in_a_node(ranks, per_node):
    if per_node < ranks.size:
        for test in TESTS:
            test(Apart(ranks, per_node))


@pytest.mark.sizes(3)
def test_operations_and_dtypes(ranks, monkeypatch):
    for test in (
        inside.test_every_operation_on_every_dtype,
        inside.test_copies_of_every_dtype,
        inside.test_every_call_on_the_same_tensors_many_times,
    ):
        test(Apart(ranks, 1), monkeypatch=monkeypatch)
