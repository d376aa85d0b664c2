"""Text leaves in whole characters, stop strings never show, templates stay inside their sandbox."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fleet_cli.up.bundled import tiny_model
from fleet_worker.engine.answer import Answer
from fleet_worker.engine.core import Output
from fleet_worker.engine.errors import BadRequestError, ModelFilesError
from fleet_worker.engine.protocol import CompletionRequest
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.engine.text import REPLACEMENT, Detokenizer, Text

TEXT = Text(tiny_model())


def told(ids: list[int], *stops: str) -> tuple[list[str], str | None]:
    """(pieces, stop) as a client gets them."""
    detokenizer, pieces = Detokenizer(TEXT, stops), []
    for token in ids:
        piece, stop = detokenizer.add(token)
        pieces.append(piece)
        if stop is not None:
            return pieces, stop
    rest, stop = detokenizer.finish()
    return [*pieces, rest], stop


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_hold_whole_characters(text: str):
    ids = TEXT.encode(text)
    pieces, _ = told(ids)
    assert "".join(pieces) == TEXT.decode(ids)
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


PARTS = sorted(set(TEXT.encode("𝕳𝖊𝖑🇩🇪日é", add_special=False)))
"""Tokens that are parts of characters."""
WHOLE = TEXT.encode("𝖊𝖑", add_special=False)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_a_character_after_bytes_that_are_none_is_not_lost(parts: list[int]):
    """Incident: after eight tokens everything was told, the begin of a character too, and its rest was told as nothing."""
    ids = [*parts, *WHOLE]
    assert "".join(told(ids)[0]) == TEXT.decode(ids)


def test_a_character_that_begins_in_the_eighth_pending_token_is_not_lost():
    lone = WHOLE[1]
    for before in range(4, 9):
        ids = [lone] * before + WHOLE
        assert "".join(told(ids)[0]) == TEXT.decode(ids)


@pytest.mark.parametrize("text", ["naïve café", "日本語のトークン", "👩‍👩‍👧 family", "mixed é日👍 end"])
def test_characters_of_several_bytes_arrive_whole(text: str):
    pieces, _ = told(TEXT.encode(text))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


def with_spaces_in_front(folder: Path) -> tuple[Text, dict[str, int]]:
    """A tokenizer as Llama 2's: a word's token begins with its space, which a text's first word loses."""
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "▁", "▁▁", "▁the", "▁word", "er", "日"])}
    pieces = words | {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return Text(folder), words


def in_bytes(text: Text, *parts: str | bytes) -> list[int]:
    """Token ids: words of `with_spaces_in_front`, and tokens for single bytes."""
    names = [name for part in parts for name in ([part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part])]
    return [text.tokenizer.token_to_id(name) for name in names]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("é".encode(), b"\xff", "▁word"), "é� word"),
        (("日".encode(), b"\xe6\x97", "▁word"), "日�� word"),
        (("日".encode(), b"\xe6"), "日�"),
        (("▁the", b"\xff", "▁word", "日".encode(), "er"), "the� word日er"),
        ((b"\x80" * 7, "𝖊𝖊".encode(), "er"), "�" * 15 + "er"),
        ((b"\xa9" * 7, "𝖊é".encode(), "▁word"), "�" * 13 + " word"),
    ],
)
def test_bytes_that_fit_no_character_change_nothing_that_was_told_and_take_no_word(
    tmp_path: Path, parts: tuple[str | bytes, ...], said: str
):
    """Incident: a fallback to bytes reads a run of them as a whole, one U+FFFD for each where it fits no characters. What was
    told of it counted as so many of its signs: `é` was followed by two for one byte, and words behind such a run were lost."""
    text, _ = with_spaces_in_front(tmp_path)
    detokenizer = Detokenizer(text)
    assert "".join([detokenizer.add(token)[0] for token in in_bytes(text, *parts)] + [detokenizer.finish()[0]]) == said


def test_no_word_is_lost_among_bytes(tmp_path: Path):
    text, _ = with_spaces_in_front(tmp_path)
    random, told_words = Random(11), ["▁the", "▁word", "er"]
    for _ in range(3000):
        runs = ["é".encode(), "日".encode(), "𝖊".encode(), b"\xe6\x97", b"\xff" * random.randint(1, 9), *told_words]
        parts = random.choices(runs, k=random.randint(1, 9))
        detokenizer = Detokenizer(text)
        ids = in_bytes(text, *parts)
        said = "".join([detokenizer.add(token)[0] for token in ids] + [detokenizer.finish()[0]])
        expected = "".join(part for part in parts if isinstance(part, str)).replace("▁", " ")
        assert "".join(sign for sign in said if sign.isascii()) in (expected, expected.removeprefix(" ")), parts


def test_a_word_keeps_its_space_behind_a_special_token(tmp_path: Path):
    """With ignore_eos `the</s> word` was told as `theword`: the word was taken for the text's first."""
    text, words = with_spaces_in_front(tmp_path)
    random = Random(7)
    for _ in range(300):
        ids = random.choices([*words.values()], k=random.randint(1, 12))
        detokenizer = Detokenizer(text)
        assert "".join([detokenizer.add(token)[0] for token in ids] + [detokenizer.finish()[0]]) == text.decode(ids), ids


