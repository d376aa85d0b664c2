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


PICTURE = DATA.replace(b'"type"', b'"uuid":"a","type"')


@pytest.mark.parametrize("raw", [
    PICTURE, PICTURE.replace(b"uuid", b"uu\\u0069d"), PICTURE.replace(b'"type":"image_url",', b""), PICTURE.replace(b'"a"', b"7"),
    b'[{"content":[{"type":"image_url","image_url":null,"uuid":"a"}]}]', b'[{"content":[{"type":"image_url","uuid":"a"}]}]',
    b'[{"content":[{"uuid":"a","type":"input_audio","input_audio":{"data":"AA==","format":"wav"}}]}]',
    b'[{"content":[{"uuid":"a","type":"input\\u005faudio"}]}]', b'[{"content":[{"uuid":"a","image_pil":null}]}]',
])  # fmt: skip
def test_nobody_finds_a_medium_by_a_name_that_a_client_gave_it(raw: bytes):
    """vLLM keeps media by it, for all of its clients: a uuid alone was another tenant's picture, and its answer told of it."""
    with pytest.raises(RequestError, match="messages: a uuid of a medium is not served") as refused:
        check_urls(raw, "messages")
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize("raw", [
    b'[{"content":[{"type":"image_embeds","image_embeds":"AA=="}]}]', b'[{"content":[{"image_embeds":{"a":"AA=="}}]}]',
    b'[{"content":[{"type":"prompt_embeds","data":"AA=="}]}]', b'[{"content":[{"type":"prompt\\u005fembeds","data":"AA=="}]}]',
])  # fmt: skip
def test_nobody_loads_a_clients_tensors(raw: bytes):
    """`prompt_embeds` of a completion was refused, and the same as a part of a message was not."""
    with pytest.raises(RequestError, match="messages: tensors of clients"):
        check_urls(raw, "messages")


@pytest.mark.parametrize("raw", [
    DATA, b'[{"content":[{"type":"text","text":"a","uuid":"b"}],"uuid":"c"}]', PICTURE.replace(b'"a"', b"null"),
    b'[{"content":"a \\"uuid\\" and image_embeds\\""}]', b'[{"content":[{"type":"image_embeds","image_embeds":null}]}]',
    b'[{"tool_calls":[{"function":{"arguments":{"uuid":"a"}}}]}]', b'[{"content":"see image_url of http://h"}]',
    b'[{"content":"caf\\u00e9 \\u0041"}]', b'[{"content":[{"image_url":null}]}]',
])  # fmt: skip
def test_what_nobody_would_fetch_passes(raw: bytes):
    check_urls(raw, "messages")
