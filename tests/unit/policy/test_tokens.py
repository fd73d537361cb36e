"""Special tokens and rendered prompts, over the kinds of tokenizers that are about."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.policy.tokens import decode, decode_all, render_prompt, special_tokens

WORDS = ["<unk>", "<bos>", "</s>", "<pad>", "user", "assistant", "one", "two", "<end>"]
BOS = 1


def make_tokenizer(*, pad=None, bos="<bos>", adds_bos=False, adds_eos=False, template=None):
    """A tokenizer of whole words; `</s>` is id 2."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = [*(["<bos>"] if adds_bos else []), "$A", *(["</s>"] if adds_eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(parts), special_tokens=[("<bos>", BOS), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", pad_token=pad, chat_template=template
    )


TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
GENERATION_PROMPT = "{% if add_generation_prompt %}assistant{% endif %}"
WITH_BOS = "{{ bos_token }} " + TEMPLATE + GENERATION_PROMPT
WITHOUT_BOS = TEMPLATE + GENERATION_PROMPT
MESSAGES = [{"role": "user", "content": "one two"}]
CHAT_IDS = [4, 6, 7, 5]


@pytest.mark.parametrize(
    ("options", "text_ids", "chat_ids"),
    [
        ({"bos": None, "template": WITHOUT_BOS}, [6, 7], CHAT_IDS),
        ({"template": WITHOUT_BOS}, [6, 7], CHAT_IDS),
        ({"adds_bos": True, "template": WITHOUT_BOS}, [BOS, 6, 7], [BOS, *CHAT_IDS]),
        ({"adds_bos": True, "template": WITH_BOS}, [BOS, 6, 7], [BOS, *CHAT_IDS]),
        ({"template": WITH_BOS}, [6, 7], [BOS, *CHAT_IDS]),
        ({"adds_bos": True, "adds_eos": True, "template": WITH_BOS}, [BOS, 6, 7], [BOS, *CHAT_IDS]),
        ({"adds_bos": True, "pad": "</s>", "template": WITH_BOS}, [BOS, 6, 7], [BOS, *CHAT_IDS]),
    ],
    ids=["no bos", "unused bos", "tokenizer only", "both", "template only", "eos added", "pad is eos"],
)
def test_prompts_have_exactly_one_bos_where_the_policy_uses_one(options, text_ids, chat_ids):
    tokenizer = make_tokenizer(**options)
    text, token_ids = render_prompt(tokenizer, "one two")
    assert (text, token_ids.tolist()) == ("one two", text_ids)
    assert render_prompt(tokenizer, MESSAGES)[1].tolist() == chat_ids


def test_a_bos_written_in_the_text_is_not_doubled():
    assert render_prompt(make_tokenizer(adds_bos=True), "<bos> one")[1].tolist() == [BOS, 6]
    assert render_prompt(make_tokenizer(adds_bos=True), "one <bos>")[1].tolist() == [BOS, 6, BOS]


def test_the_rendered_text_is_what_the_model_sees():
    assert render_prompt(make_tokenizer(template=WITH_BOS), MESSAGES)[0] == "<bos> user one two assistant"


def test_messages_without_a_template_are_refused():
    with pytest.raises(ValueError, match="no chat template"):
        render_prompt(make_tokenizer(), MESSAGES)


def test_a_template_that_refuses_the_messages_says_why():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        render_prompt(make_tokenizer(template=template), MESSAGES)


def test_an_empty_prompt_is_refused_unless_a_bos_stands_for_it():
    with pytest.raises(ValueError, match="empty"):
        render_prompt(make_tokenizer(bos=None), "")
    assert render_prompt(make_tokenizer(adds_bos=True), "")[1].tolist() == [BOS]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (2,)),
        ([7, 2], None, (7, 2)),
        (7, 8, (7, 8, 2)),
        (None, [8, 7], (8, 7, 2)),
        ([2, 7], [7, 8], (2, 7, 8)),
    ],
)
def test_every_eos_id_that_any_source_names_counts(generation, config, expected):
    tokens = special_tokens(
        make_tokenizer(), Qwen3Config(eos_token_id=config), GenerationConfig(eos_token_id=generation)
    )
    assert tokens.eos_ids == expected


def test_padding_has_an_id_of_its_own_or_any_other():
    config = Qwen3Config(eos_token_id=7)
    assert special_tokens(make_tokenizer(pad="<pad>"), config, None).pad_id == 3
    assert special_tokens(make_tokenizer(pad="</s>"), config, None).pad_id == 2
    assert special_tokens(make_tokenizer(), config, None).pad_id == 7
    assert special_tokens(make_tokenizer(bos=None), config, None).bos_id is None


def test_a_policy_without_eos_has_none():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokens = special_tokens(tokenizer, Qwen3Config(), None)
    assert (tokens.eos_ids, tokens.pad_id) == ((), 0)


def test_text_leaves_special_and_unknown_ids_out():
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer("12+3=", add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, [1, *token_ids, 2, 0, 9999]) == "12+3="
    assert decode_all(tokenizer, [token_ids, [], [9999], token_ids[:2]]) == ["12+3=", "", "", "12"]
    assert decode_all(tokenizer, []) == []


def test_the_tiny_tokenizer_takes_every_character():
    tokenizer = tiny_tokenizer()
    text, token_ids = render_prompt(tokenizer, "aZ\né1")
    assert text == "aZ\né1"
    assert token_ids.tolist() == [1, *tokenizer.convert_tokens_to_ids(["a", "<unk>", "<unk>", "<unk>", "1"])]
