"""Medusa's heads: what they draft, what they learn, and in which tree."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, drafters, generate, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import Decoder, make_rules
from specjax.distill import Batch
from specjax.models import CausalLM, ModelConfig
from specjax.ops import row_keys
from specjax.testing import TabularLM
from tests.marks import sampled

VOCAB, WIDTH = 13, 16


def small(width=WIDTH, vocab_size=VOCAB):
    return CausalLM(
        ModelConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_position_embeddings=64,
        )
    )


@functools.cache
def checkpoint(width=WIDTH, vocab_size=VOCAB):
    model = small(width, vocab_size)
    return Checkpoint(model, sharp(model))


@functools.partial(jax.jit, static_argnums=0)
def sharp(model):
    params = model.init(jax.random.key(0))
    return jax.tree.map(lambda x: 12 * x if x.ndim == 2 else x, params)


def random_heads(medusa, target, scale=0.5):
    own, rng = fresh_heads(medusa, target), np.random.default_rng(3)
    noisy = {
        name: (leaf + scale * rng.normal(size=leaf.shape)).astype(np.float32)
        for name, leaf in own.items()
    }
    return medusa.with_params(jax.tree.map(jnp.asarray, noisy))


def fresh_heads(medusa, target):
    @jax.jit
    def init(params):
        checkpoint = Checkpoint(target.model, params)
        return medusa.init_params(jax.random.key(0), checkpoint)

    return jax.tree.map(np.asarray, init(target.params))


@pytest.fixture(scope="module")
def target():
    return checkpoint()


class TestTrees:
    def test_widths_are_all_combinations(self):
        paths = drafters.cartesian_tree((2, 1, 2))
        assert len(paths) == 2 + 2 + 4
        assert paths[:4] == ((0,), (1,), (0, 0), (1, 0))
        assert drafters.Medusa(tree=(2, 1, 2)).tree == paths
        assert drafters.Medusa(tree=paths[::-1]).tree == paths

    def test_the_sparse_tree_is_the_best_of_all(self):
        """METHODS: the sum over nodes of the product of their accuracies."""
        table = np.array([[0.5, 0.3, 0.1], [0.45, 0.2, 0.05], [0.3, 0.3, 0.1]])

        def worth(tree):
            return sum(np.prod([table[d, r] for d, r in enumerate(p)]) for p in tree)

        nodes = drafters.cartesian_tree((3, 3))
        table = table[:2]
        for size in (1, 2, 4, 5):
            whole = (
                tree
                for tree in itertools.combinations(nodes, size)
                if all(len(p) == 1 or p[:-1] in tree for p in tree)
            )
            best = max(map(worth, whole))
            found = drafters.sparse_tree(table, size)
            assert len(found) == size
            assert worth(found) == pytest.approx(best)
            assert drafters.Medusa(tree=found).num_nodes == size

    @pytest.mark.parametrize(
        "tree,message",
        [
            ((), "a whole number >= 1 for each depth"),
            ((2, 0), "a whole number >= 1 for each depth"),
            (((0, 0), (1,)), r"holds \(0, 0\), but not its parent \(0,\)"),
            (((0,), (0,)), "holds a node twice"),
            (((-1,),), "rank >= 0"),
            (((0,), "x"), "by paths such as"),
            ((1, 1, 1, 1, 1), "5 deep, but there are 4 heads"),
        ],
    )
    def test_what_is_no_tree_is_refused(self, tree, message):
        with pytest.raises(ValueError, match=message):
            drafters.Medusa(tree=tree)

    @pytest.mark.parametrize(
        "accuracies,size,message",
        [
            ([[1.5]], 1, "numbers in"),
            ([], 1, "numbers in"),
            ([[0.5]], 0, "whole number >= 1"),
            ([[0.5, 0.5], [0.5]], 5, "a tree of 4 nodes at most"),
        ],
    )
    def test_a_tree_that_cannot_be_built_is_refused(self, accuracies, size, message):
        with pytest.raises(ValueError, match=message):
            drafters.sparse_tree(accuracies, size)


@functools.partial(jax.jit, static_argnums=0)
def _measure(bound, params, tokens, mask):
    """The target's output, the loss and the ranks."""
    out, _ = bound.model.apply(params["target"], tokens)
    loss = bound.loss(params, row_keys(jnp.arange(3)), tokens, mask, out)
    return out, loss, bound.ranks(params, tokens, mask, out, 4)


