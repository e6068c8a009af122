"""Stage `prepare_data`: prompts and start model of a run, checked and ready.

Invariants:
- Rows read = train + validation + test + quarantined + unused.
- No prompt is in two splits; the warm start saw no test or validation prompt.
- The same configuration gives the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.config import RunConfig
from forebay.data.builtin import draw_splits
from forebay.data.images import Pictures
from forebay.data.read import bad_row, read_source
from forebay.data.schema import BadRow, Draft, Row, write_quarantine, write_rows
from forebay.data.split import SPLITS, split_rows
from forebay.data.start_model import resolve_start_model
from forebay.data.template import Template
from forebay.errors import DataError, UserError
from forebay.rewards.composition import Composition, may_name
from forebay.run import RunContext

if TYPE_CHECKING:
    from forebay.training.warm_start import OnProgress


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Files of a run after the stage."""

    train: Path
    validation: Path
    test: Path
    model: Path
    """Start model, Hugging Face folder."""
    counts: dict[str, int]
    """read, train, validation, test, quarantined, unused."""
    warm_start: dict[str, Any] | None
    """steps, loss, tokens, seconds, cached; None if the model had none."""


def prepare_data(run: RunContext, on_progress: "OnProgress | None" = None) -> PreparedData:
    """Make or read the prompts, make or find the start model, write `run.data`. Raises `UserError`."""
    config = run.config
    if config.lengths.assumed is not None:
        raise UserError(
            "lengths.assumed is for `forebay schedule`, `simulate` and `plan`: remove it from the profile to run it"
        )
    Composition(
        config.reward, config.generation.max_new_tokens
    )  # a wrong name is better found now than after the engines have started
    if config.data.source.startswith("builtin:"):
        drafts = draw_splits(config.data, config.seed)
        held_out = [draft.prompt for name in ("test", "validation") for draft in drafts[name]]
        model, warm_start = resolve_start_model(run, held_out, on_progress)
        pictures = Pictures.of(run.images, model)
        template = Template(model, config, pictures)
        splits = {name: _all_rows([_kept(d, pictures, config) for d in drafts[name]], template) for name in SPLITS}
        read, quarantined, unused = sum(map(len, splits.values())), 0, 0
        write_quarantine(run.data / "quarantine.parquet", [])
    else:
        model, warm_start = resolve_start_model(run, ())
        pictures = Pictures.of(run.images, model)
        good, bad = _read(config, Template(model, config, pictures), pictures)
        write_quarantine(run.data / "quarantine.parquet", bad)
        _check_quality(config, good, bad, run.data / "quarantine.parquet")
        parts = split_rows(good, config.data)
        splits = {name: getattr(parts, name) for name in SPLITS}
        read, quarantined, unused = len(good) + len(bad), len(bad), parts.unused
    for name, rows in splits.items():
        write_rows(run.data / f"{name}.parquet", rows)
    counts = {"read": read, **{name: len(splits[name]) for name in SPLITS}}
    counts |= {"quarantined": quarantined, "unused": unused}
    files = {name: run.data / f"{name}.parquet" for name in SPLITS}
    return PreparedData(**files, model=model, counts=counts, warm_start=warm_start)


def _kept(draft: Draft, pictures: Pictures | None, config: RunConfig) -> Draft:
    """A built-in task's prompt, its images kept."""
    if draft.drawn and pictures is None:
        raise UserError(f"data.source {draft.source} has images, but the model of model.path reads none: set another")
    if pictures is None:
        return draft
    return replace(draft, images=tuple(pictures.keep(image, config.data.images) for image in draft.drawn), drawn=())


def _all_rows(drafts: Sequence[Draft], template: Template) -> list[Row]:
    """For built-in tasks: a prompt that does not fit is a mistake in the profile."""
    rows = []
    for draft, result in zip(drafts, template.rows(drafts), strict=True):
        if isinstance(result, DataError):
            raise UserError(f"data.source {draft.source}: {result}")
        rows.append(result)
    return rows


def _read(config: RunConfig, template: Template, pictures: Pictures | None) -> tuple[list[Row], list[BadRow]]:
    bad: list[BadRow] = []
    drafts: list[tuple[int, Draft]] = []
    for number, item in read_source(config.data, pictures):
        if isinstance(item, BadRow):
            bad.append(item)
        elif not may_name(config.reward, item.verifier):
            reason = f"verifier {item.verifier!r} is neither built in nor named in the profile (reward.options)"
            bad.append(bad_row(number, config.data.source, reason, item.messages))
        else:
            drafts.append((number, item))
    good = []
    for (number, draft), result in zip(drafts, template.rows([draft for _, draft in drafts]), strict=True):
        if isinstance(result, DataError):
            bad.append(bad_row(number, config.data.source, str(result), draft.messages))
        else:
            good.append(result)
    return good, sorted(bad, key=lambda row: row.row)


def _check_quality(config: RunConfig, good: Sequence[Row], bad: Sequence[BadRow], quarantine: Path) -> None:
    source, read = config.data.source, len(good) + len(bad)
    if read == 0:
        raise UserError(f"data.source: {source}: there are no rows in it")
    if len(good) >= 2 and len(bad) <= config.data.max_quarantined * read:
        return
    if not bad:
        raise UserError(f"data.source: {source}: only {len(good)} prompt; training and test need one each")
    allowed = f"data.max_quarantined allows {config.data.max_quarantined:.0%}" if len(good) >= 2 else "two good needed"
    raise UserError(
        f"data.source: {source}: {len(bad)} of {read} rows are bad ({allowed}); "
        f"row {bad[0].row}: {bad[0].reason}; all of them: {quarantine}"
    )
