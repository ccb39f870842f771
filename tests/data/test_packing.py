import numpy as np
import pytest

from specjax.data import Batches, pack, pad_prompts


def test_pack_loses_only_the_tail():
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]
    packed = pack(documents, length=4, eos_token_id=0)
    assert packed.dtype == np.int32
    assert packed.tolist() == [[1, 2, 3, 0], [0, 4, 0, 5], [6, 7, 8, 9]]
    rng = np.random.default_rng(0)
    many = [rng.integers(1, 50, n).astype(np.int32) for n in rng.integers(0, 30, 40)]
    stream = [t for d in many for t in [*d, 0]]
    packed = pack(many, 16, 0)
    assert packed.ravel().tolist() == stream[: packed.size]
    assert len(stream) - packed.size < 16


def test_pack_refuses_what_does_not_fill_a_sequence():
    with pytest.raises(ValueError, match="2 documents come to 5 tokens, fewer than"):
        pack([[1, 2], [3]], 6, 0)
    with pytest.raises(ValueError, match="0 documents come to 0 tokens"):
        pack([], 6, 0)
    with pytest.raises(ValueError, match="length must be at least 1"):
        pack([[1]], 0, 0)


@pytest.mark.parametrize(("num", "size"), [(10, 4), (7, 7), (3, 8), (1, 1)])
def test_every_epoch_shows_every_example_once(num, size):
    batches = Batches(num, size, seed=5)
    drawn = np.concatenate([batches[n] for n in range(4 * num)])
    for epoch in range(4 * size):
        seen = drawn[epoch * num : (epoch + 1) * num]
        assert sorted(seen) == list(range(num))


def test_a_resumed_run_draws_the_same_batches_in_the_middle_of_an_epoch():
    """A resume that replays the first epoch's order, or shifts the data by a step.

    https://github.com/AI-Hypercomputer/maxdiffusion/pull/484
    """
    straight = [Batches(50, 8, seed=1)[n].tolist() for n in range(20)]
    resumed = Batches(50, 8, seed=1)
    assert [resumed[n].tolist() for n in range(10, 20)] == straight[10:]
    assert [resumed[n].tolist() for n in reversed(range(20))] == straight[::-1]


def test_epochs_and_seeds_have_orders_of_their_own():
    batches = Batches(64, 64, seed=0)
    assert batches[0].tolist() != batches[1].tolist()
    assert batches[0].tolist() != Batches(64, 64, seed=1)[0].tolist()
    assert batches[0].tolist() != list(range(64))
    assert batches.epoch(3) == 3.0


def test_the_order_is_the_same_on_every_machine():
    assert Batches(8, 8, seed=7)[0].tolist() == ORDER


ORDER = [4, 3, 6, 2, 1, 0, 5, 7]


def test_bad_batches():
    for kwargs in ({"num_examples": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            Batches(**{"num_examples": 1, "batch_size": 1} | kwargs)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        Batches(1, 1, seed=-1)
    with pytest.raises(IndexError):
        Batches(1, 1)[-1]


def test_pad_prompts_pads_on_the_right():
    tokens, lengths = pad_prompts([[1, 2], [3]], length=4, pad_token_id=9)
    assert tokens.tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]
    assert lengths.tolist() == [2, 1]
    assert tokens.dtype == lengths.dtype == np.int32
    assert pad_prompts([[1, 2], np.array([3])])[0].shape == (2, 2)


def test_pad_prompts_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, more than the 2"):
        pad_prompts([[1], [1, 2, 3]], length=2)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pad_prompts([[1], []])
    with pytest.raises(ValueError, match="at least one prompt"):
        pad_prompts([])