@functools.partial(jax.jit, static_argnums=0)
def _propose(bound, params, tokens):
    """The target's output, and the tree behind the token after it."""
    out, _ = bound.model.apply(params["target"], tokens)
    length = jnp.array([tokens.shape[1] + 1])
    state = bound.init(params, tokens, length, 16, out)
    return out, bound.propose(params, row_keys(jnp.arange(1)), state, None)[0]


class TestLoss:
    HEADS, DECAY = 3, 0.8

    def case(self, **settings):
        target = checkpoint(8, 7)
        medusa = drafters.Medusa(self.HEADS, (2, 1), decay=self.DECAY, **settings)
        medusa = random_heads(medusa, target)
        bound, params = medusa.bind(target, 16)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 7, (3, 9))
        mask = rng.random((3, 9)) < 0.7
        mask[:, 0] = False
        return bound, params, jnp.asarray(tokens), jnp.asarray(mask)

    def oracle(self, bound, params, tokens, mask, out):
        """Token by token, from the formulas of the paper."""
        own = jax.tree.map(np.asarray, params["own"])
        hidden, raw = np.asarray(out.hidden), np.asarray(out.logits)
        w_out = np.asarray(params["target"]["embed_tokens"]).T
        loss, tokens_at = 0.0, np.zeros(self.HEADS, int)
        right, ranks = np.zeros(self.HEADS, int), []
        for b, t in itertools.product(range(3), range(9)):
            for k in range(1, self.HEADS + 1):
                if t + k + 1 >= 9 or not all(mask[b, t + 2 : t + k + 2]):
                    break
                h = hidden[b, t]
                inner = h @ own["w1"][k - 1]
                z = inner / (1 + np.exp(-inner)) + h
                logits = z @ (w_out if bound.share_head else own["w2"][k - 1])
                log_q = logits - np.log(np.exp(logits).sum())
                label = int(tokens[b, t + k + 1])
                if bound.labels == "hard":
                    value, best = -log_q[label], label
                else:
                    p = np.exp(raw[b, t + k]) / np.exp(raw[b, t + k]).sum()
                    value, best = (p * (np.log(p) - log_q)).sum(), p.argmax()
                loss += self.DECAY**k * value
                tokens_at[k - 1] += 1
                right[k - 1] += log_q.argmax() == best
                ranks.append((k - 1, int((-logits).argsort().tolist().index(label))))
        return loss, tokens_at, right, ranks

    @pytest.mark.parametrize(
        "share_head,labels,chunk",
        sampled(
            [
                (True, "hard", 1024),
                (True, "soft", 18),
                (False, "hard", 18),
                (False, "soft", 1024),
            ],
            (True, "soft", 18),
        ),
    )
    @pytest.mark.full
    def test_the_loss_is_that_of_the_paper(self, share_head, labels, chunk):
        settings = dict(share_head=share_head, labels=labels, chunk=chunk)
        bound, params, tokens, mask = self.case(**settings)
        out, (loss, sums), (hits, count) = _measure(bound, params, tokens, mask)
        wanted, counted, right, ranks = self.oracle(bound, params, tokens, mask, out)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
        assert sums["tokens"] == counted[0] > counted[2] > 0
        for k in range(self.HEADS):
            assert sums[f"tokens/head_{k + 1}"] == counted[k]
            assert sums[f"agreement/head_{k + 1}"] == right[k]
        weighted = [
            self.DECAY**k * sums[f"loss/head_{k}"] for k in range(1, self.HEADS + 1)
        ]
        np.testing.assert_allclose(sum(weighted), wanted, rtol=1e-5)
        np.testing.assert_array_equal(count, counted)
        for k, i in itertools.product(range(self.HEADS), range(4)):
            assert hits[k, i] == ranks.count((k, i))

    @pytest.mark.full
    def test_soft_labels_teach_the_target_nothing(self):
        bound, params, tokens, mask = self.case(labels="soft", share_head=False)
        out, *_ = _measure(bound, params, tokens, mask)

        @jax.jit
        @jax.grad
        def gradient_of(head):
            theirs = {**params["target"], "embed_tokens": head}
            both = {**params, "target": theirs}
            return bound.loss(both, row_keys(jnp.arange(3)), tokens, mask, out)[0]

        gradient = gradient_of(params["target"]["embed_tokens"])
        assert not np.asarray(gradient).any()

    @pytest.mark.parametrize("share_head", sampled([True, False], False))
    def test_fresh_heads_are_the_targets_own(self, target, share_head):
        medusa = drafters.Medusa(2, (2, 1), share_head=share_head)
        own = fresh_heads(medusa, target)
        bound, params = medusa.with_params(own).bind(target, 16)
        out, proposal = _propose(bound, params, jnp.array([[1, 2, 3]]))
        best = np.argsort(-np.asarray(out.logits[0, 2]))[:2]
        np.testing.assert_array_equal(proposal.tokens[0, :2], best)
        np.testing.assert_array_equal(proposal.tokens[0, 2:], best[0])
        assert proposal.parents == (-1, -1, 0, 1) and proposal.log_q is None


