"""Two drafters: the second drafts where the first has nothing to say."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    Drafter,
    Feedback,
    LMOutput,
    Params,
    Proposal,
    record,
)
from specjax.drafters._registry import registry
from specjax.ops import fold, one_hot_log


@record
class _Side:
    """One of the two."""

    own: Any  # its state
    seen: Array  # [B], how long each row was when it last took part in it


@record
class _State:
    """Between rounds, and from `propose` to `commit`."""

    first: _Side
    then: _Side
    length: Array  # [B], of the rows when this round began
    found: Array  # [B] bool, the first one drafts here
    wanted: Array  # [B] bool, the second one does


@registry.register("fallback")
@dataclasses.dataclass(frozen=True)
class Fallback:
    """In each row the first drafter's tokens, or the second's where it has none.

    Such as a look-up that costs nothing and copies well, and a model for the rest: in
    a round in which the look-up matches in every row that runs, no pass of the model
    is made. It then reads what it missed when it is next needed, several tokens a pass.

    Both draft chains of the same length. Which of them drafts in a row depends on the
    text before, not on what is drawn, so each draft keeps its own drafter's law: rows
    of a look-up have point masses, the others the model's q.

    Attributes:
        first: the drafter that is asked in every round.
        then: the one for rows where `first` drafts nothing.
    """

    first: Drafter
    then: Drafter

    def __post_init__(self):
        for name in ("first", "then"):
            drafter = getattr(self, name)
            if getattr(drafter, "num_nodes", drafter.gamma) > drafter.gamma:
                raise ValueError(
                    f"Fallback takes drafters of chains, but {name}, a "
                    f"{type(drafter).__name__}, drafts a tree"
                )
            if not hasattr(drafter, "catch_up"):
                raise ValueError(
                    f"Fallback leaves its drafters out of rounds, but {name}, a "
                    f"{type(drafter).__name__}, cannot catch up on them: it has no "
                    "catch_up (see core.Drafter)"
                )
        if self.first.gamma != self.then.gamma:
            raise ValueError(
                "Fallback needs two drafters of the same gamma, got "
                f"{self.first.gamma} and {self.then.gamma}"
            )

    @property
    def gamma(self) -> int:
        """G of both."""
        return self.first.gamma

    @property
    def features(self) -> tuple[str, ...]:
        """What either of them reads of the target."""
        both = (getattr(drafter, "features", ()) for drafter in (self.first, self.then))
        return tuple(dict.fromkeys(name for names in both for name in names))

    def bind(self, target: Checkpoint, max_length: int) -> tuple["Fallback", Params]:
        """See `Drafter.bind`: both are bound."""
        first, first_params = self.first.bind(target, max_length)
        then, then_params = self.then.bind(target, max_length)
        return Fallback(first, then), (first_params, then_params)

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> _State:
        """Both states."""
        first, then = (
            _Side(drafter.init(own, tokens, length, capacity, target), length)
            for drafter, own in zip((self.first, self.then), params, strict=True)
        )
        nobody = jnp.zeros(length.shape, bool)
        return _State(first, then, length, nobody, nobody)

    def propose(
        self, params: Params, keys: Array, state: _State, context: Context
    ) -> tuple[Proposal, _State]:
        """Asks the first, and the second if a running row is left without drafts."""
        own = self.first.catch_up(params[0], state.first.own, context)  # pyright: ignore[reportAttributeAccessIssue]
        ours, own = self.first.propose(params[0], fold(keys, 0), own, context)
        first = dataclasses.replace(state.first, own=own)
        found = ours.num_drafted > 0
        wanted = ~found if context.running is None else ~found & context.running
        context = dataclasses.replace(context, running=wanted)

        def ask(own: Any) -> tuple[Proposal, Any]:
            own = self.then.catch_up(params[1], own, context)  # pyright: ignore[reportAttributeAccessIssue]
            return self.then.propose(params[1], fold(keys, 1), own, context)

        shape, _ = jax.eval_shape(ask, state.then.own)

        def skip(own: Any) -> tuple[Proposal, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), own

        theirs, own = jax.lax.cond(jnp.any(wanted), ask, skip, state.then.own)
        then = dataclasses.replace(state.then, own=own)
        state = _State(first, then, context.length, found, wanted)
        return _merged(found, wanted, ours, theirs), state

    def commit(self, params: Params, state: _State, feedback: Feedback) -> _State:
        """Each keeps what it drafted itself; in other rows it stays where it was."""

        def told(drafter, own_params, side: _Side, used: Array, seen: Array) -> _Side:
            length = jnp.where(used, feedback.length, seen)
            accepted = jnp.where(used, feedback.num_accepted, 0)
            news = dataclasses.replace(feedback, length=length, num_accepted=accepted)
            return _Side(drafter.commit(own_params, side.own, news), length)

        found, wanted = state.found, state.wanted
        first = told(self.first, params[0], state.first, found, state.length)
        then = told(self.then, params[1], state.then, wanted, state.then.seen)
        return dataclasses.replace(state, first=first, then=then)


def _merged(found: Array, wanted: Array, ours: Proposal, theirs: Proposal) -> Proposal:
    """Row by row one chain or the other, each with its law."""
    tokens = jnp.where(found[:, None], ours.tokens, theirs.tokens)
    drafted = jnp.where(found, ours.num_drafted, theirs.num_drafted)
    drafted = jnp.where(found | wanted, drafted, 0)
    laws = [x.log_q for x in (ours, theirs) if x.log_q is not None]
    if not laws:
        return Proposal.chain(tokens, None, drafted)
    size = laws[0].shape[-1]
    one, other = (
        one_hot_log(x.tokens, size) if x.log_q is None else x.log_q
        for x in (ours, theirs)
    )
    log_q = jnp.where(found[:, None, None], one, other)
    return Proposal.chain(tokens, log_q, drafted)
