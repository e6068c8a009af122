"""Chat template and tokenizer of the start model: drafts become rows with token ids.

Invariants:
- `prompt_ids` are what transformers' `apply_chat_template(..., add_generation_prompt=True)` gives; with images, what
  the model's processor makes of that: each image token of the text as often as its image has features.
- A prompt leaves room for `generation.max_new_tokens` within `model.max_model_len`, and has at most
  `data.max_prompt_tokens`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.config import RunConfig
from forebay.data.images import MARK, Pictures
from forebay.data.schema import Draft, Row
from forebay.errors import DataError, UserError


class Template:
    """The start model's tokenizer; raises `UserError` if it cannot be loaded or has no chat template."""

    def __init__(self, model: Path, config: RunConfig, pictures: Pictures | None = None) -> None:
        """`pictures`: where the drafts' images are; None if the model reads none."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model.resolve()))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"model.path {config.model.path}: its tokenizer cannot be loaded ({reason})") from None
        if not self._tokenizer.chat_template:
            raise UserError(
                f"model.path {config.model.path}: its tokenizer has no chat template; use an instruction-tuned model "
                "or put a chat_template.jinja into the model's folder"
            )
        self._room = config.model.max_model_len - config.generation.max_new_tokens
        self._most = config.data.max_prompt_tokens
        self._settings: dict[str, Any] = {}
        if config.data.thinking is not None:
            if "enable_thinking" not in str(self._tokenizer.chat_template):
                raise UserError(
                    f"data.thinking: the chat template of model.path {config.model.path} has no such switch "
                    "(enable_thinking); set it to null"
                )
            self._settings = {"enable_thinking": config.data.thinking}
        self._pictures = pictures
        processors = model / "chat_template.json"
        if pictures is not None and processors.exists():
            # The processor's template knows images; the tokenizer's of such a folder may not.
            self._tokenizer.chat_template = json.loads(processors.read_text(encoding="utf-8"))["chat_template"]

    def rows(self, drafts: Sequence[Draft]) -> list[Row | DataError]:
        """In order: the row of each draft, or why it cannot be one."""
        texts = [self._render(draft) for draft in drafts]
        rendered = [text for text in texts if isinstance(text, str)]
        # The template has written the special tokens, so the tokenizer must not add its own. Nor may it warn of prompts
        # beyond its model's limit, which are told as bad rows.
        options = dict(add_special_tokens=False, verbose=False)
        encoded = iter(self._tokenizer(rendered, **options)["input_ids"] if rendered else [])
        return [
            self._row(draft, next(encoded)) if isinstance(text, str) else text
            for draft, text in zip(drafts, texts, strict=True)
        ]

    def _render(self, draft: Draft) -> str | DataError:
        from jinja2 import TemplateError

        messages = _with_images(draft) if draft.images else [dict(message) for message in draft.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._settings
            )
            return str(text)
        except TemplateError as error:
            return DataError(f"the model's chat template refuses the prompt ({error})")

    def _row(self, draft: Draft, ids: list[int]) -> Row | DataError:
        if self._pictures is not None:
            token = self._pictures.vision.token
            if ids.count(token) != len(draft.images):
                return DataError(f"the prompt has {ids.count(token)} image tokens for {len(draft.images)} images")
            sizes = iter([self._pictures.tokens(name) for name in draft.images])
            ids = [t for one in ids for t in ([one] * next(sizes) if one == token else [one])]
        if len(ids) > self._room:
            return DataError(
                f"the prompt has {len(ids)} tokens; model.max_model_len - generation.max_new_tokens leaves {self._room}"
            )
        if self._most is not None and len(ids) > self._most:
            return DataError(f"the prompt has {len(ids)} tokens; data.max_prompt_tokens is {self._most}")
        return Row(
            draft.prompt_id,
            draft.messages,
            draft.prompt,
            tuple(ids),
            draft.answer,
            draft.source,
            draft.verifier,
            draft.images,
            draft.tags,
        )


def _with_images(draft: Draft) -> list[dict[str, Any]]:
    """Messages in parts, as chat templates of such models take them. Without marks the images come before the last
    message's text."""
    texts = [message["content"] for message in draft.messages]
    if not any(MARK in text for text in texts):
        texts[-1] = MARK * len(draft.images) + texts[-1]
    messages: list[dict[str, Any]] = []
    for message, text in zip(draft.messages, texts, strict=True):
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(MARK)):
            parts += [{"type": "image"}] * (number > 0)
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": message["role"], "content": parts})
    return messages
