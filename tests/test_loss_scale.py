"""One loss scaler: FP32 arithmetic, exact unscaling, a floor that it never leaves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from triaccel.config import LossScaleConfig
from triaccel.loss_scale import LossScaler


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_scale_multiplies_an_fp32_loss(dtype):
    """An FP16 loss times 65536 would be inf."""
    scaled = LossScaler(LossScaleConfig()).scale(torch.tensor(2.5, dtype=dtype))
    assert scaled.dtype is torch.float32
    assert scaled.item() == 2.5 * 65536


def test_unscaled_gradients_are_those_of_the_plain_loss_bit_for_bit():
    plain, scaled = nn.Linear(5, 3), nn.Linear(5, 3)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(7, 5)
    plain(x).square().mean().backward()
    scaler = LossScaler(LossScaleConfig())
    scaler.scale(scaled(x).square().mean()).backward()
    scaler.unscale_(scaled.parameters())
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_gradients_of_low_layers_are_fp32_and_unscaled_pytorch_127176():
    """pytorch 127176: unscaling lacks BF16 gradients. Parameters and gradients stay FP32, whatever a layer computes in."""
    model = nn.Linear(4, 4)
    scaler = LossScaler(LossScaleConfig(initial=8.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 4)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(model.parameters())
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))


def test_sparse_missing_and_nonfinite_gradients():
    embedding, unused = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)
    scaler = LossScaler(LossScaleConfig(initial=4.0))
    scaler.scale(embedding(torch.tensor([1, 1])).sum()).backward()
    embedding.weight.grad._values()[0, 0] = math.inf
    scaler.unscale_([*embedding.parameters(), *unused.parameters()])
    values = embedding.weight.grad._values()
    assert values[0, 0] == math.inf
    assert values[1, 1] == 1.0
    assert unused.weight.grad is None


def test_it_backs_off_to_the_floor_and_stays_there_pytorch_99640():
    """pytorch 99640: the scale collapses to 0. It stops at the floor, where the precision policy promotes the layer instead."""
    scaler = LossScaler(LossScaleConfig(initial=16.0, floor=2.0))
    seen = []
    for _ in range(5):
        assert not scaler.at_floor or scaler.value == 2.0
        scaler.update(found_inf=True)
        seen.append(scaler.value)
    assert seen == [8.0, 4.0, 2.0, 2.0, 2.0]
    assert scaler.at_floor


def test_it_grows_after_clean_steps_in_a_row():
    scaler = LossScaler(LossScaleConfig(initial=4.0, growth_interval=3))
    for found in (False, False, True, False, False):
        scaler.update(found_inf=found)
    assert scaler.value == 2.0
    scaler.update(found_inf=False)
    assert scaler.value == 4.0


def test_growth_never_reaches_infinity():
    scaler = LossScaler(LossScaleConfig(growth=1e30, growth_interval=1))
    for _ in range(4):
        scaler.update(found_inf=False)
    assert math.isfinite(scaler.value)
    assert torch.isfinite(scaler.scale(torch.tensor(1.0)))


@given(st.lists(st.booleans(), max_size=60))
def test_it_is_never_below_the_floor_and_resumes_exactly(history):
    config = LossScaleConfig(initial=64.0, floor=4.0, growth_interval=5)
    whole, first = LossScaler(config), LossScaler(config)
    cut = len(history) // 2
    for found in history[:cut]:
        whole.update(found_inf=found)
        first.update(found_inf=found)
    second = LossScaler(config)
    second.load_state_dict(first.state_dict())
    for found in history[cut:]:
        whole.update(found_inf=found)
        second.update(found_inf=found)
    assert second.state_dict() == whole.state_dict()
    assert whole.value >= 4.0
    assert math.log2(whole.value).is_integer()


def test_a_floor_above_the_first_scale_is_an_error():
    with pytest.raises(ValueError, match="lower the floor"):
        LossScaleConfig(initial=1.0, floor=2.0)


def test_all_gradients_none_no_inf_checks():
    """PyTorch users: "No inf checks were recorded" when every gradient is None. Nothing is done, nothing raises."""
    model = nn.Linear(2, 2)
    scaler = LossScaler(LossScaleConfig(initial=4.0))
    scaler.unscale_(model.parameters())
    scaler.unscale_([])
    assert model.weight.grad is None
    assert scaler.value == 4.0
