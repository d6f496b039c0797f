"""Options that the audits share: what is attacked, how the client trains, how hard one tries."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

CLIENT, ATTACK = "The client's training", "The attack"


class Effort(StrEnum):
    """How long each attack may take."""

    QUICK = "quick"
    NORMAL = "normal"
    LONG = "long"


class Mode(StrEnum):
    """Mode of the model while a client trains."""

    TRAIN = "train"
    EVAL = "eval"


class Optimizer(StrEnum):
    """Of the local steps."""

    SGD = "sgd"
    ADAM = "adam"


BUDGETS: dict[Effort, dict[str, float]] = {
    Effort.QUICK: {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 300},
    Effort.NORMAL: {"restarts": 2, "max_evaluations": 500, "newton_steps": 10, "steps": 1000},
    Effort.LONG: {"restarts": 4, "max_evaluations": 3000, "newton_steps": 30, "steps": 6000},
}

Model = Annotated[
    str, typer.Option(help="lenet, relu-lenet, mlp, resnet8, or MODULE:FUNCTION of your own.")
]
Data = Annotated[
    str, typer.Option(help="digits, fashion-mnist, or a .safetensors file with x and y.")
]
Trials = Annotated[int, typer.Option(help="Updates to attack, each of --batch images.")]
Batch = Annotated[int, typer.Option(help="Images per update.")]
Weights = Annotated[
    Path | None, typer.Option(help=".safetensors of the weights; by default untrained.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with Fashion-MNIST's four idx files.")]
ModeOption = Annotated[
    Mode, typer.Option("--mode", help="Mode of the model's layers.", rich_help_panel=CLIENT)
]
LocalStepsCount = Annotated[
    int, typer.Option(help="Local steps; 0 sends a gradient.", rich_help_panel=CLIENT)
]
LearningRate = Annotated[float, typer.Option(help="Of the local steps.", rich_help_panel=CLIENT)]
OptimizerOption = Annotated[
    Optimizer, typer.Option("--optimizer", help="Of the local steps.", rich_help_panel=CLIENT)
]
Momentum = Annotated[float, typer.Option(help="Of sgd, in [0, 1).", rich_help_panel=CLIENT)]
Delta = Annotated[float, typer.Option(help="Of the accountant's epsilon.", rich_help_panel=CLIENT)]
HideLabels = Annotated[
    bool, typer.Option("--hide-labels", help="Infer labels.", rich_help_panel=ATTACK)
]
EffortOption = Annotated[
    Effort, typer.Option("--effort", help="Budget of each attack.", rich_help_panel=ATTACK)
]
Only = Annotated[
    list[str] | None, typer.Option(help="Only this one; repeatable.", rich_help_panel=ATTACK)
]
Seed = Annotated[int, typer.Option(help="Of weights, starting points and noise.")]
