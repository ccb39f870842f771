"""Heads over some ids: what they compute, and everything that has to know of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import parallel
from specjax.models import (
    HEAD_MARK,
    CausalLM,
    HeadVocabulary,
    ModelConfig,
    config_from_hf,
    config_to_hf,
    grow,
    param_path,
    reduce_head,
    take_layers,
    tensor_shapes,
)

IDS = [0, 3, 4, 9, 12]
TOKENS = jnp.array([[3, 11, 0, 15], [9, 9, 2, 1]])  # 11, 15, 2 and 1 have no row


def sized(**options):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12}
    heads = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    return ModelConfig(**{**sizes, **heads, **options})


def make_pair(tied):
    """A full model and the same with a reduced head, both with parameters."""
    config = sized(tie_word_embeddings=tied)
    params = jax.jit(CausalLM(config).init)(jax.random.key(0))
    reduced, rows = reduce_head(config, params, IDS)
    return (CausalLM(config), params), (CausalLM(reduced), rows)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request):
    return make_pair(request.param)


@pytest.fixture(scope="module")
def reduced_model():
    return make_pair(tied=False)[1]


class TestHeadVocabulary:
    def test_two_of_the_same_ids_are_one_static_argument(self):
        traced = []

        def count(head):
            traced.append(head)
            return jnp.asarray(head.ids).sum()

        run = jax.jit(count, static_argnums=0)
        ids = np.array(IDS, np.int64)
        one, two = HeadVocabulary(IDS), HeadVocabulary(ids)
        ids[0] = 1  # what it was made from is not what it holds
        assert one == two and hash(one) == hash(two)
        assert run(one) == run(two) == sum(IDS)
        assert len(traced) == 1
        assert one != HeadVocabulary(IDS[:-1]) and one.size == 5
        with pytest.raises(ValueError, match="read-only"):
            one.ids[0] = 7

    @pytest.mark.parametrize(
        "ids", [[], [2, 1], [1, 1], [-1, 2], [0.5], [[1, 2]], ["a"], 3]
    )
    def test_what_is_no_list_of_ids_is_refused(self, ids):
        with pytest.raises(ValueError, match="must be ascending whole numbers >= 0"):
            HeadVocabulary(ids)
        with pytest.raises(ValueError, match="must be int32"):
            HeadVocabulary([1, 2**31])


def test_settings_that_cannot_be_are_refused():
    head = HeadVocabulary([1, 16])
    with pytest.raises(ValueError, match="needs tie_word_embeddings=False, got True"):
        sized(head=HeadVocabulary(IDS))
    with pytest.raises(ValueError, match="below vocab_size=16, got 16"):
        sized(head=head, tie_word_embeddings=False)


@pytest.mark.full
def test_the_chosen_ids_have_the_logits_that_they_had(pair):
    (full, params), (reduced, rows) = pair
    assert full.head_ids is None and reduced.head_ids.tolist() == IDS
    expected = np.asarray(full.apply(params, TOKENS)[0].logits)
    out, _ = reduced.apply(rows, TOKENS)
    assert out.logits.shape == expected.shape
    # A product of other shapes may sum in another order.
    np.testing.assert_allclose(out.logits[..., IDS], expected[..., IDS], atol=1e-6)
    others = np.setdiff1d(np.arange(16), IDS)
    assert (out.logits[..., others] == -jnp.inf).all()

    compact = reduced.unembed(rows, out.hidden, reduced=True)
    assert compact.shape == (2, 4, 5)
    np.testing.assert_array_equal(reduced.unembed(rows, out.hidden)[..., IDS], compact)
    whole = full.unembed(params, out.hidden, reduced=True)
    assert whole.shape == (2, 4, 16)


@pytest.mark.full
def test_a_cached_run_equals_the_uncached_one(reduced_model):
    reduced, rows = reduced_model
    expected = reduced.apply(rows, TOKENS)[0].logits
    cache = reduced.init_cache(2, 4)
    for index in range(4):
        out, cache = reduced.apply(rows, TOKENS[:, index : index + 1], cache)
        here = expected[:, index]
        np.testing.assert_allclose(out.logits[:, 0], here, atol=1e-5)


def test_gradients_are_those_of_the_ids_alone(reduced_model):
    """Through all logits or through the head's own: the same, and finite."""
    reduced, rows = reduced_model
    label = jnp.array([[1, 0, 2, 4], [3, 3, 1, 0]])

    def loss(params, compact):
        out, _ = reduced.apply(params, TOKENS)
        logits = reduced.unembed(params, out.hidden, reduced=True)
        target = label
        if not compact:
            logits, target = out.logits, jnp.asarray(reduced.head_ids)[label]
        log_q = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_q, target[..., None], axis=-1).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    one, two = gradient(rows, True), gradient(rows, False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, two)
    # Ids without a row are read all the same, and learned.
    assert (jnp.abs(two["embed_tokens"][jnp.array([11, 15, 2])]).sum(-1) > 0).all()
    assert (two["embed_tokens"][14] == 0).all()


