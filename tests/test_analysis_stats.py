"""Statistics against hand-worked values, scipy and simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from analysis.factorial import EFFECTS, contrast, factorial_effects
from analysis.labels import COMPONENTS, FACTORIAL_ARMS
from analysis.stats import bca, holm, non_inferiority, paired_t, sign_flip, smallest_sign_flip_p

SAMPLES = [
    np.array([0.3, -0.1, 0.4, 0.2, 0.5, -0.2]),
    np.array([1.0, 2.0]),
    np.random.default_rng(3).normal(0.4, 1.0, size=10),
    np.random.default_rng(4).exponential(size=13) - 0.5,
]


@pytest.mark.parametrize("x", SAMPLES)
def test_paired_t_equals_scipy(x):
    ours, theirs = paired_t(x), scipy.stats.ttest_1samp(x, 0.0)
    low, high = theirs.confidence_interval(0.95)
    assert ours.value == pytest.approx(x.mean())
    assert (ours.low, ours.high, ours.p) == pytest.approx((low, high, theirs.pvalue))
    assert ours.n == len(x)


def test_paired_t_by_hand():
    """Differences 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.3027, half-width 4.3027 / sqrt(3)."""
    ours = paired_t([1.0, 2.0, 3.0])
    assert ours.value == 2.0
    assert ours.high - ours.value == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_one_seed_has_no_interval():
    assert (paired_t([0.4]).low, paired_t([0.4]).high, paired_t([0.4]).p) == (None, None, None)
    generator = np.random.default_rng(0)
    assert sign_flip([0.4], generator=generator) is None
    assert bca([0.4], generator=generator) is None
    assert non_inferiority([5.0], margin=0.5).verdict == "inconclusive"


def test_equal_differences_do_not_divide_by_zero():
    assert paired_t([0.0, 0.0, 0.0]).p == 1.0
    assert (paired_t([0.25] * 4).low, paired_t([0.25] * 4).p) == (0.25, 0.0)
    assert non_inferiority([0.0, 0.0], margin=0.5).verdict == "non-inferior"
    assert bca([0.25] * 4, generator=np.random.default_rng(0)) == (0.25, 0.25)


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]], [1.0, math.nan], [math.inf, 1.0]])
def test_differences_must_be_finite_numbers_one_a_seed(bad):
    """AlgoPerf PR 780: NaN is neither scored nor dropped."""
    for function in (paired_t, lambda x: non_inferiority(x, margin=1.0)):
        with pytest.raises(ValueError, match=r"difference"):
            function(bad)


@pytest.mark.parametrize("x", SAMPLES)
def test_exact_sign_flip_equals_scipy(x):
    theirs = scipy.stats.permutation_test(
        (x,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    # scipy doubles the smaller tail; for a symmetric null that is the two-sided share, which is counted here
    assert sign_flip(x, generator=np.random.default_rng(0)) == pytest.approx(theirs.pvalue)


def test_sign_flip_by_hand():
    """1, 2, 3: of the 8 sign vectors only +++ and --- reach |sum| = 6."""
    assert sign_flip([1.0, 2.0, 3.0], generator=np.random.default_rng(0)) == 0.25
    assert smallest_sign_flip_p(6) == pytest.approx(0.03125)


def test_sampled_sign_flip_is_near_the_exact_one():
    x = np.random.default_rng(5).normal(0.5, 1.0, size=14)
    exact = sign_flip(x, generator=np.random.default_rng(0))
    doubled = np.concatenate([x, x[:2] * 1e-9])  # two seeds more, without weight: the same test, now sampled
    assert sign_flip(doubled, generator=np.random.default_rng(1)) == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("x", SAMPLES[2:])
def test_bca_equals_scipy_on_many_resamples(x):
    ours = bca(x, generator=np.random.default_rng(0), resamples=60_000)
    theirs = scipy.stats.bootstrap(
        (x,), np.mean, method="BCa", n_resamples=60_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.02 * x.std())


def test_bca_depends_on_its_generator_alone():
    x = SAMPLES[2]
    assert bca(x, generator=np.random.default_rng(7)) == bca(x, generator=np.random.default_rng(7))
    assert bca(x, generator=np.random.default_rng(7)) != bca(x, generator=np.random.default_rng(8))


def test_holm_by_hand():
    """0.01, 0.04, 0.03, 0.005 -> 4 x 0.005, 3 x 0.01, 2 x 0.03, then the running maximum (Holm 1979)."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.1, 0.2, 0.0, 0.1, -0.2], "non-inferior"),
        ([-2.0, -2.2, -1.9, -2.1], "inferior"),
        ([-1.0, 0.9, -1.5, 0.2], "inconclusive"),  # the interval crosses the margin
        ([-0.51, -0.49, -0.5, -0.52], "inconclusive"),
    ],
)
def test_non_inferiority(differences, verdict):
    ours = non_inferiority(differences, margin=0.5)
    theirs = scipy.stats.ttest_1samp(np.array(differences), -0.5, alternative="greater")
    assert ours.verdict == verdict
    assert ours.p == pytest.approx(theirs.pvalue)
    assert ours.low == pytest.approx(theirs.confidence_interval(0.95).low)
    if verdict == "non-inferior":
        assert ours.low > -0.5
        assert ours.p < 0.05
    with pytest.raises(ValueError, match="margin"):
        non_inferiority(differences, margin=0.0)


