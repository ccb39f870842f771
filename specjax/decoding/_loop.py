"""The one decoding loop: propose, one target pass, verify, append, roll back, commit.

Axes: B rows, P prompt positions, S slots (the capacity of a row), G draft length (the
depth of a tree), M drafts of a round (the nodes of a tree).
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
    LMOutput,
    Params,
    Proposal,
    SpecStats,
    Stateless,
    Verdict,
    Verifier,
    record,
)
from specjax.decoding._rules import RUNNING, Rules, cut
from specjax.ops import fold, lineage, parent_rows, tree_depth, warp


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
class NoDraft(Stateless):
    """Drafts nothing: the loop is then plain autoregressive decoding."""

    gamma: int = 0

    def propose(self, params, keys, state, context) -> tuple[Proposal, Params]:
        """A proposal of no tokens."""
        batch = context.length.shape[0]
        none = Proposal.chain(
            jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros((batch,), jnp.int32)
        )
        return none, state


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a drafter and a verifier: static and hashable, holding no arrays.

    Its methods are pure; parameters come as arguments (closed over, XLA would fold them
    in as constants for seconds).
    """

    model: LanguageModel
    drafter: Drafter | NoDraft
    verifier: Verifier

    def __post_init__(self):
        if self.num_nodes > self.drafter.gamma and not self.takes_trees:
            raise ValueError(
                f"the verifier {type(self.verifier).__name__} takes chains of drafts "
                f"only, but {type(self.drafter).__name__} drafts a tree of "
                f"{self.num_nodes} tokens; use a verifier of trees, such as Rejection"
            )

    @property
    def num_nodes(self) -> int:
        """M; a drafter that does not say drafts a chain."""
        return getattr(self.drafter, "num_nodes", self.drafter.gamma)

    @property
    def takes_trees(self) -> bool:
        """Whether the verifier does; one that does not say takes chains."""
        return getattr(self.verifier, "trees", False)

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
                by the cache, and would be cut by the limit anyway. A tree's cache has
                more slots: a node may lie far behind its place in the text.
        """
        batch, width = prompts.shape
        dtype = jax.tree.leaves(params)[0].dtype
        branches = self.num_nodes - 1 if self.num_nodes > self.drafter.gamma else 0
        cache = self.model.init_cache(batch, capacity + branches, dtype)
        # (Of a single column the last token is read, and rolled back again.)
        out, cache = self._read(params, prompts[:, : max(width - 1, 1)], cache)
        return DecodeState(
            tokens=jnp.pad(prompts, ((0, 0), (0, capacity - width))),
            log_probs=jnp.zeros((batch, capacity), jnp.float32),
            length=prompt_length,
            finish=jnp.full((batch,), RUNNING, jnp.int32),
            stop_state=jnp.zeros((batch,), jnp.int32),
            cache=cache.with_length(prompt_length - 1),
            drafter=self.drafter.init(
                drafter_params, prompts, prompt_length, capacity, out
            ),
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
        active = state.finish == RUNNING
        context = self.context(rules, state)
        proposal, drafter = self.drafter.propose(
            drafter_params, fold(keys, 0), state.drafter, context
        )
        self._check(proposal)
        out, cache = self.read_drafts(params, proposal, context)
        log_p = warp(out.logits, rules.sampling)
        verdict = self._verify(fold(keys, 1), proposal, log_p, out)
        path = self._path(proposal, verdict)
        if not proposal.is_chain:
            cache = cache.compact(state.length, path)

        kept, finish, stop_state = cut(
            rules,
            state.length,
            state.stop_state,
            verdict.tokens,
            verdict.num_accepted + 1,
        )
        kept = jnp.where(active, kept, 0)
        chosen = _chosen(log_p, path, verdict.tokens)
        length = state.length + kept
        feedback = Feedback(length, verdict.num_accepted, out, path)
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
                reached=verdict.num_accepted + _more(proposal, feedback),
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

    def context(self, rules: Rules, state: DecodeState) -> Context:
        """What the drafter may look at in the next round."""
        active = state.finish == RUNNING
        return Context(state.tokens, state.length, rules.sampling, state.cache, active)

    def _check(self, proposal: Proposal) -> None:
        """Holds the drafter to what it said of itself; shapes only, so when tracing."""
        drafter, nodes = type(self.drafter).__name__, proposal.tokens.shape[1]
        if nodes != self.num_nodes or proposal.depth != self.drafter.gamma:
            raise ValueError(
                f"{drafter} says that it drafts {self.num_nodes} tokens, at most "
                f"{self.drafter.gamma} deep, but its proposal has {nodes} tokens and "
                f"the depth {proposal.depth}; set its num_nodes and gamma"
            )
        if isinstance(proposal.parents, tuple):
            depth = tree_depth(proposal.parents)
            if len(proposal.parents) != nodes or depth != proposal.depth:
                raise ValueError(
                    f"{drafter} proposes {nodes} tokens as a tree of the depth "
                    f"{proposal.depth}, but its parents are {proposal.parents}, "
                    f"{len(proposal.parents)} nodes of the depth {depth}"
                )
        elif proposal.parents.shape != proposal.tokens.shape:
            raise ValueError(
                f"{drafter} proposes tokens of the shape {proposal.tokens.shape}, so "
                f"its parents must be a tuple of {nodes} or an array of that shape, "
                f"got the shape {proposal.parents.shape}"
            )
        if not proposal.is_chain and not self.takes_trees:
            raise ValueError(
                f"the verifier {type(self.verifier).__name__} takes chains of drafts "
                f"only, got a tree from {drafter}; make the proposal with "
                "Proposal.chain, or use a verifier of trees, such as Rejection"
            )

    def _read(self, params: Params, tokens: Array, cache, **where) -> tuple:
        """The target's pass, with the features that the drafter asks for."""
        features = tuple(getattr(self.drafter, "features", ()))
        if features:
            where["features"] = features
        return self.model.apply(params, tokens, cache, **where)

    def read_drafts(
        self, params: Params, proposal: Proposal, context: Context
    ) -> tuple[LMOutput, Params]:
        """The target reads the last token and the drafts, each behind its ancestors.

        Returns:
            Its output on those M + 1 tokens, and the cache with all of them.
        """
        last = context.token_at(context.length - 1)
        block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
        if proposal.is_chain:
            return self._read(params, block, context.cache)
        parents = parent_rows(proposal.parents, block.shape[0])
        mask, depth = lineage(parents, getattr(self.drafter, "reach", proposal.depth))
        positions = context.length[:, None] - 1 + depth
        return self._read(params, block, context.cache, positions=positions, mask=mask)

    def _verify(self, keys, proposal: Proposal, log_p: Array, out: LMOutput) -> Verdict:
        if getattr(self.verifier, "reads_logits", False):
            return self.verifier(keys, proposal, log_p, logits=out.logits)  # pyright: ignore[reportCallIssue]
        return self.verifier(keys, proposal, log_p)

    def _path(self, proposal: Proposal, verdict: Verdict) -> Array:
        """The accepted nodes `[B, G]`, of a chain 0, 1, 2, ..."""
        if verdict.path is not None:
            return verdict.path
        if not proposal.is_chain:
            raise ValueError(
                f"the verifier {type(self.verifier).__name__} takes trees, but its "
                "verdict says no path; give Verdict the accepted nodes"
            )
        shape = (proposal.tokens.shape[0], proposal.depth)
        return jnp.broadcast_to(jnp.arange(proposal.depth)[None, :], shape)


