"""A byte-level BPE tokeniser trained in seconds, and fast encoding of many texts."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SWITCH = "TOKENIZERS_PARALLELISM"
_NUM_BYTES = 256
_TEXTS_A_CALL = 256


def train_bpe(
    texts: Sequence[str],
    vocab_size: int = 1024,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    max_chars: int = 4_000_000,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokeniser.

    Every byte has a token, so that `decode(encode(text)) == text` for any text.

    Args:
        texts: what to learn from.
        vocab_size: V, special tokens and the 256 bytes included; a text with too few
            different words gives fewer.
        special_tokens: they get the first ids. The first one is begin of text, end of
            text, padding and unknown token at once: masks go by length, not by id.
        max_chars: texts evenly spread over `texts` are left out until about this many
            characters stay; more changes the merges little and takes longer.

    Returns:
        The tokeniser. It adds no special token by itself.

    Raises:
        ValueError: no text, no special token, or a vocabulary that cannot hold them.

    Example:
        >>> tokenizer = train_bpe(["to be or not to be"], vocab_size=300)
        >>> tokenizer.decode(tokenizer("to be")["input_ids"])
        'to be'
    """
    special_tokens = list(special_tokens)
    if not special_tokens or len(set(special_tokens)) != len(special_tokens):
        raise ValueError(
            f"special_tokens must be one or more different texts, got {special_tokens}"
        )
    if vocab_size < _NUM_BYTES + len(special_tokens):
        raise ValueError(
            f"vocab_size must be at least {_NUM_BYTES + len(special_tokens)} "
            f"(256 bytes and {len(special_tokens)} special tokens), got {vocab_size}"
        )
    total = sum(map(len, texts))
    if total == 0:
        raise ValueError("texts must hold some text to learn from, got none")
    every = max(1, round(total / max_chars))

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _in_parallel():
        tokenizer.train_from_iterator(texts[::every], trainer)
    first = special_tokens[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=first,
        pad_token=first,
        unk_token=first,
        additional_special_tokens=special_tokens[1:],
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[np.ndarray]:
    """Encodes many texts, without special tokens, on all cores.

    Args:
        tokenizer: any tokeniser of `transformers`.
        texts: what to encode.

    Returns:
        One `[T]` int32 array a text.
    """
    arrays = []
    with _in_parallel():
        for start in range(0, len(texts), _TEXTS_A_CALL):
            encoded = tokenizer(
                list(texts[start : start + _TEXTS_A_CALL]),
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,  # no word about texts longer than the model's context
            )
            arrays += [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
    return arrays


@contextlib.contextmanager
def _in_parallel() -> Iterator[None]:
    """Uses all cores inside, unless the user has set the switch to something else.

    Behind it the switch is off: a process forked later would otherwise print a warning,
    or hang.
    """
    if _SWITCH in os.environ and os.environ[_SWITCH] != _OURS:
        yield
        return
    os.environ[_SWITCH] = "true"
    try:
        yield
    finally:
        os.environ[_SWITCH] = _OURS


# Means false to the library, and tells our setting from the user's.
_OURS = "off"
