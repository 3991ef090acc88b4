"""The loop: a plain PyTorch loop when all is off; what the three components really do when they are on."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from triaccel import Precision, TriAccel, TriAccelConfig, TriAccelError
from triaccel.sampler import ElasticBatches


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def images(n=160, seed=1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    inputs = torch.randn(n, 3, 8, 8, generator=generator) + labels[:, None, None, None]
    return inputs, labels


OFF = TriAccelConfig.arm(
    precision=False, curvature=False, batch=False, base=TriAccelConfig(batch={"initial": 32})
)


def with_parts(**parts):
    base = {
        "precision": {"rule": "off"},
        "curvature": {"estimator": "off"},
        "batch": {"rule": "off", "initial": 32},
    }
    for name, values in parts.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return TriAccelConfig.model_validate(base)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=5e-4),
        lambda p: torch.optim.AdamW(p, 1e-2),
        lambda p: torch.optim.RMSprop(p, 1e-3),
    ],
)
def test_off_is_a_plain_loop_bit_for_bit(make):
    data = images()
    ours, plain = small_net(), small_net()
    optimizer = make(plain.parameters())
    order = ElasticBatches(data, epochs=2, batch_size=lambda: 32, seed=0)
    torch.manual_seed(7)
    expected = []
    for x, y in order:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())

    accel = TriAccel(ours, make(ours.parameters()), OFF)
    torch.manual_seed(7)
    got = [accel.step(batch, nn.CrossEntropyLoss()).loss for batch in accel.batches(data, epochs=2)]

    assert torch.equal(torch.stack(got), torch.stack(expected))
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_three_calls_equal_one_step():
    data = images()
    one, three = small_net(), small_net()
    config = with_parts(precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3}, tick_samples=64)
    accel_one = TriAccel(one, torch.optim.SGD(one.parameters(), 0.1), config)
    accel_three = TriAccel(three, torch.optim.SGD(three.parameters(), 0.1), config)
    torch.manual_seed(7)
    first = [accel_one.step(batch, nn.CrossEntropyLoss()) for batch in accel_one.batches(data, epochs=2)]
    torch.manual_seed(7)
    second = []
    for x, y in accel_three.batches(data, epochs=2):
        accel_three.optimizer.zero_grad()
        with accel_three.forward():
            outputs = three(x)
        accel_three.backward(F.cross_entropy(outputs, y))
        second.append(accel_three.update())
    assert [r.loss.item() for r in first] == [r.loss.item() for r in second]
    assert [r.map_version for r in first] == [r.map_version for r in second]
    assert first[-1].map_version >= 1


def test_precision_map_changes_the_dtype_a_convolution_runs_in():
    model = small_net()
    config = with_parts(precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3}, tick_samples=32)
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), config)
    seen = []
    model[4].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    reports = [accel.step(batch, nn.CrossEntropyLoss()) for batch in accel.batches(images(), epochs=1)]
    assert seen[0] is torch.float32
    assert seen[-1] is torch.bfloat16
    assert reports[-1].precision_map["4"] is Precision.BF16
    assert accel.trace.entries[-1].verified["4"] == "bfloat16"
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_loss_is_taken_in_fp32_under_a_lowered_map():
    model = small_net()
    config = with_parts(precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3}, tick_samples=32)
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), config)
    dtypes = []

    def loss_fn(outputs, targets):
        dtypes.append(outputs.dtype)
        return F.cross_entropy(outputs, targets)

    for batch in accel.batches(images(), epochs=1):
        accel.step(batch, loss_fn)
    assert set(dtypes) == {torch.float32}
    assert Precision.BF16 in accel.precision_map.values()


def test_curvature_scales_rates_and_leaves_the_users_groups_alone():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    config = with_parts(
        curvature={"estimator": "fisher", "interval_samples": 32, "top_k": 2}, tick_samples=32
    )
    accel = TriAccel(model, optimizer, config)
    reports = [accel.step(batch, nn.CrossEntropyLoss()) for batch in accel.batches(images(), epochs=2)]
    scales = reports[-1].rate_scales
    assert max(scales.values()) / min(scales.values()) >= 1.2
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert len(optimizer.param_groups) == 1
    assert accel.report()["probes"]["probes"] >= 2


def test_schedule_follows_samples_and_reaches_its_end():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF)
    accel.schedule(lambda progress: 1.0 - progress)
    factors = [
        accel.step(batch, nn.CrossEntropyLoss()).rate_factor for batch in accel.batches(images(), epochs=2)
    ]
    assert factors == pytest.approx([1 - 32 * i / 320 for i in range(10)])


def test_elastic_batch_covers_every_sample_once_an_epoch():
    model = small_net()
    inputs, _ = images()
    data = (inputs, torch.arange(160) % 4)
    seen = []
    config = with_parts(batch={"rule": "paper", "initial": 16, "delta": 16, "maximum": 64}, tick_samples=16)
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), config)
    sizes = []
    for x, y in accel.batches(data, epochs=2):
        report = accel.step((x, y), nn.CrossEntropyLoss())
        sizes.append(report.batch_size)
        seen.extend(x[:, 0, 0, 0].tolist())
    assert len(set(sizes)) >= 2
    assert sum(sizes) == 320
    assert sorted(seen) == sorted(inputs[:, 0, 0, 0].tolist() * 2)


def test_step_refuses_a_batch_that_is_no_pair():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF)
    with pytest.raises(TriAccelError, match=r"pair \(inputs, targets\), got Tensor"):
        accel.step(images()[0], nn.CrossEntropyLoss())


def test_all_gradients_none_is_said():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF)
    detached = torch.zeros((), requires_grad=True)
    with pytest.raises(TriAccelError, match="no layer of the model got a gradient"):
        accel.step(images(8), lambda _outputs, _targets: detached * 1.0)


def test_update_without_backward_is_an_error():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF)
    with pytest.raises(TriAccelError, match="without backward"):
        accel.update()


def test_three_calls_say_what_they_need_before_the_first_forward():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), TriAccelConfig())
    with pytest.raises(TriAccelError, match=r"calibrate\("), accel.forward():
        pass


def test_nothing_trainable_is_an_error():
    model = small_net().requires_grad_(False)
    with pytest.raises(TriAccelError, match="no trainable parameter"):
        TriAccel(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))


def test_half_precision_parameters_are_refused():
    model = small_net().bfloat16()
    with pytest.raises(TriAccelError, match=r"call\s+model.float\(\)"):
        TriAccel(model, torch.optim.SGD(model.parameters(), 0.1))


def test_evaluation_is_fp32_and_restores_modes():
    model = small_net()
    config = with_parts(precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3}, tick_samples=32)
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), config)
    data = images()
    for batch in accel.batches(data, epochs=1):
        accel.step(batch, nn.CrossEntropyLoss())
    model[3].eval()
    with accel.evaluation():
        inside = model(data[0])
        assert not any(m.training for m in model.modules())
        assert not inside.requires_grad
    reference = copy.deepcopy(model).eval()
    assert model.training
    assert not model[3].training
    plain = small_net()
    plain.load_state_dict(reference.state_dict())
    with torch.no_grad():
        assert torch.equal(inside, plain.eval()(data[0]))


def test_nonfinite_gradients_skip_the_step_and_are_named():
    model = small_net()
    config = with_parts(precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3})
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), config)
    x, y = images(32)
    before = {
        k: v.clone() for k, v in model.state_dict().items() if "running" not in k and "num_batches" not in k
    }
    report = accel.step((x, y), lambda outputs, targets: F.cross_entropy(outputs, targets) * float("inf"))
    assert not report.stepped
    assert report.found_inf[0] == "8"
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
    good = accel.step((x, y), nn.CrossEntropyLoss())
    assert good.stepped
    assert accel.report()["skipped_steps"] == 1


def test_a_stepped_scheduler_under_a_growing_batch_warns_once():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    config = with_parts(batch={"rule": "paper", "initial": 16, "delta": 16, "maximum": 64}, tick_samples=16)
    accel = TriAccel(model, optimizer, config)

    def run():
        for batch in accel.batches(images(), epochs=2):
            accel.step(batch, nn.CrossEntropyLoss())
            scheduler.step()

    with pytest.warns(UserWarning, match="expects 20 steps") as caught:
        run()
    assert len(caught) == 1


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_resume_is_bit_exact(cut, tmp_path):
    config = with_parts(
        precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e-3, "stats_every": 2},
        curvature={"estimator": "fisher", "interval_samples": 64, "top_k": 2},
        batch={"rule": "paper", "initial": 16, "delta": 16, "maximum": 48, "budget_bytes": 10**9},
        tick_samples=32,
    )
    data = images()

    def build():
        model = small_net()
        return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    model, optimizer = build()
    accel = TriAccel(model, optimizer, config)
    torch.manual_seed(3)
    losses = []
    for i, batch in enumerate(accel.batches(data, epochs=2)):
        losses.append(accel.step(batch, nn.CrossEntropyLoss()).loss)
        if i == cut:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "accel": accel.state_dict(),
                    "rng": torch.get_rng_state(),
                },
                tmp_path / "checkpoint.pt",
            )

    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again, optimizer = build()
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    resumed = TriAccel(again, optimizer, config)
    resumed.load_state_dict(saved["accel"])
    torch.set_rng_state(saved["rng"])
    rest = [resumed.step(batch, nn.CrossEntropyLoss()).loss for batch in resumed.batches(data, epochs=2)]
    assert torch.equal(torch.stack(losses[cut + 1 :]), torch.stack(rest))
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert resumed.trace.entries == accel.trace.entries


def test_state_of_another_configuration_is_refused():
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF)
    other = TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), OFF.model_copy(update={"seed": 5}))
    with pytest.raises(TriAccelError, match="another configuration"):
        other.load_state_dict(accel.state_dict())
    with pytest.raises(TriAccelError, match="format 0"):
        accel.load_state_dict({**accel.state_dict(), "format": 0})


def test_replay_runs_the_recorded_map_batches_and_rates():
    config = with_parts(
        precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e3},
        curvature={"estimator": "fisher", "interval_samples": 64, "top_k": 2},
        batch={"rule": "paper", "initial": 16, "delta": 16, "maximum": 48},
        tick_samples=32,
    )
    data = images()
    model = small_net()
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.05), config)
    torch.manual_seed(3)
    recorded = [accel.step(batch, nn.CrossEntropyLoss()) for batch in accel.batches(data, epochs=2)]

    again = small_net()
    off = TriAccelConfig.arm(precision=False, curvature=False, batch=False, base=config)
    replay = TriAccel(again, torch.optim.SGD(again.parameters(), 0.05), off, policies=accel.trace.policies())
    torch.manual_seed(3)
    replayed = [replay.step(batch, nn.CrossEntropyLoss()) for batch in replay.batches(data, epochs=2)]

    assert [r.batch_size for r in recorded] == [r.batch_size for r in replayed]
    assert [dict(r.precision_map) for r in recorded] == [dict(r.precision_map) for r in replayed]
    assert [dict(r.rate_scales) for r in recorded] == [dict(r.rate_scales) for r in replayed]
    assert [r.loss.item() for r in recorded] == [r.loss.item() for r in replayed]


def test_gradient_release_gives_the_weights_and_the_statistics_of_an_ordinary_step():
    data = images()
    parts = {
        "precision": {"rule": "paper", "tau_low": 1e-30, "tau_high": 2e-30, "stats_every": 1},
        "tick_samples": 64,
    }
    plain, released = small_net(), small_net()
    ordinary = TriAccel(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), with_parts(**parts))
    torch.manual_seed(7)
    expected = [
        ordinary.step(batch, nn.CrossEntropyLoss()).loss for batch in ordinary.batches(data, epochs=1)
    ]
    config = with_parts(**parts, engine={"gradient_release": True})
    release = TriAccel(released, torch.optim.SGD(released.parameters(), 0.1, momentum=0.9), config)
    torch.manual_seed(7)
    got = []
    for batch in release.batches(data, epochs=1):
        got.append(release.step(batch, nn.CrossEntropyLoss()).loss)
        assert all(p.grad is None for p in released.parameters())
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-5, atol=1e-6)
    for a, b in zip(released.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    mine, theirs = release.trace.entries[-1].variance, ordinary.trace.entries[-1].variance
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name] == pytest.approx(value, rel=1e-4)
