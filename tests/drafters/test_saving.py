"""Trained drafters on disk: whole, named, and known to be for one target."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, generate
from specjax.core import Checkpoint, Sampling
from specjax.testing import TabularLM

MODEL = TabularLM(5, order=2)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(0)))
OTHER = Checkpoint(MODEL, MODEL.init(jax.random.key(1)))


@pytest.fixture
def medusa():
    medusa = drafters.Medusa(3, (2, 2, 1), labels="soft", share_head=False)
    own = medusa.init_params(jax.random.key(0), TARGET)
    noise = np.random.default_rng(6).normal(size=own["w1"].shape)
    return medusa.with_params({**own, "w1": jnp.asarray(noise, jnp.float32)})


@pytest.fixture
def folder(medusa, tmp_path):
    return drafters.save(medusa, tmp_path / "heads", TARGET)


def test_what_was_saved_comes_back(medusa, folder):
    found = drafters.load(folder)
    assert dataclasses.replace(found, made_for=None) == medusa
    assert found.made_for == drafters.MadeFor.of(TARGET)
    assert jax.tree.structure(found.params) == jax.tree.structure(medusa.params)
    for ours, theirs in zip(
        jax.tree.leaves(found.params), jax.tree.leaves(medusa.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    settings = dict(max_new_tokens=12, sampling=Sampling(0.0), eos_token_ids=[])
    one = generate(TARGET, [[1, 2]], drafter=found, **settings)
    two = generate(TARGET, [[1, 2]], drafter=medusa, **settings)
    assert one.tokens == two.tokens
    assert one.stats.as_dict() == two.stats.as_dict()


def test_saving_again_replaces(medusa, folder):
    narrow = dataclasses.replace(medusa, tree=(1,))
    drafters.save(narrow, folder, TARGET)
    assert drafters.load(folder).tree == ((0,),)


def test_another_target_is_refused_unless_that_is_meant(folder):
    with pytest.raises(ValueError, match="trained for another target of the same"):
        drafters.load(folder).bind(OTHER, 16)
    drafters.load(folder, any_target=True).bind(OTHER, 16)
    wide = Checkpoint(TabularLM(6), TabularLM(6).init(jax.random.key(0)))
    for any_target in (False, True):
        with pytest.raises(ValueError, match=r"width 5 with 5 tokens, but .* width 6"):
            drafters.load(folder, any_target=any_target).bind(wide, 16)


def test_what_cannot_be_saved_is_refused(medusa, tmp_path):
    with pytest.raises(ValueError, match="has no parameters to save"):
        drafters.save(drafters.Medusa(), tmp_path, TARGET)
    with pytest.raises(ValueError, match=r"width 5 with 5 tokens, but .* width 6"):
        wide = Checkpoint(TabularLM(6), TabularLM(6).init(jax.random.key(0)))
        drafters.save(medusa, tmp_path, wide)
    with pytest.raises(ValueError, match="has no parameters to save"):
        drafters.save(drafters.PromptLookup(), tmp_path, TARGET)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_no_whole_drafter_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="there is no drafter in"):
        drafters.load(tmp_path)
    path = folder / "drafter.json"
    notes = json.loads(path.read_text())
    for changed, message in (
        ({**notes, "format": "x"}, "is not of the format"),
        ({**notes, "drafter": "meduza"}, "did you mean 'medusa'"),
        ({**notes, "settings": {"new": 1}}, "does not fit the drafter 'medusa'"),
        ({k: v for k, v in notes.items() if k != "made_for"}, "lacks made_for"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            drafters.load(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        drafters.load(folder)
    path.write_text(json.dumps(notes))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"weights of the drafter .* cannot be read"):
        drafters.load(folder)
