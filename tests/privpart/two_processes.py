"""Two processes train one model together, by gloo; each writes what it saw of every case."""

import multiprocessing
import sys
from pathlib import Path

import torch
from loops import BATCH, beside_the_noise, in_turn, private, sampled, sizes, step, steps_of, train
from torch import distributed

from accounting.checks import ConfigError
from privpart.example_level.optimizer import FTRLOptimizer
from privpart.run.folder import RunFolder
from privpart.run.report import run_report
from privpart.run.store import StorageError


def weights(made):
    return torch.cat([p.detach().reshape(-1) for p in made[1].parameters()])


def seen(made, noised):
    """Return every noised sum, what is in it beside the noise, and the model."""
    return {"noised": noised, "beside": beside_the_noise(made, noised), "weights": weights(made)}


def fixed(rank, _):
    made = private(noise_multiplier=50.0)
    return seen(made, train(*made[1:])) | {"epsilon": made[0].epsilon(1e-5)}


def samples(rank, _):
    made = sampled(noise_multiplier=50.0)
    return seen(made, steps_of(made)) | {
        "sizes": sizes(made),
        "own": [len(made[2].passes.own(t)) for t in range(60)],
    }


def noise_by_each(rank, _):
    own = FTRLOptimizer._release

    def release(optimizer, noise):
        if noise is None:
            more = optimizer.noise.next().double()
            optimizer._total.add_(more * optimizer._grid.step(optimizer.max_grad_norm))
        own(optimizer, noise)

    FTRLOptimizer._release = release
    try:
        return fixed(rank, _)
    finally:
        FTRLOptimizer._release = own


def parts(rank, _):
    made = private()
    for _ in range(3):
        for batch in made[3]:
            in_turn(made, batch)
    return {"weights": weights(made)}


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.1)


def in_folder(path, **options):
    from loops import net

    module = net()
    if distributed.get_rank():
        for p in module.parameters():
            p.data += 1  # the first process has the weights that count
    own = adam(module)
    slower = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
    more = {"out": path, "resume": True, "delta": 1e-5, "scheduler": slower} | options
    return private(module, optimizer=own, **more)


def resumed(rank, folder):
    found = {}
    for name, stop in (("seeded", 4), ("seeded", 9), ("secret", 9)):
        made = in_folder(folder / name, **({} if name == "seeded" else {"seed": None}))
        for _ in range(made[0].epochs_left):
            for batch in made[3]:
                step(*made[1:3], batch)
                if made[2].passes.done == stop:
                    break
            if made[2].passes.done == stop:
                break
        made[0].close()
        found[name] = weights(made)
    if rank == 0:
        report = run_report(folder / "secret")
        words = {a.code: a.status for a in report.guarantee.assumptions}
        found |= {"words": words, "complete": report.complete}
    return found


def other_arguments(rank, _):
    return sentence(lambda: private(max_grad_norm=0.5 + rank))


def refused(rank, _):
    return sentence(lambda: private(max_grad_norm="long" if rank else 0.5))


def fault(rank, _):
    made = private()
    before = weights(made)
    x, y = next(iter(made[3]))
    twice = torch.cat([x, x]) if rank else x
    text = sentence(lambda: step(*made[1:3], (twice, torch.cat([y, y]) if rank else y)))
    return text | {"same": torch.equal(before, weights(made)), "drawn": made[2].noise.round}


def disk_is_full(rank, folder):
    def full(*_):
        raise StorageError("full")

    made = in_folder(folder / "full")
    before, own = weights(made), RunFolder.commit
    RunFolder.commit = full
    text = sentence(lambda: step(*made[1:3], next(iter(made[3]))))
    RunFolder.commit = own
    return text | {"same": torch.equal(before, weights(made))}


def sentence(act):
    try:
        act()
    except (ConfigError, StorageError) as error:
        return {"says": str(error)}
    return {"says": ""}


CASES = (
    fixed,
    samples,
    noise_by_each,
    parts,
    resumed,
    other_arguments,
    refused,
    fault,
    disk_is_full,
)


def run(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.save({case.__name__: case(rank, folder) for case in CASES}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    assert BATCH == 4
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=run, args=(rank, Path(sys.argv[1]))) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    sys.exit(max(process.exitcode for process in both))
