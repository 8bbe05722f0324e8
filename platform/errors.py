"""The one tree of errors that ebbtide raises, and the exit code each one leads to.

::

    EbbtideError            1   anything below; the message says what, where and what to do
    ├── ConfigError         2   a job file, flag or environment variable is wrong
    ├── DataError           3   a source, a token shard or an index cannot be used
    ├── StorageError        4   an object could not be read or written
    │   ├── NotFound            the object is not there
    │   ├── AlreadyExists       a conditional put lost, or the output holds other data
    │   └── AccessError         credentials, permission, bucket, endpoint or clock
    │       └── Unreachable         nothing answers at the endpoint; that may pass
    ├── CheckpointError     5   no usable checkpoint, or it does not fit the model
    ├── ClusterError        6   Ray is not reachable, or has too little for the job
    │   └── MetadataError       the cloud's metadata service does not answer as documented
    ├── TrainingError       7   the run ended: user code raised
    │   └── NotFiniteError      the loss or the gradient of a step is not finite
    ├── ServeError          8   an endpoint could not be started or an export not be served
    ├── TuneError           9   a sweep has no successful trial, or the pool is not usable
    ├── CostError          10   a price or a ledger that is asked for is not there
    └── BudgetError        11   the job's budget does not let it start, or go on: it was saved

An interrupt (Ctrl-C, SIGTERM) exits with 130 or 143, a usage error of the command line with 2.
Foreign errors (botocore, Ray, OSError) are mapped to this tree at the seam where they enter.
"""

from __future__ import annotations


class EbbtideError(Exception):
    """Root of the tree; ``exit_code`` is what the command line exits with."""

    exit_code = 1


class ConfigError(EbbtideError):
    """A job file, a flag or an environment variable is wrong; nothing has been started."""

    exit_code = 2


class DataError(EbbtideError):
    """A source document, a token shard or an index cannot be used."""

    exit_code = 3


class StorageError(EbbtideError):
    """An object could not be read or written."""

    exit_code = 4


class NotFound(StorageError):
    """The object is not there."""


class AlreadyExists(StorageError):
    """A conditional put lost, or an output already holds other data."""


class AccessError(StorageError):
    """Credentials, permission, bucket, endpoint or the machine's clock are wrong."""


class Unreachable(AccessError):
    """Nothing answers at the endpoint: a wrong address, or a storage that is down for now."""


class CheckpointError(EbbtideError):
    """No usable checkpoint, or one that does not fit the model."""

    exit_code = 5


class ClusterError(EbbtideError):
    """Ray cannot be reached, or the cluster has too little for the job."""

    exit_code = 6


class MetadataError(ClusterError):
    """The cloud's metadata service does not answer, or not as it is documented."""


class TrainingError(EbbtideError):
    """The run ended: user code raised, or the loss is not finite."""

    exit_code = 7


class NotFiniteError(TrainingError):
    """The loss or the gradient of the 1-based ``step`` is not finite."""

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class ServeError(EbbtideError):
    """An endpoint could not be started, or an export cannot be served."""

    exit_code = 8


class TuneError(EbbtideError):
    """A sweep has no successful trial, or the pool cannot be used."""

    exit_code = 9


class CostError(EbbtideError):
    """A price or a ledger that is asked for is not there."""

    exit_code = 10


class BudgetError(EbbtideError):
    """The job's budget does not let it start; or it has stopped the run, which is saved."""

    exit_code = 11
