"""Out of memory: recognised by type first, rolled back completely, retried as if the smaller size had been chosen at first."""

import copy
import os
import random
import subprocess
import sys
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from triaccel import recovery
from triaccel.recovery import StepGuard, is_out_of_memory, minimum_micro_batch, run_step_with_recovery
from triaccel.sampler import ElasticBatches, micro_batch_sizes, split_batch
from triaccel.types import TriAccelError


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks: threads would only wait for each other on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )


def data(n=70):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator)


def oom():
    return torch.OutOfMemoryError("injected")


# ---------------------------------------------------------------- recognition


def raised(error, cause=None, context=None):
    try:
        if context is not None:
            try:
                raise context
            except type(context):
                raise error  # noqa: B904
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("NPU out of memory. Tried to allocate"),
        RuntimeError("HIP out of memory"),
        RuntimeError("XPU out of memory"),
    ],
    ids=lambda e: str(e)[:30],
)
def test_recognised_by_type_by_cause_and_by_text_last(error):
    """accelerate 4226: an out-of-memory error of another backend is one too."""
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised(ValueError("in the data pipeline"), cause=error))
    assert is_out_of_memory(raised(ValueError("while cleaning up"), context=error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA out of memory is only quoted here"),
        KeyboardInterrupt(),
        raised(ValueError("deliberately cut off"), cause=None),
    ],
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_a_failed_primitive_counts_only_where_memory_is_short(monkeypatch):
    error = RuntimeError("could not create a primitive")
    monkeypatch.setattr(recovery, "headroom_bytes", lambda: 500)
    monkeypatch.setattr(recovery, "resident_set_bytes", lambda: 400)
    assert is_out_of_memory(error, needed_bytes=600)
    assert not is_out_of_memory(error, needed_bytes=400)
    assert not is_out_of_memory(error)
    monkeypatch.setattr(recovery, "headroom_bytes", lambda: 300)
    assert is_out_of_memory(error)
    monkeypatch.setattr(recovery, "headroom_bytes", lambda: None)
    assert not is_out_of_memory(error, needed_bytes=10**12)


def test_a_real_failed_allocation_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_an_endless_chain_ends():
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    assert not is_out_of_memory(a)


# ---------------------------------------------------------------- guard


class Counting:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_the_guard_restores_everything_a_step_moves():
    model, scaler = net(), Counting()
    model.register_buffer("mask", torch.ones(3))
    inputs, targets = data(16)
    guard = StepGuard(model, scaler=scaler)
    for _ in range(3):
        guard.snapshot()
        state = copy.deepcopy(model.state_dict())
        streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        random.random(), np.random.rand()
        model.mask.add_(1)
        model[1].running_mean = torch.zeros(16)  # replaced, not written
        scaler.value += 1
        guard.restore()
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key]), key
        assert torch.equal(torch.get_rng_state(), streams[0])
        assert random.getstate() == streams[1]
        assert np.array_equal(np.random.get_state()[1], streams[2])
        assert all(p.grad is None for p in model.parameters())
        assert scaler.value == 0
        model[1].running_mean.add_(0.5)  # a later step starts elsewhere


def test_constant_buffers_are_copied_once():
    model = net()
    model.register_buffer("mask", torch.ones(1000))
    guard = StepGuard(model)
    guard.snapshot()
    copies = [copy for buffer, copy, _ in guard._kept if buffer is model.mask]
    copies[0].fill_(7)  # a sign that would be overwritten by another copy
    guard.snapshot()
    assert copies[0][0] == 7
    model.mask.mul_(2)
    guard.snapshot()
    assert copies[0][0] == 2


# ---------------------------------------------------------------- one step


def attempt_on(model, batch, *, fail=None):
    """Forward and backward in micro-batches; ``fail(point, micro)`` may raise at ``"forward"`` or ``"backward"``."""
    inputs, targets = batch

    def attempt(micro):
        total = 0.0
        for x, y in split_batch((inputs, targets), micro_batch_sizes(len(targets), micro, minimum=2)):
            hidden = model[:4](x)
            if fail:
                fail("forward", micro)
                hidden.register_hook(lambda grad: fail("backward", micro))
            loss = nn.functional.cross_entropy(model[4:](hidden), y) * (len(y) / len(targets))
            loss.backward()
            total += loss.item()
        return total

    return attempt


