"""Tasks: real data sets, read from local files or from an installed package."""

from privpart.data.tasks.images import Task, cifar10, cifar100, digits, emnist, fashion_mnist
from privpart.data.tasks.shakespeare import next_word, speaking_roles

__all__ = [
    "Task",
    "cifar10",
    "cifar100",
    "digits",
    "emnist",
    "fashion_mnist",
    "next_word",
    "speaking_roles",
]
