"""Between two tokenizers: the verifier's ids as a drafter with words of its own reads them, and back.

    reading     a token of the verifier -> the drafter's token that writes the same bytes; where there is none, the
                drafter's tokens for these bytes (pieces). Token by token, so a text's rows never change as it grows
    proposing   a word of the drafter -> the verifier's token that writes the same bytes; a word without one, and the
                drafter's mask, pad and special ids, cannot be proposed: but what ends the verifier's texts can
    the same    where both tokenizers give an id the same string, it is mapped to itself, whatever else writes its bytes

Rows are numbered so that a text of mapped tokens is its own row ids: 0 .. V - 1 are the verifier's ids, V is the mask,
V + 1 + w is the drafter's token w standing in a text as a piece. Special tokens match by their strings.

Letters: V the verifier's ids, V_d draft words.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte of a SentencePiece vocabulary
WORDS = "words.safetensors"


class Token(NamedTuple):
    text: str  # as the vocabulary has it
    bytes: bytes  # what it writes
    special: bool


@dataclass(frozen=True)
class Tokens:
    """A tokenizer's tokens by id (None where an id has none), and how it reads a text."""

    tokens: list[Token | None]
    inner: Any  # of transformers, with a backend of `tokenizers`

    @property
    def pad(self) -> int | None:
        return self.inner.pad_token_id

    @cached_property
    def of_bytes(self) -> dict[bytes, int]:
        """Ordinary tokens by what they write. Of several a whole word comes before a byte, then the lower id."""
        found: dict[bytes, int] = {}
        for id_, token in sorted(self.ordinary(), key=lambda item: bool(BYTE.fullmatch(item[1].text))):
            found.setdefault(token.bytes, id_)
        return found

    @cached_property
    def of_special(self) -> dict[str, int]:
        return {token.text: id_ for id_, token in enumerate(self.tokens) if token is not None and token.special}

    def ordinary(self) -> list[tuple[int, Token]]:
        return [(id_, token) for id_, token in enumerate(self.tokens) if token is not None and not token.special]

    def spell(self, wanted: Sequence[bytes]) -> list[list[int]]:
        """Ids for these bytes: as the tokenizer reads them as a text of their own, if that writes them exactly."""
        texts = [part.decode("utf-8", errors="replace") for part in wanted]
        read = self.inner.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            ids if self._writes(ids := encoding.ids) == part else self._longest(part)
            for encoding, part in zip(read, wanted, strict=True)
        ]

    def _writes(self, ids: Sequence[int]) -> bytes | None:
        found = [self.tokens[id_] if id_ < len(self.tokens) else None for id_ in ids]
        if any(token is None or token.special for token in found):
            return None
        return b"".join(token.bytes for token in found if token is not None)

    def _longest(self, wanted: bytes) -> list[int]:
        """The longest token that fits, again and again: for bytes that are no text, or read with a space in front."""
        ids, start = list[int](), 0
        while start < len(wanted):
            ends = range(min(len(wanted), start + self._most), start, -1)
            end = next((end for end in ends if wanted[start:end] in self.of_bytes), None)
            if end is None:  # some vocabularies lack rare bytes
                if self.inner.unk_token_id is None:
                    raise ValueError(
                        f"the drafter's tokenizer has no token for byte {wanted[start]:#04x} of {wanted!r}, which the "
                        "verifier can write, and none for what is unknown; use another drafter"
                    )
                ids.append(self.inner.unk_token_id)
                start += 1
                continue
            ids.append(self.of_bytes[wanted[start:end]])
            start = end
        return ids

    @cached_property
    def _most(self) -> int:
        return max(map(len, self.of_bytes))


def tokens_of(inner: Any) -> Tokens:
    """The tokens of a tokenizer of transformers, with what each writes."""
    backend = json.loads(inner.backend_tokenizer.to_str())
    byte_level = "ByteLevel" in json.dumps([backend.get("decoder"), backend.get("pre_tokenizer")])
    added, letters = inner.added_tokens_decoder, _letters()
    vocabulary: dict[str, int] = inner.get_vocab()
    found: list[Token | None] = [None] * (max(vocabulary.values()) + 1)
    for text, id_ in vocabulary.items():
        if id_ in added:
            found[id_] = Token(text, text.encode(), bool(added[id_].special) or text in inner.all_special_tokens)
        elif byte_level and all(letter in letters for letter in text):
            found[id_] = Token(text, bytes(letters[letter] for letter in text), text in inner.all_special_tokens)
        elif not byte_level and (byte := BYTE.fullmatch(text)):
            found[id_] = Token(text, bytes([int(byte[1], 16)]), False)
        else:
            found[id_] = Token(text, text.replace("\u2581", " ").encode(), text in inner.all_special_tokens)
    return Tokens(found, inner)


