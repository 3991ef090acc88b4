"""Gradient release: same weights, fewer live bytes, refusals, and non-finite gradients that skip one parameter."""

import weakref

import pytest
import torch
from torch import nn

from triaccel.config import EngineConfig
from triaccel.layers import find_layers
from triaccel.live_tensors import live_tensor_bytes
from triaccel.optim import Updater
from triaccel.release import finite
from triaccel.types import TriAccelError

RELEASE = EngineConfig(gradient_release=True)
BOTH = EngineConfig(gradient_release=True, fused_update=True)
LOW = EngineConfig(gradient_release=True, fused_update=True, momentum_bf16=True)
SCALES = {"0": 0.5, "4": 2.0}
BUILD = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def make(build, engine, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 40),
        nn.Linear(40, 4),
    )
    optimizer = build(model.parameters())
    return model, optimizer, Updater(optimizer, find_layers(model), engine=engine, **options)


def run(build, engine, steps=4, scales=None, poison=None):
    model, optimizer, updater = make(build, engine)
    for step in range(steps):
        optimizer.zero_grad()
        updater.begin_step(scales=scales or {}, factor=0.9)
        generator = torch.Generator().manual_seed(step)
        loss = nn.functional.cross_entropy(
            model(torch.randn(5, 3, 6, 6, generator=generator)), torch.randint(4, (5,), generator=generator)
        )
        loss.backward()
        updater.step(scales=scales or {}, factor=0.9)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), model, updater


@pytest.mark.parametrize("scales", [{}, SCALES], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("name", BUILD)
def test_weights_are_those_of_an_update_after_backward_bit_for_bit(name, scales):
    released, model, _ = run(BUILD[name], RELEASE, scales=scales)
    plain, _, _ = run(BUILD[name], None, scales=scales)
    assert released.equal(plain)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("with_release", "without"),
    [(BOTH, EngineConfig(fused_update=True)), (LOW, EngineConfig(fused_update=True, momentum_bf16=True))],
    ids=["fp32", "bf16"],
)
def test_released_fused_updates_equal_those_after_backward(name, with_release, without):
    assert run(BUILD[name], with_release, scales=SCALES)[0].equal(run(BUILD[name], without, scales=SCALES)[0])


@pytest.mark.parametrize("engine", [RELEASE, BOTH], ids=["ordinary", "fused"])
def test_gradients_are_freed_during_backward(engine):
    torch.manual_seed(0)
    layers = [nn.Linear(200, 200, bias=False) for _ in range(12)]
    peaks = []
    for chosen in (None, engine):
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = Updater(optimizer, find_layers(model), engine=chosen)
        inputs = torch.randn(4, 200)
        optimizer.zero_grad()
        with live_tensor_bytes() as tracker:
            updater.begin_step(scales={})
            model(inputs).square().mean().backward()
            updater.step(scales={})
        peaks.append(tracker.peak_bytes)
    one = 200 * 200 * 4
    assert peaks[0] - peaks[1] >= 9 * one


