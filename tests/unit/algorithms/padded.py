"""Every loss and correction a second time, of [B, L] lists: loops, math and no tensors."""

import math


def _tokens(mask):
    return [[at for at, trained in enumerate(row) if trained] for row in mask]


def _per_token(formula):
    """A loss of (log r, A, log pi, log anchor) of a token alone."""

    def loss(part, mask, columns):
        now, then, worth = columns["logprobs"], columns["anchor"], columns["advantages"]
        return [
            [
                formula(part, now[row][at] - then[row][at], worth[row][at], now[row][at])
                if trained
                else 0.0
                for at, trained in enumerate(line)
            ]
            for row, line in enumerate(mask)
        ]

    return loss


def _clip(value, low, high):
    return low if value < low else high if value > high else value


def _ppo(part, log_r, worth, _):
    ratio = math.exp(log_r)
    cost = max(-ratio * worth, -_clip(ratio, 1 - part.clip_low, 1 + part.clip_high) * worth)
    return min(cost, -part.dual * worth) if part.dual and worth < 0 else cost


def _sapo(part, log_r, worth, _):
    tau = part.tau_positive if worth > 0 else part.tau_negative
    return -4 / tau / (1 + math.exp(-tau * (math.exp(log_r) - 1))) * worth


def _ipo(part, log_r, worth, now):
    kept = abs(math.exp(now) - math.exp(now - log_r)) <= part.eps
    return (-math.exp(log_r) * worth if kept else 0.0) + part.drift * log_r**2


def _bernoulli(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _kpop(part, log_r, worth, now):
    new, old = math.exp(now), math.exp(now - log_r)
    kept = _bernoulli(new, old) <= part.phi and _bernoulli(old, new) <= part.phi
    return (-math.exp(log_r) * worth if kept else 0.0) + part.drift * log_r**2


def _icepop(part, log_r, worth, _):
    ratio = math.exp(log_r)
    return -ratio * worth if part.low <= ratio <= part.high else 0.0


def _dppo_tv(part, log_r, worth, now):
    moved = math.exp(now) - math.exp(now - log_r)
    stopped = moved > part.eps if worth > 0 else moved < -part.eps
    return 0.0 if stopped else -math.exp(log_r) * worth


def _dppo_kl(part, log_r, worth, now):
    far = _bernoulli(math.exp(now - log_r), math.exp(now)) > part.eps
    away = log_r > 0 if worth > 0 else log_r < 0
    return 0.0 if far and away else -math.exp(log_r) * worth


def _sequence(mask, values, mean=True):
    """[B] mean or sum over trained tokens; 0 where there is none."""
    result = []
    for row, line in enumerate(_tokens(mask)):
        total = sum(values(row, at) for at in line)
        result.append(total / len(line) if line and mean else total)
    return result


def _spread(mask, values):
    return [[values[row] if trained else 0.0 for trained in line] for row, line in enumerate(mask)]


def _gspo(part, mask, columns):
    now, then, worth = columns["logprobs"], columns["anchor"], columns["advantages"]
    logs = _sequence(mask, lambda row, at: now[row][at] - then[row][at])
    costs = []
    for row, log_s in enumerate(logs):
        s, a = math.exp(log_s), worth[row][0]
        costs.append(max(-s * a, -_clip(s, 1 - part.clip_low, 1 + part.clip_high) * a))
    return _spread(mask, costs)


def _gmpo(part, mask, columns):
    now, then, worth = columns["logprobs"], columns["anchor"], columns["advantages"]

    def held(row, at):
        sign = 1 if worth[row][at] > 0 else -1
        return sign * min(sign * (now[row][at] - then[row][at]), part.clip)

    means = _sequence(mask, held)
    return _spread(mask, [-math.exp(mean) * worth[row][0] for row, mean in enumerate(means)])


def m2po_tau(budget, mask, columns, policy="old_logprobs"):
    """By sorting: the first k are let through whole, all others at tau."""
    squares = []
    for row, line in enumerate(_tokens(mask)):
        for at in line:
            log_r = columns[policy][row][at] - columns["rollout_logprobs"][row][at]
            worth = columns["advantages"][row][at]
            if (worth > 0 and log_r > 0) or (worth < 0 and log_r < 0):
                squares.append(log_r**2)
    squares.sort()
    target, below = budget * len(squares), 0.0
    for k, square in enumerate(squares):
        if below + square * (len(squares) - k) > target:
            return math.sqrt((target - below) / (len(squares) - k))
        below += square
    return math.inf


def _m2po(part, mask, columns):
    tau = m2po_tau(part.budget, mask, columns)

    def cost(_, log_r, worth, __):
        held = math.exp(_clip(log_r, -tau, tau))
        return max(-math.exp(log_r) * worth, -held * worth)

    return _per_token(cost)(part, mask, columns)


LOSSES = {
    "policy_gradient": _per_token(lambda part, log_r, worth, now: -worth * now),
    "ppo_clip": _per_token(_ppo),
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _per_token(_sapo),
    "cispo": _per_token(
        lambda part, log_r, worth, now: -min(math.exp(log_r), part.cap) * worth * now
    ),
    "ipo": _per_token(_ipo),
    "kpop": _per_token(_kpop),
    "icepop": _per_token(_icepop),
    "dppo_tv": _per_token(_dppo_tv),
    "dppo_kl": _per_token(_dppo_kl),
    "m2po": _m2po,
}


def _weights(formula):
    """Weights of tokens by their log w alone."""

    def weights(part, mask, columns):
        old, rollout = columns["old_logprobs"], columns["rollout_logprobs"]
        return [
            [
                formula(part, math.exp(old[row][at] - rollout[row][at])) if trained else 0.0
                for at, trained in enumerate(line)
            ]
            for row, line in enumerate(mask)
        ]

    return weights


def _gaps(columns):
    return lambda row, at: columns["old_logprobs"][row][at] - columns["rollout_logprobs"][row][at]


def _sequence_tis(part, mask, columns):
    sums = _sequence(mask, _gaps(columns), mean=False)
    return _spread(mask, [min(math.exp(total), part.cap) for total in sums])


def _opsm(part, mask, columns):
    means, worth = _sequence(mask, _gaps(columns)), columns["advantages"]
    left = [not (worth[row][0] < 0 and -mean > part.delta) for row, mean in enumerate(means)]
    return _spread(mask, [float(kept) for kept in left])


def _geometric(part, mask, columns):
    means = _sequence(mask, _gaps(columns))
    return _spread(mask, [float(part.low <= math.exp(mean) <= part.high) for mean in means])


def _k3(part, mask, columns):
    gap = _gaps(columns)
    means = _sequence(mask, lambda row, at: math.exp(gap(row, at)) - 1 - gap(row, at))
    return _spread(mask, [float(mean <= part.limit) for mean in means])


CORRECTIONS = {
    "none": _weights(lambda part, w: 1.0),
    "tis": _weights(lambda part, w: min(w, part.cap)),
    "sequence_tis": _sequence_tis,
    "icepop": _weights(lambda part, w: w if part.low <= w <= part.high else 0.0),
    "opsm": _opsm,
    "reject_geometric": _geometric,
    "reject_k3": _k3,
    "reject_k1": _weights(lambda part, w: float(part.low <= w <= part.high)),
}
