"""Mesh sizes and partition rules, some of it on eight fake devices."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from specjax import parallel
from specjax.models import CausalLM, ModelConfig

CONFIG = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qkv_bias=True,
    tie_word_embeddings=False,
)


def abstract_mesh(data=1, fsdp=1, tensor=1):
    sizes, names = (data, fsdp, tensor), parallel.AXES
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 3)


def specs(layout="io", **sizes):
    model = CausalLM(ModelConfig(**CONFIG, kernel_layout=layout))
    params = jax.eval_shape(model.init, jax.random.key(0))
    return parallel.partition_specs(params, abstract_mesh(**sizes), layout)


def test_a_size_of_minus_one_takes_what_is_left():
    mesh = parallel.make_mesh()
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.size == len(jax.devices())
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    "sizes",
    [dict(data=3, tensor=5), dict(data=-1, fsdp=-1), dict(data=0), dict(data=-2)],
)
def test_sizes_that_do_not_multiply_are_refused(sizes):
    with pytest.raises(ValueError, match="mesh sizes must"):
        parallel.make_mesh(**sizes)


@pytest.mark.parametrize("layout", ["io", "oi"])
def test_kernels_are_cut_by_what_they_mean_not_by_their_layout(layout):
    spec = specs(layout, fsdp=2, tensor=2)
    turn = (lambda *cuts: P(*cuts)) if layout == "io" else lambda *c: P(*c[::-1])
    attention, mlp = spec["layers_0"]["self_attn"], spec["layers_0"]["mlp"]
    for name in ("q_proj", "k_proj", "v_proj"):
        assert attention[name]["kernel"] == turn("fsdp", "tensor")
        assert attention[name]["bias"] == P("tensor")
    assert attention["o_proj"]["kernel"] == turn("tensor", "fsdp")
    assert mlp["up_proj"]["kernel"] == turn("fsdp", "tensor")
    assert mlp["down_proj"]["kernel"] == turn("tensor", "fsdp")
    assert spec["embed_tokens"] == spec["lm_head"] == P("tensor", "fsdp")
    assert spec["norm"]["scale"] == P()


def test_a_cut_that_does_not_divide_is_left_out():
    spec = specs(tensor=16)  # k_proj has 8 columns, q_proj 16
    attention = spec["layers_0"]["self_attn"]
    assert attention["q_proj"]["kernel"] == P(None, "tensor")
    assert attention["k_proj"]["kernel"] == P()
    assert specs(data=8)["embed_tokens"] == P()


@pytest.mark.parametrize(
    "arguments, match",
    [
        (("localhost", 2, 0), "coordinator_address must be 'host:port', got 'localh"),
        (("localhost:1234", 0, 0), "num_processes must be at least 1, got 0"),
        (("localhost:1234", 2, 2), "below num_processes, got 2 of 2"),
        (("localhost:1234", 2, -1), "process_id must be at least 0"),
        (("localhost:1234", "two", 0), "num_processes must be a whole number"),
        (("localhost:1234", 2, 0), "must come before anything"),
    ],
)
def test_wrong_settings_of_several_processes_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        parallel.initialize(*arguments)


def test_settings_of_several_processes_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    with pytest.raises(ValueError, match="got 3 of 3"):
        parallel.initialize()
    with pytest.raises(ValueError, match="got 3 of 2"):
        parallel.initialize(num_processes=2)  # arguments come first
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID must be a whole number"):
        parallel.initialize()


def test_one_process_agrees_with_itself():
    assert parallel.is_first() and parallel.agree(True) and not parallel.agree(False)
    parallel.wait("nobody")
    assert (parallel.gather({"x": jnp.ones(3)})["x"] == 1).all()


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="kernel_layout must be"):
        parallel.partition_rules("xy")


def test_constraints_do_nothing_without_a_mesh():
    x = jnp.ones((4, 2))
    assert parallel.constrain(x, parallel.BATCH) is x
    assert parallel.constrain_params({"x": x})["x"] is x


def test_parameters_are_really_cut_over_eight_devices():
    code = f"""
        import jax, jax.numpy as jnp
        from specjax import parallel
        from specjax.models import CausalLM, ModelConfig
        parallel.initialize()  # one process, nothing to join
        try:
            parallel.initialize("localhost:1234", 2)
        except ValueError as error:
            assert "several processes need coordinator_address" in str(error), error
        else:
            raise AssertionError
        model = CausalLM(ModelConfig(**{CONFIG!r}))
        mesh = parallel.make_mesh(data=2, fsdp=2, tensor=2)
        params = parallel.shard_params(model.init(jax.random.key(0)), mesh)
        kernel = params["layers_0"]["mlp"]["up_proj"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (8, 16), kernel.sharding
        rows = jax.device_put(jnp.ones((8, 3)), parallel.batch_sharding(mesh))
        assert rows.addressable_shards[0].data.shape == (2, 3)
        with jax.set_mesh(mesh):
            again = jax.jit(parallel.constrain_params)(params)
            half = jax.jit(lambda x: parallel.constrain(x, parallel.BATCH))(rows * 2)
        assert again["lm_head"].sharding == params["lm_head"].sharding
        assert half.addressable_shards[0].data.shape == (2, 3)
        try:
            parallel.make_mesh(data=3)
        except ValueError as error:
            assert "8" in str(error)
        else:
            raise AssertionError
    """
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"  # compiles faster
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=env,
        check=True,
    )
