"""`generate`: texts in, texts out, around the jitted loop."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verifiers
from specjax.core import Checkpoint, Drafter, Params, Sampling, SpecStats, Verifier
from specjax.decoding._decode import make_rules
from specjax.decoding._loop import Decoder, DecodeState, NoDraft
from specjax.decoding._rules import FINISH_REASONS, Rules, StopStrings
from specjax.io import token_bytes
from specjax.ops import row_keys

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns, one entry a prompt."""

    texts: list[str]  # new text, without special tokens and without the stop string
    tokens: list[list[int]]  # new ids, the end-of-text id included
    log_probs: list[list[float]]  # the target's, after `Sampling`
    finish_reasons: list[str]  # eos, stop, length or context
    stats: SpecStats


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request as arrays, ready for the jitted programs.

    `Job.start` and `Job.run` are what `generate` does; a benchmark times them apart.
    """

    decoder: Decoder
    params: Params
    drafter_params: Params
    prompts: Any  # [B, P]
    prompt_length: Any  # [B]
    capacity: int
    rules: Rules
    stop: Sequence[str]  # as texts; `rules` has them as an automaton

    def start(self) -> DecodeState:
        """Reads the prompts (the prefill)."""
        return _start(
            self.decoder,
            self.params,
            self.drafter_params,
            self.prompts,
            self.prompt_length,
            self.capacity,
        )

    def run(self, state: DecodeState) -> DecodeState:
        """Decodes until every row has ended; `state` is donated: it is gone after."""
        return _run(self.decoder, self.params, self.drafter_params, self.rules, state)


def generate(
    target: Checkpoint,
    prompts: Sequence[Prompt],
    *,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    eos_token_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    verifier: Verifier | str | None = None,
) -> Generation:
    """Decodes a batch of prompts, plainly or with a drafter.

    With a lossless verifier the drafter changes the speed and nothing else: greedy
    output is the same tokens (in float32; in bfloat16 near-ties may fall the other way,
    since a pass of several tokens rounds differently), sampled output the same law.

    Args:
        target: what `specjax.load` returned.
        prompts: texts, or lists of token ids, of any lengths. Texts are encoded as they
            are; apply a chat template yourself where the model expects one.
        drafter: None decodes plainly.
        sampling: default `Sampling()`: temperature 1, no filters.
        max_new_tokens: the most to add, one number or one a row.
        seed: an integer s gives row b the seed s + b; or one a row. A row's output
            depends on its own seed and prompt, not on who shares the batch.
        eos_token_ids: ids that end a text; default the checkpoint's, `[]` for none.
        stop: strings that end a text wherever they appear. `texts` ends before the
            string, `tokens` with the token that completed it.
        verifier: an instance or a registered name; default: rejection sampling.

    Returns:
        Texts, tokens, log-probabilities, finish reasons (`eos`, `stop`, `length`,
        `context`), and the counts of speculative decoding.

    Raises:
        ValueError: an argument is not usable; the message says which and why.

    Example:
        >>> out = specjax.generate(target, ["Why is the sky blue?"],
        ...     drafter=specjax.drafters.TwoModel(draft, gamma=5))  # doctest: +SKIP
        >>> out.texts[0], out.stats.block_efficiency  # doctest: +SKIP
    """
    job = prepare(
        target,
        prompts,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        eos_token_ids=eos_token_ids,
        stop=stop,
        verifier=verifier,
    )
    return collect(target, job, job.run(job.start()))


def prepare(
    target: Checkpoint,
    prompts: Sequence[Prompt],
    *,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    eos_token_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    verifier: Verifier | str | None = None,
) -> Job:
    """Checks a request (see `generate`) and lays it out in arrays of bucketed shape."""
    model = target.model
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling or None, got {sampling!r}")
    if isinstance(drafter, type) or not (drafter is None or hasattr(drafter, "bind")):
        raise ValueError(
            "drafter must be an instance such as drafters.PromptLookup(), or None, got "
            f"{drafter!r}"
        )
    ids = _encode(target, prompts)
    batch = len(ids)
    new = _per_row("max_new_tokens", max_new_tokens, batch, low=1)
    new = [min(number, model.max_length) for number in new]  # int32 sums stay small
    seeds = _per_row("seed", seed, batch, low=0)
    if np.ndim(seed) == 0:
        seeds = [(number + row) % 2**32 for row, number in enumerate(seeds)]
    lengths = [len(row) for row in ids]
    longest = max(
        min(n + m, model.max_length) for n, m in zip(lengths, new, strict=True)
    )
    capacity = bucket(longest)
    width = min(bucket(max(lengths)), capacity)

    bound, drafter_params = NoDraft(), ()
    if drafter is not None:
        bound, drafter_params = drafter.bind(target, longest)
    padded = np.zeros((batch, width), np.int32)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = tokens
    prompt_length = jnp.asarray(lengths, jnp.int32)
    strings = _stop_strings(stop)
    automaton = None
    if strings:
        if target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this target has none")
        automaton = StopStrings.build(
            strings, token_bytes(target.tokenizer, model.vocab_size)
        )
    eos = target.eos_token_ids if eos_token_ids is None else eos_token_ids
    rules = make_rules(
        model,
        prompt_length,
        row_keys(jnp.asarray(np.array(seeds, np.uint32))),
        max_new_tokens=jnp.asarray(new, jnp.int32),
        sampling=sampling or Sampling(),
        eos_ids=_eos_ids(eos, model.vocab_size),
        stop=automaton,
    )
    return Job(
        decoder=Decoder(model, bound, _verifier(verifier)),
        params=target.params,
        drafter_params=drafter_params,
        prompts=jnp.asarray(padded),
        prompt_length=prompt_length,
        capacity=capacity,
        rules=rules,
        stop=strings,
    )


def collect(target: Checkpoint, job: Job, state: DecodeState) -> Generation:
    """Brings a finished run to the host and makes texts of it."""
    tokens, log_probs, length, finish, start, stats = jax.device_get(
        (
            state.tokens,
            state.log_probs,
            state.length,
            state.finish,
            job.prompt_length,
            state.stats,
        )
    )
    spans = [slice(int(a), int(b)) for a, b in zip(start, length, strict=True)]
    rows = [row[span].tolist() for row, span in zip(tokens, spans, strict=True)]
    reasons = [FINISH_REASONS[int(code)] for code in finish]
    texts = ["" for _ in rows]
    if target.tokenizer is not None:
        texts = [_text(target.tokenizer, row) for row in rows]
        texts = [
            _before(text, job.stop) if reason == "stop" else text
            for text, reason in zip(texts, reasons, strict=True)
        ]
    return Generation(
        texts=texts,
        tokens=rows,
        log_probs=[
            row[span].tolist() for row, span in zip(log_probs, spans, strict=True)
        ],
        finish_reasons=reasons,
        stats=stats,
    )


def bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ...: at most half of a shape is padding.

    Lengths in the same bucket share one compiled program.
    """
    if length <= 16:
        return 16
    power = 1 << math.ceil(math.log2(length))
    return power * 3 // 4 if length <= power * 3 // 4 else power


