"""A tree of subjects finds the owners that comparing them one by one finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from natslog.subjects import SubjectTree, covers, overlap

plain = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)
wild = st.tuples(st.lists(st.sampled_from(["a", "b", "*"]), max_size=3), st.sampled_from(["a", "*", ">"])).map(
    lambda parts: ".".join((*parts[0], parts[1]))
)
owned = st.lists(st.tuples(wild, st.sampled_from("XYZ")), max_size=8)


@given(owned, wild, plain.map(".".join))
def test_lookups_find_what_comparing_one_by_one_finds(added: list[tuple[str, str]], pattern: str, subject: str) -> None:
    tree = SubjectTree()
    for one, owner in added:
        tree.add(one, owner)
    assert tree.overlapping(pattern) == {owner for one, owner in added if overlap(one, pattern)}
    assert tree.covers(subject) == any(covers(one, subject) for one, _ in added)


@given(owned, st.data())
def test_what_was_removed_is_not_found(added: list[tuple[str, str]], data: st.DataObject) -> None:
    tree, left = SubjectTree(), list(dict.fromkeys(added))
    for one, owner in left:
        tree.add(one, owner)
    for _ in range(data.draw(st.integers(0, len(left)))):
        tree.remove(*left.pop(data.draw(st.integers(0, len(left) - 1))))
    assert tree.overlapping(">") == {owner for _, owner in left}
    if not left:
        assert tree._root == {}, "nothing of it is kept"
