"""Whether a chat template wants a message's content as OpenAI's list of parts, or as one text: vLLM's rule (renderers/hf.py of
0.32, `--chat-template-content-format auto`), read from what the template is. One that goes through the parts of a content finds
none in a text, and writes a conversation in which nobody said anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from jinja2 import nodes

MESSAGES: Final = "messages"
CONTENT: Final = "content"


class _OddError(Exception):
    """Something is done with messages that vLLM does not follow either: its answer is text then."""


def takes_parts(template: nodes.Template) -> bool:
    """Some loop of it is over the content of a message."""
    try:
        messages = _messages(template)
        rows = {_name(loop.target) for loop in template.find_all(nodes.For) if _is_one_of(loop.iter, messages)}
        over = next((loop for loop, given in _loops(template, rows) if _is_over_content(loop, rows, given)), None)
        return over is not None and bool(_name(over.target))
    except _OddError:
        return False


def _messages(template: nodes.Template) -> set[str]:
    """What the conversation, or a part of it, is called."""
    found, queue = {MESSAGES}, [MESSAGES]
    while queue:
        name = queue.pop()
        for assigned in template.find_all(nodes.Assign):
            if _is_one_of(assigned.node, {name}) and (other := _name(assigned.target)) not in found:
                found.add(other)
                queue.append(other)
    return found


def _loops(template: nodes.Template, rows: Collection[str]) -> Iterator[tuple[nodes.For, frozenset[str] | None]]:
    """Each loop, with the parameters of its macro that are given contents; None: it is in no macro."""
    inside: dict[int, frozenset[str]] = {}
    for macro in template.find_all(nodes.Macro):
        given = frozenset(_given(template, macro, rows))
        inside |= {id(loop): inside.get(id(loop), frozenset()) | given for loop in macro.find_all(nodes.For)}
    for loop in template.find_all(nodes.For):
        yield loop, inside.get(id(loop))


def _given(template: nodes.Template, macro: nodes.Macro, rows: Collection[str]) -> Iterator[str]:
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            pairs = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
            yield from (name for name, value in pairs if name in names and _is_content(value, rows))


def _is_over_content(loop: nodes.For, rows: Collection[str], given: frozenset[str] | None) -> bool:
    """`given`: see `_loops`. Outside of macros whatever is called `content` is taken for one."""
    called = frozenset({CONTENT}) if given is None else given
    found = _plain(loop.iter)
    return _is_content(loop.iter, rows) or (isinstance(found, nodes.Name) and found.name in called)


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _OddError
    return target.name


def _plain(node: nodes.Node | None) -> nodes.Node | None:
    """Without filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node


def _is_one_of(node: nodes.Node, names: Collection[str]) -> bool:
    found = _plain(node)
    return isinstance(found, nodes.Name) and found.name in names


def _is_content(node: nodes.Node, rows: Collection[str]) -> bool:
    found = _plain(node)
    if isinstance(found, nodes.Getitem):
        key = found.arg.value if isinstance(found.arg, nodes.Const) else None
    elif isinstance(found, nodes.Getattr):
        key = found.attr
    else:
        return False
    return key == CONTENT and isinstance(found.node, nodes.Name) and found.node.name in rows
