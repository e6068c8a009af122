"""Choice of a run's rows out of data sets: chat template, lengths, verifiers, splits, leaks.

Invariants:
- accepted rows of the data sets = train + validation + test + unused + refused + leaked.
- The rows chosen for a split are the first, in the order of the split's hash, that are fit for it.
- No training prompt leaks (`forebay.data.leaks`) from the test or validation prompts chosen, and no validation prompt
  from test prompts of another source. No prompt is in two splits, checked at the end.
- Memory: the rows chosen and a block more, however large the data sets are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from forebay.config import RunConfig
from forebay.data.counted import counted
from forebay.data.dataset import Dataset
from forebay.data.leaks import HeldOut
from forebay.data.read import bad_row
from forebay.data.schema import BadRow, Draft, Row
from forebay.data.split import fill_empty, orders, shuffled, smallest
from forebay.data.template import Template
from forebay.errors import DataError, RunError, UserError
from forebay.rewards.composition import may_name

Leak = Callable[[Draft], str | None]


@dataclass
class Chosen:
    """The rows of a run, and what became of the others."""

    splits: dict[str, list[Row]]
    refused: list[BadRow]
    """Too long, refused by the chat template, or with a verifier that may not be named."""
    leaked: list[BadRow]
    unused: int


@dataclass
class _Judge:
    """Makes drafts rows, or notes why not."""

    config: RunConfig
    template: Template
    refused: list[BadRow] = field(default_factory=list)
    leaked: list[BadRow] = field(default_factory=list)

    def rows(self, drafts: list[tuple[int, Draft]], leak: Leak) -> list[Row]:
        fit = []
        for number, draft in drafts:
            if not may_name(self.config.reward, draft.verifier):
                reason = f"verifier {draft.verifier!r} is neither built in nor named in the profile (reward.options)"
                self.refused.append(bad_row(number, draft.source, reason, draft.messages))
            elif (why := leak(draft)) is not None:
                self.leaked.append(bad_row(number, draft.source, why, draft.messages))
            else:
                fit.append((number, draft))
        good = []
        for (number, draft), row in zip(fit, self.template.rows([draft for _, draft in fit]), strict=True):
            if isinstance(row, DataError):
                self.refused.append(bad_row(number, draft.source, str(row), draft.messages))
            else:
                good.append(row)
        return good


def choose(dataset: Dataset, tests: Dataset | None, config: RunConfig, template: Template) -> Chosen:
    """Rows for each split; `tests`: the data set of `data.test_source`. Raises `UserError` for leaks that the profile
    refuses."""
    data, judge = config.data, _Judge(config, template)
    places = orders(_ids(dataset), data)
    accepted = dataset.counts["accepted"]
    if tests is not None:
        places["test"] = shuffled(_ids(tests))
        accepted += tests.counts["accepted"]
    test = _fill(tests or dataset, places["test"], data.test_prompts, judge, _no_leak)
    # Places of one source share no prompt; a source of its own for the test may hold the same prompts.
    apart = _no_leak if tests is None else HeldOut(test, data.leaks).leak
    validation = _fill(dataset, places["validation"], data.validation_prompts, judge, apart)
    leak = HeldOut([*test, *validation], data.leaks).leak
    train = _fill(dataset, places["train"], data.train_prompts, judge, leak)
    if judge.leaked and data.leaks.action == "refuse":
        first = judge.leaked[0]
        raise UserError(
            f"data.source: {first.source}: {counted(len(judge.leaked), 'prompt')} to train on or to validate with "
            f"{'leaks' if len(judge.leaked) == 1 else 'leak'}; row {first.row}: {first.reason}; "
            "set data.leaks.action to drop to leave them out"
        )
    splits = {"train": train, "validation": validation, "test": test}
    if tests is None:
        fill_empty(splits)
    splits = {name: [replace(row, split=name) for row in rows] for name, rows in splits.items()}
    _check_apart(splits)
    unused = accepted - sum(map(len, splits.values())) - len(judge.refused) - len(judge.leaked)
    return Chosen(splits, judge.refused, judge.leaked, unused)


def _check_apart(splits: dict[str, list[Row]]) -> None:
    found: dict[str, str] = {}
    for name, rows in splits.items():
        for row in rows:
            if found.setdefault(row.prompt_id, name) != name:
                raise RunError(f"prompt {row.prompt_id} is in {found[row.prompt_id]} and in {name}: a bug")


def _ids(dataset: Dataset) -> list[str]:
    return list(dataset.column("prompt_id").to_pylist())


def _no_leak(draft: Draft) -> str | None:
    return None


def _fill(dataset: Dataset, order: np.ndarray, size: int, judge: _Judge, leak: Leak) -> list[Row]:
    """The first `size` fit rows in this order of places. Looks at all, or at no more than are needed."""
    kept: list[Row] = []
    step = len(order) if judge.config.data.length_filter == "all" else size + size // 4 + 64
    while len(order) and len(kept) < size:
        wanted, order = order[:step], order[step:]
        for drafts in dataset.drafts(np.sort(wanted)):
            kept += judge.rows(drafts, leak)
            if len(kept) > 2 * size + 1000:
                kept = smallest(kept, size)
    return smallest(kept, size)
