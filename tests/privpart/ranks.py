"""Two ranks of torch.distributed that train a small plan; rank 1 may be told to fail or die.

Run by test_distributed.py: ``python ranks.py RANK FILE FOLDER [fail|die]``.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from plans import small_plan
from torch import nn

from privpart import EmbeddedEngine, LocalTraining, PartialModel, SeededSource, Server, Users, fit
from privpart.engines.distributed import DistributedEngine
from privpart.pool import WorkerError

COHORTS = ([0, 1, 2, 3, 4], [5, 0, 2], [1, 2, 3, 4, 5])


def parts():
    """Return model, and an engine that computes its clients to the same bits everywhere."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=draws)
    users = Users(x, (x.sum(dim=1) > 0).long(), torch.split(torch.arange(24), 4))
    model = PartialModel(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), seed=1)
    local = LocalTraining(0.3, epochs=2, batch_size=2)
    return model, EmbeddedEngine(model, users, local=local, data_seed=0, deterministic=True)


def trained(model, engine):
    """Train the cohorts; return the parameters after each committed round."""
    committed = []
    plan = small_plan(3, (3, 1), noise_multiplier=1.0, minimum_cohort=2)
    server = Server(plan, model.flat, source=SeededSource(5))
    try:
        fit(server, engine, COHORTS, commit=lambda s, _: committed.append(s.parameters.clone()))
    except WorkerError as error:
        sys.stderr.write(f"WorkerError: {error}\n")
        try:
            fit(server, engine, COHORTS)
        except WorkerError as again:
            sys.stderr.write(f"again: {again}\n")
    return committed


def main(rank, file, folder, what=""):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model, engine = parts()
    real, rounds = engine.run, iter(range(9))

    def fails(task, start):
        if next(rounds) == 1:
            if what == "die":
                os._exit(9)
            raise WorkerError("this one is broken")
        return real(task, start)

    if rank == 1 and what:
        engine.run = fails
    with DistributedEngine(engine, timeout=60) as ranks:
        if ranks.leads:
            torch.save(trained(model, ranks), Path(folder) / "committed.pt")
        else:
            ranks.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
