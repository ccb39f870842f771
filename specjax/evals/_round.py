"""What the parts of a round cost: drafting, and the target's pass over the drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Context, Feedback, LMOutput
from specjax.decoding import Decoder, DecodeState, Job, NoDraft
from specjax.evals._latency import Timing, measure
from specjax.ops import fold


def round_costs(job: Job, *, repeats: int = 5, passes: int = 10) -> dict[str, Timing]:
    """Times the parts of a round of any drafter, behind the job's prompts.

    Nothing is verified or appended: what a round costs beyond "propose" and "verify" is
    sampling, verification and bookkeeping.

    Args:
        job: from `decoding.prepare`, with a drafter.
        repeats: timed calls of each part.
        passes: times that a call does it.

    Returns:
        "target": a pass of one token, as in plain decoding; "verify": one over the last
        token and all drafts; "propose": drafting, and taking in what became of it.
        Seconds are of one.

    Raises:
        ValueError: the job decodes plainly.
    """
    decoder = job.decoder
    if decoder.num_nodes == 0:
        raise ValueError("round_costs needs a job with a drafter, got plain decoding")
    plain = dataclasses.replace(decoder, drafter=NoDraft())
    given = job.params, job.drafter_params, job.rules, job.start()
    seen = _seen(decoder, *given)
    timings = measure(
        {
            "target": lambda: _verify(plain, passes, *given),
            "verify": lambda: _verify(decoder, passes, *given),
            "propose": lambda: _propose(decoder, passes, *given, seen),
        },
        repeats=repeats,
    )
    return {
        name: Timing(tuple(s / passes for s in t.seconds), t.compile_s)
        for name, t in timings.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _verify(decoder: Decoder, passes: int, params, drafter_params, rules, state):
    """Target passes one after the other; each reads an arg max of the one before."""
    context = decoder.context(rules, state)
    proposal, _ = decoder.drafter.propose(
        drafter_params, rules.keys, state.drafter, context
    )

    def one(_, carry):
        cache, token = carry
        now = dataclasses.replace(_ending_in(context, token), cache=cache)
        out, cache = decoder.read_drafts(params, proposal, now)
        token = jnp.argmax(out.logits[:, -1], axis=-1).astype(jnp.int32)
        return cache.with_length(state.length - 1), token

    return jax.lax.fori_loop(0, passes, one, (state.cache, _last(state)))[1]


@functools.partial(jax.jit, static_argnums=0)
def _seen(decoder: Decoder, params, drafter_params, rules, state) -> LMOutput:
    """The target's output on a proposal, for a drafter to take in."""
    context = decoder.context(rules, state)
    proposal, _ = decoder.drafter.propose(
        drafter_params, rules.keys, state.drafter, context
    )
    return decoder.read_drafts(params, proposal, context)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(
    decoder: Decoder, passes: int, params, drafter_params, rules, state, seen: LMOutput
):
    """Drafts again and again, each time as if none had been accepted."""
    context, drafter = decoder.context(rules, state), decoder.drafter
    batch = state.length.shape[0]
    feedback = Feedback(
        length=state.length,
        num_accepted=jnp.zeros((batch,), jnp.int32),
        target=seen,
        path=jnp.zeros((batch, drafter.gamma), jnp.int32),
    )

    def one(index, carry):
        own, token = carry
        keys = fold(rules.keys, index)
        now = _ending_in(context, token)
        proposal, own = drafter.propose(drafter_params, keys, own, now)
        return drafter.commit(drafter_params, own, feedback), proposal.tokens[:, 0]

    return jax.lax.fori_loop(0, passes, one, (state.drafter, _last(state)))[1]


def _last(state: DecodeState) -> Array:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


def _ending_in(context: Context, token: Array) -> Context:
    """The context with another last token: a pass then depends on the one before."""
    place = jnp.arange(context.tokens.shape[1])[None, :] == context.length[:, None] - 1
    tokens = jnp.where(place, token[:, None], context.tokens)
    return dataclasses.replace(context, tokens=tokens)
