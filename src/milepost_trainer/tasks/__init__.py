"""What is trained for: one class a task, from the lines of files to the loss of a batch."""

from milepost_trainer.tasks.base import LossTask, Mean, Outcome, Task
from milepost_trainer.tasks.classification import Classification
from milepost_trainer.tasks.distillation import Sdpg
from milepost_trainer.tasks.embedding import Embedding
from milepost_trainer.tasks.language import LanguageModelling
from milepost_trainer.tasks.preferences import Dpo, Kto
from milepost_trainer.tasks.reference import REFERENCE_FILE, Reference, ReferenceTask
from milepost_trainer.tasks.reward import Reward
from milepost_trainer.tasks.value import Value

TASKS: dict[str, type[Task]] = {
    "pretrain": LanguageModelling,
    "sft": LanguageModelling,
    "dpo": Dpo,
    "kto": Kto,
    "sdpg": Sdpg,
    "reward": Reward,
    "classification": Classification,
    "value": Value,
    "embedding": Embedding,
}

__all__ = [
    "REFERENCE_FILE",
    "TASKS",
    "LossTask",
    "Mean",
    "Outcome",
    "Reference",
    "ReferenceTask",
    "Task",
]
