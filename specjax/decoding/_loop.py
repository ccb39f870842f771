"""The one decoding loop: propose, one target pass, verify, append, roll back, commit.

Axes: B rows, P prompt positions, S slots (the capacity of a row), G draft length.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Context,
    Drafter,
    Feedback,
    LanguageModel,
    Params,
    Proposal,
    SpecStats,
    Verifier,
    record,
)
from specjax.decoding._rules import RUNNING, Rules, cut
from specjax.ops import fold, warp


@record
class DecodeState:
    """Everything that a round changes. Shapes stay; only `length` says what is valid.

    Between rounds the target's cache holds all tokens of a row but the last.
    """

    tokens: Array  # [B, S] int32, the prompt and then what was emitted
    log_probs: Array  # [B, S] float32, the target's, 0 over the prompt
    length: Array  # [B] int32
    finish: Array  # [B] int32, an index into FINISH_REASONS
    stop_state: Array  # [B] int32
    cache: Params
    drafter: Params
    stats: SpecStats


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Drafts nothing: the loop is then plain autoregressive decoding."""

    vocab_size: int
    gamma: int = 0

    def init(self, params, tokens, length, capacity) -> Params:
        """No state."""
        return ()

    def propose(self, params, keys, state, context) -> tuple[Proposal, Params]:
        """A proposal of no tokens."""
        batch = context.length.shape[0]
        none = Proposal.chain(
            jnp.zeros((batch, 0), jnp.int32),
            jnp.zeros((batch, 0, self.vocab_size)),
            jnp.zeros((batch,), jnp.int32),
        )
        return none, state

    def commit(self, params, state, feedback) -> Params:
        """Nothing to roll back."""
        return state


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a drafter and a verifier: static and hashable, holding no arrays.

    Its methods are pure; parameters come as arguments (closed over, XLA would fold them
    in as constants for seconds).
    """

    model: LanguageModel
    drafter: Drafter | NoDraft
    verifier: Verifier

    def start(
        self,
        params: Params,
        drafter_params: Params,
        prompts: Array,
        prompt_length: Array,
        capacity: int,
    ) -> DecodeState:
        """Reads the prompts: the state before the first round.

        Args:
            params: the target's.
            drafter_params: the drafter's.
            prompts: `[B, P]` int32, padded on the right.
            prompt_length: `[B]`, at least 1.
            capacity: S, at least P and every row's limit. A draft past it is dropped
                by the cache, and would be cut by the limit anyway.
        """
        batch, width = prompts.shape
        dtype = jax.tree.leaves(params)[0].dtype
        cache = self.model.init_cache(batch, capacity, dtype)
        if width > 1:
            _, cache = self.model.apply(params, prompts[:, :-1], cache)
        return DecodeState(
            tokens=jnp.pad(prompts, ((0, 0), (0, capacity - width))),
            log_probs=jnp.zeros((batch, capacity), jnp.float32),
            length=prompt_length,
            finish=jnp.full((batch,), RUNNING, jnp.int32),
            stop_state=jnp.zeros((batch,), jnp.int32),
            cache=cache.with_length(prompt_length - 1),
            drafter=self.drafter.init(drafter_params, prompts, prompt_length, capacity),
            stats=SpecStats.zeros(batch, self.drafter.gamma),
        )

    def round(
        self, params: Params, drafter_params: Params, rules: Rules, state: DecodeState
    ) -> DecodeState:
        """One round; every running row gets at least one token.

        A round's randomness is folded from the row's key and its length, which grows
        every round: a row does not depend on its neighbours, and no draw is used twice
        (a verifier may let later drafts of a block decide how many of it stay).
        """
        keys = fold(rules.keys, state.length)
        context = Context(state.tokens, state.length, rules.sampling)

        proposal, drafter = self.drafter.propose(
            drafter_params, fold(keys, 0), state.drafter, context
        )
        _require_chain(proposal)
        last = context.token_at(state.length - 1)
        block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
        out, cache = self.model.apply(params, block, state.cache)
        log_p = warp(out.logits, rules.sampling)
        verdict = self.verifier(fold(keys, 1), proposal, log_p)

        active = state.finish == RUNNING
        kept, finish, stop_state = cut(
            rules,
            state.length,
            state.stop_state,
            verdict.tokens,
            verdict.num_accepted + 1,
        )
        kept = jnp.where(active, kept, 0)
        chosen = jnp.take_along_axis(log_p, verdict.tokens[..., None], -1)[..., 0]
        length = state.length + kept
        feedback = Feedback(length, verdict.num_accepted, out)
        return DecodeState(
            tokens=_append(state.tokens, verdict.tokens, state.length, kept),
            log_probs=_append(state.log_probs, chosen, state.length, kept),
            length=length,
            finish=jnp.where(active, finish, state.finish),
            stop_state=jnp.where(active, stop_state, state.stop_state),
            cache=cache.with_length(length - 1),
            drafter=self.drafter.commit(drafter_params, drafter, feedback),
            stats=state.stats.count(
                active=active,
                drafted=proposal.num_drafted,
                accepted=verdict.num_accepted,
                emitted=kept,
            ),
        )

    def run(
        self, params: Params, drafter_params: Params, rules: Rules, state: DecodeState
    ) -> DecodeState:
        """Rounds until every row has ended, in one `lax.while_loop`."""
        return jax.lax.while_loop(
            lambda state: jnp.any(state.finish == RUNNING),
            lambda state: self.round(params, drafter_params, rules, state),
            state,
        )


def _append(buffer: Array, new: Array, length: Array, count: Array) -> Array:
    """Writes the first `count[b]` of `new [B, G+1]` at `buffer[b, length[b] ...]`."""
    size = buffer.shape[1]

    def row(buffer, new, length, count):
        offset = jnp.arange(new.shape[0])
        slot = jnp.where(offset < count, length + offset, size + offset)
        return buffer.at[slot].set(new, mode="drop", unique_indices=True)

    return jax.vmap(row)(buffer, new, length, count)


def _require_chain(proposal: Proposal) -> None:
    """The loop verifies chains; a tree needs a mask and a path to compact."""
    chain = tuple(range(-1, proposal.tokens.shape[1] - 1))
    if proposal.parents != chain:
        raise ValueError(
            "the decoding loop verifies chains of drafts, got a tree with parents "
            f"{proposal.parents}; make the proposal with Proposal.chain"
        )