def answered(text: Text, prompt: list[int], ids: list[int], stop: tuple[str, ...] = ()) -> str:
    """The text of a whole answer."""
    sampling = Sampling(max_tokens=len(ids), stop=stop)
    sequence = Sequence("r", tuple(prompt), sampling, 0, 0.0)
    answer = Answer(CompletionRequest(model="m", prompt=prompt), sequence, text, "m")
    for number, token in enumerate(ids, 1):
        if answer.add(Output(sequence, token, "length" if number == len(ids) else None)):
            break
    return str(answer.body()["choices"][0]["text"])


def test_an_answer_goes_on_where_its_prompt_ends(tmp_path: Path):
    """As vLLM's, and as `transformers` tells it: `The capital is` was answered with `Paris`, and both together were no text."""
    text, words = with_spaces_in_front(tmp_path)
    the, word, er, end = (words[name] for name in ("▁the", "▁word", "er", "</s>"))
    assert answered(text, [the], [word, er]) == " worder"
    assert answered(text, [the, word], [er, the]) == "er the"
    assert answered(text, [the], [word, the], stop=(" the",)) == " word"
    assert answered(text, [end], [word]) == "word", "behind special tokens alone it is a text's first"
    assert answered(text, [the, end], [word]) == " word"
    random = Random(5)
    for _ in range(300):
        prompt, ids = (random.choices([*words.values()], k=random.randint(1, 30)) for _ in range(2))
        whole, said = text.decode([*prompt, *ids]), text.decode(prompt)
        if said.strip() and whole.startswith(said):  # nothing of the prompt reads otherwise with the answer behind it
            assert answered(text, prompt, ids) == whole[len(said) :], (prompt, ids)


@pytest.mark.parametrize("before", range(9))
def test_an_answer_goes_on_in_a_long_run_of_bytes(tmp_path: Path, before: int):
    """Of a script or an emoji that a vocabulary has not (Llama 2's, Mistral's) each character is three or four byte tokens. Where
    the sixteen tokens before the answer began within one, all of the run was U+FFFD, and so was the answer, with 200."""
    text, _ = with_spaces_in_front(tmp_path)
    prompt = in_bytes(text, "▁the", ("မြန်မာ" * 3 + "é" * before).encode())
    assert answered(text, prompt, in_bytes(text, "စာ👍".encode(), "▁word")) == "စာ👍 word"


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_an_answers_text_does_not_depend_on_its_prompt_where_tokens_say_it_all(before: str, after: str):
    prompt, ids = TEXT.encode(before), TEXT.encode(after, add_special=False)
    if ids:
        assert answered(TEXT, prompt, ids) == TEXT.decode(ids)


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    token = TEXT.encode("é")[0]
    pieces, _ = told([token] * 20)
    assert "".join(pieces) == TEXT.decode([token] * 20)
    assert any(pieces[:-1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 12))
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_split_it(at: int, length: int):
    text = "the router keeps a block of keys and values (日本) before noon"
    stop = text[at : at + length]
    pieces, met = told(TEXT.encode(text), stop)
    assert met == stop
    assert "".join(pieces) == text[: text.index(stop)]


def test_the_beginning_of_a_stop_string_is_told_after_all_when_the_rest_does_not_come():
    text = "the router keeps a blo"
    assert "".join(told(TEXT.encode(text), "block")[0]) == text


def test_a_stop_string_before_min_tokens_is_plain_text():
    text, detokenizer = "the router keeps a block", Detokenizer(TEXT, ("keeps",))
    pieces = [detokenizer.add(token, may_stop=False) for token in TEXT.encode(text)]
    assert "".join(piece for piece, _ in pieces) + detokenizer.finish()[0] == text
    assert {stop for _, stop in pieces} == {None}


def test_other_threads_go_on_while_a_long_text_is_tokenised():
    """A thread of its own was no help: Tokenizer.encode stops them all, and with them the loop that streams answers."""
    text, longest_s = "the router sends " * 60_000, 0.0
    encoding = threading.Thread(target=TEXT.encode, args=(text,))
    begun = last = time.perf_counter()
    encoding.start()
    while encoding.is_alive():
        encoding.join(0.001)
        longest_s, last = max(longest_s, time.perf_counter() - last), time.perf_counter()
    assert longest_s < 0.7 * (last - begun)


def template(tmp_path: Path, source: str) -> Text:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model() / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return Text(tmp_path)


def test_the_template_is_the_models_own():
    assert TEXT.render_chat([{"role": "user", "content": "hi"}]) == "<s>user: hi\nassistant: "


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"],
    ids=["reaches-for-classes", "changes-its-input", "refuses"],
)
def test_a_template_that_misbehaves_is_a_bad_request(tmp_path: Path, source: str):
    with pytest.raises(BadRequestError, match="the chat template refused the messages"):
        template(tmp_path, source).render_chat([])


