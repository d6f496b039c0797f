"""An LSTM that predicts the next character; it needs torch alone."""

from torch import nn


class Characters(nn.Module):
    """Embedding, LSTM and a dense layer with an output per ASCII character."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.lstm = nn.LSTM(16, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 128)

    def forward(self, characters):
        outputs, _ = self.lstm(self.embedding(characters))
        return self.head(outputs)
