"""Which target a trained drafter belongs to."""

import dataclasses
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core import Checkpoint, LanguageModel
from specjax.io import model_digest, tokenizer_digest


@dataclasses.dataclass(frozen=True)
class MadeFor:
    """What is known of the target that a drafter was trained for.

    Attributes:
        width: D, of its hidden states.
        vocab_size: V.
        target: `io.model_digest` of its configuration and parameters.
        tokenizer: `io.tokenizer_digest`; "" without a tokeniser.
    """

    width: int
    vocab_size: int
    target: str
    tokenizer: str

    @classmethod
    def of(cls, target: Checkpoint) -> "MadeFor":
        """Describes a target; its digest is taken once, for the weights' sake."""
        if target not in _known:
            _known[target] = cls(
                hidden_width(target.model),
                target.model.vocab_size,
                model_digest(target),
                tokenizer_digest(target.tokenizer),
            )
        return _known[target]

    def check(self, kind: str, target: Checkpoint) -> None:
        """Raises a ValueError that says in what `target` is another one."""
        check_sizes(kind, self.width, self.vocab_size, target.model)
        other = MadeFor.of(target)
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise ValueError(
                f"this {kind} was trained for a target with another tokeniser: take "
                "the target that it was trained for, or train another for this one"
            )
        if self.target != other.target:
            raise ValueError(
                f"this {kind} was trained for another target of the same sizes "
                f"(SHA-256 {self.target[:12]}..., this one: {other.target[:12]}...): "
                "load that one, in the same dtype; or drafters.load(..., "
                "any_target=True) to draft for this one all the same"
            )


_known: weakref.WeakKeyDictionary[Checkpoint, MadeFor] = weakref.WeakKeyDictionary()


def check_sizes(kind: str, width: int, vocab: int | None, model: LanguageModel) -> None:
    """Raises a ValueError unless a target's width and vocabulary are these.

    Args:
        kind: the drafter's name, for the message.
        width: D that its parameters are made for.
        vocab: V that they are made for; None: for any.
        model: the target's.
    """
    wanted = width, model.vocab_size if vocab is None else vocab
    found = hidden_width(model), model.vocab_size
    if wanted != found:
        raise ValueError(
            f"this {kind} was made for a target of the width {wanted[0]} with "
            f"{wanted[1]} tokens, but this target has the width {found[0]} and "
            f"{found[1]} tokens; train another for this one"
        )


@functools.lru_cache(maxsize=64)
def hidden_width(model: LanguageModel) -> int:
    """D, of `LMOutput.hidden`: what the model says by its shapes, nothing is run."""

    def hidden(key: Any):
        return model.apply(model.init(key), jnp.zeros((1, 1), jnp.int32))[0].hidden

    return jax.eval_shape(hidden, jax.random.key(0)).shape[-1]
