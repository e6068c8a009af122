"""`RunContext`: one run's identity, settings and folders. Stages share nothing else.

All work in progress lies under `<scratch>/runs/<run id>/` on this machine; `publish` copies what lasts to the store.
"""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.launch.main_script import require_guard


@dataclass(frozen=True)
class RunContext:
    """Settings, identity and local folders of one run."""

    config: RunConfig
    run_id: str
    scratch: Path
    """Absolute; holds `cache/` (shared by runs, addressed by content) and `runs/`."""
    token: str = field(repr=False)
    """Secret of this run: every control endpoint asks for it as a bearer token. Never logged, never stored."""

    @classmethod
    def create(cls, config: RunConfig) -> "RunContext":
        """A new run with a fresh id, token and folder. Raises `UserError`."""
        require_guard()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        run_id = f"{config.name}-{stamp}-{secrets.token_hex(2)}"
        run = cls(config, run_id, Path(config.storage.scratch).resolve(), secrets.token_urlsafe(24))
        try:
            run.logs.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"storage.scratch {config.storage.scratch}: no folder can be made there ({error.strerror})"
            ) from None
        return run

    @property
    def root(self) -> Path:
        return self.scratch / "runs" / self.run_id

    @property
    def cache(self) -> Path:
        """Content-addressed results that later runs use again (the warm start)."""
        return self.scratch / "cache"

    @property
    def logs(self) -> Path:
        """One log file for each process."""
        return self.root / "logs"

    @property
    def data(self) -> Path:
        """train.parquet, validation.parquet, test.parquet, quarantine.parquet."""
        return self.root / "data"

    @property
    def images(self) -> Path:
        """The prompts' images, PNG files named by their content; shared by runs, as the data sets read are."""
        return self.cache / "images"

    @property
    def start_model(self) -> Path:
        """The start model in Hugging Face format (may be a link into the cache)."""
        return self.root / "start_model"

    @property
    def critic_model(self) -> Path:
        """What `critic.model` names (a link); not there without it."""
        return self.root / "critic_model"

    @property
    def lengths(self) -> Path:
        """profile.parquet (observed) and predictions.parquet (every training prompt)."""
        return self.root / "lengths"

    @property
    def schedule(self) -> Path:
        """schedule.parquet: the ordered minibatches."""
        return self.root / "schedule"

    @property
    def snapshots(self) -> Path:
        """v00000001/, ...: the weights of each policy version, newest few only."""
        return self.root / "snapshots"

    @property
    def checkpoints(self) -> Path:
        """step-00000010/, ...: the trainer's state, newest two only."""
        return self.root / "checkpoints"

    @property
    def trained_model(self) -> Path:
        """The trained model in Hugging Face format."""
        return self.root / "model"

    @property
    def metrics(self) -> Path:
        """JSON lines: one record for each optimizer step and each queue observation."""
        return self.root / "metrics.jsonl"
