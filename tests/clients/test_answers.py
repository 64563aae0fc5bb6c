"""Answers: whole and streamed, and what each option does to them."""

import math

import openai
import pytest

QUESTION = "Write one sentence about rivers."


def whole(stream):
    """The text of choice 0, and the finish reasons that were sent."""
    text, reasons = "", []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons


def test_the_model_is_listed(client, model):
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_stream_says_what_a_whole_answer_says(chat):
    answer = chat(QUESTION)
    text = answer.choices[0].message.content
    assert text.strip()
    assert whole(chat(QUESTION, stream=True)) == (text, [answer.choices[0].finish_reason])


def test_usage_counts_tokens_and_comes_last_when_asked(chat):
    usage = chat(QUESTION, max_tokens=5).usage
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    *chunks, last = chat(QUESTION, max_tokens=5, stream=True, stream_options={"include_usage": True})
    # The same counts, but now the ring has the prompt; only its last token is computed again.
    usage.prompt_tokens_details.cached_tokens = usage.prompt_tokens - 1
    assert last.choices == [] and last.usage == usage
    assert chat(QUESTION + " " + QUESTION, max_tokens=1).usage.prompt_tokens > usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.usage is None for chunk in chat(QUESTION, max_tokens=5, stream=True))


def test_max_tokens_ends_an_answer_under_both_names(chat):
    longer = chat(QUESTION).choices[0].message.content
    for limit in ({"max_tokens": 3}, {"max_tokens": 20, "max_completion_tokens": 3}):
        answer = chat(QUESTION, **limit)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
        assert longer.startswith(answer.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(chat, stream):
    text = chat(QUESTION).choices[0].message.content
    # In the middle of a token or across two, wherever it falls.
    for start in (7, 15, 30):
        stop = text[start : start + 3]
        expected = text[: text.index(stop)]
        answer = chat(QUESTION, stop=["never in there", stop], stream=stream)
        if stream:
            assert whole(answer) == (expected, ["stop"])
        else:
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")


def test_a_seed_repeats_and_choices_differ(chat):
    def texts(seed):
        answer = chat(QUESTION, temperature=1, seed=seed, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first
    assert len(set(first)) == 3
    assert texts(8) != first


def test_greedy_choices_are_one_answer_n_times(chat):
    alone = chat(QUESTION).choices[0].message.content
    answer = chat(QUESTION, n=4)
    assert [choice.message.content for choice in answer.choices] == [alone] * 4


def test_chat_logprobs_tell_the_tokens_of_the_text(chat):
    choice = chat(QUESTION, logprobs=True, top_logprobs=5).choices[0]
    tokens = choice.logprobs.content
    assert len(tokens) == 24
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:
        top = [(alternative.token, alternative.logprob) for alternative in token.top_logprobs]
        assert len(top) == 5
        assert top[0] == (token.token, token.logprob), "greedy takes the most likely"
        assert [logprob for _, logprob in top] == sorted((logprob for _, logprob in top), reverse=True)
        assert sum(math.exp(logprob) for _, logprob in top) <= 1 + 1e-4
    streamed = [
        token
        for chunk in chat(QUESTION, logprobs=True, top_logprobs=5, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == tokens


def test_completion_logprobs(client, model):
    answer = client.completions.create(model=model, prompt="The sea is", max_tokens=6, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 6
    for token, logprob, offset, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset, logprobs.top_logprobs
    ):
        assert top[token] == logprob == max(top.values())
        assert answer.choices[0].text[offset:].startswith(token)


def test_prompts_in_one_request_are_answered_as_alone(client, model):
    prompts = ["The sea is", "One, two, three,", "Once upon a time"]
    options = {"model": model, "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, **options)
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    streamed = [""] * 3
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_logit_bias_decides(client, model):
    token = 1000
    options = {"model": model, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    forced = client.completions.create(prompt=[token, token], logit_bias={str(token): 100}, **options).choices[0]
    assert len(set(forced.logprobs.tokens)) == 1
    assert forced.text == forced.logprobs.tokens[0] * 3
    forbidden = client.completions.create(prompt=[token, token], logit_bias={str(token): -100}, **options).choices[0]
    assert forced.logprobs.tokens[0] not in forbidden.logprobs.tokens


def test_characters_of_several_tokens_arrive_whole(client, model):
    options = {"model": model, "prompt": "🦀🐙🦀🐙🦀🐙🦀🐙", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
    assert "".join(pieces) == text
    assert any(ord(character) > 0xFFFF for character in text), f"no emoji to test with in {text!r}"
    assert "\ufffd" not in text


def test_echo_says_the_prompt_first(client, model):
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    plain = client.completions.create(**ask).choices[0].text
    assert client.completions.create(**ask, echo=True).choices[0].text == "Once upon a time" + plain
    streamed = client.completions.create(**ask, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Once upon a time" + plain


def test_a_suffix_needs_tokens_that_this_model_lacks(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="def f():", suffix="return x", max_tokens=5)
    assert caught.value.param == "suffix"
