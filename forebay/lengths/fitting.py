"""From a profile to a predictor: twice, once to be judged and once to be used.

Invariants: the judged predictor has seen nothing of the held-out prompts but what an earlier run recorded of them; its
error and its quantiles come from them. The used one takes both over and is fitted on all that was profiled; for
profiled prompts it also uses their own responses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from forebay.lengths.censored import Spread, estimate, posterior
from forebay.lengths.features import fit_features
from forebay.lengths.hidden_state import fit_hidden_state
from forebay.lengths.history import Responses
from forebay.lengths.length_lm import fit_length_lm
from forebay.lengths.predictor import (
    Calibrated,
    Known,
    Location,
    with_drift,
    with_error,
    with_mean,
    with_quantiles,
)
from forebay.lengths.profile import Profile
from forebay.lengths.prompts import Observed, Prompts, Vector
from forebay.run import RunContext

MANY_TRUNCATED = 0.02
"""Share of truncated responses from which a location is fitted twice: the first fit tells where the second expects
them. With fewer, what the prompts have in common tells enough."""


@dataclass(frozen=True)
class Fitted:
    """Two predictors and the part of the profile that judges the first."""

    judged: Calibrated
    used: Calibrated
    prompts: Prompts
    """The held-out ones."""
    observed: Observed
    """Their responses."""


def fit(run: RunContext, profile: Profile, history: Mapping[str, Responses]) -> Fitted:
    """Fit what `lengths.predictor` names (for `history` its fallback, sharpened by `history`) on a profile."""
    config = run.config
    held_out = held_out_count(len(profile.index), config.lengths.test_share)
    everything, observed = profile.prompts.take(profile.index), profile.observed
    late, early = np.arange(held_out, len(profile.index)), np.arange(held_out)
    rest, rest_observed = everything.take(late), observed.take(late)
    own = dict(zip(everything.ids, observed.lists(), strict=True))
    # An earlier profile from the cache is this one: no news of the prompts, and it would be judged on what it knows.
    known = Known({name: told for name, told in history.items() if told != own.get(name)})
    judged = _calibrated(run, rest, rest_observed, known, None)
    judged = with_error(judged, everything.take(early), observed.take(early))
    judged = with_mean(judged, rest, rest_observed)
    judged = with_quantiles(judged, everything.take(early), observed.take(early), config.lengths.quantile)
    # A model is not fine-tuned twice.
    again = judged.location if location_name(run) == "length_lm" else None
    used = _calibrated(run, everything, observed, known, again)
    used = with_mean(replace(used, error=judged.error), everything, observed)
    used = replace(used, known=(*used.known, Known(own)))
    used = replace(used, median_score=judged.median_score, upper_score=judged.upper_score)
    return Fitted(judged, used, everything.take(early), observed.take(early))


def held_out_count(profiled: int, share: float) -> int:
    """At least two are held out and two fitted."""
    return min(max(2, round(profiled * share)), profiled - 2)


def location_name(run: RunContext) -> str:
    """What predicts prompts without a history."""
    lengths = run.config.lengths
    return lengths.fallback if lengths.predictor == "history" else lengths.predictor


def _calibrated(
    run: RunContext, prompts: Prompts, observed: Observed, known: Known, location: Location | None
) -> Calibrated:
    spread = estimate(observed)
    location = location or _locate(run, prompts, observed, spread)
    predictor = Calibrated(location, run.config.generation.max_new_tokens, spread.within, spread.between)
    if known.responses:
        predictor = replace(predictor, known=(with_drift(known, predictor, prompts, observed),))
    return predictor


def _locate(run: RunContext, prompts: Prompts, observed: Observed, spread: Spread) -> Location:
    """Fit a location on mean log lengths; a truncated response counts as what is to be expected beyond the budget."""
    target = posterior(observed, spread.location, spread.between, spread.within).target
    location = _fit_location(run, prompts, target)
    if observed.truncated.mean() < MANY_TRUNCATED:
        return location
    told = location.predict(prompts)
    error = float(np.std(target - told))
    return _fit_location(run, prompts, posterior(observed, told, error, spread.within).target)


def _fit_location(run: RunContext, prompts: Prompts, target: Vector) -> Location:
    config, model = run.config, str(run.start_model)
    name = location_name(run)
    if name == "hidden_state":
        return fit_hidden_state(prompts, target, model, config.model.dtype)
    if name == "length_lm":
        setting = "lengths.model" if config.lengths.model else "model.path"
        return fit_length_lm(prompts, target, config.lengths.model or model, setting, config.seed)
    return fit_features(prompts, target, config.seed)
