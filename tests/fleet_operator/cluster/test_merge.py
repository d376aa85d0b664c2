"""Laws of server-side apply on field sets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_operator.cluster.merge import apply, changed, leaves, merge_patch

values = st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
names = st.sampled_from(["a", "b", "c"])
named = st.lists(st.fixed_dictionaries({"name": names}, optional={"value": values}), min_size=1, max_size=3).map(
    lambda items: list({item["name"]: item for item in items}.values())
)
untimed = settings(deadline=None, max_examples=200)  # a busy machine is not a failure
objects = st.recursive(
    st.dictionaries(names, values, max_size=3),
    lambda inner: st.dictionaries(names, inner | values, max_size=3) | st.fixed_dictionaries({"env": named}),
    max_leaves=6,
)


@untimed
@given(objects, objects)
def test_what_is_applied_is_there_and_applying_it_again_changes_nothing(live, wanted):
    merged, owned = apply(live, wanted, set(), set(leaves(live)))
    assert not changed(merged, apply(merged, wanted, owned, set())[0])
    again, same = apply(merged, wanted, owned, set(leaves(live)))
    assert (again, same) == (merged, owned)
    assert all(any(leaf[: len(path)] == path for leaf in leaves(merged)) for path in owned)


@untimed
@given(objects, objects)
def test_without_other_managers_the_object_becomes_what_was_applied_last(first, second):
    one, owned = apply({}, first, set(), set())
    two, _ = apply(one, second, owned, set())
    assert two == second


@untimed
@given(objects, objects)
def test_fields_of_others_survive_our_leaving(theirs, ours):
    merged, owned = apply(theirs, ours, set(), set(leaves(theirs)))
    left, _ = apply(merged, {}, owned, set(leaves(theirs)))
    assert set(leaves(theirs)) <= set(leaves(left)) | {path for path in leaves(theirs) if path not in set(leaves(merged))}


def test_merge_patch_follows_rfc_7386():
    assert merge_patch({"a": {"b": 1, "c": 2}, "l": [1, 2]}, {"a": {"b": None}, "l": [3]}) == {"a": {"c": 2}, "l": [3]}
    assert merge_patch({"a": [1]}, {"a": {"b": None, "c": 1}}) == {"a": {"c": 1}}
