"""Convert nanochat's tokenizer between tiktoken's ranks (tokenizer.pkl) and Hugging Face's tokenizer.json.

tiktoken merges any two pieces whose concatenation is a token, lowest rank first; the library `tokenizers` merges listed
pairs. Both agree if every split of a token into two tokens is listed, ordered by rank. Each conversion is verified on
sample texts, because the libraries use different regular expression engines.
"""

from __future__ import annotations

import json
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from nano_inference.nanochat.dialogue import BOS_TOKENS
from nano_inference.nanochat.pickled import PickledEncoding, encoding_of
from nano_inference.text.fast import BYTE_OF_CHAR, CHAR_OF_BYTE, set_bos_eos
from nano_inference.types import ModelError

SAMPLES = (  # texts on which both forms must agree, in addition to the text of every token
    "Hello world! I'm fine, you're not; we'LL see what they'd've SAID. It's 'quoted'",
    "1 22 333 4444 55555 3.14159 1,000,000 ٣٤٥ ²³ Ⅷ x86_64 0xDEADBEEF 2026-07-03",
    "def f(x):\n    return {\n\t'a': x**2,  # comment\n    }\n\n\nif __name__ == '__main__':\r\n\tprint(f(3))\r\n",
    "   leading, trailing   \n\n  \n\t\t \u00a0\u2003\u3000 spaces\u200b \n",
    "Ünïcödé: café naïve Straße ſ K İı ﬁ ǅ e\u0301 ñ",
    "日本語のテキスト。中文文本，한국어 텍스트 ไทย हिन्दी العربية עברית Ελληνικά Кириллица",
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪 ❤️ \U0001d54f \U0010ffff\ufeff\x00\x7f",
    "http://example.org/a?b=c&d=%20#e <|not_special|> [INST] ```json\n{}\n``` $\\frac{1}{2}$ … — “”",
    "",
    " ",
    "aaaaaaaaaaaaaaaaaaaaaaaa" * 3 + "\n" * 9 + "!" * 40,
)


def to_hf(fields: PickledEncoding, bos: str, where: str) -> tokenizers.Tokenizer:
    """Return the tokenizer for a tokenizer.json; by default it prepends `bos` to a text.

    Raises `ModelError` naming `where` if the format cannot represent it or the ids of a sample differ.
    """
    ranks, special = fields.mergeable_ranks, fields.special_tokens
    pieces = {word: "".join(CHAR_OF_BYTE[byte] for byte in word) for word in ranks}
    vocabulary = {pieces[word]: rank for word, rank in ranks.items()}
    cuts = ((word[:i], word[i:]) for word in sorted(ranks, key=lambda word: ranks[word]) for i in range(1, len(word)))
    merges = [(pieces[left], pieces[right]) for left, right in cuts if left in ranks and right in ranks]
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    try:
        cut = pre_tokenizers.Split(Regex(fields.pat_str), "isolated")
    except Exception as error:  # the library raises bare Exception for an invalid pattern
        raise ModelError(f"{where}: pat_str cannot be used in a tokenizer.json: {error}") from None
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    core.decoder = decoders.ByteLevel()
    ordered = sorted(special, key=lambda text: special[text])
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ordered])
    for text, token in special.items():
        if core.token_to_id(text) != token:
            raise ModelError(f"{where}: the special token {text!r} cannot have the id {token} in tokenizer.json")
    set_bos_eos(core, bos, None)
    check_same(core, encoding_of(fields), where)
    return core


def from_hf(path: Path) -> PickledEncoding:
    """Return the four fields of a tokenizer.pkl from a tokenizer.json.

    Raises `ModelError` naming the file unless it is a byte-level BPE with a tiktoken equivalent: no normaliser, one
    pattern, ids equal to merge ranks followed by special tokens, and the same ids for every sample.
    """
    try:
        core = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception for every damaged file
        raise ModelError(f"{path}: cannot be read as a tokenizer.json: {error}") from None
    added = sorted(core.get_added_tokens_decoder().items())
    plain = [entry.content for _, entry in added if not entry.special]
    if plain:
        raise ModelError(f"{path}: the added token {ascii(plain[0])[:80]} is not special; tiktoken has no such tokens")
    special = {entry.content: token for token, entry in added}
    if not any(text in special for text in BOS_TOKENS):
        raise ModelError(f"{path}: has neither of the special tokens {' and '.join(BOS_TOKENS)}")
    state = json.loads(core.to_str())
    parts = state["pre_tokenizer"] or {}
    first, *rest = parts.get("pretokenizers", [parts])
    is_cut = first.get("type") == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    is_bytes = [part.get("type") for part in rest] == ["ByteLevel"]
    if state["normalizer"] is not None or not is_cut or not is_bytes or "Regex" not in first["pattern"]:
        raise ModelError(f"{path}: must split with one pattern and have no normalizer, as nanochat's tokenizer")
    if rest[0]["add_prefix_space"] or rest[0]["use_regex"]:
        raise ModelError(f"{path}: ByteLevel must not add spaces or split, as in nanochat's tokenizer")
    if not isinstance(core.model, models.BPE):
        raise ModelError(f"{path}: the model must be BPE, got {type(core.model).__name__}")
    ranks: dict[bytes, int] = {}
    for piece, token in sorted(core.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
        if piece in special:
            continue
        if any(char not in BYTE_OF_CHAR for char in piece):
            raise ModelError(f"{path}: the token {ascii(piece)[:80]} has characters that represent no byte")
        ranks[bytes(BYTE_OF_CHAR[char] for char in piece)] = token
    if list(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path}: the ids of its {len(ranks)} ordinary tokens must be 0 to {len(ranks) - 1}")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path}: not every byte has a token")
    pattern = str(first["pattern"]["Regex"])
    fields = PickledEncoding(name="rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    check_same(core, encoding_of(fields), str(path))
    return fields


def check_same(core: tokenizers.Tokenizer, encoding: tiktoken.Encoding, where: str) -> None:
    """Raise `ModelError` naming the first sample text for which the ids differ.

    Samples are also the texts of all ordinary tokens that are valid UTF-8 and contain no special token.
    """
    texts = [(data, data.decode("utf-8", "ignore")) for data in encoding.token_byte_values()]
    special = encoding.special_tokens_set
    own = (text for data, text in texts if text.encode() == data and not any(word in text for word in special))
    for text in (*SAMPLES, *own):
        if core.encode(text, add_special_tokens=False).ids != encoding.encode_ordinary(text):
            raise ModelError(f"{where}: tokenizer.json and tiktoken would give different ids for {ascii(text)[:80]}")
