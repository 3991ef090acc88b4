"""Elastic batches: every sample once an epoch under any sequence of sizes, exact resumption, splitting of any structure."""

import json
import random
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from triaccel.sampler import ElasticBatches, batch_length, micro_batch_sizes, split_batch
from triaccel.types import TriAccelError


class Items(Dataset):
    """Map-style data with a random transform and a string."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        return torch.tensor(index), noise, f"item {index}"


class Resident:
    def __init__(self, n):
        self.n = n
        self.calls = []

    def __len__(self):
        return self.n

    def fetch(self, indices, epoch):
        assert indices.dtype is torch.int64
        self.calls.append((epoch, len(indices)))
        return {"x": indices.clone(), "epoch": torch.full((len(indices),), epoch)}


def sizes_from(sequence):
    """A size for each call, the last one for ever."""
    remaining = list(sequence)
    return lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def indices_of(batch):
    return (batch["x"] if isinstance(batch, dict) else batch[0]).tolist()


# ---------------------------------------------------------------- coverage


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(2, 60),
    epochs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=30),
    minimum=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
@pytest.mark.filterwarnings("ignore:the batch size has grown")
def test_every_sample_once_an_epoch_under_any_sequence_of_sizes(n, epochs, sizes, minimum, seed):
    sizes = [min(sizes[0], n), *sizes]
    batches = ElasticBatches(
        (torch.arange(n),), epochs=epochs, batch_size=sizes_from(sizes), seed=seed, minimum_micro=minimum
    )
    seen = [indices_of(batch) for batch in batches]
    assert all(minimum <= len(batch) <= n for batch in seen)
    flat = [index for batch in seen for index in batch]
    assert len(flat) == batches.total_samples == n * epochs
    for epoch in range(epochs):
        assert sorted(flat[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert (batches.epoch, batches.position) == (epochs, 0)
    assert list(batches) == []


def test_sizes_are_asked_for_as_each_batch_is_formed():
    size = 4
    batches = ElasticBatches((torch.arange(20),), epochs=1, batch_size=lambda: size, seed=0)
    lengths = []
    for batch in batches:
        lengths.append(len(batch[0]))
        size = {4: 2, 2: 6, 6: 5}.get(size, 5)
    assert lengths == [4, 2, 6, 5, 3]


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, size, epochs=2):
        batches = ElasticBatches((torch.arange(30),), epochs=epochs, batch_size=lambda: size, seed=seed)
        return [index for batch in batches for index in indices_of(batch)]

    assert order(1, 7) == order(1, 30)
    assert order(1, 7) != order(2, 7)
    assert order(1, 7)[:30] != order(1, 7)[30:]


def test_the_global_random_state_is_untouched():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    for data in ((torch.arange(20),), Items(20)):
        batches = ElasticBatches(data, epochs=1, batch_size=lambda: 6, seed=0)
        batches.draw(4, seed=3)
        assert len(list(batches)) == 4
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize(
    ("n", "size", "lengths"), [(13, 6, [6, 5, 2]), (12, 6, [6, 6]), (5, 2, [2, 3]), (7, 3, [3, 2, 2])]
)
def test_tails_of_one_are_rebalanced_or_merged(n, size, lengths):
    """BatchNorm needs two samples: a tail of one borrows a sample, or joins where borrowing would leave one."""
    batches = ElasticBatches((torch.arange(n),), epochs=1, batch_size=lambda: size, seed=0, minimum_micro=2)
    assert [len(batch[0]) for batch in batches] == lengths


def test_dropping_the_tail():
    batches = ElasticBatches((torch.arange(23),), epochs=2, batch_size=lambda: 5, seed=0, tail="drop")
    assert [len(batch[0]) for batch in batches] == [5] * 8
    assert batches.total_samples == 40


def test_resident_data_are_told_the_epoch():
    data = Resident(10)
    batches = ElasticBatches(data, epochs=2, batch_size=lambda: 5, seed=0)
    assert [batch["epoch"][0].item() for batch in batches] == [0, 0, 1, 1]
    assert data.calls == [(0, 5), (0, 5), (1, 5), (1, 5)]


def test_tensor_datasets_and_single_tensors():
    for data in (
        TensorDataset(torch.arange(9), torch.arange(9)),
        torch.arange(9),
        [torch.arange(9), torch.arange(9)],
    ):
        batches = ElasticBatches(data, epochs=1, batch_size=lambda: 4, seed=0)
        assert sorted(i for batch in batches for i in indices_of(batch)) == list(range(9))


# ---------------------------------------------------------------- map-style data, workers, transforms


def collate(samples):
    return {
        "x": torch.stack([s[0] for s in samples]),
        "noise": [s[1] for s in samples],
        "names": [s[2] for s in samples],
    }


def noise_by_index(batches, epochs, n):
    found = []
    for batch in batches:
        found += zip(batch["x"].tolist(), batch["noise"], batch["names"], strict=True)
    assert all(name == f"item {index}" for index, _, name in found)
    return [{i: v for i, v, _ in found[e * n : (e + 1) * n]} for e in range(epochs)]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_transforms_depend_on_epoch_and_index_alone():
    """Neither batch sizes nor workers change an augmentation."""
    n = 24
    plain = noise_by_index(
        ElasticBatches(Items(n), epochs=2, batch_size=lambda: 5, seed=7, collate_fn=collate), 2, n
    )
    shaped = noise_by_index(
        ElasticBatches(Items(n), epochs=2, batch_size=sizes_from([3, 8, 2, 11]), seed=7, collate_fn=collate),
        2,
        n,
    )
    workers = noise_by_index(
        ElasticBatches(Items(n), epochs=2, batch_size=lambda: 7, seed=7, collate_fn=collate, num_workers=2),
        2,
        n,
    )
    assert plain == shaped == workers
    assert len(plain[0]) == len(plain[1]) == n
    assert plain[0] != plain[1]
    assert len(set(plain[0].values())) == n


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_batches_prefetched_too_large_are_split():
    size = 12
    batches = ElasticBatches(
        Items(60), epochs=2, batch_size=lambda: size, seed=0, num_workers=2, minimum_micro=2
    )
    seen = []
    for step, batch in enumerate(batches):
        assert 2 <= len(batch[0]) <= size + 1
        seen += batch[0].tolist()
        if step == 1:
            size = 5
        if step == 12:
            size = 9
    assert Counter(seen) == dict.fromkeys(range(60), 2)
    assert sorted(seen[:60]) == list(range(60))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_workers_resume_bit_exactly_with_the_sizes_already_formed():
    plan = {2: 5, 6: 8, 9: 3}

    def run(start=None, until=None, size=10, step=0):
        current = [size]
        batches = ElasticBatches(Items(60), epochs=1, batch_size=lambda: current[0], seed=0, num_workers=2)
        if start is not None:
            batches.load_state_dict(json.loads(json.dumps(start)))
        seen = []
        for batch in batches:
            seen.append((batch[0].tolist(), batch[1].tolist()))
            current[0] = plan.get(step, current[0])
            step += 1
            if step == until:
                return seen, batches.state_dict(), current[0]
        return seen

    whole = run()
    for until in (1, 3, 4, 7):
        first, state, size = run(until=until)
        assert state["position"] == sum(len(batch) for batch, _ in first)
        assert first + run(start=state, size=size, step=until) == whole


@settings(max_examples=50, deadline=None)
@given(
    stop=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 9), min_size=30, max_size=30),
    seed=st.integers(0, 99),
)
def test_resume_in_mid_epoch(stop, sizes, seed):
    def make(sequence):
        return ElasticBatches((torch.arange(31),), epochs=2, batch_size=sizes_from(sequence), seed=seed)

    whole = [indices_of(batch) for batch in make([sizes[0], *sizes])]
    first = make([sizes[0], *sizes])
    seen = []
    for batch in first:
        seen.append(indices_of(batch))
        if len(seen) > stop:
            break
    state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] + 31 * state["epoch"] == sum(map(len, seen))
    again = make([1, *sizes[len(seen) :]])
    again.load_state_dict(state)
    assert seen + [indices_of(batch) for batch in again] == whole


def test_a_batch_can_be_taken_back_before_a_checkpoint():
    batches = ElasticBatches((torch.arange(20),), epochs=1, batch_size=lambda: 6, seed=0)
    iterator = iter(batches)
    next(iterator)
    lost = indices_of(next(iterator))
    batches.unread()
    state = batches.state_dict()
    with pytest.raises(TriAccelError, match="no batch to take back"):
        batches.unread()
    again = ElasticBatches((torch.arange(20),), epochs=1, batch_size=lambda: 3, seed=0)
    again.load_state_dict(state)
    assert indices_of(next(iter(again))) == lost


def test_states_of_other_data_are_refused():
    batches = ElasticBatches((torch.arange(20),), epochs=1, batch_size=lambda: 6, seed=0)
    for change in ({"length": 19}, {"seed": 5}):
        with pytest.raises(TriAccelError, match="order of samples would differ"):
            batches.load_state_dict(batches.state_dict() | change)


# ---------------------------------------------------------------- probe batches


def test_draw_is_seeded_and_moves_nothing():
    batches = ElasticBatches((torch.arange(50),), epochs=2, batch_size=lambda: 20, seed=0)
    next(iter(batches))
    before = batches.state_dict()
    first = indices_of(batches.draw(16, seed=4))
    assert first == indices_of(batches.draw(16, seed=4))
    assert first != indices_of(batches.draw(16, seed=5))
    assert len(set(first)) == 16
    assert batches.state_dict() == before
    with pytest.raises(TriAccelError, match="probe batch of 51"):
        batches.draw(51, seed=0)


# ---------------------------------------------------------------- structure

Pair = namedtuple("Pair", "x y")

STRUCTURES = [
    torch.arange(10),
    (torch.arange(10), torch.ones(10, 3)),
    [torch.arange(10), [torch.ones(10)]],
    {"a": torch.arange(10), "b": {"c": torch.ones(10, 2, 2)}, "none": None},
    Pair(torch.arange(10), torch.ones(10)),
    (torch.arange(10), [f"name {i}" for i in range(10)], np.arange(10)),
    {"labels": list(range(10)), "x": torch.arange(10)},
]


@pytest.mark.parametrize("batch", STRUCTURES, ids=lambda b: type(b).__name__)
def test_split_keeps_structure_and_samples(batch):
    assert batch_length(batch) == 10
    pieces = split_batch(batch, [4, 1, 5])
    assert [batch_length(piece) for piece in pieces] == [4, 1, 5]
    assert all(type(piece) is type(batch) for piece in pieces)
    whole = split_batch(batch, [10])
    assert whole[0] is batch


def test_split_gives_views():
    x = torch.arange(10)
    pieces = split_batch((x, x), [3, 7])
    assert torch.equal(torch.cat([p[0] for p in pieces]), x)
    assert pieces[1][0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for sizes in ([3, 6], [3, 8], [0, 10]):
        with pytest.raises(TriAccelError, match="cannot split"):
            split_batch(x, sizes)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.arange(3), torch.arange(4)), r"3 samples at batch\[0\] but 4 at batch\[1\]"),
        ({"x": torch.arange(3), "n": torch.tensor(3.0)}, r"single number at batch\['n'\]"),
        ((torch.arange(3), object()), r"holds a object at batch\[1\]"),
        ({"x": torch.arange(3), "flag": 1.5}, r"holds a float at batch\['flag'\]"),
        (None, "holds no tensor"),
        ({}, "holds no tensor"),
    ],
)
def test_unknown_batches_are_refused_by_place(batch, says):
    with pytest.raises(TriAccelError, match=says):
        batch_length(batch)


@given(length=st.integers(1, 300), limit=st.integers(1, 300), minimum=st.integers(1, 3))
def test_micro_batches_cover_and_respect_limits(length, limit, minimum):
    sizes = micro_batch_sizes(length, limit, minimum=minimum)
    assert sum(sizes) == length
    assert all(size >= min(minimum, length) for size in sizes)
    assert max(sizes) <= max(limit, minimum) + minimum - 1
    if minimum == 1:
        assert max(sizes) <= limit
    assert len(set(sizes)) <= 3


# ---------------------------------------------------------------- bad input


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ((torch.arange(5),), {"batch_size": lambda: 6}, r"6 is larger than the data set \(5 samples\)"),
        ((torch.arange(5), torch.arange(4)), {}, r"unequal lengths \[5, 4\]"),
        ((torch.arange(5),), {"num_workers": 2}, "leave both out"),
        (Resident(5), {"collate_fn": list}, "leave both out"),
        (Stream(), {}, "no length and index"),
        (iter([1, 2]), {}, "no length and index"),
        ((torch.arange(5),), {"batch_size": lambda: 0}, "at least one sample"),
        ((torch.arange(5),), {"epochs": 0}, "epochs=0"),
        ((torch.arange(1),), {"batch_size": lambda: 1, "minimum_micro": 2}, "larger than the data set"),
    ],
)
def test_bad_input(data, options, says):
    with pytest.raises(TriAccelError, match=says):
        ElasticBatches(data, **({"epochs": 1, "batch_size": lambda: 2, "seed": 0} | options))


def test_growing_past_the_data_warns_once():
    sizes = sizes_from([5, 5, 50])
    batches = ElasticBatches((torch.arange(20),), epochs=2, batch_size=sizes, seed=0)
    with pytest.warns(UserWarning, match="past the data set") as caught:
        lengths = [len(batch[0]) for batch in batches]
    assert sum(lengths) == 40
    assert len(caught) == 1


def test_a_collate_function_that_hides_samples_is_refused_when_a_split_is_needed():
    size = 10
    batches = ElasticBatches(
        Items(40),
        epochs=1,
        batch_size=lambda: size,
        seed=0,
        num_workers=1,
        collate_fn=lambda s: torch.zeros(1),
    )
    iterator = iter(batches)
    next(iterator)
    size = 4
    with pytest.raises(TriAccelError, match="made 1 samples of 10"):
        next(iterator)