def _letters() -> dict[str, int]:
    """The byte behind each letter of a byte-level vocabulary: printable ones are themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


@dataclass(frozen=True)
class Words:
    """The map between a verifier's ids and a drafter's."""

    own_V: Tensor  # the drafter's id of each of the verifier's; -1 where it is read in pieces
    pieces: dict[int, list[int]]  # the drafter's ids of those
    words_Vd: Tensor  # the drafter's ids of what it can propose
    d2t_Vd: Tensor  # and the verifier's
    same: bool  # every ordinary id of the verifier means the same to the drafter

    def read(self, id_: int) -> tuple[int, ...]:
        """The rows of one token of a text."""
        if id_ in self.pieces:
            return tuple(len(self.own_V) + 1 + own for own in self.pieces[id_])
        return (id_,)


def match(verifier: Tokens, drafter: Tokens, *, vocab_size: int, rows: int, mask: int, end_ids: Sequence[int]) -> Words:
    """vocab_size: V. rows: of the drafter's embedding. mask: its mask's id. end_ids: of the verifier.

    ValueError where a token of the verifier cannot be read.
    """
    if not 0 <= mask < rows:
        raise ValueError(
            f"models.drafter.mask_token_id: {mask} is no row of the drafter's {rows} embeddings; correct it"
        )
    own_V = torch.full((vocab_size,), -1)
    open_: dict[int, bytes] = {}
    for id_, token in enumerate(verifier.tokens[:vocab_size]):
        if token is None:
            own_V[id_] = mask  # no text holds it
            continue
        twin = drafter.tokens[id_] if id_ < len(drafter.tokens) else None
        same = twin is not None and (twin.text, twin.special) == (token.text, token.special)
        own = (
            id_ if same else drafter.of_special.get(token.text) if token.special else drafter.of_bytes.get(token.bytes)
        )
        if own is not None and own < rows:
            own_V[id_] = own
        else:
            open_[id_] = token.bytes
    own_V[len(verifier.tokens) :] = mask
    pieces = dict(zip(open_, drafter.spell(list(open_.values())), strict=True))
    chosen: dict[int, int] = {}
    for id_, token in enumerate(verifier.tokens[:vocab_size]):
        own = int(own_V[id_])
        if token is None or own < 0 or own == mask or (id_ not in end_ids and (token.special or own == drafter.pad)):
            continue
        best = verifier.of_bytes.get(token.bytes)  # of several that write the same, the one a text is likelier to hold
        if own not in chosen or own == id_ or (chosen[own] != own and best == id_):
            chosen[own] = id_
    ordinary = torch.tensor([id_ for id_, _ in verifier.ordinary() if id_ < vocab_size])
    added = torch.tensor(sorted(verifier.inner.added_tokens_decoder), dtype=torch.long)
    ordinary = ordinary[~torch.isin(ordinary, added)]
    words = sorted(chosen)
    return Words(
        own_V,
        pieces,
        torch.tensor(words, dtype=torch.long),
        torch.tensor([chosen[own] for own in words], dtype=torch.long),
        bool((own_V[ordinary] == ordinary).all()),
    )


def save_words(folder: Path, words: Words) -> None:
    flat = [own for ids in words.pieces.values() for own in ids]
    counts = [len(ids) for ids in words.pieces.values()]
    state = {
        "own": words.own_V,
        "words": words.words_Vd,
        "d2t": words.d2t_Vd,
        "in_pieces": torch.tensor(list(words.pieces), dtype=torch.long),
        "counts": torch.tensor(counts, dtype=torch.long),
        "pieces": torch.tensor(flat, dtype=torch.long),
        "same": torch.tensor([words.same]),
    }
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WORDS)


def load_words(folder: Path) -> Words:
    state = load_file(folder / WORDS)
    ids = state["pieces"].split(state["counts"].tolist()) if len(state["counts"]) else ()
    pieces = {int(id_): own.tolist() for id_, own in zip(state["in_pieces"], ids, strict=True)}
    return Words(state["own"], pieces, state["words"], state["d2t"], bool(state["same"]))