@functools.partial(jax.jit, static_argnums=0)
def _round(decoder, params, drafter_params, rules, state):
    return decoder.round(params, drafter_params, rules, state)


@functools.partial(jax.jit, static_argnums=0)
def _hidden(model, params, tokens):
    return model.apply(params, tokens)[0].hidden


@pytest.mark.full
def test_the_state_is_what_a_fresh_pass_says_before_the_newest_token(target):
    """In every round, of ragged rows; a prompt of one token drafts nothing at first."""
    medusa = random_heads(drafters.Medusa(3, (3, 2, 1)), target, scale=0.1)
    drafter, drafter_params = medusa.bind(target, 32)
    decoder = Decoder(target.model, drafter, verifiers.Rejection())
    prompts, length = jnp.array([[1, 0, 0], [2, 3, 0], [4, 5, 6]]), jnp.array([1, 2, 3])
    rules = make_rules(
        target.model,
        length,
        row_keys(jnp.arange(3)),
        max_new_tokens=20,
        sampling=Sampling(jnp.float32(0.7)),
    )
    start = jax.jit(Decoder.start, static_argnums=(0, 5))
    state = start(decoder, target.params, drafter_params, prompts, length, 32)
    accepted = np.zeros(3, int)
    for number in range(40):
        state = _round(decoder, target.params, drafter_params, rules, state)
        if number == 0:
            assert state.stats.drafted.tolist() == [0, 15, 15]
        running = np.asarray(state.finish) == 0
        hidden = np.asarray(_hidden(target.model, target.params, state.tokens))
        before = hidden[np.arange(3), np.asarray(state.length) - 2]
        ours = np.asarray(state.drafter.hidden)
        np.testing.assert_allclose(ours[running], before[running], atol=1e-5)
        accepted = np.asarray(state.stats.accepted)
        if not running.any():
            break
    assert (accepted > 0).all() and not running.any()


@pytest.mark.parametrize("verifier", sampled(["rejection", "greedy"], "rejection"))
@pytest.mark.full
def test_greedy_output_is_the_targets(target, verifier):
    medusa = random_heads(drafters.Medusa(3, (3, 2, 1)), target, scale=0.1)
    prompts = [[1], [2, 3], [0, 0, 0], [4, 5, 6, 7]]
    settings = dict(sampling=Sampling(0.0), max_new_tokens=24, eos_token_ids=[])
    plain = generate(target, prompts, **settings)
    out = generate(target, prompts, drafter=medusa, verifier=verifier, **settings)
    assert out.tokens == plain.tokens
    assert out.stats.block_efficiency > 1.3


@pytest.mark.full
def test_widths_of_one_are_a_chain_which_every_verifier_takes(target):
    medusa = random_heads(drafters.Medusa(3, (1, 1, 1)), target, scale=0.1)
    settings = dict(sampling=Sampling(0.0), max_new_tokens=24, eos_token_ids=[])
    plain = generate(target, [[1, 2]], **settings)
    out = generate(target, [[1, 2]], drafter=medusa, verifier="block", **settings)
    assert out.tokens == plain.tokens


@pytest.mark.full
def test_an_end_of_text_on_a_branch_ends_the_row(target):
    """At every place that greedy text has one: ids are ended on one after the other."""
    medusa = random_heads(drafters.Medusa(3, (3, 2, 1)), target, scale=0.1)
    prompts, settings = [[2, 3], [4, 5, 6, 7]], dict(sampling=Sampling(0.0))
    reasons = []
    for eos in range(VOCAB):
        settings = dict(settings, max_new_tokens=24, eos_token_ids=[eos])
        plain = generate(target, prompts, **settings)
        out = generate(target, prompts, drafter=medusa, **settings)
        assert out.tokens == plain.tokens
        assert out.finish_reasons == plain.finish_reasons
        reasons += out.finish_reasons
    assert 5 < reasons.count("eos") < len(reasons)


