"""examples/long_range*.py: tasks whose labels are true, and one encoder with three attentions."""

import json
import math
import random
import re
import statistics
from collections import Counter
from dataclasses import replace

import long_range
import long_range_tasks
import pytest
import torch
from long_range_tasks import HELD_OUT, SYMBOLS, TASKS, Examples
from torch import nn

from onchip import masks

CPU = torch.device("cpu")
TINY = long_range.Size(width=32, layers=2, batch=8, steps=2, held_out=16, lr=3e-3)
LEAST = {"listops": 16, "text": 16, "retrieval": 16, "image": 256, "pathfinder": 256}
MANY = {"listops": 32, "text": 32, "retrieval": 32, "image": 256, "pathfinder": 256}


def training(task, attention="dense", seqlen=None, size=TINY):
    return long_range.Training(task, attention, seqlen or LEAST[task], size, CPU, torch.float32)


# --------------------------------------------------------------------------------------- listops


def written(tokens, length):
    return " ".join(SYMBOLS[token] for token in tokens[:length])


def evaluate(text):
    """By rewriting: the innermost expression becomes its value, until one digit is left."""
    innermost = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")
    while not text.isdecimal():
        text, replaced = innermost.subn(lambda m: str(apply(m[1], m[2].split())), text)
        assert replaced, text
    return int(text)


