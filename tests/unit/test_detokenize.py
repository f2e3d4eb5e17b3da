from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer, decoders

from cog_triton.text.detokenize import Detokenizer, Vocabulary
from cog_triton.text.tokenizer import EngineTokenizer

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
NO_DECODER = byte_fallback()
NO_DECODER.decoder = None
METASPACE = byte_fallback()
METASPACE.decoder = decoders.Metaspace()
ALL = [BYTE_LEVEL, BYTE_FALLBACK, NO_DECODER, METASPACE]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None) -> list[str]:
    """The text of each chunk, and of the flush; one id a chunk unless `cuts` says where."""
    edges = list(range(len(ids) + 1)) if cuts is None else [0, *sorted(cuts), len(ids)]
    detokenizer = Detokenizer.by(Vocabulary(tokenizer))
    chunks = [detokenizer.feed(ids[start:end]) for start, end in pairwise(edges)]
    return [*chunks, detokenizer.flush()]


@st.composite
def ids_and_cuts(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[int]]:
    """Random ids (with some beyond the vocabulary), or a text's ids with some struck out."""
    tokenizer = draw(st.sampled_from(ALL))
    ids = draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=24))
    if draw(st.booleans()):
        ids += [i for i in tokenizer.encode(draw(st.text())).ids if draw(st.integers(0, 9))]
    return tokenizer, ids, draw(st.lists(st.integers(0, len(ids)), max_size=8))


@settings(max_examples=10 * settings.default.max_examples)
@given(ids_and_cuts())
def test_chunks_add_up_to_the_whole(case: tuple[Tokenizer, list[int], list[int]]) -> None:
    tokenizer, ids, cuts = case
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(st.binary(max_size=6)), st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]))
def test_any_bytes_decode_as_in_one_call(parts: list[bytes], tokenizer: Tokenizer) -> None:
    spelling = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    if tokenizer is BYTE_LEVEL:
        # The alphabet lists the printable bytes first: learn the spelling from the encoder.
        spelling = {byte: byte for byte in range(2, 258)}
    ids = [spelling[byte] for part in parts for byte in part if byte in spelling]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@pytest.mark.parametrize(
    "text", ["😀", "é日本語", "a👩‍👩‍👧‍👦b", "  two  spaces ", "\ufffd", "x\ufffd\ufffdy"]
)
def test_no_chunk_has_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    chunks = stream(tokenizer, tokenizer.encode(text).ids)
    assert "".join(chunks) == text
    assert sum(chunk.count("\ufffd") for chunk in chunks) == text.count("\ufffd")


BYTES = [BYTE_FALLBACK.token_to_id(f"<0x{value:02X}>") for value in "日".encode()]
PIECES = {piece: BYTE_FALLBACK.token_to_id(piece) for piece in ("!", "\ufffd", "▁", "▁he", "▁w")}


@pytest.mark.parametrize(
    ("tokenizer", "ids", "chunks"),
    [
        pytest.param(BYTE_LEVEL, [], [""], id="no ids"),
        pytest.param(
            BYTE_LEVEL, BYTE_LEVEL.encode("😀").ids, ["", "", "", "😀", ""], id="last byte"
        ),
        pytest.param(BYTE_FALLBACK, [PIECES["\ufffd"]], ["\ufffd", ""], id="a genuine U+FFFD"),
        pytest.param(BYTE_FALLBACK, [*BYTES, PIECES["!"]], ["", "", "", "日!", ""], id="byte run"),
        pytest.param(
            BYTE_FALLBACK,
            [*BYTES, BYTES[0]],
            ["", "", "", "", "\ufffd" * 4],
            id="a bad byte spoils it",
        ),
        pytest.param(
            BYTE_FALLBACK,
            [PIECES[piece] for piece in ("▁", "▁he", "▁", "▁w")],
            ["", " he", " ", " w", ""],
            id="only the first space is stripped",
        ),
    ],
)
def test_text_is_released_as_soon_as_it_cannot_change(
    tokenizer: Tokenizer, ids: list[int], chunks: list[str]
) -> None:
    assert stream(tokenizer, ids) == chunks


def test_special_tokens_are_left_out_and_added_ones_kept() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>a<tool> ü<|im_end|>").ids
    assert "".join(stream(BYTE_LEVEL, ids)) == "a<tool> ü"


@pytest.mark.parametrize("tokenizer", [BYTE_FALLBACK, METASPACE])
def test_no_id_is_decoded_more_than_three_times(tokenizer: Tokenizer) -> None:
    """Once as text, twice as context: a long run costs no more a token than a short one."""
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: bool) -> str:
            decoded.append(len(ids))
            return str(tokenizer.decode(ids, **options))

    detokenizer = Detokenizer.by(Vocabulary(Counting()))
    byte, word = tokenizer.token_to_id("<0xE6>"), tokenizer.token_to_id("▁he")
    ids = [byte] * 2000 + [word] * 2000
    for token_id in ids:
        detokenizer.feed([token_id])
    assert 0 < sum(decoded) <= 3 * len(ids)


@settings(max_examples=5 * settings.default.max_examples)
@given(ids_and_cuts())
def test_visible_special_tokens_are_part_of_the_text(
    case: tuple[Tokenizer, list[int], list[int]],
) -> None:
    tokenizer, ids, _ = case
    added = tokenizer.get_added_tokens_decoder().values()
    specials = [token.content for token in added if token.special]
    detokenizer = Detokenizer.by(Vocabulary(tokenizer, specials))
    text = "".join([*(detokenizer.feed([i]) for i in ids), detokenizer.flush()])
    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    (hidden, *shown) = specials
    shown_ids = [i for i in ids if tokenizer.id_to_token(i) != hidden]
    detokenizer = Detokenizer.by(Vocabulary(tokenizer, shown))
    text = detokenizer.feed(ids) + detokenizer.flush()
    assert text == tokenizer.decode(shown_ids, skip_special_tokens=False)


def test_streams_of_a_tokenizer_look_a_token_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    look_up = Vocabulary.look_up

    def counted(self: Vocabulary, token_id: int) -> str | None:
        looked_up.append(token_id)
        return look_up(self, token_id)

    monkeypatch.setattr(Vocabulary, "look_up", counted)
    engine = EngineTokenizer(byte_level())
    ids = engine.encode("größer als 日本")
    for _ in range(3):
        stream = engine.detokenizer()
        assert "".join([stream.feed([one]) for one in ids]) + stream.flush() == "größer als 日本"
    assert sorted(looked_up) == sorted(set(ids))
    other = replace(engine, tokenizer=byte_level())
    other.detokenizer().feed(ids)
    assert len(looked_up) == 2 * len(set(ids)), "a tokenizer knows its own tokens only"


def test_streams_that_show_other_special_tokens_are_apart() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<a>", "<b>"])
    engine = EngineTokenizer(tokenizer)
    ids = tokenizer.encode("x<a>y<b>z", add_special_tokens=False).ids
    shown = [engine.detokenizer(visible).feed(ids) for visible in ((), ["<a>"], {"<b>", "<a>"})]
    assert shown == ["xyz", "x<a>yz", "x<a>y<b>z"]