@pytest.mark.full
@pytest.mark.parametrize("share_head", [True, False])
def test_heads_overfit_one_sequence_to_a_live_acceptance_of_one(target, share_head):
    """The target's own text: every draft stays once the heads know it."""
    settings = dict(sampling=Sampling(0.0), max_new_tokens=28, eos_token_ids=[])
    text = generate(target, [[2, 3]], **settings).tokens[0]
    medusa = drafters.Medusa(3, (1, 1, 1), share_head=share_head)
    step = distill.DrafterStep(
        medusa, target.model, distill.make_optimizer("adamw", learning_rate=2e-2)
    )
    own = fresh_heads(medusa, target)
    before = generate(
        target, [[2, 3]], drafter=medusa.with_params(own), **settings
    ).stats
    state = step.init(jax.random.key(0), own)
    batch = Batch.of([[2, 3, *text]], prompt_length=2)
    for _ in range(300):
        state, sums = step(state, batch, target.params)
    assert sums.as_dict()["agreement/head_3"] == 1.0
    medusa = medusa.with_params(state.params)
    out = generate(target, [[2, 3]], drafter=medusa, **settings)
    assert out.tokens[0] == text
    assert before.acceptance_rate < 0.9  # or it would show nothing
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.block_efficiency == 4.0


class TestRefusals:
    def test_heads_without_parameters(self, target):
        with pytest.raises(ValueError, match="Medusa needs trained heads"):
            drafters.Medusa().bind(target, 16)

    @pytest.mark.parametrize("share_head", [True, False])
    def test_heads_for_another_width(self, target, share_head):
        medusa = random_heads(drafters.Medusa(share_head=share_head), target)
        message = "made for a target of the width 16 with 13 tokens, but .* the width 8"
        with pytest.raises(ValueError, match=message):
            medusa.bind(Checkpoint(small(8), {}), 16)

    def test_heads_for_another_vocabulary(self, target):
        medusa = random_heads(drafters.Medusa(share_head=False), target)
        with pytest.raises(ValueError, match=r"with 13 tokens, but .* and 7 tokens"):
            medusa.bind(Checkpoint(small(vocab_size=7), {}), 16)

    def test_parameters_for_other_settings(self, target):
        own = random_heads(drafters.Medusa(3, (1,)), target).params
        for medusa in (
            drafters.Medusa(2, (1,)),
            drafters.Medusa(3, (1,), share_head=False),
        ):
            with pytest.raises(ValueError):
                medusa.with_params(own).bind(target, 16)

    def test_a_tree_wider_than_the_vocabulary(self, target):
        medusa = random_heads(drafters.Medusa(tree=(14,)), target)
        with pytest.raises(ValueError, match=r"takes the 14 best tokens .* has 13"):
            medusa.bind(target, 16)

    def test_a_target_whose_head_cannot_be_called(self, target):
        class Headless(TabularLM):
            unembed = None  # pyright: ignore

        with pytest.raises(ValueError, match="whose head can be called alone"):
            drafters.Medusa().for_model(Headless(13))

    @pytest.mark.parametrize(
        "settings,message",
        [
            (dict(num_heads=0), "num_heads must be a whole number >= 1"),
            (dict(labels="firm"), "labels must be 'hard' or 'soft'"),
            (dict(decay=0.0), r"decay must be in \(0, 1\]"),
            (dict(chunk=0), "chunk must be a whole number >= 1"),
        ],
    )
    def test_settings_out_of_range(self, settings, message):
        with pytest.raises(ValueError, match=message):
            drafters.Medusa(**settings)

    def test_a_verifier_of_chains_refuses_its_trees(self, target):
        medusa = random_heads(drafters.Medusa(3, (2, 1)), target)
        with pytest.raises(ValueError, match="takes chains of drafts only"):
            generate(target, [[1]], drafter=medusa, verifier="block")


@pytest.mark.full
def test_typical_acceptance_keeps_more(target):
    medusa = random_heads(drafters.Medusa(3, (3, 2, 1)), target, scale=0.1)
    settings = dict(max_new_tokens=24, eos_token_ids=[], drafter=medusa)
    prompts = [[row, 3] for row in range(8)]
    exact = generate(target, prompts, **settings).stats
    typical = generate(target, prompts, verifier="typical", **settings).stats
    assert typical.block_efficiency > exact.block_efficiency
