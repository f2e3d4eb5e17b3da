"""Tokenizer of the mock engine: one token for each word of a short list, else one for each byte."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Some characters are several bytes, each a token of its own, and so span responses.
PASSAGE = """\
The sea was calm that morning, and the boats lay still in the harbour. An old fisherman sat on \
the wall and mended his net. “You should go out,” said the girl, “the weather is good.” He \
smiled. “The weather is good,” he said, “but the fish do not know it yet.” So they drank coffee \
at the Café Größenwahn, where a sign in the window read 本日休業, which nobody minded, because \
nobody could read it.

In the evening a wind came up from the south, warm and full of salt. The lamps along the shore \
were lit, one after another, and the boats went out after all 🌊⛵. The girl counted them: one, \
two, three, four, and then the fifth, with a red sail. She counted them again when they came home, \
long after midnight, and there were five, and the holds were full. “Well,” said the old man, “now \
they know.”

"""

# Words besides those of the passage.
WORDS = """
about above across again against all almost also always am among an and animal another answer any
are around as ask away back be became because become been before began begin being below best better
between big bird black blue boat body book both boy bring brought brown build but by call called
came can capital car carry cat change child children city clear close cold come country course cut
dark day deep did different do does dog done door down draw dry each earth eat eight else end enough
even ever every example explain eye face fact fall family far fast father feel few field find fire
first fish five fly follow food foot for found four fox France friend from front game gave get girl
give go good got great green ground group grow had half hand hard has have he head hear heard heart
help her here high him his home hot hour house how hundred idea if important in inside into is
island it its just keep kind king knew know land language large last late lazy learn leave left
letter life light like line list little live long look low machine made make man many map mark may
me mean men might mile mind money moon more morning most mother mountain move much music must my
name near need never new next night nine no north not note nothing now number numeral of off often
old on once one only open or order other our out over own page paper part people piece place plan
plant play point poor press problem product pull put question quick rain ran reach read ready real
red remember rest right river road rock room round rule run said same saw say school sea second see
seem self sentence serve seven several shape she ship short should show side simple since sing sit
six sky sleep slow small snow so some song soon sound south space stand star start state stay step
still stone stop story street strong study such sun sure system table take talk teach tell ten test
than that the their them then there these they thing think this those thought thousand three through
time to today together told too took top town travel tree true try turn two under until up upon us
use very voice walk want war warm was watch water way we week well went were west what wheel when
where which while white who whole why will wind with without woman wonder wood word work world would
write year yes yet you young your
"""


_OPENING, END = "<|im_start|>", "<|im_end|>"
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": END,
    "chat_template": "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
"""Content of tokenizer_config.json."""


def make() -> Tokenizer:
    """Make a byte-level BPE as GPT-2's, without merges: known words are one token, others bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = dict.fromkeys([_OPENING, END, *alphabet, *_spelled_words()])
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_OPENING, END])
    return tokenizer


def spelled(text: str) -> str:
    """A text in the byte alphabet, as tokens are spelled."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))


def _spelled_words() -> list[str]:
    words = sorted({*WORDS.split(), *filter(str.isascii, re.findall(r"\w+", PASSAGE))})
    cases = dict.fromkeys(form for word in words for form in (word, word.capitalize()))
    return [spelled(space + word) for word in cases for space in ("", " ")]
