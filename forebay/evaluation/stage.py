"""`evaluate`: the start model against the trained model on the held-out test prompts.

Invariants:
- Both models answer the same prompts on the same engines, one after the other, and the pairs are compared.
- A prompt whose reward cannot be computed for either model is left out of both sides and counted, with its reason.
- Examples show what training broke as well as what it mended.
"""

import asyncio
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from forebay.control.types import Snapshot
from forebay.data.maze import read_prompt
from forebay.data.schema import Row, read_rows
from forebay.errors import RunError, UserError
from forebay.evaluation.answers import Answer, Examiner
from forebay.evaluation.compare import Comparison, by_category, compare, compare_by_tag, pick_examples
from forebay.evaluation.metrics import majority, pass_at, powers_of_two
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.rewards.extract import final_answer
from forebay.rewards.pool import RewardPool
from forebay.rewards.tally import Tally
from forebay.run import RunContext


@dataclass(frozen=True)
class Sampled:
    """Of several responses to each prompt, means over the prompts; the model's mean reward is avg@k."""

    pass_at: dict[str, float]
    """k -> unbiased chance that one of k responses is right."""
    majority: float
    """maj@k: the reward of the most frequent final answer."""


@dataclass(frozen=True)
class EvaluationResult:
    """What training changed, on prompts that neither model was trained on."""

    n: int
    before: float
    """Mean reward of the start model (its accuracy, where rewards are 0 and 1)."""
    after: float
    gained: int
    """Prompts whose reward rose."""
    lost: int
    """Prompts whose reward fell."""
    p_value: float
    """Exact two-sided sign test on the pairs (McNemar's, where rewards are 0 and 1)."""
    interval: tuple[float, float]
    """95% bootstrap interval of the mean difference of the pairs."""
    mean_length_before: float
    """Tokens of a response."""
    mean_length_after: float
    truncated_before: int
    """Responses that ran into the token limit."""
    truncated_after: int
    left_out: int
    """Prompts that could not be scored."""
    by_size: dict[str, tuple[int, float, float]]
    """Built-in maze only: side length -> (prompts, before, after)."""
    by_tag: dict[str, Comparison]
    """Of the prompts with each tag; with many tags, remember how many comparisons these are."""
    examples: list[dict[str, Any]]
    """Of each: prompt, before, after (texts), before_reward, after_reward."""
    samples: int
    """Responses to each prompt."""
    temperature: float
    sampled_before: Sampled | None
    """None with one response to a prompt."""
    sampled_after: Sampled | None
    rules_before: dict[str, int]
    """How the final answer was found (`forebay.rewards.extract`) -> responses."""
    rules_after: dict[str, int]
    test_sha256: str
    """Of `test.parquet`: the same prompts, the same digest."""


def evaluate(run: RunContext) -> EvaluationResult:
    """Compare the two models; writes `evaluation.json` and `evaluation_samples.parquet` in the run's folder.

    Raises `UserError` without test prompts, `DeadlineError` after `evaluation.timeout_s` for one model, `RunError`.
    """
    test = run.data / "test.parquet"
    rows = read_rows(test)[: run.config.evaluation.prompts]
    if not rows:
        raise UserError(f"{test}: no test prompts to evaluate on; raise data.test_prompts")
    decode = _decoder(run.start_model)
    before, after = asyncio.run(_examine(run, rows, trained_snapshot(run)))
    samples = [_record(*pair, decode) for pair in zip(rows, before, after, strict=True)]
    result = summarize(run, samples, hashlib.sha256(test.read_bytes()).hexdigest())
    pq.write_table(pa.Table.from_pylist(samples), run.root / "evaluation_samples.parquet")
    (run.root / "evaluation.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def trained_snapshot(run: RunContext) -> Snapshot:
    """The trained model as a snapshot that an engine can load; raises `RunError` if there is none."""
    path = run.trained_model / "manifest.json"
    try:
        data = path.read_bytes()
        version = int(json.loads(data)["version"])
    except FileNotFoundError:
        raise RunError(f"{path}: no trained model to evaluate; did training finish?") from None
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path}: damaged, it names no version") from None
    return Snapshot(version, str(run.trained_model), hashlib.sha256(data).hexdigest())


