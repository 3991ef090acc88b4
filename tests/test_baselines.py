"""Arms: names, configurations, and static arms equal to hand-written loops bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from baselines import ARMS, COMPONENT_ARMS, UnknownArm, Unsupported, arm_config, make_arm, parse_arm
from triaccel import Precision, TriAccelConfig, TriAccelError
from triaccel.cost import device_ladder
from triaccel.sampler import ElasticBatches

BASE = TriAccelConfig(batch={"initial": 16}, seed=4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 3, 8, 8, generator=generator), torch.randint(4, (64,), generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)


def test_the_eight_component_arms_are_all_subsets():
    subsets = {ARMS[name].components for name in COMPONENT_ARMS}
    assert len(subsets) == 8


@pytest.mark.parametrize("name", ["nope", "fp32@", "fp32@0", "fp32@-1", "fp32@x", "@96", ""])
def test_unknown_arms_list_the_known(name):
    with pytest.raises(UnknownArm, match=r"arm"):
        parse_arm(name)


@pytest.mark.parametrize("name", ARMS)
def test_batch_suffix_sets_the_first_batch(name):
    config = arm_config(f"{name}@640", BASE)
    assert config.batch.initial == 640
    assert config.batch.rungs[0] <= 640 <= config.batch.rungs[-1]


def test_profiled_static_differs_from_off_only_in_its_map():
    off, static = arm_config("off", BASE), arm_config("profiled-static", BASE)
    assert static.precision.rule == "static"
    assert static.model_copy(update={"precision": off.precision}) == off


@pytest.mark.parametrize("name", ["fp32", "amp-bf16"])
def test_static_arms_are_plain_loops_bit_for_bit(name):
    ours, plain = net(), net()
    arm = make_arm(name, ours, sgd(ours), config=BASE, force_unsupported=True)
    got = [arm.step(batch, nn.CrossEntropyLoss()).loss for batch in arm.batches(data(), epochs=2)]
    optimizer = sgd(plain)
    expected = []
    for x, y in ElasticBatches(data(), epochs=2, batch_size=lambda: 16, seed=4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "fp32"):
            loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach().float())
    assert torch.equal(torch.stack(got), torch.stack(expected))
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_all_arms_see_the_same_samples_in_the_same_order():
    seen = {}
    for name in ("fp32", "off"):
        model = net()
        arm = make_arm(name, model, sgd(model), config=BASE)
        seen[name] = [
            y.tolist() for x, y in arm.batches(data(), epochs=2) if arm.step((x, y), nn.CrossEntropyLoss())
        ]
    assert seen["fp32"] == seen["off"]


def test_an_unsupported_format_is_refused_with_its_reason_and_runs_when_forced():
    ladder = device_ladder(torch.device("cpu"))
    if Precision.FP16 in ladder.precisions:
        pytest.skip("this CPU accelerates FP16")
    model = net()
    with pytest.raises(Unsupported, match="fp16 is not supported on this device"):
        make_arm("amp-fp16", model, sgd(model), config=BASE)
    arm = make_arm("amp-fp16", model, sgd(model), config=BASE, force_unsupported=True)
    dtypes = []
    model[0].register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    reports = [arm.step(batch, nn.CrossEntropyLoss()) for batch in arm.batches(data(), epochs=1)]
    assert set(dtypes) == {torch.float16}
    assert reports[0].loss_scale == 65536.0


def test_replay_needs_a_trace_and_others_refuse_one():
    model = net()
    with pytest.raises(TriAccelError, match="needs the trace"):
        make_arm("replay", model, sgd(model), config=BASE)


def test_static_arm_resumes_bit_exactly():
    model = net()
    arm = make_arm("fp32", model, sgd(model), config=BASE)
    arm.schedule(lambda progress: 1.0 - 0.5 * progress)
    losses = []
    for i, batch in enumerate(arm.batches(data(), epochs=2)):
        losses.append(arm.step(batch, nn.CrossEntropyLoss()).loss)
        if i == 2:
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            optimizer_state = copy.deepcopy(arm.optimizer.state_dict())
            state = arm.state_dict()
    again = net()
    again.load_state_dict(saved)
    optimizer = sgd(again)
    optimizer.load_state_dict(optimizer_state)
    resumed = make_arm("fp32", again, optimizer, config=BASE)
    resumed.schedule(lambda progress: 1.0 - 0.5 * progress)
    resumed.load_state_dict(state)
    rest = [resumed.step(batch, nn.CrossEntropyLoss()).loss for batch in resumed.batches(data(), epochs=2)]
    assert torch.equal(torch.stack(losses[3:]), torch.stack(rest))