@pytest.mark.parametrize("engine", [RELEASE, BOTH], ids=["ordinary", "fused"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_skips_that_parameter_only_and_says_so(engine, value):
    model, optimizer, updater = make(BUILD["adamw"], engine)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    updater.begin_step(scales={})
    model[4].weight.register_hook(
        lambda g: g.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(value))
    )
    model(torch.randn(5, 3, 6, 6)).square().mean().backward()
    updater.step(scales={})
    assert updater.found_inf == ("4",)
    assert updater.skipped_parameters == ("4.weight",)
    assert updater.released
    moved = {n for n, p in model.named_parameters() if not p.detach().equal(before[n])}
    assert moved == before.keys() - {"4.weight"}
    assert model[4].weight not in optimizer.state
    assert model[4].weight.grad is None
    updater.begin_step(scales={})
    assert updater.found_inf == ()


def test_layers_nearest_the_loss_come_first():
    model, _, updater = make(BUILD["sgd"], RELEASE)
    updater.begin_step(scales={})
    (model(torch.randn(5, 3, 6, 6)).sum() * float("nan")).backward()
    updater.step(scales={})
    assert updater.found_inf == ("5", "4", "1", "0")


@pytest.mark.parametrize("engine", [RELEASE, BOTH], ids=["ordinary", "fused"])
def test_statistics_are_read_before_gradients_are_gone(engine):
    collected = []
    for chosen in (None, engine):
        model, optimizer, updater = make(BUILD["sgd"], chosen)
        optimizer.zero_grad()
        updater.begin_step(scales={}, statistics=True, extremes=True)
        model(torch.ones(5, 3, 6, 6)).square().mean().backward()
        updater.step(scales={}, statistics=True, extremes=True)
        collected.append(updater.gradient_stats.values)
    torch.testing.assert_close(collected[1], collected[0], rtol=1e-6, atol=1e-9)


def test_schedulers_and_post_hooks_see_one_step():
    model, optimizer, updater = make(BUILD["sgd"], BOTH)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    updater.begin_step(scales={})
    model(torch.ones(5, 3, 6, 6)).sum().backward()
    updater.step(scales={})
    scheduler.step()
    assert calls == [1]


def test_a_tied_parameter_used_twice_is_updated_once():
    results = []
    for engine in (None, RELEASE):
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        model = nn.Sequential(shared, nn.Tanh(), shared)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = Updater(optimizer, find_layers(model), engine=engine)
        updater.begin_step(scales={})
        model(torch.randn(3, 6)).sum().backward()
        updater.step(scales={})
        results.append(shared.weight.detach().clone())
    assert results[0].equal(results[1])


def test_checkpointed_recomputation_keeps_the_result():
    results = []
    for engine in (None, RELEASE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = Updater(optimizer, find_layers(model), engine=engine)
        updater.begin_step(scales={})
        out = torch.utils.checkpoint.checkpoint(model, torch.randn(3, 6), use_reentrant=False)
        out.sum().backward()
        updater.step(scales={})
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert results[0].equal(results[1])


def test_outside_a_step_gradients_stay_for_probes_and_for_the_user():
    model, _, updater = make(BUILD["sgd"], RELEASE)
    before = model[5].weight.detach().clone()
    model(torch.ones(5, 3, 6, 6)).sum().backward()
    assert model[5].weight.grad is not None
    assert model[5].weight.detach().equal(before)
    assert not updater.released


def test_gradients_set_by_hand_are_applied_by_step():
    model, _, updater = make(BUILD["sgd"], BOTH)
    before = model[5].bias.detach().clone()
    updater.begin_step(scales={})
    model[5].bias.grad = torch.ones(4)
    updater.step(scales={})
    torch.testing.assert_close(model[5].bias.detach(), before - 0.1 * (1 + 1e-2 * before))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"clipping": True}, "clipping by the global norm"),
        ({"accumulation": True}, "gradient accumulation"),
        ({"oom_retry": True}, "retry after out-of-memory"),
    ],
)
def test_refused_at_construction(options, match):
    with pytest.raises(TriAccelError, match=match):
        make(BUILD["sgd"], RELEASE, **options)
    make(BUILD["sgd"], None, **options)


def test_refused_with_an_active_loss_scale_and_with_micro_batches():
    _, _, updater = make(BUILD["sgd"], RELEASE)
    with pytest.raises(TriAccelError, match="active loss scaler"):
        updater.begin_step(scales={}, loss_scale=1024.0)
    with pytest.raises(TriAccelError, match="gradient accumulation"):
        updater.begin_step(scales={}, micro_batches=2)
    updater.begin_step(scales={}, loss_scale=1.0)


def test_a_second_backward_in_one_step_names_the_parameter():
    model, _, updater = make(BUILD["sgd"], RELEASE)
    updater.begin_step(scales={})
    model(torch.ones(5, 3, 6, 6)).sum().backward()
    with pytest.raises(TriAccelError, match=r"'5\.(weight|bias)' got a second gradient in one step"):
        model(torch.ones(5, 3, 6, 6)).sum().backward()


def test_step_without_begin_is_an_error():
    _, _, updater = make(BUILD["sgd"], RELEASE)
    with pytest.raises(TriAccelError, match="needs begin_step"):
        updater.step(scales={})


def test_optimizers_that_need_all_gradients_are_refused():
    with pytest.raises(TriAccelError, match="LBFGS needs all gradients"):
        make(torch.optim.LBFGS, RELEASE)

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    model, optimizer, updater = make(lambda p: Counting(p, lr=0.1), RELEASE)
    optimizer.param_groups[0]["k"] = 0
    updater.begin_step(scales={})
    with pytest.raises(TriAccelError, match="changes 'k' of its parameter group"):
        model(torch.ones(5, 3, 6, 6)).sum().backward()
    assert optimizer.param_groups[0]["k"] == 0


def test_pre_hooks_are_refused():
    _, optimizer, updater = make(BUILD["sgd"], BOTH)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(TriAccelError, match="has step hooks"):
        updater.begin_step(scales={})


def test_finite_is_exact():
    assert finite(torch.full((4,), 3e38))
    assert finite(torch.zeros(0))
    assert not finite(torch.tensor([float("inf"), -float("inf")]))
    assert not finite(torch.tensor([0.0, float("nan")]))
    assert not finite(torch.tensor([0.0, float("nan")]).to_sparse())


def test_hooks_hold_no_model_alive():
    model, optimizer, updater = make(BUILD["sgd"], RELEASE)
    updater._release.remove()
    gone = weakref.ref(model)
    del model, optimizer, updater
    import gc

    gc.collect()
    assert gone() is None
