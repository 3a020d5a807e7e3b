"""What is counted of a train step before it is compiled, against formulas."""

from __future__ import annotations

import jax
import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.programs.chips import CHIPS
from paxcli.programs.estimate import Work, count_work, measure_mesh
from paxcli.programs.topologies import find_compile_target, hide_accelerators
from paxcli.training.session import Session, build_session
from paxcli.training.state import bytes_per_device

pytest.importorskip("libtpu")

LAYERS, ROWS, LENGTH, DIMS, HEADS = 4, 8, 256, 128, 4
SETTINGS = (f"max_seq_len={LENGTH}", "loss_chunk=null", "optimizer=Adam", "scan=true", "rotary=null")
ACTIVATION = ROWS * LENGTH * DIMS * 4  # of one layer, in float32
NUMBERS = ROWS * LENGTH * 4  # one of each position
TARGET = find_compile_target("v5e-4", 1)


def opened(*settings: str):
    hide_accelerators()
    return build_session(resolve("tiny-synthetic", (), [*settings, *SETTINGS]).config, TARGET.devices()).active()


def counted(policy: str, *settings: str) -> tuple[Work, Session]:
    with opened(f"remat_policy={policy}", *settings) as session:
        return count_work(session), session


def test_matmuls_are_those_of_the_model_and_those_that_remat_repeats() -> None:
    everything, session = counted("everything")
    model, spec = session.experiment.task.model, session.spec
    logits = 2 * ROWS * LENGTH * DIMS * model.vocab_size
    sums = 2 * LAYERS * ROWS * LENGTH * DIMS  # of attention's outputs times their gradients
    assert everything.flops == model.step_flops(spec).weights + sums
    assert everything.attention_flops == model.forward_flops(spec).attention * 3.5
    # The last matmul of a layer is not needed for gradients.
    last = 2 * LAYERS * ROWS * LENGTH * DIMS * model.hidden_dims
    nothing, _ = counted("nothing")
    assert nothing.flops - everything.flops == model.forward_flops(spec).weights - logits - last
    assert nothing.attention_flops == model.forward_flops(spec).attention * 4.5
    assert counted("context")[0].attention_flops == everything.attention_flops


def test_matmuls_in_fp8_take_a_share_of_the_time() -> None:
    with opened("remat_policy=everything", "precision=fp8", "fprop_dtype=bfloat16") as session:
        slow, fast = (count_work(session, speed).flops for speed in (1.0, 2.0))
        model = session.experiment.task.model
    logits = 3 * 2 * ROWS * LENGTH * DIMS * model.vocab_size  # these are not in FP8
    assert slow - fast == (model.step_flops(session.spec).weights - logits) / 2


def test_saved_are_the_inputs_of_layers_and_what_the_policy_saves() -> None:
    nothing, context, out_proj = (counted(policy)[0].saved for policy in ("nothing", "context", "context_and_out_proj"))
    assert context - nothing == LAYERS * (ACTIVATION + HEADS * NUMBERS)  # with the log-sum-exp of each head
    assert out_proj - context == LAYERS * ACTIVATION
    assert LAYERS * ACTIVATION <= nothing <= 1.7 * LAYERS * ACTIVATION


def test_offloaded_activations_are_in_host_memory_but_those_of_two_layers() -> None:
    context, _ = counted("context")
    offloaded, _ = counted("context", "offload=[query, key, value]")
    assert offloaded.offloaded == 3 * LAYERS * ACTIVATION and context.offloaded == 0
    assert offloaded.saved - context.saved == 2 * 3 * ACTIVATION
    assert context.toward(offloaded, 0.5).offloaded == offloaded.offloaded / 2
    assert context.flops - offloaded.flops == 3 * 2 * LAYERS * ROWS * LENGTH * DIMS * DIMS  # not computed again
    with opened() as session:
        mesh = measure_mesh(session, TARGET)
    assert mesh.on_host(offloaded) == offloaded.offloaded / 4 and mesh.num_stages == 1
    without, hidden, slow = (mesh.seconds(context._replace(offloaded=size)) for size in (0, 1e4, 1e12))
    assert without == hidden
    assert slow == pytest.approx(2 * 1e12 / 4 / CHIPS["v5e"].pcie, rel=0.01)  # there and back; four devices


