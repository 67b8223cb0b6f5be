"""Open instructions without a data set: the verifier writes them itself (Magpie, arXiv 2406.08464).

An instruction-tuned model that is given its chat template up to the user's header continues with what users
ask. Sampled in batches; attempt i has its own coins, so the batch size changes nothing in exact arithmetic.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.common.decode import Decoded, decode_batch
from stages.download.items import Item, words
from stages.download.params import Magpie

SPECIAL = re.compile(r"<\|[^|>]*\|>|\ufffd")  # template tokens spelled out, or bytes that are no text


def from_magpie(source: Magpie, *, folder: Path, dtype: Any, device: str) -> list[Item]:
    """Instructions that are finished, readable, long enough and not repeated."""
    from tqdm import tqdm

    from stages.common.models import load_verifier
    from stages.common.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    verifier = load_verifier(folder, dtype=dtype, device=device)
    header = tokenizer.user_turn_prefix()

    def advance(tokens: int, finished: int) -> None:
        bar.update(finished)

    with tqdm(total=source.attempts, desc="magpie", unit="prompt", disable=None) as bar:
        decoded = decode_batch(
            verifier,
            [header] * source.attempts,
            keys=[f"magpie/{index}" for index in range(source.attempts)],
            seed=source.seed,
            temperature=source.temperature,
            max_new_tokens=source.max_new_tokens,
            batch_size=source.batch_size,
            progress=advance,
        )
    texts = [tokenizer.decode(answer.output_ids) for answer in decoded]
    return keep(texts, decoded, min_words=source.min_words)


def keep(texts: Sequence[str], decoded: Sequence[Decoded], *, min_words: int) -> list[Item]:
    """Drops what ran into the limit, is empty, short or unreadable. Repeats are left to the corpus."""
    return [
        Item(f"{index}", text.strip(), None, "magpie")
        for index, (text, answer) in enumerate(zip(texts, decoded, strict=True))
        if answer.finish_reason == "stop" and len(words(text)) >= min_words and not SPECIAL.search(text)
    ]