@pytest.mark.parametrize("n", [6, 10])
@pytest.mark.parametrize("draw", ["normal", "skewed", "heavy"])
def test_paired_t_covers_at_least_93_percent(n, draw):
    """Seeded simulation at the n in use: 20,000 experiments, normal, gamma(4) (skewness 1) and t with 5 degrees of freedom."""
    rng = np.random.default_rng([n, *draw.encode()])
    shape = (20_000, n)
    x = {
        "normal": lambda: rng.normal(size=shape),
        "skewed": lambda: rng.gamma(4.0, size=shape) - 4.0,
        "heavy": lambda: rng.standard_t(5, size=shape),
    }[draw]()
    half = scipy.stats.t.ppf(0.975, n - 1) * x.std(axis=1, ddof=1) / math.sqrt(n)
    first = paired_t(x[0])
    assert first.high - first.value == pytest.approx(half[0])  # the simulated interval is the one in use
    assert (np.abs(x.mean(axis=1)) <= half).mean() >= 0.93


def test_bootstrap_undercovers_at_ten_seeds_and_so_stands_beside():
    rng = np.random.default_rng(11)
    hits = []
    for _ in range(400):
        low, high = bca(rng.normal(size=10), generator=rng, resamples=999)
        hits.append(low <= 0.0 <= high)
    assert 0.82 < np.mean(hits) < 0.945


# ------------------------------------------------------------------ the 2^3 design


def _responses(rng, seeds, effects):
    """arm -> seed -> y with known effects (difference of means) and a block effect that cancels."""
    block = {seed: rng.normal(0, 5) for seed in seeds}
    found = {}
    for arm in FACTORIAL_ARMS:
        on = set(COMPONENTS) if arm == "tri-accel" else set(arm.split("+"))
        for seed in seeds:
            y = block[seed] + sum(
                size / 2 * math.prod(1 if c in on else -1 for c in effect) for effect, size in effects.items()
            )
            found.setdefault(arm, {})[seed] = y
    return found


def test_effects_are_recovered_exactly_without_noise():
    effects = {("precision",): -2.0, ("batch",): 1.0, ("precision", "batch"): 0.5, COMPONENTS: -0.25}
    found = factorial_effects(_responses(np.random.default_rng(0), range(4), effects))
    assert [effect.components for effect in found] == list(EFFECTS)
    for effect in found:
        assert effect.estimate.value == pytest.approx(effects.get(effect.components, 0.0), abs=1e-12)
        assert effect.seeds == (0, 1, 2, 3)


def test_effects_equal_least_squares_with_sum_coding():
    rng = np.random.default_rng(1)
    y = {arm: {seed: rng.normal() for seed in range(5)} for arm in FACTORIAL_ARMS}
    rows, target = [], []
    for arm in FACTORIAL_ARMS:
        on = set(COMPONENTS) if arm == "tri-accel" else set(arm.split("+"))
        for seed in range(5):
            coded = [math.prod(1.0 if c in on else -1.0 for c in effect) for effect in EFFECTS]
            rows.append([1.0, *coded])
            target.append(y[arm][seed])
    beta = np.linalg.lstsq(np.array(rows), np.array(target), rcond=None)[0]
    ours = [effect.estimate.value for effect in factorial_effects(y)]
    assert ours == pytest.approx(2 * beta[1:])


def test_main_effect_by_hand():
    """off 10, precision 8, all others as if additive: the effect of precision is -2."""
    y = {arm: {0: 10.0 - 2.0 * ("precision" in arm or arm == "tri-accel")} for arm in FACTORIAL_ARMS}
    found = {effect.name: effect.estimate for effect in factorial_effects(y)}
    assert found["precision"].value == -2.0
    assert found["precision x batch"].value == 0.0
    assert found["precision"].low is None  # one seed


def test_seeds_without_all_eight_arms_do_not_count():
    y = _responses(np.random.default_rng(2), range(4), {("batch",): 1.0})
    del y["off"][2]
    assert factorial_effects(y)[0].seeds == (0, 1, 3)
    del y["curvature"]
    assert factorial_effects(y) == []


def test_contrasts_are_orthogonal():
    matrix = np.array([contrast(effect) for effect in EFFECTS])
    assert matrix @ matrix.T == pytest.approx(np.eye(7) / 2)
    assert matrix.sum(axis=1) == pytest.approx(np.zeros(7))
