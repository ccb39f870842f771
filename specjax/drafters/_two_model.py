"""A smaller language model drafts a chain of tokens, one after the other."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    Feedback,
    LanguageModel,
    LMOutput,
    Params,
    Proposal,
)
from specjax.drafters._chain import draw_chain, require_confidence
from specjax.drafters._registry import registry, require_gamma
from specjax.io import check_same_tokenizer, share_vocabulary
from specjax.ops import fit_vocabulary


@registry.register("two_model")
@dataclasses.dataclass(frozen=True)
class TwoModel:
    """Drafts `gamma` tokens with a draft model, each drawn from its own law q.

    The state is the draft's cache. It holds all but the last two tokens of a row: the
    last was never read, and the one before it may be the last draft of a round in which
    all were accepted, which was drawn but never read either. The first pass of a round
    reads both; a slot that is there already is written again with the same numbers.

    Attributes:
        draft: a checkpoint, or a bare model whose parameters the caller passes.
        gamma: G, tokens drafted in a round, with `min_confidence` the most.
        min_confidence: in (0, 1]; a row stops drafting where its draft gives no token
            this probability (before temperature and filters), and a round where all
            rows have stopped. It looks at the law, not at what is drawn from it, and so
            leaves the output's law alone. None: always `gamma` tokens.
        vocab_size: the target's V (set by `bind`): a smaller draft vocabulary never
            drafts the ids it lacks, and of a larger one the surplus is masked. Only
            the draft is masked, so the target's law stays as it is.
        vocabulary: "same": the tokeniser must be the target's. "intersection": it may
            be another one, and the draft drafts what tokens both have (see
            `io.share_vocabulary`).

    Reference: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    Intersection: Timor et al., arXiv 2502.05202, algorithm 4.
    """

    draft: Checkpoint | LanguageModel
    gamma: int = 5
    vocab_size: int | None = None
    min_confidence: float | None = None
    vocabulary: Literal["same", "intersection"] = "same"

    def __post_init__(self):
        require_gamma(self.gamma)
        require_confidence(self.min_confidence)
        if self.vocabulary not in ("same", "intersection"):
            raise ValueError(
                f"vocabulary must be 'same' or 'intersection', got {self.vocabulary!r}"
            )

    @property
    def model(self) -> LanguageModel:
        """The draft model."""
        return self.draft.model if isinstance(self.draft, Checkpoint) else self.draft

    def bind(self, target: Checkpoint, max_length: int) -> tuple["TwoModel", Params]:
        """See `Drafter.bind`; about the tokeniser, see `vocabulary`."""
        if not isinstance(self.draft, Checkpoint):
            raise ValueError(
                "TwoModel needs a checkpoint to draft with in generate(), got a bare "
                f"{type(self.draft).__name__}; use specjax.load or Checkpoint(model, "
                "params)"
            )
        draft = self.draft
        if self.vocabulary == "intersection":
            draft = share_vocabulary(target, draft)
        check_same_tokenizer(target, draft)
        if self.model.max_length < max_length:
            raise ValueError(
                f"the draft reads at most {self.model.max_length} tokens, but a row "
                f"may come to {max_length}; shorten the prompt or max_new_tokens, or "
                "use a draft with a longer context"
            )
        bound = dataclasses.replace(
            self, draft=draft.model, vocab_size=target.model.vocab_size
        )
        return bound, self.draft.params

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> Params:
        """Reads the prompts but for their last two tokens, see the class."""
        dtype = jax.tree.leaves(params)[0].dtype
        cache = self.model.init_cache(tokens.shape[0], capacity, dtype)
        if tokens.shape[1] > 2:
            _, cache = self.model.apply(params, self._readable(tokens[:, :-2]), cache)
        # One token: -1. The slot before the first is dropped when it is written.
        return cache.with_length(length - 2)

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        """Draws up to G tokens, a pass of the draft each; the first reads two."""
        size = self.vocab_size or self.model.vocab_size

        def read(tokens: Array, cache: Params) -> tuple[Array, Params]:
            out, cache = self.model.apply(params, tokens, cache)
            return fit_vocabulary(out.logits[:, -1], size), cache

        last_two = context.token_at(context.length[:, None] + jnp.array([[-2, -1]]))
        first, cache = read(self._readable(last_two), state)
        return draw_chain(
            read,
            keys,
            first,
            cache,
            context,
            gamma=self.gamma,
            min_confidence=self.min_confidence,
        )

    def commit(self, params: Params, state: Params, feedback: Feedback) -> Params:
        """Rolls the draft's cache back to what was accepted."""
        return state.with_length(feedback.length - 2)

    def catch_up(self, params: Params, state: Params, context: Context) -> Params:
        """Reads the tokens of rounds that it was left out of, G + 1 a pass."""
        goal, size = context.length - 2, self.gamma + 1
        running = context.running
        if running is None:
            running = jnp.ones(goal.shape, bool)

        def read(cache: Params) -> Params:
            start = cache.length
            tokens = context.token_at(start[:, None] + jnp.arange(size)[None, :])
            _, cache = self.model.apply(params, self._readable(tokens), cache)
            return cache.with_length(jnp.minimum(start + size, goal))

        def behind(cache: Params) -> Array:
            return jnp.any(running & (cache.length < goal))

        return jax.lax.while_loop(behind, read, state)

    def _readable(self, tokens: Array) -> Array:
        """Ids that the draft lacks are read as its last one: any law will do for q."""
        return jnp.minimum(tokens, self.model.vocab_size - 1)
