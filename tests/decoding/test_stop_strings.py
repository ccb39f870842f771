"""Stop strings: found wherever they begin and end, as a search on the host does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from specjax import drafters, generate
from specjax.core import Checkpoint, Sampling
from specjax.decoding import StopStrings
from specjax.testing import DraftTree, TabularLM

FOUND = 1


def search(strings, pieces):
    """How many pieces it takes until their text holds one of the strings, or None."""
    text = b""
    for count, piece in enumerate(pieces, 1):
        text += piece
        if any(s.encode() in text for s in strings):
            return count
    return None


def test_automaton_equals_a_search_over_random_strings():
    rng = np.random.default_rng(0)

    def word(low, high):
        return "".join(rng.choice(list("ab\u00e9"), rng.integers(low, high)))

    scan = jax.jit(StopStrings.scan)
    hits = 0
    for _ in range(40):
        strings = [word(1, 6) for _ in range(rng.integers(1, 4))]
        # Pieces of bytes, empty ones and halves of a character among them.
        pieces = [word(0, 5).encode()[: rng.integers(0, 6)] for _ in range(10)]
        pieces += [b""] * (12 - len(pieces))
        tokens = rng.integers(0, len(pieces), (6, 9))
        automaton = StopStrings.build(strings, pieces)
        padding = ((0, 32 - automaton.next_state.shape[0]), (0, 0))
        automaton = StopStrings(jnp.pad(automaton.next_state, padding))
        states = np.asarray(scan(automaton, jnp.zeros(6, jnp.int32), tokens))
        for row in range(6):
            expected = search(strings, [pieces[t] for t in tokens[row]])
            found = states[row] == FOUND
            first = int(np.argmax(found)) + 1 if found.any() else None
            assert first == expected, (strings, [pieces[t] for t in tokens[row]])
            assert found[first - 1 :].all() if first else True  # it stays found
            hits += first is not None
    assert 60 < hits < 200  # neither always nor never


def test_a_string_inside_a_longer_one_is_found():
    automaton = StopStrings.build(["baaa", "a"], [b"b", b"a"])
    states = automaton.scan(jnp.zeros(1, jnp.int32), jnp.array([[0, 0, 1]]))
    assert (states == FOUND).tolist() == [[False, False, True]]


def test_a_state_goes_on_from_block_to_block():
    automaton = StopStrings.build(["abab"], [b"a", b"b", b"ba"])
    state, found = jnp.zeros(1, jnp.int32), []
    for tokens in ([0, 1], [1, 0], [2, 2], [1, 0], [0, 1], [0, 0]):
        state = automaton.scan(state, jnp.array([tokens]))[:, -1]
        found.append(bool(state[0] == FOUND))
    # ab|ba|baba holds it at the end of the third block; then it stays found.
    assert found == [False, False, True, True, True, True]


def byte_level(pieces):
    """A tokeniser whose tokens are `pieces`; it is only asked to decode."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, pieces[0]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


PIECES = ["a", "b", "c", "ab", "bc", "abc", "\u0120", "ca"]  # the seventh: a space
TEXTS = ["a", "b", "c", "ab", "bc", "abc", " ", "ca"]


@pytest.fixture(scope="module")
def babbler():
    model = TabularLM(len(PIECES) + 1, order=1)  # one id has no token: padding
    params = model.init(jax.random.key(0))
    return Checkpoint(model, params, tokenizer=byte_level(PIECES))


@pytest.fixture(scope="module")
def drafter(babbler):
    near = jax.tree.map(
        lambda x: x + 0.5 * jax.random.normal(jax.random.key(1), x.shape),
        babbler.params,
    )
    draft = Checkpoint(babbler.model, near, tokenizer=babbler.tokenizer)
    return drafters.TwoModel(draft, gamma=4)


@pytest.mark.parametrize(
    "stop",
    ["abc", [" ", "cab"], ["ca", "bcb"], ["aab", "ba b"], ["b"], ["zzz"], "bb"],
    ids=str,
)
def test_generation_stops_where_a_search_on_the_host_would(babbler, drafter, stop):
    stops_where_a_search_would(babbler, drafter, stop)


@pytest.mark.parametrize("stop", ["abc", [" ", "cab"]], ids=str)
@pytest.mark.full
def test_a_string_is_found_on_any_branch_of_a_tree(babbler, drafter, stop):
    tree = DraftTree(drafter.draft, ((-1, -1, 0, 0, 1, 2), (-1, 0, -1, 2, 3)))
    stops_where_a_search_would(babbler, tree, stop)


def stops_where_a_search_would(babbler, drafter, stop):
    settings = dict(drafter=drafter, sampling=Sampling(1.0), max_new_tokens=30, seed=0)
    prompts = [[0, 1, 2], [5], [1, 0], [7, 7, 1, 2, 3, 0]] * 2
    free = generate(babbler, prompts, **settings)
    out = generate(babbler, prompts, stop=stop, **settings)
    strings = [stop] if isinstance(stop, str) else stop
    pieces = [*(t.encode() for t in TEXTS), b""]
    for row, tokens in enumerate(free.tokens):
        count = search(strings, [pieces[t] for t in tokens])
        assert out.tokens[row] == tokens[:count]
        assert out.finish_reasons[row] == ("stop" if count else "length")
        text = b"".join(pieces[t] for t in tokens[:count]).decode()
        if count:  # the text ends before the string that was complete first
            ends = {text.find(s) + len(s): text.find(s) for s in strings if s in text}
            text = text[: ends[min(ends)]]
        assert out.texts[row] == text
        assert not any(s in out.texts[row] for s in strings)
        assert len(out.log_probs[row]) == len(out.tokens[row])
    # Some strings were complete in the middle of an accepted block.
    assert out.stats.accepted.sum() > 0
    np.testing.assert_array_equal(out.stats.emitted, [len(r) for r in out.tokens])


def test_the_prompt_does_not_count(babbler, drafter):
    """A stop string in the prompt, or half in it, is not new text."""
    out = generate(
        babbler,
        [[0, 1, 2, 0, 1], [0, 0, 0, 1]] * 4,
        drafter=drafter,
        sampling=Sampling(1.0),
        max_new_tokens=30,
        stop="abc",
    )
    for tokens, reason in zip(out.tokens, out.finish_reasons, strict=True):
        text = "".join([*TEXTS, ""][t] for t in tokens)
        assert ("abc" in text) == (reason == "stop")


def test_an_end_of_text_id_wins_over_a_later_stop_string(babbler, drafter):
    settings = dict(drafter=drafter, sampling=Sampling(1.0), max_new_tokens=30)
    prompts = [[0, 1, 2], [5], [1, 0], [7, 7, 1, 2, 3, 0]] * 2
    free = generate(babbler, prompts, **settings)
    out = generate(babbler, prompts, stop="abc", eos_token_ids=[6], **settings)
    for row, tokens in enumerate(free.tokens):
        stop = search(["abc"], [[*TEXTS, ""][t].encode() for t in tokens])
        eos = tokens.index(6) + 1 if 6 in tokens else None
        ends = [(eos, "eos")] * bool(eos) + [(stop, "stop")] * bool(stop)
        count, reason = min(ends) if ends else (30, "length")
        assert (out.tokens[row], out.finish_reasons[row]) == (tokens[:count], reason)
