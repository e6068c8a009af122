"""Stage `prepare_data`: prompts and start model of a run, checked and ready.

Invariants:
- Rows read = train + validation + test + unused + quarantined + duplicates + leaked, checked at the end.
- No prompt is in two splits; the warm start saw no test or validation prompt.
- The same configuration gives the same rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from forebay.config import RunConfig
from forebay.data.builtin import draw_splits
from forebay.data.choose import Chosen, choose
from forebay.data.counted import counted
from forebay.data.dataset import COUNTS, Dataset, make_dataset
from forebay.data.images import Pictures
from forebay.data.progress import reading_bar
from forebay.data.schema import Draft, Row, write_quarantine, write_rows
from forebay.data.split import SPLITS
from forebay.data.start_model import resolve_start_model
from forebay.data.template import Template
from forebay.errors import DataError, RunError, UserError
from forebay.rewards.composition import Composition
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
    """read = train + validation + test + unused + quarantined + duplicates + leaked."""
    warm_start: dict[str, Any] | None
    """steps, loss, tokens, seconds, cached; None if the model had none."""
    versions: list[Dataset]
    """Of the source and of `data.test_source`; none of a built-in task. `dataset.json` tells them too."""
    warnings: list[str]
    """Splits that got less than half of the prompts asked for."""


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
        splits = {name: [replace(row, split=name) for row in rows] for name, rows in splits.items()}
        write_quarantine(run.data / "quarantine.parquet", [])
        counts = {"read": sum(map(len, splits.values())), "quarantined": 0, "duplicates": 0, "leaked": 0, "unused": 0}
        versions: list[Dataset] = []
    else:
        model, warm_start = resolve_start_model(run, ())
        pictures = Pictures.of(run.images, model)
        versions, chosen = _read(run, Template(model, config, pictures), pictures)
        splits = chosen.splits
        counts = {name: sum(version.counts[name] for version in versions) for name in COUNTS if name != "accepted"}
        counts["quarantined"] += len(chosen.refused)
        counts |= {"leaked": len(chosen.leaked), "unused": chosen.unused}
    for name in SPLITS:
        write_rows(run.data / f"{name}.parquet", splits[name])
    counts |= {name: len(splits[name]) for name in SPLITS}
    if empty := [name for name in ("train", "test") if not splits[name]]:
        raise UserError(f"data.source: {config.data.source}: no prompt is left for {' and '.join(empty)} ({counts})")
    if config.evaluation.every_versions and not splits["validation"]:
        raise UserError(
            f"data.source: {config.data.source}: no prompt is left for validation; evaluation.every_versions needs "
            f"some ({counts}): give more rows, raise data.validation_prompts, or set evaluation.every_versions=0"
        )
    if counts["read"] != sum(count for name, count in counts.items() if name != "read"):
        raise RunError(f"{run.data}: the account of rows does not add up ({counts}): a bug")
    files = {name: run.data / f"{name}.parquet" for name in SPLITS}
    told = [{**version.manifest, "cached": version.cached} for version in versions]
    warnings = _too_few(counts, config)
    record = {"counts": counts, "versions": told, "warnings": warnings}
    (run.data / "dataset.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return PreparedData(
        **files, model=model, counts=counts, warm_start=warm_start, versions=versions, warnings=warnings
    )


def _too_few(counts: Mapping[str, int], config: RunConfig) -> list[str]:
    asked = {name: getattr(config.data, f"{name}_prompts") for name in SPLITS}
    return [
        f"{name} has {counts[name]:,} of the {counted(asked[name], 'prompt')} asked for: give more rows, or lower "
        f"data.{name}_prompts"
        for name in SPLITS
        if 2 * counts[name] < asked[name]
    ]


def _read(run: RunContext, template: Template, pictures: Pictures | None) -> tuple[list[Dataset], Chosen]:
    """The versions read, those of the training prompts first, and what of them the run takes."""
    config, data, quarantine = run.config, run.config.data, run.data / "quarantine.parquet"
    sources = [(data.source, data.hub_split)]
    sources += [] if data.test_source is None else [(data.test_source, data.test_hub_split)]
    versions = []
    for source, split in sources:
        with reading_bar(source) as on_read:
            versions.append(make_dataset(source, split, config, run.cache, pictures, on_read))
    kept = [file for version in versions for file in version.files("quarantine.parquet")]
    write_quarantine(quarantine, [], kept)
    _check_quality(config, versions, 0, 0, quarantine)
    chosen = choose(versions[0], versions[1] if len(versions) > 1 else None, config, template)
    write_quarantine(quarantine, [*chosen.refused, *chosen.leaked], kept)
    _check_quality(config, versions, len(chosen.refused), len(chosen.leaked), quarantine)
    return versions, chosen


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


def _check_quality(config: RunConfig, versions: Sequence[Dataset], refused: int, leaked: int, quarantine: Path) -> None:
    """`refused`, `leaked`: rows that the data sets have accepted and the run does not."""
    for version, source in zip(versions, (config.data.source, config.data.test_source), strict=False):
        if version.counts["read"] == 0:
            raise UserError(f"data.source: {source}: there are no rows in it")
    read, bad, good = (sum(v.counts[name] for v in versions) for name in ("read", "quarantined", "accepted"))
    bad, good = bad + refused, good - refused - leaked
    if good >= 2 and bad <= config.data.max_quarantined * read:
        return
    if not bad:  # then not two are good
        raise UserError(
            f"data.source: {config.data.source}: only {counted(good, 'prompt')}; training and test need one each"
        )
    allowed = f"data.max_quarantined allows {config.data.max_quarantined:.0%}" if good >= 2 else "two good needed"
    first = next(pq.ParquetFile(quarantine).iter_batches(batch_size=1)).to_pylist()[0]
    raise UserError(
        f"data.source: {config.data.source}: {bad} of {counted(read, 'row')} {'is' if bad == 1 else 'are'} bad "
        f"({allowed}); "
        f"row {first['row']}: {first['reason']}; all of them: {quarantine}"
    )
