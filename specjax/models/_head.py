"""A head that has rows for some ids only.

Most of what a small draft costs is its head: 49,152 rows of width 576 are twice the
parameters of four layers of SmolLM2-135M. A draft needs a row only for ids that are
worth guessing; all others the target writes itself.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

HEAD_IDS = "lm_head.ids"  # the tensor that holds them, beside lm_head.weight
HEAD_MARK = "reduced_head"  # the key of config.json that says so
_MODEL_TYPE = "specjax_reduced_head"  # which no other library takes for its own
_NOTE = (
    f"lm_head.weight has rows for the ids in {HEAD_IDS} only: transformers cannot load "
    "this folder, specjax.load can"
)


@dataclasses.dataclass(frozen=True, init=False)
class HeadVocabulary:
    """The ids that a reduced head has rows for, in the order of its rows.

    A static value: equality and hash go by a digest of the ids, made once.

    Args:
        ids: whole numbers >= 0, ascending, no id twice.

    Attributes:
        ids: `[W]` int32, read-only.
        size: W.
        digest: SHA-256 of the ids.

    Raises:
        ValueError: no id, or ids that do not ascend.

    Reference: the draft vocabulary of EAGLE-3 (Li et al., arXiv 2503.01840; 32,000 of
    128,256 ids) and FR-Spec (Zhao et al., arXiv 2502.14856).

    Example:
        >>> HeadVocabulary([2, 3, 5, 7]) == HeadVocabulary(np.array([2, 3, 5, 7]))
        True
    """

    ids: np.ndarray = dataclasses.field(compare=False, repr=False)
    size: int = dataclasses.field(init=False)
    digest: str = dataclasses.field(init=False)

    def __init__(self, ids: Sequence[int] | np.ndarray):
        found = np.asarray(ids)
        whole = found.ndim == 1 and found.dtype.kind in "iu" and found.size > 0
        if not whole or found[0] < 0 or (np.diff(found.astype(np.int64)) <= 0).any():
            raise ValueError(
                "the ids of a head must be ascending whole numbers >= 0, at least one "
                f"and none twice, got {np.array2string(found, threshold=8)}"
            )
        if found[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"the ids of a head must be int32, got {found[-1]}")
        own = found.astype(np.int32)
        own.flags.writeable = False
        object.__setattr__(self, "ids", own)
        object.__setattr__(self, "size", own.size)
        bits = own.astype("<i4").tobytes()
        object.__setattr__(self, "digest", hashlib.sha256(bits).hexdigest())


def mark_head(hf: Mapping[str, Any], head: HeadVocabulary) -> dict[str, Any]:
    """A config.json that says that the head is reduced, and to what.

    Its `model_type` is one that other libraries do not know, so that they refuse the
    folder with a sentence instead of a table of sizes that do not fit.
    """
    mark = {"size": head.size, "sha256": head.digest, "note": _NOTE}
    return {**hf, "model_type": _MODEL_TYPE, HEAD_MARK: mark}


def check_head(
    hf: Mapping[str, Any], head: HeadVocabulary | None, source: str
) -> HeadVocabulary | None:
    """The head, once it is known to be the one that a config.json speaks of.

    Raises:
        ValueError: it is another one, or there is one where there should be none.
    """
    mark = hf.get(HEAD_MARK)
    if mark is None and head is None:
        return None
    if mark is None:
        raise ValueError(
            f"{source} describes a full head, but the weights hold {HEAD_IDS!r}: they "
            "do not belong together"
        )
    if not isinstance(mark, Mapping) or not {"size", "sha256"} <= mark.keys():
        raise ValueError(
            f"{source}: {HEAD_MARK!r} must hold size and sha256, got {mark!r:.80}; "
            "export the model again"
        )
    if head is None:
        raise ValueError(
            f"{source} describes a head reduced to {mark['size']} ids, which are in "
            f"the weights as {HEAD_IDS!r}: load the whole folder with specjax.load"
        )
    if (head.size, head.digest) != (mark["size"], mark["sha256"]):
        raise ValueError(
            f"{source} was written for a head of {mark['size']} ids with SHA-256 "
            f"{str(mark['sha256'])[:12]}..., but the weights hold {head.size} with "
            f"{head.digest[:12]}...: the folder is damaged, export the model again"
        )
    return head
