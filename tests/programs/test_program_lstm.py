"""A character language model: an LSTM over packed sequences, with its state carried along."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from programs.sides import check, weights

WIDTH = 24
WINDOW = 12
NO_TARGET = -100


class LanguageModel(nn.Module):
    """The decoder's weight is the embedding's. The state has the batch first, since a wrapper cuts
    and joins along one dimension."""

    def __init__(self, letters):
        super().__init__()
        self.embedding = nn.Embedding(letters, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, letters)
        self.decoder.weight = self.embedding.weight

    def forward(self, letters, lengths, state):
        self.lstm.flatten_parameters()
        packed = pack_padded_sequence(
            self.embedding(letters), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        state = tuple(part.transpose(0, 1).contiguous() for part in state)
        hidden, state = self.lstm(packed, state)
        hidden, _ = pad_packed_sequence(hidden, batch_first=True, total_length=letters.size(1))
        return self.decoder(hidden), tuple(part.transpose(0, 1) for part in state)


def sentences():
    """Lines of the descriptions that scikit-learn ships with its data, as numbers from 1."""
    from sklearn import datasets

    text = datasets.load_iris().DESCR + datasets.load_wine().DESCR
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > WINDOW]
    numbers = {letter: i for i, letter in enumerate(sorted(set("".join(lines))), start=1)}
    return [[numbers[letter] for letter in line] for line in lines], len(numbers) + 1


def batches(size):
    """Lines side by side, padded with 0, in windows; a line that has ended has one letter, so that
    it can be packed, and no targets."""
    lines, _ = sentences()
    for start in range(0, len(lines) - size, size):
        group = lines[start : start + size]
        padded = torch.zeros(size, max(map(len, group)) + WINDOW + 1, dtype=torch.long)
        for row, line in enumerate(group):
            padded[row, : len(line)] = torch.tensor(line)
        for at in range(0, max(map(len, group)) - 1, WINDOW):
            letters, targets = padded[:, at : at + WINDOW], padded[:, at + 1 : at + 1 + WINDOW]
            lengths = (letters != 0).sum(1).clamp(min=1)
            yield at == 0, letters, lengths, targets.masked_fill(targets == 0, NO_TARGET)


def language_model(side, batch_size, steps=12):
    torch.manual_seed(0)
    _, letters_in_all = sentences()
    model = side.wrap(LanguageModel(letters_in_all).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, state = [], None
    for step, (first, letters, lengths, targets) in enumerate(batches(batch_size)):
        if step == steps:
            break
        letters, lengths, targets = (t.to(side.home) for t in (letters, lengths, targets))
        if first:
            zeros = torch.zeros(batch_size, 2, WIDTH, dtype=torch.double, device=side.home)
            state = (zeros, zeros)
        state = tuple(part.detach() for part in state)
        scores, state = model(letters, lengths, state)
        loss = functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses, state, weights(model)


@pytest.mark.row("A22", "D11")
@pytest.mark.parametrize("batch_size, n", [(8, 2), (7, 3)])
@pytest.mark.filterwarnings("error:RNN module weights")
def test_language_model(fast, batch_size, n):
    check(lambda side: language_model(side, batch_size), fast, n)
