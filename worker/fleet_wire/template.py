"""A model's chat template: somebody's program, run for each conversation, by the worker and by routers that know its tokenizer.
jinja's sandbox bounds what it may touch; here is how long it may run and how much it may make, in units that are the same on
every machine.

Each turn of a loop, each call, each joining of texts, each thing that is written, and each long text or list that is looked
through costs (`budget.py`); what a conversation may cost grows with its length. A template that never ends stood everybody's
streams (short conversations are rendered on the server's own loop), and one that writes without end took all memory.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fleet_wire.budget import (
    CHARACTERS_PER_STEP,
    CHARACTERS_READ_PER_STEP,
    SIZED,
    TEXTS,
    Budget,
    Steps,
    TooMuchError,
    budget_now,
    compares,
    looks_at,
    now,
    searches,
    size_of,
    weighed,
    weight_of,
)  # fmt: skip
from fleet_wire.contentparts import takes_parts

STEPS: Final = Steps()
MAX_TEMPLATE_BYTES: Final = 1024 * 1024
"""chat_template.jinja: some ten kilobytes."""
MAX_NUMBER: Final = 1_000_000
"""Given to a filter or a method: a width, a count."""
MAX_BITS: Final = 4_096
"""Of a number that is made."""
WIDTH: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{6})|\{[^{}]*:[^{}]*\d{6}")
"""In a format: a width of 100,000 characters and more, or one that comes from elsewhere."""
LIGHT: Final = frozenset({
    "abs", "attr", "batch", "count", "d", "default", "filesizeformat", "first", "float", "int", "items", "last", "length", "list",
    "map", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice",
})  # fmt: skip
"""Filters that read none of the texts in what they are given."""
AT_ONCE: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length", "random"})
"""Filters that take as long over a long text or list as over a short one."""
AT_ITS_END: Final = frozenset({"endswith", "startswith"})
"""Methods that read no more of a text than what they are given."""
EACH: Final = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that do something for each of a list, when somebody asks for the next one."""
COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge,
}  # fmt: skip
READING: Final = frozenset(
    {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lt", "ne"}
)
"""Tests that compare."""
FORMATS: Final = frozenset({"divisibleby", "even", "odd"})
"""Tests that calculate with `%`, which formats where it is given a text."""
AS_TEXT: Final = frozenset({"lower", "upper"})
"""Tests of what is made a text first."""
BOUNDED_TESTS: Final = READING | FORMATS | AS_TEXT | {"in"}
BY_WIDTH: Final = frozenset({"expandtabs", "indent", "tojson"})
"""What puts spaces, as many as it is told, in more than one place."""
GROWS: Final = BY_WIDTH | {"format", "format_map", "join", "replace", "translate", "urlize", "wordwrap"}
"""What puts a text, or spaces, into another one; the other filters and methods make of one text another that is about as long."""


class NoTemplateError(ValueError):
    """The text is no template."""


def _check_growth(name: str, text: Any, more: tuple[Any, ...]) -> None:
    """Of what reads all that it is given, and may put a text, or so many spaces, into `text` in several places."""
    budget, found = budget_now(), weight_of(text, *more)
    budget.allows(found)
    budget.charge(found // CHARACTERS_READ_PER_STEP)
    if not more:
        return
    widths = [abs(one) for one in more if isinstance(one, int)] if name in BY_WIDTH else []
    if places := _places(name, text, more):
        budget.allows(places * max((*widths, *(weight_of(one) for one in more if not isinstance(one, int))), default=0))


def _places(name: str, text: Any, more: tuple[Any, ...]) -> int:
    if name == "tojson":
        return weighed((text,))[1]
    if name == "join":
        return len(text) if isinstance(text, Collection) else 0
    if name in ("format", "format_map"):
        return str(text).count("%") + str(text).count("{")
    if name == "replace":
        return max((str(text).count(str(one)) for one in more), default=0)
    if name in BY_WIDTH:
        return str(text).count("\n") + str(text).count("\t") + 1
    return len(str(text)) if name in ("translate", "urlize", "wordwrap") else 0


def _listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Those with an end that is not known yet have one then."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in values)


def _turns(values: Any) -> Iterator[Any]:
    budget = budget_now()
    for value in values:
        budget.charge(_turn())
        yield value


def _counted(values: Any) -> Iterator[Any]:
    budget = budget_now()
    for value in values:
        budget.charge(1)
        yield value


def _turn() -> int:
    """What one costs; also for what the turn's own text is long: it may be written as often."""
    return 1 + int(getattr(now, "source", 0)) // (16 * CHARACTERS_PER_STEP)


def _joined(*values: Any) -> str:
    if others := [value for value in values if not isinstance(value, str)]:
        budget_now().allows(weight_of(*others))
    texts = [str(value) for value in values]
    budget_now().makes(sum(map(len, texts)))
    return "".join(texts)


def _written(value: Any) -> Any:
    if not isinstance(value, str):
        budget_now().allows(weight_of(value))
    budget_now().makes(size_of(value))
    return value


def _check_numbers(given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in (*given, *named.values())):
        raise TooMuchError(f"it gives a number above {MAX_NUMBER} to a filter or method")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and WIDTH.search(text):
        raise TooMuchError("it formats with a width that is too large, or not said")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter. Some are given jinja's own state before the value."""
    first = int(hasattr(function, "jinja_pass_arg"))
    is_light, grows, is_format = name in LIGHT, name in GROWS, function is FILTERS["format"]
    is_read, for_each = name not in AT_ONCE, name in EACH

    @functools.wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        _check_numbers(given[1:], named)
        if is_format:
            _check_format(given[0])
        if grows or not (is_light or isinstance(given[first], str)):
            given = (*given[:first], *_listed(given[first:]))
            _check_growth(name, given[first], (*given[first + 1 :], *named.values()))
            if name == "sum":  # of lists: each is put behind a copy of those before
                budget_now().charge(size_of(given[first]) * weighed((given[first],))[1] // CHARACTERS_READ_PER_STEP)
        elif is_read:
            looks_at(*given[first:])
        if for_each and given[first]:
            given = (*given[:first], _counted(given[first]), *given[first + 1 :])
        made = function(*given, **named)
        budget_now().makes(size_of(made))
        return made

    return bounded


def _bounded_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *given: Any, **named: Any) -> Any:
        for other in (*given, *named.values()):
            if name == "in":
                searches(value, other)
            elif name in READING:
                compares(value, other)
        if name in FORMATS and isinstance(value, str):
            _check_format(value)
            _check_growth("format", value, (*given, *named.values()))
        elif name in AS_TEXT:
            _check_growth(name, value, ())
        return test(value, *given, **named)

    return bounded


def _compared(name: str, value: Any, other: Any) -> Any:
    compares(value, other)
    return COMPARISONS[name](value, other)


def _in(value: Any, other: Any) -> bool:
    searches(value, other)
    return value in other


def _not_in(value: Any, other: Any) -> bool:
    return not _in(value, other)


def _read(value: Any) -> Any:
    """One of several that are compared at once."""
    if isinstance(value, str | bytes | Collection):
        budget_now().charge(weight_of(value) // CHARACTERS_READ_PER_STEP)
    return value


def _made(value: Any) -> Any:
    budget_now().makes(size_of(value))
    return value


def _is_short(node: nodes.Expr) -> bool:
    """It is written in the template, and no longer than that."""
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(one, nodes.Const) for one in node.items)
    )


class _Bounds(NodeTransformer):
    """Loops count their turns, texts are joined within the bound, and what is compared, or cut out of a text, is charged for."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered("turns_", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) > 1:
            for operand in node.ops:
                operand.expr = _filtered("read_", operand.expr)
            node.expr = _filtered("read_", node.expr)
            return node
        op, other = node.ops[0].op, node.ops[0].expr
        if _is_short(other) or (op in COMPARISONS and _is_short(node.expr)):
            return node
        return _filtered(f"{op}_", node.expr, other)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("made_", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("joined_", *node.nodes)


def _filtered(name: str, value: Any, *others: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(others), [], None, None, lineno=value.lineno)


OWN: Final[Mapping[str, Callable[..., Any]]] = {
    "turns_": _turns, "joined_": _joined, "read_": _read, "made_": _made, "in_": _in, "notin_": _not_in,
    **{f"{name}_": functools.partial(_compared, name) for name in COMPARISONS},
}  # fmt: skip
"""Filters that take the place of what a template has."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = budget_now()
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TooMuchError(f"it asks for a number of more than {MAX_BITS} bits")
        elif operator == "*":
            budget.makes(max(size_of(left) * _count(right), size_of(right) * _count(left)))
        elif operator == "+":
            budget.makes(size_of(left) + size_of(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_growth("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:
        budget = budget_now()
        budget.charge(_turn())
        method = getattr(__obj, "__wrapped__", __obj)  # of `format` the sandbox gives a function of its own
        owner = getattr(method, "__self__", None)
        _check_reading(method, owner, (*given, *named.values()))
        if isinstance(owner, TEXTS):
            _check_numbers(given, named)
            if method.__name__ in ("format", "format_map"):
                _check_format(owner)
            if method.__name__ in GROWS:
                given = _listed(given)
                text, more = (owner, given) if method.__name__ != "join" else (given[0] if given else "", (owner,))
                _check_growth(method.__name__, text, (*more, *named.values()))
        made = super().call(__context, __obj, *given, **named)
        budget.makes(size_of(made))
        return made


def _check_reading(method: Any, owner: Any, given: tuple[Any, ...]) -> None:
    """Not of a macro, which hands on what it is given."""
    if isinstance(owner, TEXTS):
        looks_at("" if method.__name__ in AT_ITS_END else owner, *given)
    elif owner is None:
        looks_at(*given if isinstance(method, type) else ())
    elif isinstance(owner, LoopContext):  # whether it changed
        for value in given:
            compares(value, value)
    elif isinstance(owner, Collection):
        looks_at(owner, *given)
        for value in given if isinstance(owner, SIZED) else ():
            searches(value, owner)


class _Generation(Extension):
    """`{% generation %}` of templates for training says what of a text the model said; Hugging Face writes what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """What is inside; what it sets is not seen behind it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


class ChatTemplate:
    """Compiled; safe to render from several threads. `known`: what it may call beside jinja's own."""

    def __init__(self, source: str, steps: Steps = STEPS, known: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        """NoTemplateError when it is none."""
        if len(source) > MAX_TEMPLATE_BYTES:
            raise NoTemplateError(f"chat template of more than {MAX_TEMPLATE_BYTES} characters")
        self._length, self._steps = len(source), steps
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_written,
        )  # fmt: skip
        del environment.globals["lipsum"]  # it writes without end
        environment.globals |= {"raise_exception": _raise, **known}
        environment.filters |= {name: _bounded(name, known) for name, known in environment.filters.items()}
        environment.filters |= {"tojson": _bounded("tojson", _tojson), **OWN}
        tests: dict[str, Any] = environment.tests
        tests |= {name: _bounded_test(name, tests[name]) for name in BOUNDED_TESTS}
        try:
            self._template = environment.from_string(source)
            self.takes_parts = takes_parts(environment.parse(source))
            """A message's content comes as a list of its parts."""
        except (jinja2.TemplateError, ValueError, RecursionError) as error:  # of a number of 5,000 digits jinja says ValueError
            raise NoTemplateError(f"chat template does not compile: {error}") from error

    def render(self, characters: int, **given: Any) -> str:
        """Over messages of so many characters; whatever the template raises, TooMuchError when it costs more than those may."""
        now.budget, now.source = Budget(characters, self._steps), self._length
        try:
            return self._joined(self._template.generate(**given), now.budget.most)
        finally:
            now.budget, now.source = None, 0

    @staticmethod
    def _joined(pieces: Iterator[str], most: int) -> str:
        found, size = [], 0
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size > most:
                raise TooMuchError(f"it writes more than {most} characters")
        return "".join(found)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    what: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> Any:  # fmt: skip
    """Hugging Face's: jinja's own is for HTML, and sorts."""
    return json.dumps(what, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