def _chosen(log_p: Array, path: Array, tokens: Array) -> Array:
    """The log-probabilities `[B, G+1]` of `tokens`, each behind its path."""
    entry = jnp.pad(path + 1, ((0, 0), (1, 0)))
    return jax.vmap(lambda row, entry, token: row[entry, token])(log_p, entry, tokens)


def _more(proposal: Proposal, feedback: Feedback) -> Array:
    """Whether `[B]` there was another draft to look at behind those accepted."""
    batch, nodes = proposal.tokens.shape
    parents = parent_rows(proposal.parents, batch)
    node = jnp.broadcast_to(jnp.arange(-1, nodes)[None, :], (batch, nodes + 1))
    end = feedback.at_end(node)
    drafted = jnp.arange(nodes)[None, :] < proposal.num_drafted[:, None]
    more = jnp.any((parents == end[:, None]) & drafted, axis=1)
    return (more & (feedback.num_accepted < proposal.depth)).astype(jnp.int32)


def _append(buffer: Array, new: Array, length: Array, count: Array) -> Array:
    """Writes the first `count[b]` of `new [B, G+1]` at `buffer[b, length[b] ...]`."""
    size = buffer.shape[1]

    def row(buffer, new, length, count):
        offset = jnp.arange(new.shape[0])
        slot = jnp.where(offset < count, length + offset, size + offset)
        return buffer.at[slot].set(new, mode="drop", unique_indices=True)

    return jax.vmap(row)(buffer, new, length, count)
