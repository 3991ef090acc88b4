"""A real FP16 overflow in the middle of a network: scale first, then the culprit by name, and training goes on."""

import torch
from torch import nn

from triaccel import Precision, TriAccel, TriAccelConfig

BATCH, WIDTH = 256, 512


def trap():
    """Forward values are small. In the backward of ``k`` a bias gradient of 76,800 and an input gradient of 153,600 times the
    loss scale arise, which FP16 (65,504 at most) cannot hold at any scale; upstream of it gradients become NaN.
    """
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in [
        ("a", nn.Linear(8, WIDTH)),
        ("n", nn.LayerNorm(WIDTH)),
        ("k", nn.Linear(WIDTH, WIDTH)),
        ("b", nn.Linear(WIDTH, 1)),
    ]:
        model.add_module(name, layer)
    with torch.no_grad():
        model.k.weight.fill_(1.0)
        model.k.bias.zero_()
        model.b.weight.fill_(300.0)
        model.b.bias.zero_()
    return model


def test_the_scale_backs_off_first_then_the_culprit_alone_is_promoted_transformers_12225():
    """transformers 12225 and pytorch 99640, 152279, 55585: the layer is named, every skip is said, the run survives."""
    model = trap()
    config = TriAccelConfig.model_validate(
        {
            "precision": {
                "rule": "paper",
                "tau_low": 1e30,
                "tau_high": 1e31,
                "ladder": ["fp16", "fp32"],
                "pin": {"n": "fp32"},
                "overflow_patience": 3,
                "promotion_hold": 50,
                "loss_scale": {"initial": 8.0, "floor": 0.5},
            },
            "curvature": {"estimator": "off"},
            "batch": {"rule": "off", "initial": BATCH},
            "tick_samples": BATCH,
        }
    )
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 1e-14), config)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(BATCH, 8, generator=generator), torch.zeros(BATCH)) for _ in range(7)]
    weights = []
    reports = []
    for batch in batches:
        reports.append(accel.step(batch, lambda outputs, _targets: outputs.sum()))
        weights.append(model.b.weight.detach().clone())
    fp16, fp32 = Precision.FP16, Precision.FP32
    assert reports[0].precision_map == {"a": fp32, "n": fp32, "k": fp32, "b": fp32}
    low = {"a": fp16, "n": fp32, "k": fp16, "b": fp16}
    assert all(r.precision_map == low for r in reports[1:4])
    assert [r.stepped for r in reports] == [True, False, False, False, True, True, True]
    assert [r.loss_scale for r in reports[1:4]] == [4.0, 2.0, 1.0] or [
        r.loss_scale for r in reports[1:4]
    ] == [8.0, 4.0, 2.0]
    assert all(r.found_inf == ("k", "n", "a") for r in reports[1:4])
    assert torch.equal(weights[0], weights[3])
    promoted = [c for c in reports[3].changes if c.component == "precision"]
    assert [(c.layer, c.before, c.after) for c in promoted] == [("k", fp16, fp32)]
    assert promoted[0].why.startswith("found inf in k in 3 steps in a row")
    assert all(r.precision_map == low | {"k": fp32} for r in reports[4:])
    assert all(r.found_inf == () for r in reports[4:])
    assert accel.report()["skipped_steps"] == 3
    assert accel.report()["decided_by"]["overflow"] > 0


def test_all_fp16_gradients_that_fit_train_as_in_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    plain.load_state_dict(model.state_dict())
    config = TriAccelConfig.model_validate(
        {
            "precision": {"rule": "off", "pin": {"*": "fp16"}, "ladder": ["fp16", "fp32"]},
            "curvature": {"estimator": "off"},
            "batch": {"rule": "off", "initial": 32},
        }
    )
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.05), config)
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(32, 8, generator=generator)
        y = x[:, :1].sin()
        report = accel.step((x, y), nn.MSELoss())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
    assert report.loss_scale == 65536.0
    torch.testing.assert_close(report.loss, loss.detach(), rtol=0.02, atol=1e-3)
