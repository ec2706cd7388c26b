"""What the sampling controls make of a row of logits, slowly and obviously.

Order: penalties, bias, bitmask (these give the processed logits z, in float32, every step rounded as
the kernels round it), temperature, top-k, top-p, min-p (these give the law p, in float64). Every filter
keeps a prefix of the ids sorted by z descending, then id ascending.
"""

import numpy as np

GREEDY = np.float32(1e-5)
LOG2E = np.float32(1.44269504088896340736)
TARGET_NAN, DRAFT_NAN, BAD_ID, EMPTY_SUPPORT, BAD_TREE = 1, 2, 4, 8, 16

PER_REQUEST = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "token_counts",
    "prompt_mask",
]
NAMES = [
    *PER_REQUEST,
    "bias_offsets",
    "bias_ids",
    "bias_values",
    "token_bitmask",
    "bitmask_rows",
    "filter_order",
]


def usable(x):
    """Whether a row has a law: no NaN, no +inf, something finite."""
    return not (np.isnan(x).any() or (x == np.inf).any()) and np.isfinite(x).any()


def bits(words, count):
    """The first `count` bits of int32 words, lowest bit first."""
    words = np.asarray(words).astype(np.int64)
    ids = np.arange(count)
    return (words[ids // 32] >> (ids % 32)) & 1 == 1


def scale(temperature):
    """Factor of a logit in an exponent of 2."""
    with np.errstate(all="ignore"):
        return np.maximum(LOG2E / np.float32(temperature), np.float32(1e-30))


class Controls:
    """The controls of a call; `of` gives those of a request (of a row, for `sample`)."""

    def __init__(self, vocab_size, **options):
        assert set(options) <= set(NAMES), sorted(set(options) - set(NAMES))
        self.vocab_size = vocab_size
        self.options = {k: v for k, v in options.items() if v is not None}

    def of(self, b):
        return Request(self, b)


class Request:
    """The controls of one request."""

    def __init__(self, controls, b):
        self.vocab_size = controls.vocab_size
        options = controls.options

        def value(name, default):
            return options[name][b].item() if name in options else default

        self.temperature = np.float32(value("temperature", 1.0))
        self.top_k = value("top_k", 0)
        self.top_p = np.float32(value("top_p", 1.0))
        self.min_p = np.float32(value("min_p", 0.0))
        self.repetition = np.float32(value("repetition_penalty", 1.0))
        self.frequency = np.float32(value("frequency_penalty", 0.0))
        self.presence = np.float32(value("presence_penalty", 0.0))
        self.joint = options.get("filter_order", "sequential") == "joint"
        self.counts = np.zeros(self.vocab_size, dtype=np.int64)
        if "token_counts" in options:
            self.counts = options["token_counts"][b, : self.vocab_size].long().numpy()
        self.in_prompt = np.zeros(self.vocab_size, dtype=bool)
        if "prompt_mask" in options:
            self.in_prompt = bits(options["prompt_mask"][b], self.vocab_size)
        self.bias = []
        if "bias_offsets" in options:
            ids, values = options["bias_ids"], options["bias_values"]
            low = min(max(int(options["bias_offsets"][b]), 0), len(ids))
            high = min(max(int(options["bias_offsets"][b + 1]), low), len(ids))
            self.bias = [(int(ids[i]), np.float32(values[i])) for i in range(low, high)]
        self.masks, self.mask_rows = options.get("token_bitmask"), options.get("bitmask_rows")

    @property
    def greedy(self):
        return not self.temperature >= GREEDY or self.top_k == 1

    def allowed(self, row):
        """Ids that the bitmask allows in row `row` of the call; None: unconstrained."""
        if self.masks is None:
            return None
        index = row if self.mask_rows is None else int(self.mask_rows[row])
        if index == -1:
            return None
        if not 0 <= index < self.masks.shape[0]:
            return np.zeros(self.vocab_size, dtype=bool)
        return bits(self.masks[index], self.vocab_size)

    def process(self, x, row, drafts=(), ids=None):
        """Processed logits of a float32 row; drafts: the tokens before it that are not in the counts
        yet; ids: the target id of every entry (default: its number)."""
        z = x.astype(np.float32).copy()
        ids = np.arange(len(z)) if ids is None else np.asarray(ids)
        known = (ids >= 0) & (ids < self.vocab_size)
        at = np.where(known, ids, 0)
        counts = self.counts.copy()
        for token in drafts:
            counts[token] += 1
        counts, in_prompt = counts[at], self.in_prompt[at]
        with np.errstate(all="ignore"):
            if self.repetition != 1:
                hit = (counts > 0) | in_prompt
                z = np.where(hit, np.where(z > 0, z / self.repetition, z * self.repetition), z)
            if self.frequency != 0 or self.presence != 0:
                less = self.frequency * counts.astype(np.float32) + self.presence
                z = np.where(counts > 0, z - less, z)
            for token, value in self.bias:
                z = np.where(known & (at == token), z + value, z)
        allowed = self.allowed(row)
        if allowed is not None:
            z = np.where(allowed[at], z, np.float32(-np.inf))
        z = np.where(known, z, np.float32(-np.inf))
        assert z.dtype == np.float32
        return z

    def kept(self, z, band=0.0):
        """How many ids of the sorted row the filters keep: the exact number first, then those that
        rounding within the band may give."""
        order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))
        order = order[z[order] > -np.inf]
        weight = np.exp(_exponents(z[order], z[order[0]], self.temperature))
        before = np.cumsum(weight) - weight
        count_k = len(order)
        if 0 < self.top_k < self.vocab_size:
            count_k = min(self.top_k, count_k)

        def count(shift):
            n = count_k
            if self.top_p < 1:
                total = weight.sum() if self.joint else weight[:count_k].sum()
                target = float(self.top_p) * (1 + shift) * total
                n = min(n, max(1, int((before < target).sum())))
            if self.min_p > 0:
                with np.errstate(all="ignore"):
                    d = (z[order] - z[order[0]]) * scale(self.temperature)
                    cut = np.float32(np.log2(np.float64(min(self.min_p, np.float32(1)))))
                d = np.where(np.isnan(d), np.float32(0), d)
                n = min(n, max(1, int((d >= cut + np.float32(shift)).sum())))
            return n

        counts = [count(0.0)]
        if band:
            # Only the fewest and the most: the laws between differ by less than the band.
            counts += sorted({count(-band), count(band)} - set(counts))
        return [order[:n] for n in counts]

    def laws(self, z, band=0.0):
        """Laws of a usable row: the exact one first."""
        if self.greedy:
            p = np.zeros(len(z))
            p[np.argmax(z)] = 1.0
            return [p]
        return [_softmax(z, keep, self.temperature) for keep in self.kept(z, band)]

    def reported_logs(self, z):
        """Logarithms of the law that processed log-probabilities are of: at temperature 1 for greedy
        requests. They stay finite where the probabilities themselves underflow."""
        t = np.float32(1) if not self.temperature >= GREEDY else self.temperature
        request = Request.__new__(Request)
        request.__dict__.update(self.__dict__, temperature=t)
        keep = request.kept(z)[0]
        e = _exponents(z[keep], z.max(), t)
        logs = np.full(len(z), -np.inf)
        logs[keep] = e - np.log(np.exp(e).sum())
        return logs


