"""The study behind ``ablations.search``: Optuna proposes, the harness runs, the journal remembers. Source: ours.

A trial carries its owner (host, process) and a beat; a running trial whose owner is dead on this host, or whose beat is older
than ``STALE`` seconds, is closed as failed and its values are enqueued again. Retries of crashed processes are the harness's, not
Optuna's. With one objective, a trial whose accuracy after the same number of samples falls behind the median is pruned.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from .cell import Options
from .cells import Cell
from .executors.interrupt import GRACE, Interrupt
from .executors.process import CellProcess, death
from .folder import RunFolder
from .record import RecordError, read_lines
from .search import DIRECTIONS, SearchError, SearchPlan, trial_cells

__all__ = ["STALE", "open_study", "recover_dead", "run_trial", "search"]

STALE = 300.0
"""Seconds without a beat after which another host's trial counts as dead."""
TRIES = 3


class Stopped(RuntimeError):
    """The search was asked to stop; the trial stays open and is taken up by the next call."""


@dataclass
class Runner:
    """How cells of trials run.

    Attributes:
        folder: where; cells of equal content are shared between trials.
        options: device, data, time limit.
        stop: set when the search shall end.
    """

    folder: RunFolder
    options: Options
    stop: threading.Event


def open_study(
    plan: SearchPlan, *, out: Path, storage: str | None, sampler_seed: int = 0, worker: int = 0
) -> optuna.Study:
    """The study of ``plan``: made, or joined.

    Raises:
        SearchError: the storage cannot be reached, or holds another study under this name.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = f"{plan.grid.name}-{plan.grid.arms[0]}"
    where: Any = storage
    try:
        if storage is None:
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend

            out.mkdir(parents=True, exist_ok=True)
            where = JournalStorage(JournalFileBackend(str(out / "study.journal")))
        single = len(plan.objectives) == 1
        study = optuna.create_study(
            storage=where,
            study_name=name,
            directions=[DIRECTIONS[objective] for objective in plan.objectives],
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4) if single else optuna.pruners.NopPruner(),
        )
        seed = sampler_seed + 1000 * worker + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, constant_liar=True)
        known = study.user_attrs.get("plan")
        if known is None:
            study.set_user_attr("plan", plan.digest)
            study.set_user_attr("objectives", list(plan.objectives))
    except Exception as error:  # the drivers of databases share no base class
        raise SearchError(
            f"the storage {storage or out / 'study.journal'} cannot be used ({type(error).__name__}: "
            f"{(str(error).splitlines() or ['no message'])[0]}); check the URL, or leave --storage out for a journal file"
        ) from error
    if known not in (None, plan.digest):
        raise SearchError(
            f"study {name!r} in {storage or out} was made for another grid, space or set of objectives: choose another --out"
            + (" and database" if storage else "")
        )
    return study


def recover_dead(study: optuna.Study) -> int:
    """Close running trials whose owner is dead, and enqueue their values; returns how many there were."""
    dead = [trial for trial in study.get_trials(states=(TrialState.RUNNING,)) if _dead(trial)]
    for trial in dead:
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        fixed = trial.system_attrs.get("fixed_params") or trial.params
        if fixed:
            study.enqueue_trial(fixed, user_attrs={"again": trial.number})
    return len(dead)


def _dead(trial: FrozenTrial) -> bool:
    owner = trial.user_attrs.get("owner")
    if owner is None:  # between ask and its first attribute
        begun = trial.datetime_start
        return begun is not None and time.time() - begun.timestamp() > STALE
    if owner["host"] == socket.gethostname():
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return bool(owner["pid"] == os.getpid() and owner["run"] != _RUN)
    return time.time() - trial.user_attrs.get("beat", owner["beat"]) > STALE


_RUN = f"{os.getpid()}-{time.time_ns()}"


def run_trial(
    runner: Runner, trial: optuna.Trial, plan: SearchPlan, *, prune: bool
) -> tuple[float, ...] | None:
    """Run the cells of ``trial``.

    Returns:
        One value per objective, or ``None`` where a cell has no result (its reason is in the trial's attributes).

    Raises:
        TrialPruned: it fell behind.
        Stopped: the search shall end.
    """
    values = plan.space.draw(trial)
    if trial.user_attrs.get("default"):  # itself, though a value of it may lie outside the space
        values = plan.space.values_of(plan.grid.config)
    try:
        cells = trial_cells(plan, values)
    except ValueError as error:
        trial.set_user_attr("reason", f"the configuration is refused: {error}")
        return None
    trial.set_user_attr("values", values)
    trial.set_user_attr("cells", [cell.id for cell in cells])
    results = []
    for cell in cells:
        result = _run_cell(runner, cell, trial, prune=prune)
        if result["state"] != "done":
            trial.set_user_attr("reason", f"cell {cell.id}: {result['state']}: {result['reason']}")
            return None
        results.append(result)
    measured = objectives_of(results)
    trial.set_user_attr("measured", measured)
    return tuple(measured[name] for name in plan.objectives)


def objectives_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over cells: validation accuracy in [0, 1], training seconds, peak bytes."""
    metrics = [result["metrics"] for result in results]
    count = len(metrics)
    return {
        "accuracy": sum(m["validation_accuracy"] for m in metrics) / count,
        "time": sum(m["train_seconds"] for m in metrics) / count,
        "bytes": sum(m["peak_cuda_reserved_bytes"] or m["peak_live_tensor_bytes"] for m in metrics) / count,
    }


def _run_cell(runner: Runner, cell: Cell, trial: optuna.Trial | None, *, prune: bool) -> dict[str, Any]:
    folder = runner.folder
    folder.declare(cell)
    for left in reversed(range(TRIES)):
        while not folder.claim(cell.id):  # another trial, perhaps of another machine, runs the same cell
            if runner.stop.wait(0.5):
                raise Stopped
        try:
            result = folder.result(cell.id)
            if result is not None and folder.finished(cell.id):
                return result
            process = CellProcess(folder.path, cell.id, runner.options)
            pruned = _watch(runner, process, cell, trial, prune=prune)
            if pruned:
                raise optuna.TrialPruned
            if runner.stop.is_set():
                raise Stopped
            result = folder.result(cell.id)
            if process.exit_code == 0 and result is not None:
                return result
            reason = f"its process died ({death(process.exit_code)}); see {folder.cell_folder(cell.id) / 'stdout.log'}"
        finally:
            folder.release(cell.id)
        print(
            f"trial {trial.number if trial else '-'}: cell {cell.id}: {reason}; {left} tries left", flush=True
        )
    return {"state": "error", "reason": reason}


def _watch(
    runner: Runner, process: CellProcess, cell: Cell, trial: optuna.Trial | None, *, prune: bool
) -> bool:
    """Until the process has ended; returns whether the trial was pruned."""
    told, beat, pruned = 0, time.monotonic(), False
    while process.alive:
        process.join(0.25)
        runner.folder.touch(cell.id)
        if trial is not None and time.monotonic() - beat > STALE / 10:
            trial.set_user_attr("beat", time.time())
            beat = time.monotonic()
        if trial is not None and prune and not pruned:
            for event in _evaluations(runner.folder, cell)[told:]:
                trial.report(event["accuracy"], event["samples_seen"])
                told += 1
                pruned = pruned or trial.should_prune()
        timeout = runner.options.timeout
        late = timeout is not None and time.monotonic() - process.began > timeout + GRACE
        if pruned or late or runner.stop.is_set():
            process.stop(grace=GRACE)
    process.join()
    return pruned


def _evaluations(folder: RunFolder, cell: Cell) -> list[dict[str, Any]]:
    try:
        return [e for e in read_lines(folder.cell_folder(cell.id) / "log.jsonl") if e.get("event") == "eval"]
    except RecordError:
        return []  # not written yet, or just being cut for a resume


def search(
    plan: SearchPlan,
    *,
    out: Path,
    trials: int,
    workers: int,
    devices: Sequence[str],
    storage: str | None,
    root: Path,
    sampler_seed: int,
    timeout: float | None,
) -> int:
    """Run the study until it has ``trials`` finished trials, then compare, print, draw and write the best.

    Returns:
        0, or 1 when stopped before the end.
    """
    from .pareto import conclude

    studies = [
        open_study(plan, out=out, storage=storage, sampler_seed=sampler_seed, worker=w)
        for w in range(workers)
    ]
    first = studies[0]
    if again := recover_dead(first):
        print(f"{again} trial(s) of a search that died are run again")
    if not first.trials:
        first.enqueue_trial(plan.space.defaults(plan.grid.config), user_attrs={"default": True})
    stop, lock = threading.Event(), threading.Lock()
    threads_each = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else None
    runners = [
        Runner(
            RunFolder(out / "trials"),
            Options(
                device=devices[w % len(devices)],
                root=str(root),
                threads=threads_each,
                timeout=timeout,
                shared_machine=workers > 1,
            ),
            stop,
        )
        for w in range(workers)
    ]
    errors: list[BaseException] = []

    def work(study: optuna.Study, runner: Runner) -> None:
        try:
            while not stop.is_set() and _one(study, runner, plan, trials, lock):
                pass
        except Exception as error:  # of a thread: told by the main one
            errors.append(error)
            stop.set()

    with Interrupt() as interrupt:
        pool = [
            threading.Thread(target=work, args=pair, daemon=True)
            for pair in zip(studies, runners, strict=True)
        ]
        for thread in pool:
            thread.start()
        while any(thread.is_alive() for thread in pool):
            for thread in pool:
                thread.join(0.1)
            if interrupt.asked:
                stop.set()
        if errors:
            raise errors[0]
        if stop.is_set():
            print("stopped; the same command goes on")
            return 1
        return conclude(
            first,
            plan,
            out=out,
            run=lambda cell: _run_cell(runners[0], cell, None, prune=False),
        )


def _one(study: optuna.Study, runner: Runner, plan: SearchPlan, trials: int, lock: threading.Lock) -> bool:
    """One trial; ``False`` when there are enough."""
    prune = len(plan.objectives) == 1 and plan.objectives[0] == "accuracy"
    with lock:
        finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        counted = [
            t
            for t in study.get_trials(deepcopy=False)
            if t.state in finished or t.state is TrialState.RUNNING
        ]
        # those closed because their worker died are run again under another number
        again = {t.user_attrs["again"] for t in study.get_trials(deepcopy=False) if "again" in t.user_attrs}
        if len([t for t in counted if t.number not in again]) >= trials:
            return False
        trial = study.ask()
        now = time.time()
        trial.set_user_attr(
            "owner", {"host": socket.gethostname(), "pid": os.getpid(), "run": _RUN, "beat": now}
        )
    try:
        values = run_trial(runner, trial, plan, prune=prune)
    except Stopped:
        return False
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
        print(f"trial {trial.number}: pruned", flush=True)
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's own word about failed trials; ours follows
        study.tell(trial, values, state=TrialState.FAIL if values is None else None)
    told = study.trials[trial.number]
    shown = told.user_attrs.get("measured") or told.user_attrs.get("reason")
    print(f"trial {trial.number}: {json.dumps(shown)}", flush=True)
    return True