def apply(operator, digits):
    digits = sorted(map(int, digits))
    low, high = digits[(len(digits) - 1) // 2], digits[len(digits) // 2]
    median = math.floor((low + high) / 2)
    return {"MIN": digits[0], "MAX": digits[-1], "MED": median, "SM": sum(digits) % 10}[operator]


def test_the_evaluator_knows_the_example_of_the_paper():
    """Nangia and Bowman 2018, figure 1; then the mean of two middle digits, rounded down."""
    assert evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]") == 9
    assert evaluate("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == 5
    assert evaluate("[SM [MED 1 2 ] 9 ]") == 0


@pytest.mark.parametrize(("count", "seqlen"), [(150, 8), (150, 64), (30, 600)])
def test_listops_have_their_values(count, seqlen):
    examples = TASKS["listops"].draw(count, seqlen, 3)
    for (tokens,), label, (length,) in zip(*(x.tolist() for x in examples), strict=True):
        assert seqlen // 4 < length <= seqlen
        assert not any(tokens[length:]) and all(tokens[:length])
        assert evaluate(written(tokens, length)) == label


def test_listops_follow_the_published_grammar():
    """Operators are equally frequent, have 2 to 10 arguments and are nested up to 9 deep."""
    deepest, arguments, operators = 0, [], Counter()
    for (tokens,), _, (length,) in zip(
        *(x.tolist() for x in TASKS["listops"].draw(60, 600, 5)), strict=True
    ):
        open_counts = []
        for symbol in written(tokens, length).split():
            if symbol == "]":
                arguments.append(open_counts.pop())
                continue
            if open_counts:
                open_counts[-1] += 1
            if symbol.startswith("["):
                operators[symbol] += 1
                open_counts.append(0)
                deepest = max(deepest, len(open_counts))
    assert deepest == 9 and (min(arguments), max(arguments)) == (2, 10)
    assert statistics.mean(arguments) == pytest.approx(6, abs=0.3)
    count = operators.total()
    assert len(operators) == 4
    assert all(abs(n - count / 4) < 4 * (count * 3 / 16) ** 0.5 for n in operators.values())


def test_a_quarter_of_the_arguments_are_expressions():
    """Of those above the last level, in expressions of every length."""
    chance, counts = random.Random(1), Counter()
    for _ in range(300):
        symbols, depth = [], 0
        long_range_tasks.write_expression(symbols, 10**6, chance)
        for symbol in symbols:
            if symbol != "]" and 0 < depth < 9:
                counts[symbol.startswith("[")] += 1
            depth += {"[": 1, "]": -1}.get(symbol[0], 0)
    assert counts.total() > 10_000
    assert counts[True] / counts.total() == pytest.approx(0.25, abs=0.01)


# ------------------------------------------------------------------------------ text and retrieval


def bytes_of(tokens):
    return bytes(tokens.tolist())


def test_books_begin_where_they_begin():
    """The 66 books have all chapters, in both parts together every byte but some separators."""
    assert len(long_range_tasks.CHAPTERS) == 66 and sum(long_range_tasks.CHAPTERS) == 1189
    parts = [long_range_tasks.read_books(held_out) for held_out in (False, True)]
    begins = {
        0: b"In the beginning God",
        18: b"Blessed is the man",
        39: b"The book of the generation",
    }
    for number, begin in begins.items():
        assert bytes_of(parts[0][number]).startswith(begin)
    letters = sum(len(book) for part in parts for book in part)
    assert 4_139_037 - 2 * 1189 <= letters <= 4_139_037


@pytest.mark.parametrize("seed", [11, HELD_OUT + 11])
def test_passages_are_of_the_testament_of_their_label(seed):
    texts = [bytes_of(text) for text in long_range_tasks.read_testaments(seed >= HELD_OUT)]
    tokens, labels, _ = TASKS["text"].draw(40, 200, seed)
    for (passage,), label in zip(tokens, labels.tolist(), strict=True):
        assert bytes_of(passage) in texts[label] and bytes_of(passage) not in texts[1 - label]


@pytest.mark.parametrize("seed", [11, HELD_OUT + 11])
def test_pairs_are_of_one_book_or_of_two_and_share_no_byte(seed):
    books = [bytes_of(book) for book in long_range_tasks.read_books(seed >= HELD_OUT)]
    tokens, labels, _ = TASKS["retrieval"].draw(60, 400, seed)
    for pair, label in zip(tokens, labels.tolist(), strict=True):
        a, b = map(bytes_of, pair)
        holds = [[i for i, book in enumerate(books) if x in book] for x in (a, b)]
        assert [len(found) for found in holds] == [1, 1]
        assert (holds[0] == holds[1]) == bool(label)
        if label:
            book = books[holds[0][0]]
            assert abs(book.index(a) - book.index(b)) >= 400


def test_one_passage_of_a_pair_does_not_tell():
    """Books are drawn equally often for both labels: here, the share of the New Testament."""
    new = [bytes_of(book) for book in long_range_tasks.read_books(False)[39:]]
    text = b"\n\n".join(new)
    tokens, labels, _ = TASKS["retrieval"].draw(800, 100, 2)
    is_new = torch.tensor([[bytes_of(x) in text for x in pair] for pair in tokens]).float()
    for column in is_new.T:
        gap = column[labels == 1].mean() - column[labels == 0].mean()
        assert abs(gap) < 4 * (2 * 0.25 / 400) ** 0.5


def words(text):
    return re.findall(rb"[a-z]+", text.lower())


def test_a_longer_passage_tells_more():
    """Naive Bayes over words, fitted to the training text."""
    counts = [Counter(words(bytes_of(text))) for text in long_range_tasks.read_testaments(False)]
    totals = [sum(count.values()) for count in counts]
    evidence = lambda word: math.log(
        (counts[1][word] + 1) / totals[1] * totals[0] / (counts[0][word] + 1)
    )
    accuracy = {}
    for seqlen in (64, 1024):
        tokens, labels, _ = TASKS["text"].draw(300, seqlen, HELD_OUT)
        scores = [sum(map(evidence, words(bytes_of(passage)))) for (passage,) in tokens]
        right = [(score > 0) == bool(y) for score, y in zip(scores, labels.tolist(), strict=True)]
        accuracy[seqlen] = sum(right) / len(right)
    assert accuracy[64] < 0.9 and accuracy[1024] > accuracy[64] + 0.08


def test_held_out_passages_are_not_in_the_training_text():
    training_text = b"".join(bytes_of(text) for text in long_range_tasks.read_testaments(False))
    for task in ("text", "retrieval"):
        for passage in TASKS[task].draw(100, 300, HELD_OUT).tokens.flatten(0, 1):
            assert bytes_of(passage) not in training_text


# ------------------------------------------------------------------------------------------ images


def test_shapes_cover_what_they_should():
    """Points inside and outside of each, within the unit square."""
    disc, square, diamond, triangle, cross = (
        lambda x, y, shape=shape: bool(shape(torch.tensor(x), torch.tensor(y)) < 0)
        for shape in long_range_tasks.SHAPES
    )
    assert disc(0.7, 0.7) and not disc(0.75, 0.75)
    assert square(0.75, -0.75) and not square(0.9, 0.0)
    assert diamond(0.9, 0.0) and not diamond(0.6, 0.6)
    assert triangle(0.0, -0.9) and triangle(0.7, 0.4) and not triangle(0.7, -0.4)
    assert cross(0.9, 0.0) and cross(0.0, -0.9) and not cross(0.5, 0.5)


def test_outlines_leave_out_the_inside(monkeypatch):
    """Without noise: the ground is the commonest level; an outline covers fewer pixels."""
    monkeypatch.setattr(long_range_tasks, "NOISE", 0.0)
    tokens, labels, _ = TASKS["image"].draw(400, 1024, 1)
    covered = (tokens[:, 0] != tokens[:, 0].mode(1).values[:, None]).sum(1).double()
    area = torch.stack([covered[labels == label].mean() for label in range(10)])
    assert bool((area[5:] < 0.8 * area[:5]).all()) and covered.min() > 20


def test_the_shape_and_the_ground_differ_by_more_than_the_noise():
    tokens = TASKS["image"].draw(200, 256, 1).tokens[:, 0].double()
    ends = tokens.quantile(torch.tensor([0.02, 0.98], dtype=torch.double), dim=1)
    assert (ends[1] - ends[0]).min() > 4 * long_range_tasks.NOISE
    assert tokens.min() >= 0 and tokens.max() <= 255


def test_a_small_convolutional_network_learns_the_kinds_of_image():
    """So the labels can be read from the pixels, which few steps of the encoder do not show."""

    def contrast(tokens):
        pixels = tokens.view(-1, 1, 16, 16).float()
        ground = pixels.flatten(1).median(1).values[:, None, None, None]
        return (pixels - ground).abs() / 128

    layer = lambda c_in, c_out: [nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layer(1, 16), *layer(16, 32), nn.Flatten(), nn.Linear(512, 64))
    model.extend([nn.ReLU(), nn.Linear(64, 10)])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for seed in range(150):
        tokens, labels, _ = TASKS["image"].draw(64, 256, seed)
        nn.functional.cross_entropy(model(contrast(tokens)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, labels, _ = TASKS["image"].draw(300, 256, HELD_OUT)
    correct = model(contrast(tokens)).argmax(1) == labels
    assert correct.float().mean() > 0.7


def test_pathfinder_is_that_of_its_own_example():
    scene = long_range_tasks.draw_pathfinder(5, 16, 9)
    tokens, labels, _ = TASKS["pathfinder"].draw(5, 256, 9)
    assert torch.equal(tokens[:, 0].view(5, 16, 16), scene.images.long())
    assert torch.equal(labels, scene.labels)


# --------------------------------------------------------------------------------------- all tasks


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_labels_are_in_range_and_even(name):
    """Equally frequent labels, but those of listops: MIN and MAX make 0 and 9 more frequent."""
    task, count = TASKS[name], 1000
    tokens, labels, lengths = task.draw(count, MANY[name], 4)
    assert tokens.shape == (count, task.documents, MANY[name])
    assert lengths.shape == (count, task.documents) and labels.shape == (count,)
    assert tokens.min() >= 0 and tokens.max() < task.vocab_size
    share = labels.bincount(minlength=task.num_classes) / count
    assert len(share) == task.num_classes
    if name == "listops":
        assert share.min() > 0.03 and share.max() < 0.25
    else:
        fair = 1 / task.num_classes
        assert (share - fair).abs().max() < 4 * (fair * (1 - fair) / count) ** 0.5


@pytest.mark.parametrize("name", TASKS)
def test_examples_depend_on_the_seed_and_held_out_ones_are_others(name):
    draw = lambda seed: TASKS[name].draw(50, MANY[name], seed)
    one, same = draw(5), draw(5)
    assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))
    trained_on = {bytes_of(x.flatten()) for seed in range(4) for x in draw(seed).tokens}
    held_out = {bytes_of(x.flatten()) for seed in range(4) for x in draw(HELD_OUT + seed).tokens}
    assert len(trained_on) > 190 and not trained_on & held_out


def test_training_seeds_are_never_held_out():
    seeds = {long_range.training_seed(seed, step) for seed in (0, 1, 4000) for step in range(1000)}
    assert len(seeds) == 3000 and max(seeds) < HELD_OUT <= 0xFFFFFFFF


@pytest.mark.parametrize(
    ("name", "seqlen", "message"),
    [
        ("listops", 7, "listops needs seqlen >= 8, not 7"),
        ("text", 10**6, "text has no passage of 1,000,000 bytes"),
        ("retrieval", 10**6, "no two books with two passages of 1,000,000 bytes"),
        ("image", 1000, "image needs seqlen = side [*] side >= 256, not 1000"),
        ("image", 225, "image needs seqlen"),
        ("pathfinder", 225, "pathfinder needs seqlen"),
    ],
)
def test_lengths_that_a_task_does_not_have_are_refused(name, seqlen, message):
    with pytest.raises(ValueError, match=message):
        TASKS[name].draw(1, seqlen, HELD_OUT)


# ----------------------------------------------------------------------------------------- encoder


def loss_and_gradients(task, attention):
    one = training(task, attention)
    examples = one.examples(6, 1)
    model, _ = one.start(0)
    logits = one.logits(model, examples)
    loss = nn.functional.cross_entropy(logits, examples.labels)
    return logits, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("task", TASKS)
def test_dense_and_standard_are_one_function(task):
    """With padding (listops), with two documents (retrieval) and without either."""
    torch.testing.assert_close(
        loss_and_gradients(task, "dense"), loss_and_gradients(task, "standard")
    )


@pytest.mark.parametrize("task", TASKS)
def test_sparse_is_dense_where_the_mask_is_full(task, monkeypatch):
    dense, sparse = (loss_and_gradients(task, name) for name in ("dense", "sparse"))
    assert (dense[0] - sparse[0]).abs().max() > 1e-5  # it is not, where it is not
    long_range.build_sparse.cache_clear()
    monkeypatch.setattr(long_range, "REACH", 1)
    full = loss_and_gradients(task, "sparse")
    long_range.build_sparse.cache_clear()
    torch.testing.assert_close(full, dense)


@pytest.mark.parametrize("has_padding", [False, True])
def test_sparse_attention_is_standard_attention_under_its_mask(has_padding):
    q, k, v = torch.randn(3, 2, 300, 2, 32)
    lengths = torch.tensor([300, 170])
    attend = long_range.choose_attend("sparse", lengths, 300, CPU, has_padding)
    near = (torch.arange(300)[:, None] - torch.arange(300)).abs() <= 300 // 16
    first = torch.arange(300) < 300 // 16
    visible = (near | first | first[:, None]).expand(2, 1, 300, 300)
    if has_padding:
        visible = visible & (torch.arange(300) < lengths[:, None, None, None])
    want = long_range.attend_standard(q, k, v, visible)
    seen = visible.any(-1)[:, 0, :, None, None]  # rows of padding may see nothing
    torch.testing.assert_close(attend(q, k, v) * seen, want.nan_to_num() * seen)


def test_a_long_sparse_mask_leaves_out_most_blocks():
    built = masks.build(long_range.sparse_pattern(4096), 1, 1, 4096, 4096)
    assert built.density() < 0.3


@pytest.mark.parametrize("attention", long_range.ATTENTIONS)
def test_padding_is_not_seen(attention):
    one = training("listops", attention)
    tokens, labels, lengths = one.examples(6, 1)
    assert (lengths < 16).any()
    is_padding = torch.arange(16) >= lengths[..., None]
    other = Examples(tokens.masked_fill(is_padding, 7), labels, lengths)
    model, _ = one.start(0)
    logits = [
        one.logits(model, examples) for examples in (Examples(tokens, labels, lengths), other)
    ]
    torch.testing.assert_close(*logits)


def test_it_learns_more_than_a_constant():
    """Short listops: the operator at the front says much. Luck is within 6 standard deviations."""
    size = replace(TINY, layers=1, batch=24, steps=100, held_out=500)
    one = training("listops", seqlen=12, size=size)
    held_out = one.examples(size.held_out, HELD_OUT)
    model = long_range.train(one, 0, lambda text: None)
    constant = long_range.constant_accuracy(held_out.labels)
    luck = (constant * (1 - constant) / size.held_out) ** 0.5
    assert one.accuracy(model, held_out) > constant + 6 * luck


def test_weights_depend_on_the_seed_and_not_on_the_attention():
    state = lambda one, seed: list(one.start(seed)[0].parameters())
    dense, sparse = training("text"), training("text", "sparse")
    assert all(map(torch.equal, state(dense, 3), state(sparse, 3)))
    assert not all(map(torch.equal, state(dense, 3), state(dense, 4)))


class AlwaysNine(long_range.Training):
    def logits(self, model, examples):
        return nn.functional.one_hot(torch.full_like(examples.labels, 9), 10).float()


def test_accuracy_is_the_share_of_correct_labels():
    """Of 20 examples in batches of 8: the last has four."""
    one = AlwaysNine("listops", "dense", 16, TINY, CPU, torch.float32)
    examples = one.examples(20, 1)
    nines = int((examples.labels == 9).sum())
    assert one.accuracy(None, examples) == nines / 20 and 0 < nines < 20
    assert long_range.constant_accuracy(torch.tensor([1, 3, 3, 0])) == 0.5


# -------------------------------------------------------------------------------------- the program


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(long_range, "SMALL", TINY)
    monkeypatch.setattr(long_range, "ROUNDS", 2)


def test_it_writes_results_of_every_seed(tiny, tmp_path, capsys):
    file = tmp_path / "out.json"
    options = ["--tasks", "retrieval,listops", "--attention", "standard,sparse,dense"]
    options += ["--seqlen", "16", "--seeds", "2", "--steps", "1", "--device", "cpu"]
    assert long_range.main([*options, "--results", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["steps"], found["seeds"], found["width"]) == (1, 2, TINY.width)
    assert found["dtype"] == "float32" and found["torch"] == torch.__version__
    tasks = [(row["task"], row["attention"]) for row in found["rows"]]
    assert tasks == [(t, a) for t in ("listops", "retrieval") for a in long_range.ATTENTIONS]
    speed = {(row["task"], row["attention"]): row["steps_per_second"] for row in found["rows"]}
    for row in found["rows"]:
        accuracies = row["accuracies"]
        assert row["seqlen"] == 16 and 0 < row["constant"] < 1
        assert len(accuracies) == (0 if row["attention"] == "standard" else 2)
        if accuracies:
            assert row["mean"] == pytest.approx(sum(accuracies) / 2)
            assert [row["min"], row["max"]] == sorted(accuracies)
        ratio = row["steps_per_second"] / speed[row["task"], "standard"]
        assert row["over_standard"] == pytest.approx(ratio)
    printed = capsys.readouterr().out
    assert "over standard" in printed and "retrieval" in printed and "seed 1" in printed


def test_without_standard_there_is_no_ratio(tiny, tmp_path):
    file = tmp_path / "out.json"
    options = ["--tasks", "text", "--seqlen", "16", "--device", "cpu", "--attention", "dense"]
    assert long_range.main([*options, "--results", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["over_standard"] is None and len(row["accuracies"]) == 1


def test_ctrl_c_keeps_what_is_complete(tiny, tmp_path, monkeypatch, capsys):
    """In the fourth training: the first task has both, the second task one."""
    whole, calls = long_range.train, []

    def train(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(long_range, "train", train)
    file = tmp_path / "out.json"
    options = ["--tasks", "listops,text", "--seqlen", "16", "--device", "cpu"]
    assert long_range.main([*options, "--results", str(file)]) == 130
    rows = json.loads(file.read_text())["rows"]
    complete = [(row["task"], row["attention"], len(row["accuracies"])) for row in rows]
    assert complete[:2] == [("listops", "dense", 1), ("listops", "sparse", 1)]
    assert complete[2:] == [("text", "dense", 1), ("text", "sparse", 0)]
    assert "mean" not in rows[3] and [*tmp_path.iterdir()] == [file]
    output = capsys.readouterr()
    assert "interrupted" in output.err and output.out.count("listops") >= 2


def test_defaults_are_the_published_lengths_on_a_gpu_and_short_ones_elsewhere(monkeypatch):
    args = long_range.parse(["--device", "cpu"])
    assert args.small and args.dtype == "float32" and args.attention == ("dense", "sparse")
    lengths = {name: long_range.length_of(name, args) for name in args.tasks}
    assert lengths == {n: task.small_seqlen for n, task in TASKS.items()} and len(lengths) == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = long_range.parse(["--device", "cuda", "--tasks", "text,listops"])
    assert not args.small and args.dtype == "bfloat16" and args.tasks == ("listops", "text")
    assert [long_range.length_of(name, args) for name in args.tasks] == [2000, 4096]
    assert long_range.parse(["--device", "cuda", "--small", "--dtype", "float32"]).small


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "listops,words"], "'words' is not one of listops, text"),
        (["--attention", "linear"], "'linear' is not one of dense, sparse, standard"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--seeds", "-1"], "not an integer of at least 1"),
        (["--seqlen", "100"], "image needs seqlen = side"),
        (["--tasks", "listops", "--seqlen", "4"], "listops needs seqlen >= 8"),
        (["--results", "no/such/folder/out.json"], "there is no folder no/such/folder"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        long_range.main(["--device", "cpu", *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        long_range.main(["--device", "cuda"])
    assert "torch finds no GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("attention", long_range.ATTENTIONS)
@pytest.mark.parametrize("task", TASKS)
def test_a_gpu_computes_the_loss_of_a_cpu(task, attention):
    losses = []
    for device in (CPU, torch.device("cuda")):
        one = replace(training(task, attention, MANY[task]), device=device)
        losses.append(one.step(*one.start(0), one.examples(4, 1)).item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