def nothing():
    return None


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_retried_step_is_as_if_the_smaller_size_had_been_chosen_at_first(point):
    batch = data(32)
    failing, plain = net(), net()
    torch.manual_seed(5)

    def fail(where, micro):
        if where == point and micro > 8:
            raise oom()

    guard = StepGuard(failing)
    failed = []
    loss, micro, survived = run_step_with_recovery(
        attempt_on(failing, batch, fail=fail),
        guard=guard,
        micro_batch_size=32,
        minimum=2,
        on_floor=nothing,
        on_oom=failed.append,
    )
    state = torch.get_rng_state()
    assert (micro, survived, failed) == (8, 2, [32, 16])
    torch.manual_seed(5)
    assert attempt_on(plain, batch)(8) == loss
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(failing.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(failing.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_accumulation_is_normalised_by_true_counts():
    """transformers 37766: unequal micro-batches weigh by their samples."""
    model = nn.Sequential(*[nn.Identity()] * 4, nn.Linear(6, 4))
    batch = data(23)
    attempt_on(model, batch)(23)
    whole = model[4].weight.grad.clone()
    model.zero_grad()
    attempt_on(model, batch)(5)
    torch.testing.assert_close(model[4].weight.grad, whole)


def test_the_frames_that_failed_are_released_before_the_retry():
    """pytorch 18853, 27600: a traceback keeps tensors alive; the retry must find them gone."""
    alive = []

    class Held:
        pass

    def deep(micro):
        held, tensor = Held(), torch.zeros(1000)
        alive.append((weakref.ref(held), weakref.ref(tensor)))
        if micro > 4:
            try:
                raise ValueError("first")
            except ValueError as error:
                raise oom() from error
        return micro

    def attempt(micro):
        kept = torch.ones(10)
        alive.append((weakref.ref(kept), weakref.ref(kept)))
        if len(alive) > 1:
            assert all(ref() is None for pair in alive[:-1] for ref in pair)
        return deep(micro)

    result = run_step_with_recovery(
        attempt, guard=StepGuard(net()), micro_batch_size=16, minimum=1, on_floor=nothing
    )
    assert result == (4, 4, 2)


@pytest.mark.filterwarnings("ignore:out of memory down to micro-batches")
def test_the_floor_writes_a_checkpoint_and_says_what_to_do():
    """accelerate 1934: a floor, and a checkpoint before the end."""
    model = net()
    weights = copy.deepcopy(model.state_dict())
    order = []

    def attempt(micro):
        order.append(micro)
        model(data(8)[0])
        raise oom()

    with pytest.raises(
        TriAccelError, match=r"micro-batches of 2, the smallest .*\(injected\).*then resume"
    ) as caught:
        run_step_with_recovery(
            attempt,
            guard=StepGuard(model),
            micro_batch_size=9,
            minimum=2,
            on_floor=lambda: order.append("checkpoint"),
        )
    assert order == [9, 4, 2, "checkpoint"]
    assert caught.value.__context__ is None  # raised outside the except block: nothing is held
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights.values(), strict=True))


@pytest.mark.filterwarnings("ignore:out of memory down to micro-batches")
def test_sizes_follow_the_ladder():
    tried = []

    def attempt(micro):
        tried.append(micro)
        if micro > 3:
            raise oom()

    run_step_with_recovery(
        attempt,
        guard=StepGuard(net()),
        micro_batch_size=500,
        minimum=2,
        on_floor=nothing,
        ladder=(16, 96, 192, 384),
    )
    assert tried == [500, 192, 96, 16, 8, 4, 2]


def test_other_errors_pass_through_untouched():
    def attempt(micro):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run_step_with_recovery(
            attempt, guard=StepGuard(net()), micro_batch_size=8, minimum=1, on_floor=nothing
        )


