"""Eight devices take the step that one device takes."""

import os
import subprocess
import sys
import textwrap

import pytest

CODE = """
    import json, sys
    import jax, numpy as np
    sys.path.insert(0, sys.argv[1])
    from conftest import corpus, language_model, sharp
    from specjax import distill, divergences, parallel

    draft = language_model(vocab_size=16)
    target = language_model(vocab_size=16, num_layers=2, width=16)
    params, teacher_params = sharp(draft, 0), sharp(target, 1)
    shapes, source = json.loads(sys.argv[2]), distill.FixedCorpus()
    if sys.argv[3] == "rollouts":
        rollout = distill.StudentGenerated(4, 8, eos_ids=(3,))
        source = distill.Mixture(source, rollout, per="row")
    step = distill.TrainStep(
        draft,
        distill.Objective(
            (1.0, distill.Distill(divergences.resolve("jsd", beta=0.3))), chunk=64
        ),
        distill.make_optimizer("adamw", learning_rate=1e-3),
        teacher=target,
        source=source,
        accumulate=2,
    )
    batch = distill.Batch.of(
        corpus(rows=16, width=16, vocab_size=16),
        length=[2, 16, 9, 5] * 4,
        prompt_length=2,
    )

    def flat(tree):
        leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
        return np.concatenate(leaves)

    assert len(jax.devices()) == 8
    state = step.init(jax.random.key(0), params)
    gradients, sums = step.gradients(state, batch, teacher_params)
    one, counts = flat(gradients), sums.as_dict()
    for shape in shapes:
        mesh = parallel.make_mesh(*shape)
        with jax.set_mesh(mesh):
            state = parallel.shard_params(step.init(jax.random.key(0), params), mesh)
            sharded = parallel.shard_params(teacher_params, mesh)
            rows = jax.device_put(batch, parallel.batch_sharding(mesh))
            gradients, sums = step.gradients(state, rows, sharded)
        many, many_counts = flat(gradients), sums.as_dict()
        error = np.linalg.norm(one - many) / np.linalg.norm(one)
        assert error < 1e-5, (shape, error)
        assert abs(counts["loss"] - many_counts["loss"]) < 1e-5 * counts["loss"]
        assert counts["tokens"] == many_counts["tokens"]
        assert counts["on_policy_tokens"] == many_counts["on_policy_tokens"]
    assert (counts["on_policy_tokens"] > 0) == (sys.argv[3] == "rollouts")

    if sys.argv[3] == "corpus":  # a step leaves every parameter where it was
        places = jax.tree.map(lambda x: x.sharding, state.params)
        with jax.set_mesh(mesh):
            state, _ = step(state, rows, sharded)
        for x, place in zip(*map(jax.tree.leaves, (state.params, places)), strict=True):
            assert x.sharding.is_equivalent_to(place, x.ndim), (x.sharding, place)

        sys.path.insert(0, sys.argv[4])  # every registered term, by itself
        from tests.conformance import test_terms as terms

        models, rows = terms.make_models(), terms.batch()
        one = [terms.loss_and_gradient(*models, rows, n) for n in terms.INDICES]
        with jax.set_mesh(mesh):
            models = parallel.shard_params(models, mesh)
            rows = jax.device_put(rows, parallel.batch_sharding(mesh))
            many = [terms.loss_and_gradient(*models, rows, n) for n in terms.INDICES]
        for name, a, b in zip(terms.NAMES, one, many, strict=True):
            assert abs(a[0] - b[0]) < 1e-5 * abs(a[0]), (name, a[0], b[0])
            error = terms.relative(a[1], b[1])
            assert error < 1e-5, (name, error)
"""


@pytest.mark.parametrize(
    "rows, shapes",
    [("corpus", "[[8, 1, 1], [1, 4, 2]]"), ("rollouts", "[[2, 2, 2]]")],
)
def test_eight_devices_equal_one(rows, shapes):
    """https://github.com/huggingface/trl/issues/4719"""
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"  # compiles faster
    subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            textwrap.dedent(CODE),
            os.path.dirname(__file__),
            shapes,
            rows,
            os.path.abspath(f"{os.path.dirname(__file__)}/../.."),
        ],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
        },
        check=True,
    )
