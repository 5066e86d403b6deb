"""How many tokens to draft, from the share that is accepted and from the measured times of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

_RECENT = 5  # times of a length that count
_LIFE = 1000  # steps after which the times of a length that was not used are forgotten
_MEMORY = 0.95  # weight of the past at each tested token
_PRIOR_WEIGHT = 3.0  # how many tokens the expected share of a new sequence is worth


class StepTimes:
    """Seconds of the steps by their number of tokens. A longer step never counts as faster than a shorter one.

    A server lives long, and its contexts and the machine's load change. A length that a thousand steps did not use is
    forgotten, and thus tried again: where drafts never pay, that is one step of each length in a thousand.
    """

    def __init__(self) -> None:
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._medians: dict[int, float] = {}
        self._used: dict[int, int] = {}  # the step that used a length last
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measured step."""
        self._steps += 1
        self._used[tokens] = self._steps
        self._times[tokens].append(seconds)
        self._medians[tokens] = median(self._times[tokens])
        for unused in [length for length, step in self._used.items() if self._steps - step >= _LIFE]:
            del self._used[unused], self._times[unused], self._medians[unused]

    def __call__(self, tokens: int) -> float | None:
        """Predict a step of so many tokens; None before a step of one token was measured.

        A length that was never measured counts as fast as the next shorter one, so that it is tried.
        """
        if 1 not in self._medians:
            return None
        shorter = max(count for count in self._medians if count <= tokens)
        return min(seconds for count, seconds in self._medians.items() if count >= shorter)


class DraftLength:
    """The draft length of one sequence that makes the tokens cheapest; 0 where drafts do not pay.

    The expected number of tokens of a step with n drafted ones is ``1 + a + ... + a^n`` if each is accepted with
    probability a (Leviathan et al. 2023, arXiv 2211.17192, equation 1). ``expected`` is a before any token was tested.
    """

    def __init__(self, seconds: StepTimes, expected: float) -> None:
        self._seconds = seconds
        self._accepted, self._tested = expected * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        """The estimated probability that a drafted token is accepted."""
        return self._accepted / self._tested

    def record(self, accepted: bool) -> None:
        """Count one drafted token that was compared with the model's own."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._tested = _MEMORY * self._tested + 1

    def choose(self, most: int, cost: Callable[[int], float], behind: float = 0.0, left: int = 1) -> int:
        """Return the number of tokens to draft, at most ``most``.

        ``cost`` predicts the seconds of a draft, ``behind`` those that the drafter needs before its first one. The
        ``left`` tokens of the sequence have to gain the latter.
        """
        best, single = 0, self._seconds(1)
        if single is None or not left:
            return 0
        least = single - behind / left
        tokens, probability = 1.0, 1.0
        for count in range(1, most + 1):
            probability *= self.acceptance
            tokens += probability
            per_token = ((self._seconds(count + 1) or single) + cost(count)) / tokens
            if per_token < least:
                best, least = count, per_token
        return best