def test_needed_bytes_reach_the_recogniser():
    asked = []

    def attempt(micro):
        if micro > 4:
            raise RuntimeError("could not create a primitive")

    def is_oom(error, *, needed_bytes):
        asked.append(needed_bytes)
        return True

    run_step_with_recovery(
        attempt,
        guard=StepGuard(net()),
        micro_batch_size=8,
        minimum=1,
        on_floor=nothing,
        needed_bytes=lambda size: 1000 * size,
        is_oom=is_oom,
    )
    assert asked == [8000]


def test_several_ranks_are_refused(monkeypatch):
    """composer PR 2117: one rank out of memory leaves the rest hanging; until ranks agree, several are refused."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(TriAccelError, match=r"2 ranks.*train on one process"):
        StepGuard(net())


def test_the_batch_norm_floor_warns():
    def attempt(micro):
        if micro > 2:
            raise oom()
        return micro

    def run(model):
        return run_step_with_recovery(
            attempt, guard=StepGuard(model), micro_batch_size=8, minimum=2, on_floor=nothing
        )

    with pytest.warns(UserWarning, match="micro-batches of 2, the least that BatchNorm"):
        run(net())
    assert run(nn.Linear(2, 2)) == (2, 2, 2)  # no BatchNorm, no warning


def test_batch_norm_needs_two_samples():
    assert minimum_micro_batch(net()) == 2
    assert minimum_micro_batch(nn.Linear(2, 2)) == 1


# ---------------------------------------------------------------- a run with two hundred failures


def train(*, injections=None, sizes=None, epochs=20, n=136):
    """A run with probes and evaluations; ``injections`` raise once at (call, point), ``sizes`` replays micro-batch sizes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    guard = StepGuard(model)
    inputs, targets = data(n)
    batches = ElasticBatches(
        (torch.arange(n), inputs, targets), epochs=epochs, batch_size=lambda: 16, seed=0, minimum_micro=2
    )
    seen, ran, injected, losses = Counter(), [], Counter(), []
    torch.manual_seed(9)

    def guarded(point, length, attempt):
        """One call with at most one injection, at the micro-batch chosen by its number."""
        call = len(ran)
        pending = [] if injections is None else injections.get(call, [])[:]

        def fail(where, micro):
            if pending and pending[0] == where:
                pending.pop(0)
                injected[where] += 1
                raise oom()

        result, micro, _ = run_step_with_recovery(
            lambda micro: attempt(micro, fail),
            guard=guard,
            micro_batch_size=length if sizes is None else sizes[call],
            minimum=2,
            on_floor=nothing,
        )
        ran.append(micro)
        return result

    def evaluate(micro, fail):
        model.eval()
        try:
            correct = 0
            for x, y in split_batch((inputs, targets), micro_batch_sizes(n, micro)):
                with torch.no_grad():
                    correct += int((model(x).argmax(1) == y).sum())
                fail("evaluation", micro)
            return correct
        finally:
            model.train()

    def probe(micro, fail):
        drawn = batches.draw(16, seed=len(ran))
        total = torch.zeros(())
        for _, x, y in split_batch(drawn, micro_batch_sizes(16, micro, minimum=2)):
            grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
            fail("probe", micro)
            total += sum(g.square().sum() for g in grads) * len(y)
        guard.restore()  # a probe leaves nothing behind
        return total.item()

    for step, (index, x, y) in enumerate(batches):
        optimizer.zero_grad()
        losses.append(
            guarded("step", len(y), lambda micro, fail, x=x, y=y: attempt_on(model, (x, y), fail=fail)(micro))
        )
        optimizer.step()
        seen.update(index.tolist())
        optimizer.zero_grad()
        if step % 2 == 0:
            losses.append(guarded("probe", 16, probe))
        if step % 2 == 1:
            losses.append(guarded("evaluation", n, evaluate))
    return model, seen, ran, injected, losses