def test_parameters_are_counted_and_named(pair):
    for model, params in pair:
        leaves = jax.tree.leaves_with_path(params)
        assert model.config.num_params == sum(leaf.size for _, leaf in leaves)
        ours = {tuple(k.key for k in path): leaf.shape for path, leaf in leaves}
        wanted = tensor_shapes(dataclasses.replace(model.config, kernel_layout="oi"))
        assert ours.keys() == {param_path(name) for name in wanted}
        if model.head is not None:
            assert wanted["lm_head.weight"] == ours["lm_head",] == (5, 8)
            fresh = jax.eval_shape(model.init, jax.random.key(1))
            assert fresh["lm_head"].shape == (5, 8)


def test_other_surgery_keeps_the_head(reduced_model):
    reduced, rows = reduced_model
    config, params = take_layers(reduced.config, rows, [1])
    assert config.head == reduced.head
    np.testing.assert_array_equal(params["lm_head"], rows["lm_head"])
    config, params = grow(config, params, 2)
    out, _ = CausalLM(config).apply(params, TOKENS)
    assert np.isfinite(out.logits).sum() == 2 * 4 * 5


def test_a_head_is_reduced_once(pair):
    (full, params), (reduced, rows) = pair
    with pytest.raises(ValueError, match="reduced to 5 ids already"):
        reduce_head(reduced.config, rows, IDS[:2])
    with pytest.raises(ValueError, match="below vocab_size=16, got 16"):
        reduce_head(full.config, params, [1, 16])


def test_its_rows_are_cut_like_those_of_any_head(reduced_model):
    _, rows = reduced_model
    axes = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.AbstractMesh((1, 2, 5), parallel.AXES, axis_types=axes)
    cut = parallel.partition_specs(rows, mesh)["lm_head"]
    assert cut == jax.sharding.PartitionSpec("tensor", "fsdp")


class TestConfigurations:
    HEAD = HeadVocabulary(IDS)
    CONFIG = sized(tie_word_embeddings=False, head=HEAD)

    def test_they_survive_the_round_trip(self):
        hf = config_to_hf(self.CONFIG, "Qwen3ForCausalLM")
        assert config_from_hf(hf, head=self.HEAD) == self.CONFIG
        assert hf["model_type"] == "specjax_reduced_head"
        assert "transformers cannot load" in hf[HEAD_MARK]["note"]

    def test_another_head_is_refused(self):
        hf = config_to_hf(self.CONFIG)
        plain = config_to_hf(dataclasses.replace(self.CONFIG, head=None))
        cases = [
            (hf, None, "reduced to 5 ids, which are in the weights as 'lm_head.ids'"),
            (hf, HeadVocabulary(IDS[1:]), "head of 5 ids .* but the weights hold 4"),
            (hf, HeadVocabulary([1, *IDS[1:]]), "folder is damaged"),
            (plain, self.HEAD, "describes a full head, but"),
            ({**hf, HEAD_MARK: {"size": 5}}, self.HEAD, "must hold size and sha256"),
            ({**hf, HEAD_MARK: True}, self.HEAD, "must hold size and sha256"),
        ]
        for given, head, message in cases:
            with pytest.raises(ValueError, match=message):
                config_from_hf(given, head=head)
