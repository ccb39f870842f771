"""Drafters of trees: one of every kind from a language model, and one by a script."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    LanguageModel,
    Params,
    Proposal,
    Stateless,
)
from specjax.ops import fold, lineage, sample, tree_depth, warp

Siblings = Literal["best", "with_replacement", "without_replacement"]


class _OfTrees(Stateless):
    """A drafter of given trees."""

    trees: tuple[tuple[int, ...], ...]

    @property
    def gamma(self) -> int:
        """G, the depth of the deepest tree."""
        return max(tree_depth(tree) for tree in self.trees)

    @property
    def num_nodes(self) -> int:
        """M, the size of the largest tree."""
        return max(len(tree) for tree in self.trees)


@dataclasses.dataclass(frozen=True)
class DraftTree(_OfTrees):
    """Drafts trees of a given shape; the draft's law looks at the last `window` tokens.

    It has no cache, so nothing of it can go wrong between rounds: what a test with it
    shows is due to the verifier and the loop.

    Attributes:
        draft: a checkpoint of the draft, or its bare model once bound.
        trees: the parents of each tree. One: a static tree. Several: trees of a row's
            own, the one of number `length % len(trees)`, padded to equal sizes.
        siblings: "best": the i-th child is the i-th most likely token, a point mass;
            else each child is drawn, with or without replacement.
        window: how many tokens the draft reads.

    Example:
        >>> DraftTree(None, ((-1, -1, 0, 0), (-1, 0, 1))).gamma
        3
    """

    draft: Checkpoint | LanguageModel | None
    trees: tuple[tuple[int, ...], ...]
    siblings: Siblings = "best"
    window: int = 2

    def bind(self, target: Checkpoint, max_length: int) -> tuple["DraftTree", Params]:
        """See `Drafter.bind`."""
        if not isinstance(self.draft, Checkpoint):
            raise ValueError(f"DraftTree needs a checkpoint, got {self.draft!r}")
        bound = dataclasses.replace(self, draft=self.draft.model)
        return bound, self.draft.params

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        """Draws one node after the other, each from the law behind its parent."""
        parents, sizes = _pick_tree(self.trees, context.length)
        back = jnp.arange(-self.window, 0)[None, :]
        root = context.token_at(context.length[:, None] + back)
        # The last tokens up to the root and each node, `[B, M+1, window]`.
        windows = jnp.repeat(root[:, None], self.num_nodes + 1, axis=1)
        number = jnp.arange(self.num_nodes)

        def draw(carry: tuple[Array, Array], xs: tuple[Array, Array]):
            (windows, tokens), (node, parent) = carry, xs
            window = _row(windows, parent + 1)
            law = self._law(params, window, context)
            twin = (parents == parent[:, None]) & (number < node)[None, :]
            token, law = self._draw(fold(keys, node), law, tokens, twin)
            window = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
            windows = windows.at[:, node + 1].set(window)
            return (windows, tokens.at[:, node].set(token)), law

        carry = (windows, jnp.zeros_like(parents))
        (_, tokens), laws = jax.lax.scan(draw, carry, (number, parents.T))
        proposal = Proposal.tree(
            tokens,
            None if self.siblings == "best" else jnp.swapaxes(laws, 0, 1),
            sizes,
            self.trees[0] if len(self.trees) == 1 else parents,
            self.gamma,
        )
        return proposal, state

    def _law(self, params: Params, window: Array, context: Context) -> Array:
        assert self.draft is not None and not isinstance(self.draft, Checkpoint)
        out, _ = self.draft.apply(params, window)
        return warp(out.logits[:, -1], context.sampling)

    def _draw(
        self, keys: Array, law: Array, tokens: Array, twin: Array
    ) -> tuple[Array, Array]:
        """A token `[B]`, and the law `[B, V]` that it came from.

        `twin [B, M]` says which of `tokens [B, M]` are its earlier siblings'.
        """
        same = tokens[:, :, None] == jnp.arange(law.shape[1])[None, None, :]
        taken = jnp.any(same & twin[:, :, None], axis=1)
        if self.siblings == "best":
            # (Of a law that says never, any token will do.)
            rank = jnp.where(taken, -jnp.inf, jnp.maximum(law, -1e30))
            return jnp.argmax(rank, axis=1).astype(jnp.int32), law
        if self.siblings == "without_replacement":
            rest = jnp.where(taken, -jnp.inf, law)
            total = jnp.log(jnp.sum(jnp.exp(rest), axis=1, keepdims=True))
            # Where no token is left to draw, one comes again.
            law = jnp.where(total > -jnp.inf, rest - total, law)
        return sample(keys, law), law


def _row(x: Array, index: Array) -> Array:
    """`x [B, N, W]` at `index [B]`: `[B, W]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedTree:
    """Drafts trees in which one branch says what a script says, as far as it is told.

    With the greedy continuation as the script, a known number of drafts stays on a
    known branch in every round: the leaf of number `length % leaves`. The counterpart
    of `Scripted` for trees.

    Attributes:
        trees: the parents of each tree, as in `DraftTree`.
        tokens: `[B, S]`, the whole text of each row as it will be, prompt included.
        right: `[B]` or one number, how many nodes of the branch follow the script, all
            others are wrong. Negative: as many as the row's length modulo G + 1.
    """

    trees: tuple[tuple[int, ...], ...]
    tokens: Any
    right: Any = -1

    def bind(self, target: Checkpoint, max_length: int) -> tuple["_Bound", Params]:
        """See `Drafter.bind`."""
        tokens = jnp.asarray(self.tokens, jnp.int32)
        right = jnp.broadcast_to(jnp.asarray(self.right, jnp.int32), tokens.shape[:1])
        return _Bound(self.trees, target.model.vocab_size), (tokens, right)


@dataclasses.dataclass(frozen=True)
class _Bound(_OfTrees):
    trees: tuple[tuple[int, ...], ...]
    vocab_size: int

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        (script, right), length = params, context.length
        parents, sizes = _pick_tree(self.trees, length)
        way, depth = lineage(parents, self.gamma)
        way, depth = way[:, 1:, 1:], depth[:, 1:]  # of nodes
        # The leaf of this round, and the branch from the root to it.
        number = jnp.arange(self.num_nodes)[None, :]
        is_leaf = ~jnp.any(parents[:, None, :] == number[:, :, None], axis=2)
        is_leaf &= number < sizes[:, None]
        wanted = length % jnp.sum(is_leaf, axis=1)
        rank = jnp.cumsum(is_leaf, axis=1) - 1
        leaf = jnp.argmax(is_leaf & (rank == wanted[:, None]), axis=1)
        branch = jnp.take_along_axis(way, leaf[:, None, None], axis=1)[:, 0]

        right = jnp.where(right < 0, length % (self.gamma + 1), right)
        follows = branch & (depth <= right[:, None])
        slot = jnp.minimum(length[:, None] + depth - 1, script.shape[1] - 1)
        tokens = jnp.take_along_axis(script, slot, axis=1)
        wrong = (tokens + 1 + number % (self.vocab_size - 1)) % self.vocab_size
        tokens = jnp.where(follows, tokens, wrong)
        static = self.trees[0] if len(self.trees) == 1 else parents
        return Proposal.tree(tokens, None, sizes, static, self.gamma), state


def _pick_tree(trees: tuple[tuple[int, ...], ...], length: Array):
    """The parents `[B, M]` and the size `[B]` of the tree of this round."""
    size, which = max(len(tree) for tree in trees), length % len(trees)
    padded = [[*tree, *[-1] * (size - len(tree))] for tree in trees]
    sizes = [len(tree) for tree in trees]
    return jnp.array(padded, jnp.int32)[which], jnp.array(sizes, jnp.int32)[which]
