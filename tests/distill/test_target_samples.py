"""The target's own text on disk: whose it is, how it goes on, and what it refuses."""

import dataclasses
import errno
import functools
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax import generate
from specjax.core import Checkpoint, Sampling
from specjax.distill import sample_target

LENGTH = 9
PROMPTS = [[1, 2, 3], [4], [5, 6], [7], [1, 2, 3], [8, 9], [3]]
SETTINGS = {"length": LENGTH, "seed": 5, "batch_size": 2, "shard_rows": 3}


@pytest.fixture(scope="module")
def target(toys):
    """Ends of text are frequent: some answers come to one, some are cut."""
    model = toys.draft
    return Checkpoint(model, toys.draft_params, None, model.config, (0, 5))


@pytest.fixture(scope="module")
def straight(target, tmp_path_factory):
    """Samples of a run without a break, and their folder."""
    folder = tmp_path_factory.mktemp("straight") / "samples"
    return SimpleNamespace(
        samples=sample_target(target, PROMPTS, folder, **SETTINGS), folder=folder
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_row_is_what_its_own_seed_draws(target, straight):
    samples = straight.samples
    alone = generate(
        target,
        PROMPTS,
        max_new_tokens=[LENGTH - len(p) for p in PROMPTS],
        seed=SETTINGS["seed"],
    )
    for row, prompt in enumerate(PROMPTS):
        whole = prompt + alone.tokens[row]
        assert samples.length[row] == len(whole)
        assert samples.tokens[row].tolist() == whole + [0] * (LENGTH - len(whole))
        assert samples.ended[row] == (alone.finish_reasons[row] == "eos")
    assert samples.prompt_length.tolist() == [3, 1, 2, 1, 3, 2, 1]
    assert 0 < samples.ended.sum() < len(PROMPTS)
    # The same prompt has another answer under another seed.
    assert samples.tokens[0].tolist() != samples.tokens[4].tolist()


def test_the_loss_is_on_the_answers_and_their_ends(straight):
    samples = straight.samples
    batch = samples.batch()
    index = np.arange(LENGTH)
    expected = (index >= samples.prompt_length[:, None]) & (
        index < samples.length[:, None]
    )
    np.testing.assert_array_equal(batch.mask, expected)
    ends = samples.tokens[np.arange(len(PROMPTS)), samples.length - 1]
    assert set(ends[samples.ended].tolist()) <= {0, 5}
    assert batch.mask[np.arange(len(PROMPTS)), samples.length - 1].all()


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    target, straight, tmp_path
):
    folder, seen = tmp_path / "samples", []

    def stop(done, total):
        seen.append((done, total))
        if done == 5:  # in the middle of the second shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample_target(target, PROMPTS, folder, progress=stop, **SETTINGS)
    assert list(contents(folder)) == ["shard-00000.safetensors"]
    again = functools.partial(sample_target, target, PROMPTS, folder, **SETTINGS)
    samples = again(progress=lambda *numbers: seen.append(numbers))
    assert seen == [(2, 7), (3, 7), (5, 7), (5, 7), (6, 7), (7, 7)]
    assert contents(folder) == contents(straight.folder)
    for name in ("tokens", "length", "prompt_length", "ended"):
        np.testing.assert_array_equal(
            getattr(samples, name), getattr(straight.samples, name)
        )
    again(progress=lambda *_: pytest.fail("drawn twice"))


def test_batch_sizes_change_no_sample(target, straight, tmp_path):
    settings = SETTINGS | {"batch_size": 5, "shard_rows": 7}
    samples = sample_target(target, PROMPTS, tmp_path / "samples", **settings)
    np.testing.assert_array_equal(samples.tokens, straight.samples.tokens)
    # The negative control: another seed does.
    other = sample_target(target, PROMPTS, tmp_path / "other", **settings | {"seed": 6})
    assert (other.tokens != straight.samples.tokens).any()


def test_a_full_disk_leaves_whole_shards_only(target, straight, tmp_path, monkeypatch):
    folder, real, calls = tmp_path / "samples", os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; make room"):
        sample_target(target, PROMPTS, folder, **SETTINGS)
    assert len(contents(folder)) == 2
    sample_target(target, PROMPTS, folder, **SETTINGS)
    assert contents(folder) == contents(straight.folder)


def scaled(target):
    params = jax.tree.map(lambda x: x * 1.01, target.params)
    return dataclasses.replace(target, params=params)


other_tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
OTHERS = {
    "target": lambda t: ((scaled(t), PROMPTS), {}),
    "tokenizer": lambda t: (
        (dataclasses.replace(t, tokenizer=other_tokenizer), PROMPTS),
        {},
    ),
    "prompts": lambda t: ((t, [[2], *PROMPTS[1:]]), {}),
    "length": lambda t: ((t, PROMPTS), {"length": 8}),
    "sampling": lambda t: ((t, PROMPTS), {"sampling": Sampling(temperature=0.5)}),
    "seed": lambda t: ((t, PROMPTS), {"seed": 6}),
    "eos_token_ids": lambda t: ((t, PROMPTS), {"eos_token_ids": []}),
    "shard_rows": lambda t: ((t, PROMPTS), {"shard_rows": 4}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_samples_of_something_else_are_not_taken(target, straight, name):
    before = contents(straight.folder)
    args, settings = OTHERS[name](target)
    with pytest.raises(ValueError, match=rf"another one: its {name} is .*, expected"):
        sample_target(*args, straight.folder, **(SETTINGS | settings))
    assert contents(straight.folder) == before


def test_temperature_1_is_temperature_1(target, straight):
    settings = SETTINGS | {"sampling": Sampling(temperature=1)}
    sample_target(target, PROMPTS, straight.folder, **settings)


def test_bad_requests(target, tmp_path):
    draw = functools.partial(sample_target, folder=tmp_path / "new")
    for prompts, settings, message in (
        ([], {}, "at least one prompt to answer, got none"),
        ([[1], []], {}, "prompt 1 is empty"),
        (
            [[1], [1] * 9, [1] * 10],
            {},
            r"2 of 3 prompts leave no room .*prompt 1 has 9",
        ),
        (PROMPTS, {"length": 65}, "length must be at most the context 64, got 65"),
        (PROMPTS, {"batch_size": 0}, "batch_size must be at least 1"),
        (PROMPTS, {"shard_rows": 0}, "shard_rows must be at least 1"),
        (PROMPTS, {"seed": -1}, "seed must be in"),
        (
            PROMPTS,
            {"sampling": Sampling(temperature=np.ones(7))},
            r"sampling\.temperature must be a number for all rows",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            draw(target, prompts, **(SETTINGS | settings))
    assert not (tmp_path / "new").exists()