def test_a_template_that_knows_calls_of_tools_writes_them(tmp_path: Path):
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %};{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": "<'é'>", "a": 1}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "4", "tool_call_id": "a"}
    said = """assistant:{"name": "f", "arguments": {"b": "<'é'>", "a": 1}};tool:4a;"""
    assert template(tmp_path, source).render_chat([asked, result]) == said


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}!"}], "a!"),
        ([{"name": "tool_use", "template": "tools"}], None),
        ([{"name": "default"}, "odd", 5], None),
        ([], None),
    ],
    ids=["default", "for-tools-only", "odd", "empty"],
)
def test_of_several_named_templates_the_default_is_the_models_own(tmp_path: Path, named: list[object], said: str | None):
    """Hermes 2 and 3 have two: the model was said to have none. transformers and vLLM take this one where no tools are given."""
    shutil.copy(tiny_model() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    made = Text(tmp_path)
    if said is not None:
        assert made.render_chat([{"role": "user", "content": "a"}]) == said
        return
    with pytest.raises(BadRequestError, match="the model has no chat template"):
        made.render_chat([{"role": "user", "content": "a"}])


def test_a_template_that_does_not_compile_is_named(tmp_path: Path):
    with pytest.raises(ModelFilesError, match="chat template does not compile"):
        template(tmp_path, "{% for %}")


FAILING = {
    "{{ 1 / (messages|length - 1) }}": "ZeroDivisionError: division by zero",
    "{{ messages[0].content.index('zzz') }}": "ValueError: substring not found",
    "{{ messages[0].content.encode('ascii') }}": "UnicodeEncodeError: ",
    "{{ messages[0].content.split('') }}": "ValueError: empty separator",
    "{{ messages[0].content.nothing.more }}": "has no attribute 'nothing'",
    "{{ raise_exception('roles must alternate') }}": "messages: roles must alternate",
}


@pytest.mark.parametrize("source", FAILING)
def test_a_template_that_fails_in_any_way_refuses_the_messages(tmp_path: Path, source: str):
    """It was a 500 without a word."""
    with pytest.raises(BadRequestError) as told:
        template(tmp_path, source).render_chat([{"role": "user", "content": "é"}])
    assert FAILING[source] in str(told.value)
    assert told.value.param == "messages"


class Letters:
    """Tokens that are letters, or several."""

    special: frozenset[str] = frozenset()

    def decode(self, ids: list[str]) -> str:
        return "".join(ids)


@pytest.mark.parametrize(
    ("stops", "text", "before", "met"),
    [
        (("b", "a"), "xaxb", "x", "a"),
        (("a", "b"), "xaxb", "x", "a"),
        (("ax", "a"), "xaxb", "x", "ax"),
        (("zz", "b"), "xaxb", "xax", "b"),
    ],
)
def test_of_several_stop_strings_in_one_token_the_first_in_the_text_ends_it(
    stops: tuple[str, ...], text: str, before: str, met: str
):
    assert Detokenizer(Letters(), stops).add(text) == (before, met)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("may_stop", "told", "met"), [(True, "x", "a"), (False, "xa" + REPLACEMENT, None)], ids=["may-stop", "before-min-tokens"]
)
def test_a_stop_string_that_is_held_with_a_part_of_a_character_ends_the_text(may_stop: bool, told: str, met: str | None):
    """Incident: a last token such as " \\xe2\\x80" was told whole, though the space in it was a stop string."""
    detokenizer = Detokenizer(Letters(), ("a",))  # type: ignore[arg-type]
    assert detokenizer.add("xa" + REPLACEMENT, may_stop=may_stop) == ("", None)  # type: ignore[arg-type]
    assert detokenizer.finish(may_stop=may_stop) == (told, met)
    assert detokenizer.sent == told


@pytest.mark.parametrize(
    ("pieces", "stop", "sent", "met"),
    [
        (["a", "\n", "\n", "b"], ("\n\n",), "a", "\n\n"),
        (["\n\n", "\n", "b", "\n\n", "c"], ("\n\n",), "\n", "\n\n"),
        (["xab", "c", "d"], ("ab", "xabcd"), "", "xabcd"),
        (["xab", "y", "d"], ("ab", "xabcd"), "xabyd", None),
    ],
    ids=["over-the-border", "ends-behind-it", "the-old-one-counts-not", "nor-later"],
)
def test_a_stop_string_that_began_before_min_tokens_counts_when_it_ends_after_them(
    pieces: list[str], stop: tuple[str, ...], sent: str, met: str | None
):
    """As in vLLM. Incident: its first half was told, and the answer went on to max_tokens."""
    detokenizer = Detokenizer(Letters(), stop)  # type: ignore[arg-type]
    first = 2 if pieces[0] == "a" else 1
    for number, piece in enumerate(pieces):
        _, found = detokenizer.add(piece, may_stop=number >= first)  # type: ignore[arg-type]
        if found is not None:
            break
    else:
        found = detokenizer.finish()[1]
    assert (detokenizer.sent, found) == (sent, met)
