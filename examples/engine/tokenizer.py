"""Text to ids and back, from the fields of a GGUF header."""

from collections.abc import Sequence

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint import TokenizerFields


class ChatTokenizer:
    """Byte-level BPE with single digits, and the checkpoint's own chat template."""

    def __init__(self, fields: TokenizerFields):
        vocabulary = {token: index for index, token in enumerate(fields.tokens)}
        merges = [tuple(merge.split(" ")) for merge in fields.merges]
        self._tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [
                AddedToken(fields.tokens[i], special=True, normalized=False)
                for i in fields.control_ids
            ]
        )
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(fields.chat_template)
        self.stop_ids = [fields.eos_id]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without control tokens. Half a character decodes to U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat_text(self, user_message: str) -> str:
        messages = [{"role": "user", "content": user_message}]
        return self._template.render(messages=messages, add_generation_prompt=True)

    def encode_chat(self, user_message: str) -> list[int]:
        """The prompt that asks the model to answer one user message."""
        return self.encode(self.chat_text(user_message))