@pytest.mark.filterwarnings("ignore:out of memory down to micro-batches")
def test_two_hundred_failures_change_nothing():
    """200 injected errors, 50 each in forward, backward, probe and evaluation: every sample once an epoch, equal weights."""
    clean = train()
    calls = len(clean[2])
    rng = random.Random(0)
    kinds = [
        "step" if call % 2 == 0 else ("probe" if call % 4 == 1 else "evaluation") for call in range(calls)
    ]
    steps = [call for call in range(calls) if kinds[call] == "step"]
    injections = {}
    for call in rng.sample(steps, 80):
        injections[call] = [rng.choice(["forward", "backward"])]
    for call, points in list(injections.items())[:20]:
        injections[call] = [*points, rng.choice(["forward", "backward"])]
    for kind in ("probe", "evaluation"):
        for call in rng.sample([c for c in range(calls) if kinds[c] == kind], 50):
            injections[call] = [kind]
    model, seen, ran, injected, losses = train(injections=injections)
    assert sum(injected.values()) == 200
    assert min(injected[point] for point in ("forward", "backward", "probe", "evaluation")) >= 40
    assert seen == dict.fromkeys(range(136), 20)
    again = train(sizes=ran)
    assert again[2] == ran
    assert losses == again[4]
    for a, b in zip(model.state_dict().values(), again[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- a real limit

CHILD = """
import resource, sys
import psutil, torch, torchvision
from torch import nn
from triaccel.batch import make_batch_policy
from triaccel.config import BatchConfig
from triaccel.memory import make_memory_probe
from triaccel.recovery import StepGuard, is_out_of_memory, run_step_with_recovery
from triaccel.sampler import ElasticBatches, micro_batch_sizes, split_batch
from triaccel.types import Observation

fixed, initial, samples = sys.argv[1] == "fixed", int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(2)
layout = dict(memory_format=torch.channels_last)
data = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
model = torchvision.models.resnet18(num_classes=10).to(**layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def attempt(x, y, micro):
    optimizer.zero_grad()
    for xs, ys in split_batch((x, y), micro_batch_sizes(len(y), micro, minimum=2)):
        (nn.functional.cross_entropy(model(xs.contiguous(**layout)), ys) * (len(ys) / len(y))).backward()

attempt(data[0][:16], data[1][:16], 16)
optimizer.step()
limit = psutil.Process().memory_info().vms + 200 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
config = BatchConfig(rule="off" if fixed else "model", initial=initial, noise_cap=0, min_updates=0)
policy = make_batch_policy(config, total_samples=samples)
state = policy.init(())
decision = policy.initial(state)
probe = make_memory_probe("cpu", budget_bytes=None, margin=config.margin)
guard = StepGuard(model)
seen = step = 0
largest = 0
for x, y in ElasticBatches(data, epochs=1, batch_size=lambda: decision.batch_size, seed=0, minimum_micro=2):
    with probe.observe(batch_size=len(y), map_version=0):
        if fixed:
            try:
                attempt(x, y, len(y))
            except RuntimeError as error:
                print("out of memory" if is_out_of_memory(error) else repr(error))
                sys.exit(3)
        else:
            run_step_with_recovery(
                lambda micro: attempt(x, y, micro), guard=guard, micro_batch_size=len(y), minimum=2,
                on_floor=lambda: None, ladder=config.rungs,
                on_oom=lambda size: probe.out_of_memory(batch_size=size, map_version=0),
            )
        optimizer.step()
    seen, step, largest = seen + len(y), step + 1, max(largest, len(y))
    if step % 2 == 0:
        state, decision = policy.step(state, Observation(step, step, seen, samples, len(y), memory=probe.reading()))
print("seen", seen, "largest", largest)
"""


@pytest.mark.long  # oneDNN now and then dies of a failed allocation of its own near the limit, which Python cannot catch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is enforced on Linux")
def test_under_a_real_limit_where_the_fixed_batch_fails():
    """RLIMIT_AS 200 MiB above a first small step: 512 fixed fails, the elastic run from 96 ends."""
    pytest.importorskip("torchvision")
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", CHILD, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    fixed = run("fixed", "512", "1024")
    assert fixed.returncode == 3, fixed.stderr
    assert fixed.stdout.strip() == "out of memory"
    elastic = run("elastic", "96", "960")
    assert elastic.returncode == 0, elastic.stderr
    assert elastic.stdout.startswith("seen 960")
