"""Lookahead against a plain Python version that reads the whole text again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import Decoder, make_rules
from specjax.drafters import Lookahead
from specjax.drafters._lookahead import _merged
from specjax.ops import row_keys
from specjax.testing import TabularLM, greedy_reference, reference_logits
from tests.decoding.conftest import sharp, small_model
from tests.marks import sampled

# Sure of itself, so that texts run in circles and n-grams come again.
MODEL = TabularLM(6, order=2, scale=3.0)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(2)))
PROMPTS = [[1, 2, 0, 1, 2], [3], [4, 4, 5, 0, 2, 1, 3, 5]]
GREEDY = Sampling(temperature=0.0)
CAPACITY = 48


def best_of(target):
    """The target's next token behind a text."""
    if target is not TARGET:
        return lambda text: int(
            np.argmax(reference_logits(target.model, target.params, text)[-1])
        )
    table = np.asarray(TARGET.params["table"])
    return lambda text: int(np.argmax(table[tuple([6, 6, *text][-2:])]))


class Reference:
    """One row of it, with lists."""

    def __init__(self, drafter, prompt, window, best):
        self.best = best
        self.d, self.text, self.window = drafter, list(prompt), window
        self.filled, self.pool = 1, []  # the oldest n-gram first
        if drafter.prompt_as_reference:
            for i in range(len(prompt) - drafter.level + 1):
                self.add(prompt[i : i + drafter.level])

    def add(self, gram):
        gram = tuple(gram)
        if gram in self.pool:
            self.pool.remove(gram)
        self.pool.append(gram)

    def round(self):
        """The guesses of this round, as they hang on the last token."""
        self.window[0][0] = self.text[-1]
        found = [g[1:] for g in reversed(self.pool) if g[0] == self.text[-1]]
        guesses = found[: self.d.guesses]
        self.look_ahead()
        kept = max((self.agreed(guess) for guess in guesses), key=len, default=[])
        self.text += kept
        self.text.append(self.best(self.text))
        return guesses

    def agreed(self, guess):
        kept = []
        for token in guess:
            if token != self.best(self.text + kept):
                break
            kept.append(token)
        return kept

    def look_ahead(self):
        rows, last = self.d.level - 1, self.filled - 1
        new = []
        for j in range(self.d.window):
            seen = self.window[0][1 : j + 1] + [
                self.window[r][j] for r in range(1, last + 1)
            ]
            new.append(self.best(self.text + seen))
        if self.filled < rows:
            self.window[self.filled] = new
            self.filled += 1
            return
        for j in range(self.d.window):
            self.add([row[j] for row in self.window] + [new[j]])
        self.window = [*self.window[1:], new]


def start(drafter, prompts, target=TARGET, new_tokens=30):
    length = jnp.array([len(p) for p in prompts])
    tokens = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    decoder = Decoder(target.model, drafter, verifiers.Rejection())
    rules = make_rules(
        target.model,
        length,
        row_keys(jnp.arange(len(prompts))),
        max_new_tokens=new_tokens,
        sampling=GREEDY,
    )
    begin = jax.jit(Decoder.start, static_argnums=(0, 5))
    tokens = jnp.asarray(tokens)
    state = begin(decoder, target.params, (), tokens, length, CAPACITY)
    return decoder, rules, state


@pytest.mark.parametrize("known", sampled([False, True], True))
@pytest.mark.full
def test_windows_pools_and_guesses_are_the_papers(known):
    check(Lookahead(window=4, level=4, guesses=3, prompt_as_reference=known))


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        dict(window=1, level=2, guesses=1),
        dict(window=5, level=2, guesses=3),
        dict(window=9, level=3, guesses=1),
    ],
)
def test_of_every_shape(settings):
    check(Lookahead(**settings, prompt_as_reference=True))


@pytest.mark.full
def test_positions_and_sight_of_the_window_are_those_of_a_text():
    """A transformer: what it guesses in the window it would guess reading it alone."""
    model = small_model(vocab_size=6)
    check(Lookahead(window=4, level=4, guesses=3), Checkpoint(model, sharp(model, 3)))


def check(drafter, target=TARGET):
    decoder, rules, state = start(drafter, PROMPTS, target)
    best = best_of(target)
    rows = [
        Reference(drafter, prompt, np.asarray(state.drafter.window[b]).tolist(), best)
        for b, prompt in enumerate(PROMPTS)
    ]
    one_round = jax.jit(Decoder.round, static_argnums=0)
    propose = jax.jit(Lookahead.propose, static_argnums=0)
    size, drafted = drafter.gamma, 0
    while (np.asarray(state.finish) == 0).any():
        going = np.asarray(state.finish) == 0
        context = decoder.context(rules, state)
        proposal, _ = propose(drafter, (), rules.keys, state.drafter, context)
        state = one_round(decoder, target.params, (), rules, state)
        for b, row in enumerate(rows):
            if not going[b]:
                continue
            guesses = row.round()
            assert int(proposal.num_drafted[b]) == size * len(guesses)
            ours = proposal.tokens[b, : size * len(guesses)].tolist()
            assert ours == [token for guess in guesses for token in guess]
            drafted += len(guesses)
            length = int(state.length[b])
            assert state.tokens[b, :length].tolist() == row.text[:length]
            assert state.drafter.window[b].tolist()[1:] == row.window[1:]
            assert state.drafter.window[b, 0, 1:].tolist() == row.window[0][1:]
    assert drafted > 0 and int(state.stats.accepted.sum()) > 0
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = greedy_reference(target.model, target.params, prompt, 30)
        assert row.text[len(prompt) :][:30] == expected


def test_what_begins_alike_is_one_branch():
    guesses = jnp.array([[[1, 2, 3, 5], [1, 2, 4, 0], [0, 2, 3, 5], [1, 2, 4, 1]]])
    assert _merged(guesses)[0].tolist() == [
        [-1, 0, 1, 2],
        [-1, 0, 1, 6],  # its own "1, 2" is never needed
        [-1, 8, 9, 10],
        [-1, 0, 1, 6],
    ]


def test_the_pool_forgets_the_oldest():
    drafter = Lookahead(window=3, level=3, guesses=2, pool=4, prompt_as_reference=True)
    prompt = [0, 1, 2, 3, 4, 0, 1, 3]  # of its n-grams the four newest stay
    _, _, state = start(drafter, [prompt])
    pool = state.drafter.pool
    grams = {
        (int(first), *rest.tolist())
        for first, rest in zip(pool.first[0], pool.rest[0], strict=True)
    }
    assert grams == {(2, 3, 4), (3, 4, 0), (4, 0, 1), (0, 1, 3)}


def test_greedy_output_is_the_targets_and_takes_fewer_rounds():
    out = generate(
        TARGET,
        PROMPTS,
        drafter=Lookahead(window=4, level=4, guesses=3),
        sampling=GREEDY,
        max_new_tokens=30,
    )
    assert out.tokens == [
        greedy_reference(MODEL, TARGET.params, prompt, 30) for prompt in PROMPTS
    ]
    assert out.stats.block_efficiency > 1.3


@pytest.mark.parametrize(
    "wrong,words",
    [
        (dict(level=1), "level, a whole number >= 2"),
        (dict(window=0), "window, a whole number >= 1"),
        (dict(guesses=2.0), "guesses, a whole number"),
        (dict(pool=6), "pool must hold the n-grams of one round at least, 7"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Lookahead(**wrong)
