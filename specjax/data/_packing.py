"""From documents and prompts of any length to arrays of a fixed shape.

Axes: N sequences, B rows, P prompt positions.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

Tokens = Sequence[int] | np.ndarray


def pack(
    documents: Sequence[Tokens], length: int, eos_token_id: int
) -> Int[np.ndarray, "N T"]:
    """Lays documents end to end and cuts the stream into sequences.

    An end of text follows every document. No token is lost but the tail of the stream
    that does not fill a sequence: fewer than `length` tokens.

    Args:
        documents: token ids of each document.
        length: T, tokens a sequence.
        eos_token_id: what separates documents.

    Returns:
        `[N, T]` int32.

    Raises:
        ValueError: the documents do not fill one sequence.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    eos = np.asarray([eos_token_id], np.int32)
    pieces = [np.asarray(p, np.int32) for d in documents for p in (d, eos)]
    stream = np.concatenate(pieces) if pieces else np.zeros((0,), np.int32)
    num_sequences = len(stream) // length
    if num_sequences == 0:
        raise ValueError(
            f"{len(documents)} documents come to {len(stream)} tokens, "
            f"fewer than one sequence of length {length}"
        )
    return stream[: num_sequences * length].reshape(num_sequences, length)


@dataclass(frozen=True)
class Batches:
    """Which examples batch number n holds: a pure function of the seed and n.

    There is no iterator to save: a run that resumes at step n asks for batch n, in the
    middle of an epoch too. Each epoch has an order of its own and shows every example
    once; a batch may hold the end of one epoch and the start of the next.

    Attributes:
        num_examples: how many there are to draw from.
        batch_size: B.
        seed: of the order.

    Example:
        >>> batches = Batches(num_examples=5, batch_size=2, seed=0)
        >>> sorted(int(i) for n in range(5) for i in batches[n])
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    num_examples: int
    batch_size: int
    seed: int = 0

    def __post_init__(self):
        for name in ("num_examples", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def __getitem__(self, n: int) -> np.ndarray:
        """Returns the indices `[B]` of batch `n`, counted from 0 over all epochs."""
        if n < 0:
            raise IndexError(f"batches are counted from 0, got {n}")
        drawn = np.arange(n * self.batch_size, (n + 1) * self.batch_size)
        epoch, place = np.divmod(drawn, self.num_examples)
        indices = np.empty_like(drawn)
        for e in np.unique(epoch):
            order = _order(self.seed, int(e), self.num_examples)
            indices[epoch == e] = order[place[epoch == e]]
        return indices

    def epoch(self, n: int) -> float:
        """How many times the examples have been seen before batch `n`."""
        return n * self.batch_size / self.num_examples


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    # The raw stream of a bit generator is the same in every version of NumPy, what
    # `permutation` makes of it need not be.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    order = np.argsort(bits.random_raw(num_examples), kind="stable")
    order.flags.writeable = False
    return order


def pad_prompts(
    prompts: Sequence[Tokens], length: int | None = None, pad_token_id: int = 0
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
    """Pads prompts on the right to one shape.

    What is real goes by length only, so that `pad_token_id` may be any token, the end
    of text included.

    Args:
        prompts: token ids of each prompt, at least one each.
        length: P, a bucket that all fit in; None: the longest prompt.
        pad_token_id: what fills the rest.

    Returns:
        The tokens `[B, P]` and the lengths `[B]`, int32.

    Raises:
        ValueError: no prompt, an empty one, or one longer than `length`.
    """
    if len(prompts) == 0:
        raise ValueError("prompts must hold at least one prompt, got none")
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    if lengths.min() == 0:
        raise ValueError(
            f"prompt {int(lengths.argmin())} is empty: a model needs at least one "
            "token to continue, such as the begin of text"
        )
    length = int(lengths.max()) if length is None else length
    if lengths.max() > length:
        raise ValueError(
            f"prompt {int(lengths.argmax())} has {lengths.max()} tokens, more than "
            f"the {length} of length"
        )
    tokens = np.full((len(prompts), length), pad_token_id, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = np.asarray(prompt, np.int32)
    return tokens, lengths
