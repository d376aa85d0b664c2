"""A chat template is somebody's program: what it writes is jinja's, and it neither runs nor writes without end."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fleet_wire.budget import Steps, TooMuchError
from fleet_wire.template import MAX_TEMPLATE_BYTES, ChatTemplate, NoTemplateError

MESSAGES = [{"role": role, "content": f"  said {at} by {role}\n"} for at, role in enumerate(("system", "user", "assistant") * 3)]
GOOD = {
    "chat": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim + '\n' }}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}",
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.revindex }} {{ loop.cycle('a', 'b') }} "
    "{{ loop.previtem.role if not loop.first }} {{ loop.nextitem.role if not loop.last }}{% else %}none{% endfor %}",
    "filtered": "{% for m in messages if m.role == 'user' %}{{ m.content ~ loop.index ~ 'x' }}{% endfor %}",
    "empty": "{% for m in nothing %}a{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}",
    "recursive": "{% for n in [[1, [2, [3]]], [4]] recursive %}{% if n is iterable %}<{{ loop(n) }}>{% else %}{{ n }}{% endif %}"
    "{% endfor %}",
    "macro": "{% macro say(m, deep=2) %}{{ m.role * deep }}{% if deep %}{{ say(m, deep - 1) }}{% endif %}{% endmacro %}"
    "{% for m in messages[::-1] %}{{ say(m) }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{% continue %}{% endif %}{% if ns.n > 2 %}{% break %}{% endif %}{{ ns.n ** 2 }}{% endfor %}",
    "texts": "{{ '%s is %5d' % ('a', 7) }}{{ '%.2f' | format(1.5) }}{{ '{:>8}|{}'.format('x', 1) }}{{ 'ab'.center(9) }}"
    "{{ messages | map(attribute='role') | unique | list | join(', ') }}{{ messages[0].content.strip().split(' ')[-1] | upper }}"
    "{{ '** * %' ~ '{:}' }}{{ range(5) | list }}{{ '-' * 40 }}{{ 'abc' | indent(2) | replace('b', 'bb') | length }}",
    "grown": "{{ 'a\\tb'.expandtabs(4) ~ 'a\\nb' | indent(4) }}{{ 'abc'.translate({97: 'x'}) }}{{ ', '.join(['a', 'b']) }}"
    "{{ {'a': [1, 'x']} | tojson(indent=2) | length }}{{ 'a b c' | wordwrap(3, wrapstring='|') }}{{ ['b', 'a'] | sort | join }}"
    "{{ 'b,a'.split(',') | map('upper') | join('-') }}{{ [1, none, 'x'] }}{{ {'a': 1}.items() | list }}"
    "{{ [[1], [2]] | sum(start=[]) }}",
    "compared": "{% for m in messages %}{{ m.role in ['user', 'a'] }}{{ 'tool' in m }}{{ 'said' in m.content }}"
    "{{ m in messages }}{{ m.role not in 'users' }}{{ 1 < loop.index <= 3 }}"
    "{{ m == messages[0] }}{{ m.content > 'b' ~ 'c' }}{{ m.nothing == none }}"
    "{{ m.content[2:-1] }}{{ loop.index is divisibleby(num=2) }}{{ loop.changed(m.role) }}{{ 'x' in nothing }}{% endfor %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ nothing | map('upper') | list }}{{ 'A' is upper }}"
    "{{ [1, 2, 3] | select('odd') | list }}{{ none | select | list }}{{ (1, [2]) in {(1, 2): 3}.items() }}{{ [1, 2].index(2) }}"
    "{{ messages | map(attribute='role') | reject('in', ['user']) | join }}{{ 'abc'.startswith(('a', 'b')) }}{{ 3 in range(4) }}"
    "{{ [3, 1] | sum }}{{ [1, 2] == [1, 2] }}{{ (2, 1) > (1, 2) }}{{ dict(a=1) }}{{ 'a' in ('a', 'b') }}{{ messages[:1] }}",
    "block": "{% set said %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ said | length }}{{ said }}",
}  # fmt: skip


def plain(source: str, **given: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return environment.from_string(source).render(**given)


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_what_a_template_writes_is_what_jinja_writes(source: str):
    given = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>"}
    assert ChatTemplate(source).render(200, **given) == plain(source, **given)


def test_marks_of_a_training_are_passed_over():
    """The torch engine refused a model with them; Hugging Face (AssistantTracker) writes what is inside, in its own scope."""
    begin, end = "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}", "{{ x }}{% endif %}{% endfor %}"
    marked = begin + "{% generation %}\n{% set x = 2 %}{{ m.content ~ x }}{% endgeneration %}\n" + end
    assert ChatTemplate(marked).render(200, messages=MESSAGES) == plain(begin + "{{ m.content ~ 2 }}" + end, messages=MESSAGES)
    with pytest.raises(TooMuchError):
        ChatTemplate("{% generation %}" + nested("{{ 1 }}") + "{% endgeneration %}").render(10)


def test_a_long_conversation_is_within_the_bounds():
    source, messages = GOOD["chat"], [{"role": "user", "content": "a b " * 10} for _ in range(100_000)]
    assert len(ChatTemplate(source).render(4_000_000, messages=messages, bos_token="")) > 4_000_000


def nested(body: str, deep: int = 3) -> str:
    return "{% for a in range(99999) %}" * deep + body + "{% endfor %}" * deep


ENDLESS = {
    "loops": nested(""),
    "loops-that-set": nested("{% set x = 1 %}"),
    "loops-that-write": nested("a"),
    "macros": "{% macro f(n) %}{{ f(n + 1) if n < 200 }}{{ f(n + 1) if n < 200 }}{% endmacro %}{{ f(0) }}",
    "long-turns": "{% set x %}" + nested("a" * 100_000, 1) + "{% endset %}",
    "copies": "{% set x = 'x' * 900000 %}" + nested("{% set y = x ~ 'y' %}"),
    "written-aside": "{% set x = 'x' * 900000 %}{% set y %}" + nested("{{ x }}", 1) + "{% endset %}",
}
SPINS = {
    "in": "{{ 'ab' in long }}",
    "not-in": "{{ 'ab' not in long }}",
    "equal": "{{ long == same }}",
    "before": "{{ long <= same }}",
    "between": "{{ long <= same <= long }}",
    "lists-equal": "{{ many == as_many }}",
    "in-list": "{{ 2 in many }}",
    "text-in-list": "{{ long in texts }}",
    "list-in-list": "{{ many in [as_many, as_many] }}",
    "in-range": "{{ 'a' in range(99999) }}",
    "in-values": "{{ 2 in {'a': 1}.values() or 2 in many }}",
    "is-in": "{{ 'ab' is in long }}",
    "is-equal": "{{ long is eq(same) }}",
    "is-lower": "{{ long is lower }}",
    "select": "{{ range(99999) | select('none') | list }}",
    "select-attribute": "{{ range(99999) | selectattr('x') | first }}",
    "select-in": "{{ [long, long] | select('in', [same, same]) | list | length }}",
    "map": "{{ range(99999) | map('string') | select('none') | list }}",
    "find": "{{ long.find('b') }}",
    "count": "{{ long.count('b') }}",
    "split": "{{ long.split('b') | length }}",
    "strip": "{{ spaces.strip() }}",
    "list-index": "{{ (many + [2]).index(2) }}",
    "list-count": "{{ many.count(2) }}",
    "cut": "{{ long[1:] is none }}",
    "list-cut": "{{ many[1:] is none }}",
    "changed": "{{ loop.changed(many if loop.index % 2 else as_many) }}",
    "words": "{{ long | wordcount }}",
    "trim": "{{ spaces | trim }}",
    "float": "{{ spaces | float }}",
    "batch": "{{ range(99999) | batch(99999) | first is none }}",
    "sum": "{{ ([[1] * 30] * 900) | sum(start=[]) | length }}",
    "dict": "{{ dict([['a', 1]] * 90000) | length }}",
}
"""In a loop, over long texts and lists that were made once."""
GIVEN = (
    "{% set long = 'a' * 900000 %}{% set same = 'a' * 899990 ~ 'a' * 10 %}{% set spaces = ' ' * 900000 %}"
    "{% set many = [1] * 900000 %}{% set as_many = [1] * 900000 %}{% set texts = [same, same, same] %}"
)
LONG = "{% set a = 'a' * 400000 %}{% set b = 'b' * 400000 %}{% set many = ['a'] * 400000 %}"
GIANT = {
    "times": "{{ 'x' * 1000000000000 }}",
    "times-left": "{{ 1000000000000 * 'x' }}",
    "list-times": "{{ ([1] * 1000000000000) | length }}",
    "doubled": "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "added": "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
    "squared": "{% set n = namespace(x=3) %}{% for a in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "filter": "{{ 'x' | center(1000000000000) }}",
    "method": "{{ 'x'.ljust(1000000000000) }}",
    "percent": "{{ '%1000000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (1000000000000, 1) }}",
    "format-filter": "{{ '%1000000000000d' | format(1) }}",
    "format-method": "{{ '{:1000000000000}'.format(1) }}",
    "format-method-argument": "{{ '{:{}}'.format(1, 1000000000000) }}",
    "written": nested("{{ 'x' * 10000 }}", 1),
    "slices": "{{ 'x' | batch(1000000000000, 'y') | list }}",
    # of two that are no giants
    "replace": LONG + "{{ a.replace('a', b) | length }}",
    "replace-nothing": LONG + "{{ a.replace('', b) | length }}",
    "replace-filter": LONG + "{{ a | replace('a', b) | length }}",
    "replace-filter-named": LONG + "{{ a | replace(new=b, old='a') | length }}",
    "join": LONG + "{{ b.join(many) | length }}",
    "join-filter": LONG + "{{ many | join(b) | length }}",
    "join-mapped": LONG + "{{ ([{'b': b}] * 400000) | map(attribute='b') | join | length }}",
    "percent-many": LONG + "{{ ('%(b)s' * 90000 % {'b': b}) | length }}",
    "format-many": LONG + "{{ ('{0}' * 90000).format(b) | length }}",
    "format-filter-many": LONG + "{{ '%s' * 90000 | format(*([b] * 90000)) | length }}",
    "indent": LONG + "{{ ('\\n' * 400000) | indent(900000) | length }}",
    "tabs": LONG + "{{ ('\\t' * 400000).expandtabs(900000) | length }}",
    "translate": LONG + "{{ a.translate({97: b}) | length }}",
    "wrapped": LONG + "{{ ('a ' * 200000) | wordwrap(1, wrapstring=b) | length }}",
    "json": LONG + "{{ ([b] * 400000) | tojson | length }}",
    "json-width": "{{ ([1] * 400000) | tojson(indent=900000) | length }}",
    "list-as-text": LONG + "{{ ([b] * 400000) | string | length }}",
    "list-joined": LONG + "{{ (([b] * 400000) ~ '') | length }}",
    "list-written": LONG + "{{ [b] * 400000 }}",
    "dict-written": LONG + "{{ {'b': [b] * 400000}.items() }}",
    "namespace-written": LONG + "{{ namespace(b=[b] * 400000) }}",
    "is-upper": LONG + "{{ ([b] * 400000) is upper }}",
    "is-odd": "{{ '%1000000000d' is odd }}",
    "is-divisible": "{{ '%1000000000d' is divisibleby(1) }}",
    "sorted": LONG + "{{ ([b] * 400000) | sort | length }}",
}


@pytest.mark.parametrize("source", [*ENDLESS.values(), *GIANT.values()], ids=[*ENDLESS, *GIANT])
def test_a_template_without_end_is_ended(source: str):
    """Incident: two loops stood every stream until the kubelet restarted the worker; one multiplication took all memory."""
    made = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises((TooMuchError, RecursionError)):
            made.render(10, messages=MESSAGES)
    with pytest.raises(jinja2.UndefinedError):
        ChatTemplate("{{ messages[3].no.where }}").render(10, messages=MESSAGES)  # and the thread is fit for the next one


@pytest.mark.parametrize("body", SPINS.values(), ids=SPINS)
def test_what_only_looks_comes_to_an_end(body: str):
    """Nothing was made, so nothing was counted: one comparison in two loops stood every stream, or a thread of the worker."""
    once = ChatTemplate(GIVEN + nested(body, 1).replace("99999", "1"), Steps(400_000, 0))
    once.render(10)
    with pytest.raises(TooMuchError):
        ChatTemplate(GIVEN + nested(body, 2), Steps(400_000, 0)).render(10)


def test_what_only_fills_pages_is_not_there():
    """lipsum(n=100000000) came to no end: nobody counts what it writes."""
    with pytest.raises(jinja2.UndefinedError, match="lipsum"):
        ChatTemplate("{{ lipsum(n=2) }}").render(10)


def test_a_template_of_the_largest_size_compiles_or_is_refused_by_name():
    ChatTemplate("a" * MAX_TEMPLATE_BYTES)
    with pytest.raises(NoTemplateError, match="chat template of more than"):
        ChatTemplate("a" * (MAX_TEMPLATE_BYTES + 1))


@pytest.mark.parametrize("source", ["{% for", "{{ " + "(" * 5_000, "{{ " + "9" * 5_000 + " }}", "{% generation %}"])
def test_what_is_no_template_is_said_to_be_none(source: str):
    with pytest.raises(NoTemplateError, match="chat template does not compile"):
        ChatTemplate(source)


def test_whoever_has_less_time_gives_less():
    """A router renders between two requests, a worker's thread beside others."""
    source = "{% for m in messages %}{{ m }}{% endfor %}"
    assert ChatTemplate(source, Steps(50, 0)).render(0, messages=range(10)) == "0123456789"
    with pytest.raises(TooMuchError, match="it comes to no end"):
        ChatTemplate(source, Steps(50, 0)).render(0, messages=range(100))
    assert ChatTemplate(source, Steps(50, 3)).render(100, messages=range(100))
