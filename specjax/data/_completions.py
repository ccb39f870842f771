"""Prompts with their completions, and which tokens the loss is on.

Axes: B rows, T positions. A mask is on the *token*, not on the position that predicts
it: whoever computes a next-token loss uses `mask[:, 1:]`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Example:
    """One sequence, and which of its tokens the loss is on."""

    tokens: Sequence[int]
    mask: Sequence[bool]


@dataclass(frozen=True)
class PaddedExamples:
    """Examples of one shape, and how many were changed to get there.

    Attributes:
        tokens: `[B, T]` int32, padded on the right.
        lengths: `[B]` int32: only they say what is padding.
        mask: `[B, T]`, where the loss is; False on padding.
        num_cut: examples that lost their end.
        num_dropped: examples that are not among the rows.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    num_cut: int
    num_dropped: int

    @property
    def prompt_lengths(self) -> np.ndarray:
        """`[B]` int32: where the loss begins, and a rollout takes over."""
        return self.mask.argmax(axis=1).astype(np.int32)


def completion_mask(
    tokens: Int[np.ndarray, "B T"],
    prompt_lengths: Int[np.ndarray, " B"],
    eos_token_ids: Collection[int] = (),
    lengths: Int[np.ndarray, " B"] | None = None,
) -> Bool[np.ndarray, "B T"]:
    """Which tokens were generated: from the prompt's end to the first end of text.

    That end of text is included, as the draft has to learn to stop; what follows is
    padding, whatever its id. Nothing is decided by comparing with a padding id, which
    many models share with their end of text.

    Args:
        tokens: `[B, T]`, prompts and completions, padded on the right.
        prompt_lengths: `[B]`.
        eos_token_ids: the ids that end a text.
        lengths: `[B]`, prompt and completion, for rows that were cut off before an end
            of text; None: all T tokens are real unless an end of text comes first.

    Returns:
        `[B, T]`, True on generated tokens.
    """
    position = np.arange(tokens.shape[1])
    generated = position >= np.asarray(prompt_lengths)[:, None]
    if lengths is not None:
        generated &= position < np.asarray(lengths)[:, None]
    ends = generated & np.isin(tokens, list(eos_token_ids))
    ended_before = np.cumsum(ends, axis=1) - ends
    return generated & (ended_before == 0)


def completion_example(
    prompt: Sequence[int],
    completion: Sequence[int],
    eos_token_ids: Collection[int] = (),
) -> Example:
    """A prompt and what was generated, up to and with the first end of text.

    Args:
        prompt: token ids; an end of text among them is an ordinary token.
        completion: token ids; what follows an end of text is left out.
        eos_token_ids: the ids that end a text.

    Returns:
        The example, with the loss on the completion.
    """
    said = []
    for token in completion:
        said.append(int(token))
        if token in eos_token_ids:
            break
    mask = [False] * len(prompt) + [True] * len(said)
    return Example([*map(int, prompt), *said], mask)


def pad_examples(
    examples: Sequence[Example],
    length: int,
    pad_token_id: int,
    *,
    overlong: str = "raise",
    empty: str = "raise",
) -> PaddedExamples:
    """Brings examples to one shape, and counts what that cost.

    Args:
        examples: what to pad.
        length: T.
        pad_token_id: what fills the rest; may be any token, the end of text included.
        overlong: what to do with an example of more tokens: `raise` a ValueError,
            `drop` it, or `cut` its end off. A beginning is never cut: an answer
            without its question teaches nothing.
        empty: what to do with an example that has no token to learn from, as when its
            prompt alone fills the length: `raise` or `drop`.

    Returns:
        The rows, in the order of the examples that stayed.

    Raises:
        ValueError: an example that `overlong` or `empty` does not let pass, or none
            that stays.
    """
    if overlong not in ("raise", "drop", "cut"):
        raise ValueError(f"overlong must be raise, drop or cut, got {overlong!r}")
    if empty not in ("raise", "drop"):
        raise ValueError(f"empty must be raise or drop, got {empty!r}")
    rows, num_cut = [], 0
    for number, example in enumerate(examples):
        tokens, mask = list(example.tokens), list(example.mask)
        if len(tokens) != len(mask):
            raise ValueError(
                f"example {number} has {len(tokens)} tokens but a mask of {len(mask)}"
            )
        too_long = len(tokens) > length
        if too_long and overlong == "raise":
            raise ValueError(
                f"example {number} has {len(tokens)} tokens, more than the {length} of "
                "length; allow more, or cut or drop it"
            )
        if too_long and overlong == "drop":
            continue
        # The first token has nothing before it to be predicted from.
        if not any(mask[1:length]):
            if empty == "raise":
                raise ValueError(
                    f"example {number} has no token to learn from among its first "
                    f"{length}; give it a completion, or drop it"
                )
            continue
        num_cut += too_long
        rows.append((tokens[:length], mask[:length]))
    if not rows:
        raise ValueError(f"none of {len(examples)} examples can be learnt from")
    return _padded(rows, length, pad_token_id, num_cut, len(examples) - len(rows))


def _padded(
    rows: Sequence[tuple[list[int], list[bool]]],
    length: int,
    pad_token_id: int,
    num_cut: int,
    num_dropped: int,
) -> PaddedExamples:
    tokens = np.full((len(rows), length), pad_token_id, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for row, (row_tokens, row_mask) in enumerate(rows):
        tokens[row, : len(row_tokens)] = row_tokens
        mask[row, : len(row_mask)] = row_mask
    mask[:, 0] = False
    lengths = np.asarray([len(row_tokens) for row_tokens, _ in rows], np.int32)
    return PaddedExamples(tokens, lengths, mask, num_cut, num_dropped)
