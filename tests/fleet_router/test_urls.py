"""URLs that somebody would fetch are refused, however they are spelt; words about them are not."""

from __future__ import annotations

import pytest

from fleet_router.errors import RequestError
from fleet_router.urls import check_urls

DATA = b'[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}]'


@pytest.mark.parametrize("raw", [
    DATA.replace(b"data:image", b"http://h"), DATA.replace(b"data:", b"DATA:"), DATA.replace(b"data:", b" data:"),
    DATA.replace(b"data:image", b"http:").replace(b'"image_url":', b'"image\\u005furl":').replace(b'"type":"image_url",', b""),
    b'[{"content":[{"audio_url":"file:///etc/passwd"}]}]', b'[{"content":[{"video_url":{"url":["http://h"]}}]}]',
    b'[{"content":[{"image_url":5}]}]', b'[{"a":{"b":[{"x_url":"ftp://h"}]}}]',
])  # fmt: skip
def test_what_would_be_fetched_is_refused(raw: bytes):
    with pytest.raises(RequestError) as refused:
        check_urls(raw, "messages")
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize("raw", [
    DATA, b'[{"content":"see image_url of http://h"}]',
    b'[{"content":"caf\\u00e9 \\u0041"}]', b'[{"content":[{"image_url":null}]}]',
])  # fmt: skip
def test_what_nobody_would_fetch_passes(raw: bytes):
    check_urls(raw, "messages")
