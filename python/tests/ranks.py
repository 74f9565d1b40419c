"""Runs a function on several ranks: processes forked from this one, joined by gloo."""

import multiprocessing
import os
import pickle
import tempfile
import traceback

import torch
import torch.distributed as dist

TIMEOUT = 240  # seconds


def _run(function, arguments, rank, n, folder, queue):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    torch.set_num_threads(1)
    try:
        if n > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
        queue.put((rank, True, pickle.dumps(function(*arguments))))  # by value: the process ends
    except BaseException as error:  # noqa: BLE001 (what it is goes to the parent)
        queue.put((rank, False, (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        # Ranks that failed alone leave others in a collective; the parent ends them.
        queue.close()
        queue.join_thread()
        os._exit(0)


def run(n, function, *arguments):
    """The results by rank; `(name, message, traceback)` for a rank that raised, with `False` before it."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [context.Process(target=_run, args=(function, arguments, r, n, folder, queue)) for r in range(n)]
        for process in ranks:
            process.start()
        found = {}
        try:
            while len(found) < n:
                rank, passed, result = queue.get(timeout=TIMEOUT)
                found[rank] = (passed, result)
                if not passed and len(found) < n:
                    # The others wait for it, unless they were refused alike.
                    for _ in range(n - len(found)):
                        rank, passed, result = queue.get(timeout=10)
                        found[rank] = (passed, result)
        except Exception:  # noqa: BLE001 (queue.Empty of the context)
            if all(passed for passed, _ in found.values()):
                raise
        finally:
            for process in ranks:
                process.kill()
        loaded = {rank: (passed, pickle.loads(result) if passed else result) for rank, (passed, result) in found.items()}
        return [loaded.get(rank, (False, ("Hang", "", ""))) for rank in range(n)]


def results(n, function, *arguments):
    """The results by rank. Fails with the first traceback."""
    found = run(n, function, *arguments)
    for passed, result in found:
        if not passed and result[0] != "Hang":
            raise AssertionError(result[2])
    assert all(passed for passed, _ in found), "a rank hangs"
    return [result for _, result in found]
