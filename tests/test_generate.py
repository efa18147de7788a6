"""Generation, text samples and validation with a model whose answers are known."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner import generate as command
from runner.api import Sample, View
from runner.evaluate import TextSamples, Validation
from runner.generate import LoadedRun, generate
from tests.sessions import TINY, opened, ran

V, PADDED, CONTEXT = 10, 16, 8


class Counter(nn.Module):
    """Says that the next token is the last one plus one, and remembers how it was asked."""

    max_seq_len, vocab_size = CONTEXT, V

    def __init__(self, *, cached=False, noise=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.noise, self.asked = noise, []
        if cached:
            self.new_cache = lambda batch: SimpleNamespace(length=0, batch=batch)

    def forward(self, tokens, targets=None, *, reduction="mean", cache=None):
        self.asked.append(tokens.shape[1])
        seen = tokens.shape[1] + (cache.length if cache else 0)
        assert seen <= CONTEXT
        assert not self.training
        if cache is not None:
            cache.length = seen
        logits = torch.full((*tokens.shape, PADDED), -50.0)
        logits[..., V:] = 99.0  # padding that must never win
        logits.scatter_(-1, ((tokens + 1) % V)[..., None], 0.0)
        logits = logits + (self.noise * torch.randn(PADDED) if self.noise else 0) + self.weight
        if targets is None:
            return logits
        return logits[..., :V].gather(-1, targets[..., None]).mean()


def test_greedy_text_is_the_models_and_rolls_past_the_context():
    for cached in (False, True):
        model = Counter(cached=cached)
        rows = generate(model, torch.tensor([[3], [8]]), max_tokens=25, temperature=0.0)
        assert rows == [[(4 + i) % V for i in range(25)], [(9 + i) % V for i in range(25)]]
    assert model.asked == [1] * CONTEXT + [CONTEXT] * (25 - CONTEXT)  # with a cache: one token while it lasts


def test_the_cache_is_optional_and_changes_no_token():
    prompt = torch.tensor([[1, 2, 3]])
    plain = Counter(cached=True)
    want = generate(plain, prompt, max_tokens=12, temperature=1.5, seed=4, use_cache=False)
    assert plain.asked[:3] == [3, 4, 5]
    assert generate(Counter(cached=True), prompt, max_tokens=12, temperature=1.5, seed=4) == want


def test_a_long_prompt_is_cropped_to_its_end():
    model = Counter(cached=True)
    assert generate(model, torch.arange(30)[None] % V, max_tokens=2, temperature=0.0) == [[0, 1]]
    assert model.asked == [CONTEXT, CONTEXT]


def test_a_stop_token_ends_a_row_and_the_last_one_ends_the_call():
    model = Counter()
    rows = generate(model, torch.tensor([[1], [3]]), max_tokens=50, temperature=0.0, stop_token=5)
    assert rows == [[2, 3, 4], [4]]
    assert len(model.asked) == 4


def test_training_is_left_as_it_was():
    model = Counter().train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a = generate(model, torch.tensor([[0]]), max_tokens=5, temperature=9.0, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.weight.grad is None
    assert a == generate(model, torch.tensor([[0]]), max_tokens=5, temperature=9.0, seed=1)
    draws = {
        str(generate(model, torch.tensor([[0]]), max_tokens=5, temperature=40.0, seed=s)) for s in range(9)
    }
    assert len(draws) > 1


def test_prompts_that_the_model_cannot_read_are_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(Counter(), torch.zeros(1, 0, dtype=torch.int64), max_tokens=1)
    with pytest.raises(ValueError, match=r"token 12; the model knows 0\.\.9"):
        generate(Counter(), torch.tensor([[12]]), max_tokens=1)
    with pytest.raises(ValueError, match="temperature=-1"):
        generate(Counter(), torch.tensor([[1]]), max_tokens=1, temperature=-1)


class Digits:
    name, vocab_size, eot = "digits", V, 0

    def encode(self, text):
        return [int(c) for c in text]

    def decode(self, tokens):
        return "".join(map(str, tokens))


class Batches:
    """Validation batches that count on, so that a stream left where it stood would give another loss."""

    opened = 0

    def __init__(self):
        Batches.opened += 1
        self.position = 0

    def next(self):
        self.position += 1
        inputs = torch.full((2, 4), self.position % V)
        return SimpleNamespace(inputs=inputs, targets=(inputs + self.position) % V)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def close(self):
        self.position = None


class Dealt(Batches):
    """What one of several ranks gets of `Batches`."""

    def __init__(self, rank, world):
        super().__init__()
        self.skip, self.position = world - 1, rank

    def next(self):
        batch = super().next()
        self.position += self.skip
        return batch


def view_of(model, **data):
    engine = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), mean=lambda x: x)
    corpus = SimpleNamespace(tokenizer=Digits(), val=lambda **where: Batches(), **data)
    return View(model, engine, corpus, contextlib.nullcontext, 2, 4, 0, 100)


def test_a_text_sample_is_an_event_with_its_prompt():
    model = Counter(noise=1.0).train()
    before = torch.get_rng_state()
    (event,) = TextSamples(prompt="56", max_tokens=9, temperature=0.0)(view_of(model), 10)
    assert event == Sample(10, "56", "789")  # 0 is the end of the text
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)  # although the model drew from it
    assert list(TextSamples()(view_of(model), 0)) == []


def test_a_model_that_diverged_has_no_text_and_stops_no_run(caplog):
    model = Counter().train()
    with torch.no_grad():
        model.weight.fill_(math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            generate(model, torch.tensor([[3]]), max_tokens=2, temperature=temperature)
        assert list(TextSamples(max_tokens=3, temperature=temperature)(view_of(model), 7)) == []
    assert "no text sample at step 7" in caplog.text
    assert model.training


def test_only_rank_0_reports_a_sample_but_every_rank_writes_it():
    model = Counter()
    view = view_of(model)
    view.engine.rank = 1
    assert list(TextSamples(max_tokens=3, temperature=0.0)(view, 5)) == []
    assert len(model.asked) == 3


def test_validation_repeats_itself_and_leaves_training_alone():
    model = Counter().train()
    view, validate = view_of(model, bytes_per_token=lambda split: 2.0), Validation(batches=3)
    Batches.opened = 0
    before = torch.get_rng_state()
    (first,), (second,) = list(validate(view, 0)), list(validate(view, 250))
    assert Batches.opened == 1
    assert first.loss == second.loss == pytest.approx((0 - 50 - 50) / 3)  # only the first batch counts by one
    assert first.bits_per_byte == pytest.approx(first.loss / math.log(2) / 2.0)
    assert (first.step, second.step) == (0, 250)
    assert model.training
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)
    validate.close()


def test_validation_by_tokens_does_not_depend_on_the_micro_batch(tmp_path):
    settings = ["data=moby", "train.steps=1", "train.tokens_per_step=64", "optimizer.lr=0", "evaluate=val"]
    losses = {}
    for rows in (1, 2, 4):
        run = [*TINY, *settings, f"train.micro_batch={rows}"]
        for key in ("tokens=100", "batches=7"):  # 100 tokens are 7 sequences of 16
            session = ran(*run, f"evaluate.val.{key}", dir=tmp_path / f"{key}-{rows}")
            losses.setdefault(key, []).append(session.progress.val_loss)
    assert losses["tokens=100"][0] == losses["batches=7"][0]  # one sequence in a batch: the same thing
    assert losses["tokens=100"] == pytest.approx([losses["tokens=100"][0]] * 3, abs=1e-6)
    assert losses["batches=7"][2] != pytest.approx(losses["batches=7"][0], abs=1e-6)


def test_a_validation_set_that_depends_on_the_memory_is_told(tmp_path):
    auto = [*TINY, "logger=[jsonl]", "evaluate=val", "train.micro_batch=auto", "train.tokens_per_step=64"]
    for name, more in (("a", []), ("b", ["evaluate.val.tokens=1280"])):
        opened(*auto, *more, dir=tmp_path / name).emitter.close("stopped")
    said = "the memory decides on how many tokens the loss is measured; evaluate.val.tokens=1280 would"
    assert (tmp_path / "a" / "metrics.jsonl").read_text().count(said) == 1
    assert said not in (tmp_path / "b" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_validation_by_tokens(world):
    means = []
    for rank in range(world):
        view = view_of(Counter())
        view.engine.__dict__.update(rank=rank, world=world, mean=lambda x: means.append(float(x)) or x)
        view.data.val = lambda *, rank, world, **where: Dealt(rank, world)
        list(Validation(tokens=18)(view, 0))  # 5 sequences of 4 in batches of 2: the last one half
    assert sum(means) / (5 / 2) == pytest.approx((0 * 2 - 50 * 2 - 50) / 5)


def test_the_bytes_of_a_token_are_measured_once():
    asked = []
    view, validate = (
        view_of(Counter(), bytes_per_token=lambda split: asked.append(split) or 2.0),
        Validation(),
    )
    for step in (0, 1, 2):
        list(validate(view, step))
    assert asked == ["val"]


def test_bits_per_byte_is_nan_where_nobody_knows_the_bytes():
    (event,) = Validation(batches=1)(view_of(Counter()), 0)
    assert math.isnan(event.bits_per_byte)
    for unknown in (None, 0.0):
        view = view_of(Counter(), bytes_per_token=lambda split, unknown=unknown: unknown)
        (event,) = Validation(batches=1)(view, 0)
        assert math.isnan(event.bits_per_byte)


def test_every_rank_contributes_its_mean():
    view = view_of(Counter())
    view.engine.mean = lambda x: (x + 10.0) / 2  # another rank measured 10
    (event,) = Validation(batches=1)(view, 0)
    assert event.loss == pytest.approx(5.0)


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr(command, "load_run", lambda path, **_: LoadedRun(Counter(), Digits(), 42))


def test_the_command_prints_text_or_json(loaded, capsys):
    assert command.main(["run=x", "prompt=12", "temperature=0", "max_tokens=3", "top_k=null"]) == 0
    assert capsys.readouterr().out == "12345\n"
    assert command.main(["run=x", "n=2", "temperature=0", "max_tokens=3", "json=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 42, "prompt": "", "text": "123", "tokens": [1, 2, 3], "end": "length"}
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=1"], "run=PATH is missing"),
        (["run=x", "promt=1"], "'promt=1' is not an option"),
        (["run=x", "n=many"], "n=many must be a whole number"),
        (["run=x", "n=0"], "n=0"),
        (["run=x", "json=1"], "json=1 must be true or false"),
        (["run=x", "temperature=-1"], "temperature=-1"),
        (["run=x", "top_p=0"], "top_p=0"),
        (["run=x", f"seed={2**64}"], f"seed={2**64} must lie in 0"),
    ],
)
def test_the_commands_mistakes_are_one_line(loaded, arguments, message, capsys):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert command.main([]) == 0