def _exponents(z, top, temperature):
    with np.errstate(all="ignore"):
        e = (z.astype(np.float64) - float(top)) / float(temperature)
    return np.where(z == -np.inf, -np.inf, np.where(np.isnan(e), 0.0, e))


def _softmax(z, keep, temperature):
    p = np.zeros(len(z))
    p[keep] = np.exp(_exponents(z[keep], z.max(), temperature))
    return p / p.sum()


class Row:
    """A target row under a request's controls: its law, or the token it falls back to."""

    def __init__(self, x, request, row, drafts=()):
        self.raw, self.request = x, request
        self.z = request.process(x, row, drafts)
        allowed = request.allowed(row)
        self.status, self.fallback = 0, None
        if not usable(x) or np.isnan(self.z).any() or (self.z == np.inf).any():
            self.status, self.fallback = TARGET_NAN, _finite_argmax(x, allowed)
        elif not usable(self.z):
            self.status = EMPTY_SUPPORT
            some = allowed is not None and allowed.any()
            self.fallback = int(np.argmax(allowed)) if some else int(np.argmax(x))

    def laws(self, band=0.0):
        return self.request.laws(self.z, band)

    def logprobs(self, mode, band=0.0):
        """Log-probability of every id, float64; None where the row has no such law."""
        with np.errstate(divide="ignore"):
            if mode == "raw":
                if not usable(self.raw):
                    return None
                x = self.raw.astype(np.float64)
                return x - (x.max() + np.log(np.exp(x - x.max()).sum()))
            return None if self.status else self.request.reported_logs(self.z)


def top(logprobs, sort_by, n):
    """The n most probable ids (ties: lowest id) and their log-probabilities, padded with -1 and 0."""
    ids, values = np.full(n, -1, dtype=np.int64), np.zeros(n)
    if logprobs is not None:
        order = np.lexsort((np.arange(len(logprobs)), -sort_by.astype(np.float64)))
        order = order[logprobs[order] > -np.inf][:n]
        ids[: len(order)], values[: len(order)] = order, logprobs[order]
    return ids, values


def _finite_argmax(x, allowed):
    """Lowest id of the largest finite logit among the allowed ids; the lowest allowed id when none is
    finite; without any allowed id, the same over all ids, and 0."""
    if allowed is None or not allowed.any():
        allowed = np.ones(len(x), dtype=bool)
    good = allowed & np.isfinite(x)
    if not good.any():
        return int(np.argmax(allowed))
    return int(np.argmax(np.where(good, x, -np.inf)))
