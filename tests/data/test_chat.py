import numpy as np
import pytest
from tokenizers import processors

from specjax.data import (
    Example,
    Prompt,
    chat_example,
    chat_prompts,
    completion_example,
    completion_mask,
    load_prompts,
    pad_examples,
    text_prompts,
    train_bpe,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, ASSISTANT = "user", "assistant"


def make_tokenizer(template=CHATML, prepends_bos=False):
    tokenizer = train_bpe(
        ["a text to learn from, user and assistant"],
        vocab_size=270,
        special_tokens=("<s>", "<|im_start|>", "<|im_end|>"),
    )
    if prepends_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.chat_template = template
    return tokenizer


def said(*contents):
    roles = (USER, ASSISTANT) * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("prepends_bos", [False, True])
@pytest.mark.parametrize("renders_bos", [False, True])
def test_one_begin_of_text_whoever_adds_it(prepends_bos, renders_bos):
    """A template that renders the BOS and a tokeniser that adds another.

    https://github.com/OpenRLHF/OpenRLHF/issues/393
    """
    template = ("{{ bos_token }}" if renders_bos else "") + CHATML
    tokenizer = make_tokenizer(template, prepends_bos)
    assert tokenizer("x")["input_ids"].count(0) == prepends_bos
    chat = chat_prompts(tokenizer, ["Hi"]).tokens[0]
    example = chat_example(tokenizer, said("Hi", "Yo"))
    for ids in (chat, example.tokens):
        # The template alone decides: it is what the model was trained on.
        assert list(ids).count(0) == renders_bos
        assert (ids[0] == 0) == renders_bos
    assert list(example.tokens[: len(chat)]) == chat
    for text in ("Hi", "<s>Hi"):
        ids = text_prompts(tokenizer, [text]).tokens[0]
        assert ids.count(0) == (prepends_bos or text.startswith("<s>"))


def test_a_prompt_ends_where_the_model_speaks():
    tokenizer = make_tokenizer()
    prompt = Prompt((*said("Hi", "Yo", "Why?"),))
    text = tokenizer.decode(chat_prompts(tokenizer, [prompt]).tokens[0])
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_prompts(tokenizer, [prompt]).tokens == [tokenizer("Why?")["input_ids"]]


def test_template_options_reach_the_template():
    tokenizer = make_tokenizer("{{ mood }}{{ messages[0].content }}")
    encoded = chat_prompts(tokenizer, ["Hi"], options={"mood": "calm "})
    assert tokenizer.decode(encoded.tokens[0]) == "calm Hi"


def test_over_long_prompts_are_refused_or_counted():
    tokenizer = make_tokenizer()
    prompts = ["a" * 9, "b", "c" * 8]
    for encode in (text_prompts, chat_prompts):
        lengths = [len(t) for t in encode(tokenizer, prompts).tokens]
        limit = lengths[1]
        with pytest.raises(ValueError, match=rf"2 of 3 prompts .* {limit} tokens.*: "):
            encode(tokenizer, prompts, max_length=limit)
        encoded = encode(tokenizer, prompts, max_length=limit, overlong="drop")
        assert (encoded.kept, encoded.num_dropped) == ([1], 2)
        assert [len(t) for t in encoded.tokens] == [limit]
        with pytest.raises(ValueError, match="all 3 prompts exceed 0 tokens"):
            encode(tokenizer, prompts, max_length=0, overlong="drop")
        with pytest.raises(ValueError, match="overlong must be 'raise' or 'drop'"):
            encode(tokenizer, prompts, overlong="truncate")


def test_a_tokenizer_without_a_chat_template_says_so():
    with pytest.raises(ValueError, match="has no chat template"):
        chat_prompts(make_tokenizer(template=None), ["Hi"])


def test_files_of_prompts_go_through(tmp_path):
    tokenizer = make_tokenizer()
    prompts = load_prompts("packaged", split="eval")
    encoded = chat_prompts(tokenizer, prompts)
    assert len(encoded.tokens) == len(prompts)
    assert tokenizer.decode(encoded.tokens[0]).count(prompts[0].text) == 1


def test_the_mask_of_a_chat_is_what_the_assistant_said():
    """A template without generation marks gave masks of all ones, or all zeros.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359
    """
    tokenizer = make_tokenizer()
    example = chat_example(tokenizer, said("Hi", "Yo é  ", "Why?", "user\n\nok"))
    spans, inside = [], False
    for token, mask in zip(example.tokens, example.mask, strict=True):
        if mask and not inside:
            spans.append([])
        if mask:
            spans[-1].append(token)
        inside = mask
    # The end of a turn is learnt, the line end that the template puts behind it is not.
    assert [tokenizer.decode(s) for s in spans] == [
        "Yo é  <|im_end|>",
        "user\n\nok<|im_end|>",
    ]


def test_a_template_without_an_end_of_turn_keeps_all_that_was_said():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = make_tokenizer(template)
    example = chat_example(tokenizer, said("Hi", "Yo"))
    heard = [t for t, m in zip(example.tokens, example.mask, strict=True) if m]
    assert tokenizer.decode(heard).strip() == "Yo"


def test_conversations_without_a_mask_are_refused():
    with pytest.raises(ValueError, match="no assistant message to learn from"):
        chat_example(make_tokenizer(), said("Hi"))
    forgets = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders message 1 differently once others"):
        chat_example(make_tokenizer(forgets), said("Hi", "Yo", "Why?", "So"))


def test_the_end_of_text_stays_in_the_loss_where_padding_has_its_id():
    """The final EOS label became padding's, so that the student never learnt to stop.

    https://github.com/huggingface/trl/pull/6357
    """
    pad = eos = 2
    example = completion_example([2, 7], [5, 6, 2], [eos])
    padded = pad_examples([example], length=8, pad_token_id=pad)
    assert padded.tokens.tolist() == [[2, 7, 5, 6, 2, 2, 2, 2]]
    assert padded.mask.tolist() == [[False] * 2 + [True] * 3 + [False] * 3]
    # The prompt's own 2 is inside the length: it stays attended.
    assert padded.lengths.tolist() == [5]
    mask = completion_mask(padded.tokens, np.array([2]), [eos])
    assert mask.tolist() == padded.mask.tolist()


def test_completion_mask_with_several_ends_of_text_and_none():
    tokens = np.array([[1, 5, 6, 3, 2, 2], [2, 2, 5, 2, 0, 0], [1, 5, 6, 7, 8, 9]])
    prompts = np.array([1, 2, 3])
    mask = completion_mask(tokens, prompts, [2, 3])
    assert mask.astype(int).tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    # Cut off by length before any end of text: padding is not learnt as one.
    cut = np.array([[1, 5, 6, 2, 2, 2]])
    mask = completion_mask(cut, np.array([1]), [2], lengths=np.array([3]))
    assert mask.astype(int).tolist() == [[0, 1, 1, 0, 0, 0]]
    assert completion_mask(tokens, prompts).sum() == 5 + 4 + 3


def test_what_follows_the_end_of_text_is_left_out():
    assert completion_example([1], [5, 3, 6, 2], [2, 3]).tokens == [1, 5, 3]
    assert completion_example([1], [5, 6]).mask == [False, True, True]


LONG = Example([1, 2, 3, 4, 5], [False, False, True, True, True])
LONG_PROMPT = Example([1, 2, 3, 4, 5], [False, False, False, False, True])
SHORT = Example([1, 2], [False, True])
NOTHING = Example([1, 2], [False, False])


def test_over_long_examples_are_refused_cut_or_dropped():
    """Truncation that dropped the prompt, and rows left without any loss.

    https://github.com/huggingface/trl/issues/4725
    https://github.com/huggingface/trl/issues/2217
    """
    with pytest.raises(ValueError, match="example 1 has 5 tokens, more than the 4"):
        pad_examples([SHORT, LONG], 4, 0)
    cut = pad_examples([SHORT, LONG], 4, 0, overlong="cut")
    assert cut.tokens.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert cut.mask.sum(1).tolist() == [1, 2]
    assert (cut.num_cut, cut.num_dropped) == (1, 0)
    dropped = pad_examples([SHORT, LONG], 4, 0, overlong="drop")
    assert dropped.tokens.tolist() == [[1, 2, 0, 0]]
    assert (dropped.num_cut, dropped.num_dropped) == (0, 1)


@pytest.mark.parametrize("example", [NOTHING, LONG_PROMPT, Example([1], [True])])
def test_examples_without_a_loss_are_refused_or_counted(example):
    with pytest.raises(ValueError, match="example 1 has no token to learn from"):
        pad_examples([SHORT, example], 4, 0, overlong="cut")
    padded = pad_examples([SHORT, example], 4, 0, overlong="cut", empty="drop")
    assert (len(padded.tokens), padded.num_cut, padded.num_dropped) == (1, 0, 1)
    with pytest.raises(ValueError, match="none of 1 examples can be learnt from"):
        pad_examples([example], 4, 0, overlong="cut", empty="drop")


def test_bad_examples():
    with pytest.raises(ValueError, match="has 2 tokens but a mask of 1"):
        pad_examples([Example([1, 2], [True])], 4, 0)
    with pytest.raises(ValueError, match="overlong must be raise, drop or cut"):
        pad_examples([SHORT], 4, 0, overlong="keep")
    with pytest.raises(ValueError, match="empty must be raise or drop"):
        pad_examples([SHORT], 4, 0, empty="keep")