@functools.partial(jax.jit, static_argnums=(0, 5))
def _start(decoder: Decoder, params, drafter_params, prompts, prompt_length, capacity):
    return decoder.start(params, drafter_params, prompts, prompt_length, capacity)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def _run(decoder: Decoder, params, drafter_params, rules, state):
    return decoder.run(params, drafter_params, rules, state)


def _encode(target: Checkpoint, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt, checked."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list, got one string: write [text]")
    if len(prompts) == 0:
        raise ValueError("prompts must hold at least one prompt, got an empty list")
    model, rows = target.model, []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if target.tokenizer is None:
                raise ValueError(
                    f"prompt {number} is a text, but this target has no tokenizer: "
                    "give token ids"
                )
            prompt = target.tokenizer(prompt)["input_ids"]
        try:
            row = [int(token) for token in prompt]
        except (TypeError, ValueError):
            raise ValueError(
                f"prompt {number} must be a text or a list of token ids, got {prompt!r}"
            ) from None
        if not row:
            raise ValueError(
                f"prompt {number} is empty: a model needs at least one token to go on"
            )
        if min(row) < 0 or max(row) >= model.vocab_size:
            raise ValueError(
                f"prompt {number} holds the token id "
                f"{max(row) if min(row) >= 0 else min(row)}, outside the vocabulary of "
                f"{model.vocab_size}"
            )
        if len(row) >= model.max_length:
            raise ValueError(
                f"prompt {number} has {len(row)} tokens, but the model's context is "
                f"{model.max_length} and at least one must be left for new text; "
                "shorten the prompt"
            )
        rows.append(row)
    return rows


def _per_row(name: str, value, batch: int, low: int) -> list[int]:
    """One whole number a row."""
    values = [value] * batch if np.ndim(value) == 0 else list(value)
    if len(values) != batch:
        raise ValueError(
            f"{name} must be one number or one a prompt, got {len(values)} for "
            f"{batch} prompts"
        )
    for number in values:
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole or not low <= number < 2**32:
            raise ValueError(f"{name} must be a whole number >= {low}, got {number!r}")
    return [int(number) for number in values]


def _eos_ids(ids: Sequence[int], vocab_size: int):
    """End-of-text ids padded with -1 to a few sizes."""
    try:
        ids = [int(token) for token in ids]
    except (TypeError, ValueError):
        raise ValueError(
            f"eos_token_ids must be a list of token ids, got {ids!r}"
        ) from None
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"eos_token_ids must be in the vocabulary of {vocab_size}, got {token}"
            )
    size = 4 * max(1, math.ceil(len(ids) / 4))
    return jnp.asarray(ids + [-1] * (size - len(ids)), jnp.int32)


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must be non-empty strings, got {string!r}")
    return strings


def _verifier(verifier: Verifier | str | None) -> Verifier:
    if verifier is None:
        return verifiers.Rejection()
    return verifiers.get(verifier)() if isinstance(verifier, str) else verifier


def _text(tokenizer, row: list[int]) -> str:
    return tokenizer.decode(
        row, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _before(text: str, strings: Sequence[str]) -> str:
    """The text before the stop string that ends first."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    return text[: min(ends)[1]] if ends else text