def summarize(run: RunContext, samples: Sequence[dict[str, Any]], test_sha256: str) -> EvaluationResult:
    """The comparison of the samples (rows of `evaluation_samples.parquet`) that both models' rewards are known of."""
    scored = [s for s in samples if s["before_reward"] is not None and s["after_reward"] is not None]
    if not scored:
        reason = next((s["reason"] for s in samples if s["reason"]), "unknown")
        raise RunError(f"evaluation: not one of {len(samples)} test prompts could be scored; the first: {reason}")
    before = [s["before_reward"] for s in scored]
    after = [s["after_reward"] for s in scored]
    sizes = [_maze_side(s["prompt"]) for s in scored] if run.config.data.source == "builtin:maze" else []
    shown = pick_examples(before, after, run.config.evaluation.examples)
    return EvaluationResult(
        **asdict(compare(before, after)),
        mean_length_before=statistics.fmean(s["before_length"] for s in scored),
        mean_length_after=statistics.fmean(s["after_length"] for s in scored),
        truncated_before=sum(s["before_truncated"] for s in scored),
        truncated_after=sum(s["after_truncated"] for s in scored),
        left_out=len(samples) - len(scored),
        by_size=by_category(sizes, before, after) if sizes else {},
        by_tag=compare_by_tag([s["tags"] for s in scored], before, after),
        examples=[
            {key: scored[i][key] for key in ("prompt", "before", "after", "before_reward", "after_reward")}
            for i in shown
        ],
        samples=run.config.evaluation.samples,
        temperature=run.config.evaluation.temperature,
        sampled_before=_sampled(scored, "before"),
        sampled_after=_sampled(scored, "after"),
        rules_before=_rules(scored, "before"),
        rules_after=_rules(scored, "after"),
        test_sha256=test_sha256,
    )


def _sampled(scored: Sequence[dict[str, Any]], side: str) -> Sampled | None:
    rewards = [s[f"{side}_rewards"] for s in scored]
    if (n := len(rewards[0])) == 1:
        return None
    return Sampled(
        {str(k): statistics.fmean(pass_at(k, own) for own in rewards) for k in powers_of_two(n)},
        statistics.fmean(majority(s[f"{side}_answers"], s[f"{side}_rewards"]) for s in scored),
    )


def _rules(scored: Sequence[dict[str, Any]], side: str) -> dict[str, int]:
    return dict(Counter(rule for s in scored for rule in s[f"{side}_rules"]).most_common())


async def _examine(run: RunContext, rows: Sequence[Row], trained: Snapshot) -> tuple[list[Answer], list[Answer]]:
    config = run.config
    # Accuracy is the first term's: the others shape what is learnt.
    reward = config.reward.model_copy(update={"weights": {next(iter(config.reward.weights)): 1.0}})
    pool = RewardPool(reward, run.start_model, config.generation.max_new_tokens, Tally(len(rows)))
    try:
        async with Fleet(run, run.start_model, plan_cores(config)) as fleet:
            examiner = Examiner(fleet, pool, config)
            before = await examiner.answer_all(rows, "start model")
            await examiner.load(trained)
            return before, await examiner.answer_all(rows, "trained model")
    finally:
        pool.close()


def _decoder(model: Path) -> Callable[[Sequence[int]], str]:
    file = model / "tokenizer.json"
    if not file.is_file():
        raise RunError(f"{file}: missing; a model needs a fast tokenizer (tokenizer.json)")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _record(row: Row, before: Answer, after: Answer, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One row of `evaluation_samples.parquet`; of several responses `before` and `after` are the first one's text."""
    record: dict[str, Any] = {"prompt_id": row.prompt_id, "prompt": row.prompt, "answer": row.answer}
    record["tags"] = list(row.tags)
    for side, answer in (("before", before), ("after", after)):
        texts = [decode(sample.ids) for sample in answer.samples]
        found = [final_answer(text) for text in texts]
        record |= {
            side: texts[0] if texts else "",
            f"{side}_reward": answer.reward,
            f"{side}_length": statistics.fmean(len(s.ids) for s in answer.samples) if texts else None,
            f"{side}_truncated": sum(s.finish_reason == "length" for s in answer.samples) if texts else None,
            f"{side}_rewards": list(answer.rewards or ()),
            f"{side}_answers": [one.text or text.strip() for one, text in zip(found, texts, strict=True)],
            f"{side}_rules": [one.rule for one in found],
        }
    return record | {"reason": before.reason or after.reason}


def _maze_side(prompt: str) -> int:
    return math.isqrt(len(read_prompt(prompt).passages))
