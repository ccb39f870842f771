"""Where a row ends: its token limit, the ids that end a text, and stop strings."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import Sampling, record

RUNNING, EOS, STOP, LENGTH, CONTEXT = range(5)
FINISH_REASONS = ("running", "eos", "stop", "length", "context")

_ROOT, _FOUND = 0, 1


@record
class StopStrings:
    """A finite automaton over tokens that notices stop strings as they are completed.

    It is the Aho-Corasick automaton of the strings' bytes, stepped through the bytes of
    each token beforehand. So a string is found wherever it begins and ends, across
    tokens or in the middle of an accepted block, without leaving the device.
    """

    next_state: Array  # [states, V] int32; state 1 means found, and stays

    @classmethod
    def build(cls, strings: Sequence[str], token_bytes: Sequence[bytes]):
        """Compiles `strings` for a vocabulary given as the bytes of each id.

        The number of states is padded to a power of two, so that most changes of the
        strings do not compile again.
        """
        by_byte = _aho_corasick([s.encode() for s in strings])
        longest = max((len(b) for b in token_bytes), default=1)
        codes = np.full((len(token_bytes), max(longest, 1)), -1, np.int16)
        for token, data in enumerate(token_bytes):
            codes[token, : len(data)] = np.frombuffer(data, np.uint8)
        size = 1 << max(len(by_byte) - 1, 1).bit_length()
        state = np.zeros((size, len(token_bytes)), np.int32)
        state[: len(by_byte)] = np.arange(len(by_byte))[:, None]
        for column in codes.T:
            state = np.where(column >= 0, by_byte[state, column], state)
        return cls(jnp.asarray(state, jnp.int32))

    def scan(self, state: Array, tokens: Array) -> Array:
        """States `[B, T]` after each of `tokens [B, T]`, from `state [B]` before."""

        def step(state, token):
            state = self.next_state[state, token]
            return state, state

        return jnp.swapaxes(jax.lax.scan(step, state, tokens.T)[1], 0, 1)


@record
class Rules:
    """What a decoding run was asked for, beside its prompts.

    All are arrays: changing them does not compile again. Only whether there are stop
    strings, and which filters `sampling` has, is structure.
    """

    keys: Array  # [B], one key a row
    sampling: Sampling
    limit: Array  # [B] int32, the most tokens a row may come to, prompt included
    context_bound: Array  # [B] bool, the limit is the model's context
    eos_ids: Array  # [E] int32, -1 for none
    stop: StopStrings | None


def cut(rules: Rules, length: Array, stop_state: Array, tokens: Array, count: Array):
    """Ends the rows whose new tokens complete a text.

    Args:
        rules: the run's.
        length: `[B]`, tokens before this round.
        stop_state: `[B]`, state of the stop-string automaton.
        tokens: `[B, G+1]`, the new tokens.
        count: `[B]`, how many of them the verifier emitted.

    Returns:
        How many to keep `[B]`, the reason `[B]` (RUNNING: it goes on), and the
        automaton's state `[B]`.
    """
    offset = jnp.arange(tokens.shape[1])[None, :]
    remaining = rules.limit - length
    count = jnp.minimum(count, remaining)

    is_eos = jnp.any(tokens[:, :, None] == rules.eos_ids[None, None, :], axis=-1)
    is_stop = jnp.zeros_like(is_eos)
    states = stop_state[:, None]
    if rules.stop is not None:
        states = rules.stop.scan(stop_state, tokens)
        is_stop = states == _FOUND

    ends = (is_eos | is_stop) & (offset < count[:, None])
    count = jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, count)
    last = jnp.maximum(count - 1, 0)[:, None]

    def at_last(x: Array) -> Array:
        last_column = jnp.minimum(last, x.shape[1] - 1)
        return jnp.take_along_axis(x, last_column, axis=1)[:, 0]

    reason = jnp.where(
        at_last(is_eos),
        EOS,
        jnp.where(
            at_last(is_stop),
            STOP,
            jnp.where(
                count < remaining,
                RUNNING,
                jnp.where(rules.context_bound, CONTEXT, LENGTH),
            ),
        ),
    )
    return count, reason, at_last(states)


def _aho_corasick(patterns: Sequence[bytes]) -> np.ndarray:
    """The full transition table `[states, 256]`; state 1 absorbs every match."""
    children: list[dict[int, int]] = [{}, {}]
    for pattern in patterns:
        node = _ROOT
        for index, byte in enumerate(pattern):
            if node == _FOUND:
                break
            if index == len(pattern) - 1:
                children[node][byte] = _FOUND
            else:
                if byte not in children[node]:
                    children.append({})
                    children[node][byte] = len(children) - 1
                node = children[node][byte]
    table = np.zeros((len(children), 256), np.int32)
    fail = np.zeros(len(children), np.int32)
    queue = [_ROOT]
    while queue:  # breadth first: a node's failure link is complete before the node
        node = queue.pop(0)
        table[node] = table[fail[node]] if node != _ROOT else _ROOT
        for byte, child in children[node].items():
            suffix = table[node][byte]  # the state without this node's first byte
            if suffix == _FOUND:  # a shorter string ends inside this longer one
                continue
            if child != _FOUND:
                fail[child] = suffix
                queue.append(child)
            table[node][byte] = child
    table[_FOUND] = _FOUND
    return table
