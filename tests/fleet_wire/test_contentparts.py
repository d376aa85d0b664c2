"""Which chat templates are given a content as a list of parts: as vLLM 0.32 decides it (renderers/hf.py,
`_detect_content_format`; each row was compared with it)."""

from __future__ import annotations

import pytest

from fleet_wire.template import ChatTemplate

GUARD = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] | trim }}{% endfor %}\n"
    "{% endfor %}"
)
TEXT = [
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for part in other['content'] %}{{ part }}{% endfor %}{% endfor %}",
    "{% set a, b = 1, 2 %}{% for c in document.content %}{{ c }}{% endfor %}",
    "{% set n = namespace() %}{% set n.all = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for a, b in m.content %}{{ a }}{% endfor %}{% endfor %}",
    "{% macro w(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ w(1) }}{% endfor %}",
    "{{ messages[0]['content'][0]['text'] }}",
]
PARTS = [
    GUARD,
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}"
    "{% endif %}{% endfor %}",
    "{% set others = messages[1:] %}{% for m in others %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}",
    "{% macro w(x, parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ w(1, m.content) }}"
    "{% endfor %}",
    "{% macro w(parts) %}{% for c in parts %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ w(parts=m.content) }}"
    "{% endfor %}",
    "{% for m in messages | reverse %}{% for c in m.content[1:] %}{{ c }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", TEXT)
def test_a_content_that_is_written_is_a_text(source: str):
    assert not ChatTemplate(source).takes_parts


@pytest.mark.parametrize("source", PARTS)
def test_a_content_that_is_gone_through_is_a_list(source: str):
    assert ChatTemplate(source).takes_parts
