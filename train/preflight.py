"""What can be seen to be wrong with a training job before anything is started."""

from __future__ import annotations

from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import TokenDataset
from ebbtide.train.model import check_model


def check(config: TrainConfig) -> int:
    """The number of sequences in an epoch.

    Raises the ConfigError, DataError or StorageError with which the job's ranks would end.

    Reads the dataset's index and the model's configuration; no shard and no weights.
    """
    train = TokenDataset(config.data.uri, "train", config.data.sequence_length)
    TokenDataset(config.data.uri, "validation", config.data.sequence_length)
    check_model(config.model, train.index.vocab_size, config.data.sequence_length)
    return train.num_sequences
