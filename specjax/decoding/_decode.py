"""Decoding as one pure function, for use inside another jitted program."""

import jax.numpy as jnp
from jax import Array

from specjax.core import (
    Drafter,
    LanguageModel,
    Params,
    Sampling,
    SpecStats,
    Verifier,
    record,
)
from specjax.decoding._loop import Decoder, NoDraft
from specjax.decoding._rules import Rules, StopStrings
from specjax.verifiers import Rejection


@record
class Decoded:
    """What a run produced. Row b: its prompt directly followed by its new tokens."""

    tokens: Array  # [B, P + max_new_tokens] int32, anything past `length`
    length: Array  # [B] int32, prompt and new tokens
    log_probs: Array  # [B, P + max_new_tokens], the target's, 0 over the prompt
    finish: Array  # [B] int32, an index into FINISH_REASONS
    stats: SpecStats


def make_rules(
    model: LanguageModel,
    prompt_length: Array,
    keys: Array,
    *,
    max_new_tokens: int | Array,
    sampling: Sampling,
    eos_ids: Array | None = None,
    stop: StopStrings | None = None,
) -> Rules:
    """Rules with each row's limit: its budget of tokens, or the model's context."""
    wanted = prompt_length + jnp.asarray(max_new_tokens, jnp.int32)
    return Rules(
        keys=keys,
        sampling=sampling,
        limit=jnp.minimum(wanted, model.max_length),
        context_bound=wanted > model.max_length,
        eos_ids=jnp.full((1,), -1, jnp.int32) if eos_ids is None else eos_ids,
        stop=stop,
    )


def decode(
    model: LanguageModel,
    params: Params,
    prompts: Array,
    prompt_length: Array,
    keys: Array,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    limit: Array | None = None,
    eos_ids: Array | None = None,
    drafter: Drafter | None = None,
    drafter_params: Params = (),
    verifier: Verifier | None = None,
) -> Decoded:
    """Decodes a batch inside whatever program calls it: pure, no host round trip.

    Args:
        model: the target.
        params: its parameters.
        prompts: `[B, P]` int32, padded on the right.
        prompt_length: `[B]`, at least 1.
        keys: `[B]`, one key a row (`ops.row_keys`).
        max_new_tokens: the most tokens to add to any row.
        sampling: how to draw.
        limit: `[B]`, the most tokens to add to each row; default: `max_new_tokens`.
        eos_ids: `[E]` ids that end a text, -1 for none.
        drafter: a bound drafter; None: plain decoding.
        drafter_params: its parameters.
        verifier: default: `Rejection()`.

    Returns:
        The rows, their lengths and counts.
    """
    decoder = Decoder(model, drafter or NoDraft(), verifier or Rejection())
    rules = make_rules(
        model,
        prompt_length,
        keys,
        max_new_tokens=max_new_tokens if limit is None else limit,
        sampling=sampling,
        eos_ids=eos_ids,
    )
    capacity = prompts.shape[1] + max_new_tokens
    state = decoder.start(params, drafter_params, prompts, prompt_length, capacity)
    state = decoder.run(params, drafter_params, rules, state)
    return Decoded(
        tokens=state.tokens,
        length=state.length,
        log_probs=state.log_probs,
        finish=state.finish,
        stats=state.stats,
    )
