"""The offline interface: prompts of any shape, folders, streams, chats, ranks."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import onchip
from onchip import LLM, BeamSearchParams, SamplingParams
from onchip.engine import ByteTokenizer
from onchip.models import ModelConfig, builtin, random_model, save

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny.model(), tokenizer=ByteTokenizer(), num_pages=200, max_num_seqs=8) as one:
        yield one
        assert not one.engine.cache.pool.tables


@pytest.fixture
def folder(tiny, tmp_path):
    """A checkpoint with a word-level tokenizer, and config and generation_config that disagree."""
    config = tiny.CONFIG | {"vocab_size": 64, "eos_token_id": 1}
    save(random_model(ModelConfig.from_hf(config), seed=2), tmp_path)
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_prompts_of_any_shape(llm):
    ids = list(b"text")
    for prompts in (
        "text",
        ["text"],
        ids,
        [ids],
        {"prompt": "text"},
        [{"prompt_token_ids": ids}],
        {"prompt": "other", "prompt_token_ids": ids},
    ):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.prompt_token_ids == tuple(ids) and len(output.outputs[0].token_ids) == 5
        assert output.finished and output.outputs[0].finish_reason == "length"
    assert llm.generate([], GREEDY) == []
    assert output.prompt == "other"
    with pytest.raises(ValueError, match="'prompt' or 'prompt_token_ids'"):
        llm.generate({"text": "x"})


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = [f"prompt {i}" for i in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i * 7 % 11) for i in range(30)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    alone = [
        llm.generate(*pair)[0].outputs[0].token_ids for pair in zip(prompts, params, strict=True)
    ]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    with pytest.raises(ValueError, match="2 sampling_params for 30 prompts"):
        llm.generate(prompts, params[:2])


def test_more_prompts_than_the_queue_holds(tiny):
    with LLM(tiny.model(), tokenizer=ByteTokenizer(), num_pages=40, max_num_seqs=2) as one:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        expected = one.generate(["x"] * 20, params)
    with LLM(tiny.model(), tokenizer=ByteTokenizer(), num_pages=40, max_num_seqs=2) as one:
        one.engine.limits.__dict__["max_queued_requests"] = 3
        outputs = one.generate(["x"] * 20, params)
    ids = lambda many: [output.outputs[0].token_ids for output in many]
    assert ids(outputs) == ids(expected), "draws do not depend on who was refused when"


def test_a_prompt_that_cannot_be_served_fails_the_whole_call(llm):
    with pytest.raises(ValueError, match="prompt 1 cannot be served: 300 tokens of prompt"):
        llm.generate(["fine", "x" * 300], GREEDY)
    assert not llm.engine.has_work and not llm.engine.cache.pool.tables


def test_a_stream_grows_to_what_generate_gives(llm):
    prompts = ["one", "two"]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=2)
    whole = llm.generate(prompts, params)
    last, texts = {}, {}
    for output in llm.stream(prompts, params):
        last[output.request_id] = output
        for c in output.outputs:
            before = texts.get((output.request_id, c.index), "")
            assert c.text.startswith(before)
            texts[output.request_id, c.index] = c.text
    contents = lambda output: [(c.text, c.token_ids, c.finish_reason) for c in output.outputs]
    assert [contents(last[str(i)]) for i in range(2)] == [contents(output) for output in whole]


def test_leaving_a_stream_cancels_it(llm):
    for output in llm.stream(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    llm.engine.step()
    assert not llm.engine.has_work and not llm.engine.cache.pool.tables


def test_closing_a_stream_cancels_it(llm):
    stream = llm.stream(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True, n=2))
    for _ in range(5):
        next(stream)
    assert llm.engine.cache.pool.tables
    stream.close()
    assert not llm.engine.cache.pool.tables and not llm.engine.scheduler.has_work


def interrupted_at(place, work):
    """Do the work with a KeyboardInterrupt at the `place`-th executed line of engine and cache.
    Return False if fewer lines are executed.
    """
    root, left = str(Path(onchip.__file__).parent), place

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith((f"{root}/engine", f"{root}/kvcache")):
            return None
        left -= event == "line"
        if not left:
            left = -1
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("start", [1, 2, 3])
def test_after_an_interrupt_at_any_line_the_next_call_works(tiny, start):
    """Inside schedule, launch, update, add and cancel: nothing leaks, and the next call gives the
    same outputs. The strides cover all parts of a call; no two runs stop at the same lines.
    """
    prompts = [tiny.PREFIX + "a", tiny.PREFIX, "x"]
    how = SamplingParams(temperature=0, max_tokens=4, n=2, ignore_eos=True, stop=["never"])
    options = {"num_pages": 40, "max_num_seqs": 5, "block_size": 4, "max_num_batched_tokens": 30}
    with LLM(tiny.model(), tokenizer=ByteTokenizer(), **options) as one:
        generate = lambda: [[c.token_ids for c in o.outputs] for o in one.generate(prompts, how)]
        expected, place = generate(), start
        while interrupted_at(place, lambda: one.generate(prompts, how)):
            assert not one._batches and len(one.engine.scheduler.waiting) == 0
            assert generate() == expected
            tiny.check(one.engine)
            tiny.check_empty(one.engine)
            place = place * 5 // 4 + 7
    assert place > 2000


def test_an_interrupted_call_ends_an_open_stream(llm):
    stream = llm.stream("one", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert interrupted_at(1500, lambda: llm.generate(["two"] * 3, GREEDY))
    *_, last = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"


def test_calls_between_the_outputs_of_a_stream(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.stream("one", params)]
    between = []
    for output in llm.stream("one", params):
        between.append(output.outputs[0].token_ids)
        if len(between) in (1, 5):
            assert len(llm.generate(["two", "three"], GREEDY)) == 2
    assert between == alone


def test_chats(llm):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "user: hello\nassistant:"
    assert [o.prompt for o in llm.chat([messages] * 2, GREEDY)] == [output.prompt] * 2
    (bare,) = llm.chat(messages, GREEDY, chat_template="{{ messages[0].content }}")
    assert bare.prompt == "hello"


def test_beam_search(llm):
    (output,) = llm.beam_search("text", BeamSearchParams(3, 5, ignore_eos=True))
    scores = [c.cumulative_logprob for c in output.outputs]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    (old,) = llm.generate(
        "text",
        SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=5, ignore_eos=True),
    )
    assert [c.token_ids for c in old.outputs] == [c.token_ids for c in output.outputs]


def test_seeds(tiny):
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    texts = []
    for seed in (0, 0, 1):
        with LLM(tiny.model(), tokenizer=ByteTokenizer(), num_pages=40, seed=seed) as one:
            texts.append([o.outputs[0].token_ids for o in one.generate(["a", "a"], params)])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


# Folders


def test_a_folder(folder):
    with LLM(folder, num_pages=40) as one:
        (output,) = one.generate("w5 w6", GREEDY)
        assert output.prompt_token_ids == (5, 6)
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text.split() == [f"w{i}" for i in ids]
        assert one.engine.eos_token_ids == (1,)
    config = {"eos_token_id": [ids[2], 1]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with LLM(folder, num_pages=40) as one:
        (output,) = one.generate("w5 w6", SamplingParams(temperature=0, max_tokens=5))
        assert output.outputs[0].token_ids == ids[: ids.index(ids[2]) + 1]
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None


def test_a_folder_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with LLM(str(folder), num_pages=40) as one:
        assert one.get_tokenizer() is None
        (output,) = one.generate([5, 6], GREEDY)
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 5
        with pytest.raises(ValueError, match="has no tokenizer"):
            one.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "options, match",
    [
        ({"dtype": "int8"}, "dtype='int8' is not one of auto, bfloat16"),
        ({"max_model_len": 257}, r"max_model_len=257 must be in \[2, 256\]"),
        ({"block_size": 5}, "must be a power of two"),
        ({"swap_space": -1}, "swap_space=-1 must be"),
        ({"kv_offloading_size": -1}, "kv_offloading_size=-1 must be"),
        ({"kv_offloading_size": 1e-9, "num_pages": 9}, "hold 0 pages, but the cache has 8: a requ"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be above 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": 2}, "torchrun --nproc-per-node 2"),
        ({"tensor_parallel_size": 2, "seed": None}, "must sample the same tokens: give a seed"),
    ],
)
def test_invalid_arguments_are_rejected(folder, options, match):
    with pytest.raises(ValueError, match=match):
        LLM(folder, **options)


def test_dtypes(folder):
    for dtype, expected in (
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.float64, torch.float64),
    ):
        with LLM(folder, dtype=dtype, num_pages=40) as one:
            assert one.engine.cache.spec.dtype == one.engine.model.embed.dtype == expected
            assert one.generate([3], GREEDY)[0].finished


def test_an_unknown_device_is_rejected():
    with pytest.raises(ValueError, match="there is no device 'bogus' here"):
        LLM(builtin.NAME, device="bogus")


def test_models_that_several_ranks_do_not_divide(tiny):
    with pytest.raises(ValueError, match="divide tiny: num_kv_heads=1 cannot be divided among 2"):
        LLM(builtin.NAME, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="needs the folder of a checkpoint"):
        LLM(tiny.model(), tensor_parallel_size=2)


RANK = """
    import json, os, sys, torch
    from onchip import LLM, SamplingParams, BeamSearchParams
    with LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), dtype=torch.float64, device="cpu",
             max_num_seqs=6, max_num_batched_tokens=9, num_pages=14, block_size=4) as llm:
        prompts = [[i, 2, 3, 4, 5, 6, i] for i in range(6)]
        how = [SamplingParams(max_tokens=9 + i, n=1 + i % 2, ignore_eos=True) for i in range(5)]
        outputs = llm.generate(prompts, [*how, BeamSearchParams(2, 5)])
        stats = llm.stats()
        preempted = stats.preempted_by_recompute, stats.preempted_by_swap
    if os.path.exists(tasks := "/proc/self/task"):
        names = [open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks)]
        assert not [name for name in names if "gloo" in name], names  # which could abort the exit
    with open(sys.argv[3], "w") as file:
        json.dump([preempted, [[c.token_ids for c in o.outputs] for o in outputs]], file)
"""


@pytest.mark.slow
def test_two_ranks_give_the_outputs_of_one(folder, tmp_path):
    """With torchrun's variables: the same tokens, beams and preemptions on both ranks."""
    code, results = textwrap.dedent(RANK), [tmp_path / name for name in ("a", "b", "alone")]
    package = str(Path(onchip.__file__).parents[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    base = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1", "MASTER_PORT": port}

    def start(file, world_size, **variables):
        command = [sys.executable, "-c", code, str(folder), str(world_size), str(file)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, env=base | variables)

    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [start(results[i], 2, RANK=str(i), LOCAL_RANK=str(i), **job) for i in range(2)]
    for process in (*processes, start(results[2], 1)):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    a, b, alone = (json.loads(file.read_text()) for file in results)
    assert a == b and a[0][1] > 0 and a[1] == alone[1]