def test_a_mesh_costs_state_gathers_and_exchanges() -> None:
    with opened() as session:
        replicated = measure_mesh(session, TARGET)
    with opened("mesh.ici_mesh_shape={fsdp: 4}") as session:
        sharded = measure_mesh(session, TARGET)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(session.abstract.params))
    with opened("mesh.ici_mesh_shape={tensor: 4}") as session:
        tensor = measure_mesh(session, TARGET)
    assert replicated.gather == replicated.exchange == sharded.exchange == tensor.gather == 0
    assert 3.5 < replicated.state / sharded.state < 4.1  # 2 x 2 chips; biases stay on each
    link = 2 * CHIPS["v5e"].ici_link  # two open rows
    assert sharded.gather == pytest.approx(3 * 2 * parameters * 3 / 4 / link)
    assert tensor.exchange == pytest.approx(8 * 3 / 4 / link)


def test_a_pipeline_takes_longer_by_its_bubble_and_holds_weights_that_it_gathers_once() -> None:
    pipeline = ("stack=PipelinedStack", "num_stages=2", "microbatch_size=2", "mesh.ici_mesh_shape=[2, 1, 1, 2]")
    with opened("remat_policy=everything", "mesh.ici_mesh_shape={tensor: 4}") as session:
        plain, sharded = count_work(session), measure_mesh(session, TARGET)
    with opened(*pipeline, "remat_policy=everything") as session:
        work, mesh = count_work(session), measure_mesh(session, TARGET)
        weights = 2 * sum(leaf.size for leaf in jax.tree.leaves(session.abstract.params)) / 4
    assert mesh.bubble == 1 + 1 / 4 and sharded.bubble == 1  # four microbatches
    assert mesh.num_stages == 2
    assert work.attention_flops == plain.attention_flops
    assert work.flops == pytest.approx(plain.flops, rel=0.05)  # that of the logits is divided by the bubble, too
    assert work.between_layers == 2 * LAYERS * ROWS * LENGTH * DIMS
    assert mesh.seconds(work) > mesh._replace(bubble=1.0).seconds(work)
    assert mesh.times(2).bubble == 1 + 1 / 8
    with pytest.raises(ConfigError, match="does not divide"):
        mesh.times(1 / 16)  # less than a row, and a microbatch has two
    # What goes in and what comes out, in bfloat16, each divided over the two devices of a stage.
    assert mesh.memory(work) == mesh.state + mesh.bubble * work.saved / 4 + 2 * ROWS * LENGTH * DIMS
    with opened(*pipeline, "remat_policy=everything", "gather_weights_once=true", "stream_io=true") as session:
        gathered = measure_mesh(session, TARGET)
        own_gradients = bytes_per_device(session.abstract.params)
    assert gathered.state - mesh.state == pytest.approx(2 * weights - own_gradients)
    assert gathered.held == mesh.held / 2
    # Two chips have one link, and each works on half of the layers.
    assert mesh.exchange == pytest.approx(12 * 1 / 2 / CHIPS["v5e"].ici_link / 2)


def test_more_rows_take_longer_and_need_more_memory() -> None:
    work, _ = counted("nothing")
    with opened() as session:
        mesh = measure_mesh(session, TARGET)
    assert mesh.seconds(work.times(4)) > 2 * mesh.seconds(work)
    assert mesh.memory(work.times(2)) - mesh.memory(work) == pytest.approx(work.saved / 4)


def test_matmuls_of_experts_count() -> None:
    experts = ("feed_forward=MoeFeedForward", "num_experts=4", "remat_policy=everything", "fprop_dtype=bfloat16")
    with opened(*experts) as session:
        found, step = count_work(session), session.experiment.task.model.step_flops(session.spec)
    assert found.flops == pytest.approx(step.weights, rel=0.01)
