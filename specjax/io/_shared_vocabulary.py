"""A draft with another tokeniser, made to speak the target's ids."""

import dataclasses

import numpy as np

from specjax.core import Checkpoint
from specjax.io._tokenizer import token_bytes
from specjax.models import IntersectedModel, VocabularyMap

_Piece = bytes | str  # the bytes of a token, or the name of a special one


def share_vocabulary(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """The draft over the target's ids, restricted to the tokens that both have.

    Two tokens are the same if they add the same bytes to a text; special ones if they
    have the same name, and the first end-of-text ids of both stand for each other. Only
    the draft is restricted: the target's law, and so the output's, stays as it is.

    A token of the target that the draft lacks is read as the longest of the draft's
    tokens that ends as it does, for the end of the text says most about what follows.
    (Special ones, and where there is none: the draft's end of text, else its id 0.)
    What the draft makes of it is its q: any law will do, as long as it is the one drawn
    from.

    Args:
        target: the model that verifies.
        draft: the model that drafts, with a tokeniser of its own.

    Returns:
        A checkpoint of the draft with the target's tokeniser and the same parameters.

    Raises:
        ValueError: a tokeniser is missing or of an unknown kind, or no token is shared.

    Reference: Timor et al., arXiv 2502.05202, algorithm 4.
    """
    for side, checkpoint in (("target", target), ("draft", draft)):
        if checkpoint.tokenizer is None:
            raise ValueError(
                "tokens of two vocabularies can be matched by their text only, but the "
                f"{side} ({checkpoint.source or 'unnamed'}) has no tokeniser; load it "
                "from a folder that holds one"
            )
    ours, theirs = _pieces(target), _pieces(draft)
    own = {}  # of the same bytes twice the first id
    for index, piece in enumerate(theirs):
        if piece is not None:
            own.setdefault(piece, index)
    end = draft.eos_token_ids[0] if draft.eos_token_ids else 0
    shared = np.array([own.get(piece, -1) for piece in ours], np.int32)
    if target.eos_token_ids and draft.eos_token_ids:
        first = target.eos_token_ids[0]
        shared[first] = end if shared[first] < 0 else shared[first]
    readable = [
        index if index >= 0 else _nearest(piece, own, end)
        for index, piece in zip(shared.tolist(), ours, strict=True)
    ]
    model = IntersectedModel(draft.model, VocabularyMap(shared, readable))
    return dataclasses.replace(
        draft,
        model=model,
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
    )


def _pieces(checkpoint: Checkpoint) -> list[_Piece | None]:
    """What each id of the model stands for; None for ids without a token."""
    size, tokenizer = checkpoint.model.vocab_size, checkpoint.tokenizer
    pieces: list[_Piece | None] = [x or None for x in token_bytes(tokenizer, size)]
    special = {index for index in tokenizer.all_special_ids if index < size}
    names = {index: name for name, index in tokenizer.get_vocab().items()}
    for index in special:
        pieces[index] = names[index]
    return pieces


def _nearest(piece: _Piece | None, own: dict[_Piece, int], end: int) -> int:
    """The id of the longest token that `piece` ends with."""
    if isinstance(piece, bytes):
        for start in range(1, len(piece)):
            if piece[start:] in own:
                return own[piece[start:]]
    return end
