"""A drafter of trees of every kind, from a language model that reads a few tokens."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
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
from specjax.ops import fold, sample, tree_depth, warp

Siblings = Literal["best", "with_replacement", "without_replacement"]


@dataclasses.dataclass(frozen=True)
class DraftTree:
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

    @property
    def gamma(self) -> int:
        """G, the depth of the deepest tree."""
        return max(tree_depth(tree) for tree in self.trees)

    @property
    def num_nodes(self) -> int:
        """M, the size of the largest tree."""
        return max(len(tree) for tree in self.trees)

    def bind(self, target: Checkpoint, max_length: int) -> tuple["DraftTree", Params]:
        """See `Drafter.bind`."""
        if not isinstance(self.draft, Checkpoint):
            raise ValueError(f"DraftTree needs a checkpoint, got {self.draft!r}")
        bound = dataclasses.replace(self, draft=self.draft.model)
        return bound, self.draft.params

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> Params:
        """No state."""
        return ()

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        """Draws one node after the other, each from the law behind its parent."""
        size, batch = self.num_nodes, context.length.shape[0]
        padded = np.array([[*t, *[-1] * (size - len(t))] for t in self.trees], np.int32)
        which = context.length % len(self.trees)
        parents = jnp.asarray(padded)[which]  # [B, M]
        back = jnp.arange(-self.window, 0)[None, :]
        windows = [context.token_at(context.length[:, None] + back)]
        tokens, laws = [], []
        for node in range(size):
            window = _row(jnp.stack(windows, axis=1), parents[:, node] + 1)
            law = self._law(params, window, context)
            # Which of the earlier nodes are siblings, and their tokens.
            earlier = jnp.stack(tokens, 1) if tokens else jnp.zeros((batch, 0), int)
            twin = parents[:, :node] == parents[:, node, None]
            token, law = self._draw(fold(keys, node), law, earlier, twin)
            tokens.append(token)
            laws.append(law)
            windows.append(jnp.concatenate([window[:, 1:], token[:, None]], axis=1))
        sizes = jnp.array([len(tree) for tree in self.trees], jnp.int32)[which]
        proposal = Proposal.tree(
            jnp.stack(tokens, axis=1),
            None if self.siblings == "best" else jnp.stack(laws, axis=1),
            sizes,
            self.trees[0] if len(self.trees) == 1 else parents,
            self.gamma,
        )
        return proposal, state

    def commit(self, params: Params, state: Params, feedback: Feedback) -> Params:
        """Nothing to roll back."""
        return state

    def _law(self, params: Params, window: Array, context: Context) -> Array:
        assert self.draft is not None and not isinstance(self.draft, Checkpoint)
        out, _ = self.draft.apply(params, window)
        return warp(out.logits[:, -1], context.sampling)

    def _draw(
        self, keys: Array, law: Array, earlier: Array, twin: Array
    ) -> tuple[Array, Array]:
        """A token `[B]`, and the law `[B, V]` that it came from."""
        same = earlier[:, :, None] == jnp.arange(law.shape[1])[None, None, :]
        taken = jnp.any(same & twin[:, :, None], axis=1)
        if self.siblings == "best":
            token = jnp.argmax(jnp.where(taken, -jnp.inf, law), axis=1)
            return token.astype(jnp.int32), law
        if self.siblings == "without_replacement":
            rest = jnp.where(taken, -jnp.inf, law)
            total = jnp.log(jnp.sum(jnp.exp(rest), axis=1, keepdims=True))
            # Where no token is left to draw, one comes again.
            law = jnp.where(total > -jnp.inf, rest - total, law)
        return sample(keys, law), law


def _row(x: Array, index: Array) -> Array:
    """`x [B, N, W]` at `index [B]`: `[B, W]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
