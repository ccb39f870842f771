"""Tokenisers: loading, comparing, and the bytes that each token stands for."""

import json
from pathlib import Path
from typing import Any

from specjax.core import Checkpoint

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def folder_tokenizer(folder: Path) -> Any:
    """The tokeniser of a Hugging Face folder, or None where it has none.

    A tokenizer.json is taken as it is: `AutoTokenizer` would rebuild some of them from
    the vocabulary by the rules of the class that tokenizer_config.json names.

    Raises:
        ValueError: the files are damaged.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None
    # Imported one by one: AutoTokenizer imports torch where it is installed.
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Kind
    else:
        from transformers import AutoTokenizer as Kind
    try:
        return Kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"the tokeniser files in {str(folder)!r} cannot be read ({error}); "
            "download or export the folder again"
        ) from error


def check_same_tokenizer(target: Checkpoint, draft: Checkpoint) -> None:
    """Makes sure that two checkpoints mean the same text by the same ids.

    Sizes say nothing: two tokenisers of equal size may number their tokens differently,
    and one tokeniser may serve models whose embeddings are padded to different sizes.
    So the maps from token to id are compared. Without a tokeniser on either side there
    is nothing to compare.

    Args:
        target: the model that verifies or teaches.
        draft: the model that drafts or learns.

    Raises:
        ValueError: the maps differ; names the first token (by id) that does.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differ = [t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t)]
    first = min(differ, key=lambda t: (min(ours.get(t, 1e18), theirs.get(t, 1e18)), t))

    def place(vocab: dict[str, int]) -> str:
        return f"id {vocab[first]}" if first in vocab else "no id"

    raise ValueError(
        f"target and draft need the same tokeniser, but {len(differ)} tokens differ: "
        f"{first!r} has {place(ours)} in the target ({target.source or 'unnamed'}) and "
        f"{place(theirs)} in the draft ({draft.source or 'unnamed'}); take a draft "
        "trained with the target's tokeniser"
    )


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The raw bytes that each token adds to the decoded text.

    Joined over a sequence they are the text in UTF-8, which one alone need not be.
    (SentencePiece and word tokenisers drop the space that a text begins with.)

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocab_size: V of the model; ids without a token (padding) give `b""`.

    Returns:
        V entries; special tokens give `b""`.

    Raises:
        ValueError: the tokeniser's decoder is not byte-level, SentencePiece or words.
    """
    try:
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    except AttributeError:
        raise ValueError(
            "token_bytes needs a PreTrainedTokenizerFast, got "
            f"{type(tokenizer).__name__}"
        ) from None
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        to_bytes = _from_byte_level
    elif not kinds or any("▁" in json.dumps(s, ensure_ascii=False) for s in steps):
        to_bytes = _from_sentencepiece if kinds else _from_word
    else:
        raise ValueError(
            "token_bytes knows byte-level, SentencePiece and word tokenisers, got a "
            f"decoder of {', '.join(sorted(kinds))}"
        )
    added = tokenizer.added_tokens_decoder
    special = {i for i, t in added.items() if t.special} | set(
        tokenizer.all_special_ids
    )
    found = [b""] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index >= vocab_size or index in special:
            continue
        found[index] = token.encode() if index in added else to_bytes(token)
    return found


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder.get("decoders", [decoder])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = {chr(b): b for b in plain}
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


_LETTERS = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    # A letter outside the alphabet stands for itself, as in the decoder.
    return b"".join(
        bytes([_LETTERS[c]]) if c in _LETTERS else c.encode() for c in token
    )


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _from_word(token: str) -> bytes:
    return b" " + token.encode()
