"""What a compiled step keeps in memory: from shapes alone, no numbers are run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.distill import (
    AdaSPEC,
    Batch,
    CrossEntropy,
    Distill,
    MiniLLM,
    Objective,
    TeacherMixed,
)
from specjax.models import CausalLM, ModelConfig

pytestmark = pytest.mark.full

ROWS, WIDTH, VOCAB = 2, 512, 128 * 1024
CHUNK = 32
# The least memory, as on GPU and TPU: by default XLA's CPU scheduler makes activations
# again at once, long before they are needed, and nothing is saved.
THRIFTY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def model(vocab_size=VOCAB, remat=False, **sizes):
    least = dict(hidden_size=8, intermediate_size=16, num_layers=1, head_dim=4)
    config = ModelConfig(
        vocab_size=vocab_size,
        num_heads=2,
        num_kv_heads=1,
        max_position_embeddings=WIDTH,
        **(least | sizes),
    )
    return CausalLM(config, remat)


def temporaries(objective):
    """Bytes that an update needs beside its arguments and results."""
    rollouts = any(isinstance(term, MiniLLM) for _, term in objective.terms)
    half = WIDTH // 2
    step = distill.TrainStep(
        model(),
        objective,
        distill.make_optimizer("adamw", learning_rate=1e-3),
        teacher=model(),
        source=TeacherMixed(half, half, chunk=CHUNK)
        if rollouts
        else distill.FixedCorpus(),
        reference=model() if objective.needs_reference else None,
    )
    key = jax.random.key(0)
    state, params = jax.eval_shape(step.init, key), jax.eval_shape(model().init, key)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, Batch.of(zeros())))
    others = params, params if objective.needs_reference else None
    update = jax.jit(step.__call__, donate_argnums=0).lower(state, batch, *others)
    return update.compile().memory_analysis().temp_size_in_bytes


def zeros():
    return np.zeros((ROWS, WIDTH), np.int32)


TERMS = {
    "distill": [(1.0, Distill(divergences.resolve("jsd")))],
    "weighted sum": [(0.5, Distill(temperature=2.0)), (0.5, CrossEntropy())],
    "minillm": [(1.0, MiniLLM()), (1.0, CrossEntropy())],
    "adaspec": [(1.0, AdaSPEC())],
}
ALL = [weighted for terms in TERMS.values() for weighted in terms]


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param(ALL, id="all at once"),
        *[
            pytest.param(x, id=name, marks=pytest.mark.full)
            for name, x in TERMS.items()
        ],
    ],
)
def test_whole_logits_are_never_alive(terms):
    """Of V = 128k: a step takes the room of few chunks, at any number of positions.

    Rollouts included. The control makes all logits at once and takes the room of
    several whole `[B, T, V]` arrays.
    """
    whole, chunk = (4 * VOCAB * tokens for tokens in (ROWS * WIDTH, CHUNK))
    assert 16 * chunk <= whole / 2
    assert temporaries(Objective(*terms, chunk=CHUNK)) < 16 * chunk
    assert temporaries(Objective(*terms, chunk=None)) > 4 * whole


def test_activations_made_again_change_nothing_but_the_memory(toys):
    batch = Batch.of(toys.corpus(width=128))
    sizes = dict(num_layers=2, hidden_size=16, intermediate_size=64)
    params, key = toys.sharp(model(toys.vocab, **sizes), 0), jax.random.key(0)
    state = distill.TrainState(params, (), jnp.zeros((), jnp.int32), key, ((),))
    found = []
    for remat in (False, True):
        step = distill.TrainStep(
            model(toys.vocab, remat, **sizes),
            Objective((1.0, CrossEntropy()), chunk=None, monitor=False),
            distill.make_optimizer("adamw", learning_rate=1e-3),
        )
        compiled = jax.jit(step.gradients).lower(state, batch).compile(THRIFTY)
        gradient, sums = compiled(state, batch)
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])
        room = compiled.memory_analysis().temp_size_in_bytes
        found.append((float(sums.mean_loss), flat, room))
    (loss, plain, room), (again_loss, again, less) = found
    assert again_loss == pytest.approx(loss, rel=1e-6)
    assert np.linalg.norm(again - plain) < 1e-6 * np.linalg.norm(plain)
    assert less < 0.7 * room
