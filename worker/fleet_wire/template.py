"""A model's chat template: somebody's program, run for each conversation, by the worker and by routers that know its tokenizer.
jinja's sandbox bounds what it may touch; here is how long it may run and how much it may make, in units that are the same on
every machine.

Each turn of a loop, each call, each joining of texts and each thing that is written costs; what a conversation may cost grows
with its length. A template that never ends stood everybody's streams (short conversations are rendered on the server's own loop),
and one that writes without end took all memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_BYTES: Final = 1024 * 1024
"""chat_template.jinja: some ten kilobytes."""
MADE: Final = 1_000_000
MADE_PER_CHARACTER: Final = 16
"""Characters of one text that is made on the way, and of all that is written."""
CHARACTERS_PER_STEP: Final = 256
"""To copy so many costs a step."""
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
BY_WIDTH: Final = frozenset({"expandtabs", "indent", "tojson"})
"""What puts spaces, as many as it is told, in more than one place."""
GROWS: Final = BY_WIDTH | {"format", "format_map", "join", "replace", "translate", "urlize", "wordwrap"}
"""What puts a text, or spaces, into another one; the other filters and methods make of one text another that is about as long."""
_now: Final = threading.local()


class NoTemplateError(ValueError):
    """The text is no template."""


class TooMuchError(jinja2.TemplateError):
    """The template asks for more time or memory than its conversation may cost."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a conversation may cost: turns, calls and so on, each about a microsecond."""

    each: int = 500_000
    per_character: int = 64


class _Budget:
    """Of one rendering."""

    def __init__(self, characters: int, steps: Steps) -> None:
        self.steps = steps.each + steps.per_character * characters
        self.most = MADE + MADE_PER_CHARACTER * characters

    def charge(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TooMuchError("it comes to no end")

    def allows(self, size: int) -> None:
        """Before so much is made: afterwards is too late."""
        if size > self.most:
            raise TooMuchError(f"it makes a text of more than {self.most} characters")

    def makes(self, size: int) -> None:
        """A text or list of this size."""
        self.allows(size)
        self.charge(1 + size // CHARACTERS_PER_STEP)


def _budget() -> _Budget:
    """Of this thread's rendering; constants are also computed when a template is compiled."""
    found: _Budget | None = getattr(_now, "budget", None)
    return found if found is not None else _Budget(0, Steps())


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _weight(*values: Any) -> int:
    """Characters of them as text, about, and not far beyond the bound: a list may hold one long text a million times."""
    return _weighed(values)[0]


def _weighed(values: Iterable[Any]) -> tuple[int, int]:
    """(characters, texts and numbers and what holds them)."""
    budget, left, size, looks = _budget(), list[Any](values), 0, 0
    while left and size <= budget.most:
        one, looks = left.pop(), looks + 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif one is None or isinstance(one, int):
            size += 1 + (one or 0).bit_length() // 3
        elif isinstance(one, Collection | Namespace):
            held = one._Namespace__attrs if isinstance(one, Namespace) else one  # what its repr shows
            left += held
            left += held.values() if isinstance(held, Mapping) else ()
            size += len(held)
        else:
            size += 1
    budget.charge(looks // 8)
    return size, looks


def _check_growth(name: str, text: Any, more: tuple[Any, ...]) -> None:
    """Of what reads all that it is given, and may put a text, or so many spaces, into `text` in several places."""
    budget = _budget()
    budget.allows(_weight(text, *more))
    if not more:
        return
    widths = [abs(one) for one in more if isinstance(one, int)] if name in BY_WIDTH else []
    if places := _places(name, text, more):
        budget.allows(places * max((*widths, *(_weight(one) for one in more if not isinstance(one, int))), default=0))


def _places(name: str, text: Any, more: tuple[Any, ...]) -> int:
    if name == "tojson":
        return _weighed((text,))[1]
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
    budget = _budget()
    for value in values:
        budget.charge(_turn())
        yield value


def _turn() -> int:
    """What one costs; also for what the turn's own text is long: it may be written as often."""
    return 1 + int(getattr(_now, "source", 0)) // (16 * CHARACTERS_PER_STEP)


def _joined(*values: Any) -> str:
    if others := [value for value in values if not isinstance(value, str)]:
        _budget().allows(_weight(*others))
    texts = [str(value) for value in values]
    _budget().makes(sum(map(len, texts)))
    return "".join(texts)


def _written(value: Any) -> Any:
    if not isinstance(value, str):
        _budget().allows(_weight(value))
    _budget().makes(_size(value))
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

    @functools.wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        _check_numbers(given[1:], named)
        if function is FILTERS["format"]:
            _check_format(given[0])
        if name in GROWS or not (name in LIGHT or isinstance(given[first], str)):
            given = (*given[:first], *_listed(given[first:]))
            _check_growth(name, given[first], (*given[first + 1 :], *named.values()))
        made = function(*given, **named)
        _budget().makes(_size(made))
        return made

    return bounded


class _Bounds(NodeTransformer):
    """Loops count their turns, texts are joined within the bound."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "turns_", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node.nodes[0], "joined_", node.nodes[1:], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TooMuchError(f"it asks for a number of more than {MAX_BITS} bits")
        elif operator == "*":
            budget.makes(max(_size(left) * _count(right), _size(right) * _count(left)))
        elif operator == "+":
            budget.makes(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_growth("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:
        budget = _budget()
        budget.charge(_turn())
        method = getattr(__obj, "__wrapped__", __obj)  # of `format` the sandbox gives a function of its own
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_numbers(given, named)
            if method.__name__ in ("format", "format_map"):
                _check_format(owner)
            if method.__name__ in GROWS:
                given = _listed(given)
                text, more = (owner, given) if method.__name__ != "join" else (given[0] if given else "", (owner,))
                _check_growth(method.__name__, text, (*more, *named.values()))
        made = super().call(__context, __obj, *given, **named)
        budget.makes(_size(made))
        return made


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

    def __init__(
        self, source: str, steps: Steps = Steps(), known: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> None:
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
        environment.filters |= {"tojson": _bounded("tojson", _tojson), "turns_": _turns, "joined_": _joined}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, ValueError, RecursionError) as error:  # of a number of 5,000 digits jinja says ValueError
            raise NoTemplateError(f"chat template does not compile: {error}") from error

    def render(self, characters: int, **given: Any) -> str:
        """Over messages of so many characters; whatever the template raises, TooMuchError when it costs more than those may."""
        _now.budget, _now.source = _Budget(characters, self._steps), self._length
        try:
            return self._joined(self._template.generate(**given), _now.budget.most)
        finally:
            _now.budget, _now.source = None, 0

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
